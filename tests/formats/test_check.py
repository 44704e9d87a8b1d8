"""`spechead check` finds every key and tensor that was touched, and names it."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from safetensors.torch import load_file, save_file

from spechead.formats.check import Line, check_folder
from spechead.formats.export import write_export
from spechead.formats.gguf_file import read_gguf
from spechead.heads import Head
from tests.helpers.exporting import export_info, make_head, tiny
from tests.helpers.targets import make_target

EXPORTS = [
    ("vllm", "eagle3"),
    ("vllm", "medusa-shared"),
    ("vllm", "eagle-layers"),
    ("sglang", "eagle3-other-taps"),
    ("sglang", "eagle-bias"),
    ("eagle", "eagle3"),
    ("eagle", "eagle"),
    ("medusa", "medusa"),
    ("speculators", "eagle3-1"),
    ("tgi", "medusa-blocks"),
    ("trtllm", "eagle3-fusion"),
    ("llama.cpp", "eagle3"),
]
QUICK = EXPORTS[:2]
LONG = [pytest.param(*export, marks=pytest.mark.slow) for export in EXPORTS[2:]]
Change = Callable[[Path], None]


@pytest.fixture(scope="module")
def exports(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, str], tuple[Path, Head]]:
    root, target, made = tmp_path_factory.mktemp("exports"), tiny("llama"), {}
    for form, name in EXPORTS:
        head, out = make_head(name, target), root / form / name
        write_export(head, form, out, export_info(target, root))
        made[form, name] = out, head
    return made


def failed(lines: Iterator[Line]) -> list[str]:
    return [str(line) for line in lines if not line.ok]


# ------------------------------------------------------------------------------------------------ changes


def other(value: Any) -> Any:
    """Another value of the same kind."""
    if isinstance(value, bool):
        return not value
    if isinstance(value, (int, float)):
        return value + 1
    if isinstance(value, str):
        return value + "x"
    if isinstance(value, list):
        return [item + 1 if isinstance(item, int) else other(item) for item in value]
    if isinstance(value, dict):
        return {key: other(item) for key, item in value.items()}
    return 1


def edit(path: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    value = json.loads(path.read_text())
    change(value)
    path.write_text(json.dumps(value))


def rewrite(path: Path, change: Callable[[dict[str, torch.Tensor]], Any]) -> None:
    tensors = load_file(path)
    change(tensors)
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, path)


def set_key(key: str, value: Any) -> Change:
    return lambda at: edit(at / "config.json", lambda c: c.update({key: value}))


def drop_key(key: str) -> Change:
    return lambda at: edit(at / "config.json", lambda c: c.pop(key))


def drop_tensor(file: str, name: str) -> Change:
    return lambda at: rewrite(at / file, lambda t: t.pop(name))


def set_tensor(file: str, name: str, value: torch.Tensor) -> Change:
    return lambda at: rewrite(at / file, lambda t: t.update({name: value}))


def swap_tensors(file: str, one: str, two: str) -> Change:
    return lambda at: rewrite(at / file, lambda t: t.update({one: t[two].clone(), two: t[one].clone()}))


def changes(folder: Path) -> Iterator[tuple[str, Change]]:
    """What a check must name, and what is done to a copy of the folder."""
    if (folder / "config.json").is_file():
        for key, value in json.loads((folder / "config.json").read_text()).items():
            yield key, set_key(key, other(value))
            yield key, drop_key(key)
    for path in folder.glob("*.safetensors"):
        tensors, file = load_file(path), path.name
        for name, tensor in tensors.items():
            yield name, drop_tensor(file, name)
            if bool((tensor != tensor.flip(0)).any()):
                yield name, set_tensor(file, name, tensor.flip(0))
        for gate in [name for name in tensors if "gate_proj" in name]:
            yield gate, swap_tensors(file, gate, gate.replace("gate_proj", "up_proj"))
        first = next(iter(tensors))
        yield "extra.weight", set_tensor(file, "extra.weight", torch.ones(2))
        yield first, set_tensor(file, first, tensors[first].double())
    for path in folder.glob("*.gguf"):
        for name in read_gguf(path).tensors:
            yield name, partial(scribble, file=path.name, name=name)


def scribble(folder: Path, file: str, name: str) -> None:
    """Another value in a tensor of a GGUF file."""
    reader = gguf.GGUFReader(folder / file, "r+")
    tensor = next(tensor for tensor in reader.tensors if tensor.name == name)
    tensor.data.flat[0] += 1
    reader.data.flush()


# ------------------------------------------------------------------------------------------------ tests


@pytest.mark.parametrize("source", ["record", "head"])
@pytest.mark.parametrize("form, name", [*QUICK, *LONG], ids=str)
def test_every_change_is_named(
    form: str, name: str, source: str, exports: dict[tuple[str, str], tuple[Path, Head]], tmp_path: Path
) -> None:
    folder, head = exports[form, name]
    silent = []
    for number, (wanted, change) in enumerate(changes(folder)):
        copy = tmp_path / f"{number}" / name
        shutil.copytree(folder, copy)
        if source == "head":
            (copy / "spechead.json").unlink()
        change(copy)
        failures = failed(check_folder(copy, tiny("llama"), head if source == "head" else None, form))
        seen_by_head = source == "record" or wanted != "base_model_name_or_path"  # a head does not know that name
        if seen_by_head and not any(wanted in line for line in failures):
            silent.append((number, wanted, failures))
        shutil.rmtree(copy)
    assert silent == []


@pytest.mark.parametrize("form, name", EXPORTS, ids=str)
def test_a_missing_tensor_is_named_without_manifest_and_head(
    form: str, name: str, exports: dict[tuple[str, str], tuple[Path, Head]], tmp_path: Path
) -> None:
    for path in exports[form, name][0].glob("*.safetensors"):
        for tensor in load_file(path):
            if tensor in ("t2d", "embed_tokens.weight"):  # servers do not read the one, and have the target's other
                continue
            copy = tmp_path / tensor / name
            shutil.copytree(path.parent, copy)
            (copy / "spechead.json").unlink()
            rewrite(copy / path.name, lambda t, tensor=tensor: t.pop(tensor))  # type: ignore[misc]
            suffix = {"fc.bias": "fc.bias"}.get(tensor, tensor.split(".")[-1])
            failures = failed(check_folder(copy, tiny("llama"), None, form))
            assert any(suffix in line for line in failures), (tensor, failures)


SEEN_BY_THE_DRAFTS: dict[str, Callable[[Path], None]] = {
    "gate and up swapped": lambda at: rewrite(
        at / "model.safetensors",
        lambda t: t.update(
            {
                "midlayer.mlp.gate_proj.weight": t["midlayer.mlp.up_proj.weight"].clone(),
                "midlayer.mlp.up_proj.weight": t["midlayer.mlp.gate_proj.weight"].clone(),
            }
        ),
    ),
    "d2t by one": lambda at: rewrite(
        at / "model.safetensors", lambda t: (t.pop("t2d"), t.update({"d2t": t["d2t"] - 1}))
    ),
    "layers by one": lambda at: edit(
        at / "config.json", lambda c: c.update({"eagle_aux_hidden_state_layer_ids": [3, 4, 5]})
    ),
    "rotary base": lambda at: edit(
        at / "config.json",
        lambda c: c.update({"rope_theta": 5e3, "rope_parameters": {"rope_type": "default", "rope_theta": 5e3}}),
    ),
    "residual": lambda at: edit(at / "config.json", lambda c: c.update({"norm_before_residual": True})),
    "feedback": lambda at: edit(at / "config.json", lambda c: c.update({"norm_output": True})),
    "epsilon": lambda at: edit(at / "config.json", lambda c: c.update({"rms_norm_eps": 0.01})),
    "heads": lambda at: edit(
        at / "config.json",
        lambda c: c.update({"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 4}),
    ),
    "output rows": lambda at: rewrite(
        at / "model.safetensors", lambda t: t.update({"lm_head.weight": t["lm_head.weight"].roll(1, 0)})
    ),
    "a zero norm": lambda at: rewrite(at / "model.safetensors", lambda t: t["norm.weight"].zero_()),
}  # fmt: skip


@pytest.mark.parametrize("change", SEEN_BY_THE_DRAFTS)
def test_drafts_differ(change: str, exports: dict[tuple[str, str], tuple[Path, Head]], tmp_path: Path) -> None:
    folder, head = exports["vllm", "eagle3"]
    copy = tmp_path / "copy"
    shutil.copytree(folder, copy)
    SEEN_BY_THE_DRAFTS[change](copy)
    assert any(line.startswith("FAIL  forward") for line in failed(check_folder(copy, tiny("llama"), head)))


def test_settings_are_reported(exports: dict[tuple[str, str], tuple[Path, Head]], tmp_path: Path) -> None:
    folder, head = exports["vllm", "eagle3"]
    lines = {line.name: line.text for line in check_folder(folder, tiny("llama"), head)}
    assert lines["layers"] == "reads hidden_states [2, 3, 4] of 0 to 7"
    assert lines["vocabulary"] == "40 draft tokens of 97, d2t and t2d agree"
    assert lines["rotary"] == "base 10000, no scaling, heads of 8"
    assert lines["longest text"] == "256 tokens"
    assert lines["embedding"] == "the target's"
    assert lines["output layer"] == "its own"
    assert lines["dtype"] == "float32"


@pytest.fixture
def without_manifest(exports: dict[tuple[str, str], tuple[Path, Head]], tmp_path: Path) -> Path:
    """A copy of an export to vLLM that nothing but its own files describes."""
    copy = tmp_path / "copy"
    shutil.copytree(exports["vllm", "eagle3"][0], copy)
    (copy / "spechead.json").unlink()
    return copy


@pytest.mark.parametrize(
    "change, message",
    [
        (lambda c: c.update({"max_position_embeddings": 100}), "longest text  100 tokens, the target reads 256"),
        (lambda c: c.update({"torch_dtype": "bfloat16"}), "torch_dtype is bfloat16, the tensors are float32"),
        (lambda c: c.update({"vocab_size": 96}), "contents      vocab_size is 96, but the target has 97 tokens"),
        (lambda c: c.update({"hidden_act": "gelu"}), "contents      hidden_act is gelu"),
        (lambda c: c.update({"_name_or_path": "/home/me/model"}), "paths         config.json: _name_or_path"),
        (lambda c: c.update({"draft_vocab_size": 39}), "contents      d2t has 40 entries, but draft_vocab_size is 39"),
        (lambda c: c.update({"num_attention_heads": 6}), "contents      tensors do not make this eagle3 head"),
    ],
)  # fmt: skip
def test_a_wrong_setting_is_reported_without_manifest_and_head(
    change: Callable[[dict[str, Any]], None],
    message: str,
    without_manifest: Path,
) -> None:
    edit(without_manifest / "config.json", change)
    assert any(message in line for line in failed(check_folder(without_manifest, tiny("llama"))))


@pytest.mark.parametrize(
    "change, message",
    [
        (lambda t: t.update({"d2t": t["d2t"] * 0}), "t2d does not mark the target ids"),
        (lambda t: t["d2t"].__setitem__(1, t["d2t"][0] - 1), "must be 40 different target ids below 97"),
        (lambda t: t.update({"d2t": t["d2t"] + 60}), "must be 40 different target ids below 97"),
        (lambda t: t["fc.weight"].__setitem__((0, 0), float("nan")), "fc.weight has NaN"),
        (lambda t: t.update({"embed_tokens.weight": torch.ones(97, 32)}), "embed_tokens.weight differs"),
        (lambda t: t.update({"fc.weight": t["fc.weight"].T}), "fc.weight is [96, 32], not [32, 96]"),
    ],
)  # fmt: skip
def test_a_wrong_tensor_is_reported_without_manifest_and_head(
    change: Callable[[dict[str, torch.Tensor]], None],
    message: str,
    without_manifest: Path,
) -> None:
    rewrite(without_manifest / "model.safetensors", change)
    assert any(message in line for line in failed(check_folder(without_manifest, tiny("llama"))))


def test_another_target_is_reported(exports: dict[tuple[str, str], tuple[Path, Head]]) -> None:
    folder, _ = exports["vllm", "eagle3"]
    failures = failed(check_folder(folder, tiny("qwen2")))
    assert failures[0] == "FAIL  target        exported for org/model, and tiny-qwen2 has other weights"


def test_another_tokenizer_in_a_gguf_file_is_reported(
    exports: dict[tuple[str, str], tuple[Path, Head]], tmp_path: Path
) -> None:
    target = make_target("llama")
    vocab = target.tokenizer.get_vocab()
    target.tokenizer.add_tokens(["<new>"])
    assert len(target.tokenizer) == len(vocab) + 1
    failures = failed(check_folder(exports["llama.cpp", "eagle3"][0], target))
    assert any("tokenizer" in line and "tokens of" in line for line in failures)


def test_scaled_embeddings_must_come_with_the_head(tmp_path: Path) -> None:
    target = tiny("gemma3")
    out = tmp_path / "out"
    write_export(make_head("eagle", target), "vllm", out, export_info(target, tmp_path))
    (out / "spechead.json").unlink()
    rewrite(out / "model.safetensors", lambda t: t.pop("embed_tokens.weight"))
    failures = failed(check_folder(out, target))
    assert "FAIL  embedding     the target's stored rows, but the target scales them" in failures
    assert any(line.startswith("FAIL  forward") for line in failures)


@pytest.mark.parametrize(
    "form, name", [("vllm", "eagle"), ("vllm", "eagle3"), ("speculators", "eagle3"), ("llama.cpp", "eagle3")]
)
def test_scaled_embeddings_may_be_rounded(form: str, name: str, tmp_path: Path) -> None:
    target, head, out = tiny("gemma3"), make_head(name, tiny("gemma3")), tmp_path / "out"
    write_export(head, form, out, export_info(target, tmp_path, torch.bfloat16))
    assert failed(check_folder(out, target, head)) == []
    assert torch.equal(head.target.embed(torch.arange(9)), target.embed(torch.arange(9))), "the head's stays exact"


# ------------------------------------------------------------------------------------------------ values of any kind


def places(value: Any) -> Iterator[list[Any]]:
    """The way to every value inside a JSON value."""
    for key, inner in value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ():
        yield [key]
        yield from ([key, *way] for way in places(inner))


def put(value: Any, way: list[Any], new: Any) -> None:
    for key in way[:-1]:
        value = value[key]
    value[way[-1]] = new


@pytest.mark.parametrize(
    "form, name, with_head",
    [
        ("vllm", "eagle3", True),
        ("vllm", "medusa-shared", False),
        ("speculators", "eagle3-1", False),
        ("tgi", "medusa-blocks", True),
        pytest.param("speculators", "eagle3-1", True, marks=pytest.mark.slow),
    ],
)
def test_a_value_of_any_type_anywhere_is_a_line(
    form: str, name: str, with_head: bool, exports: dict[tuple[str, str], tuple[Path, Head]], tmp_path: Path
) -> None:
    folder, head = exports[form, name]
    copy = tmp_path / "copy"
    shutil.copytree(folder, copy)
    (copy / "spechead.json").unlink()
    config = json.loads((copy / "config.json").read_text())
    for way in places(config):
        for new in ("x", -1, True, {"a": [1]}, 10**400):
            changed = json.loads(json.dumps(config))
            put(changed, way, new)
            (copy / "config.json").write_text(json.dumps(changed))
            lines = list(check_folder(copy, tiny("llama"), head if with_head else None, form))
            assert lines and all("\n" not in line.text for line in lines), (way, new)


@pytest.mark.parametrize("key", ["dtype", "kind", "options"])
def test_a_manifest_with_values_of_any_type_is_a_line(
    key: str, exports: dict[tuple[str, str], tuple[Path, Head]], tmp_path: Path
) -> None:
    folder, head = exports["vllm", "eagle3"]
    copy = tmp_path / "copy"
    shutil.copytree(folder, copy)
    edit(copy / "spechead.json", lambda c: c.update({key: ["x"], "target": c["target"] | {"name": 5}}))
    assert list(check_folder(copy, tiny("llama"), head))


def test_the_longest_text_is_a_number(exports: dict[tuple[str, str], tuple[Path, Head]], tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(exports["vllm", "eagle3"][0], copy)
    edit(copy / "config.json", lambda c: c.update({"max_position_embeddings": "many"}))
    failures = failed(check_folder(copy, tiny("llama")))
    assert "FAIL  longest text  max_position_embeddings is many: a whole number is expected" in failures


def test_a_tokenizer_in_the_folder_is_the_targets(
    exports: dict[tuple[str, str], tuple[Path, Head]], tmp_path: Path
) -> None:
    """Token -> id, or [token, score] in the order of ids, as Unigram tokenizers have it."""
    copy = tmp_path / "copy"
    shutil.copytree(exports["vllm", "eagle3"][0], copy)
    (copy / "spechead.json").unlink()
    ids = dict(sorted(tiny("llama").tokenizer.get_vocab().items(), key=lambda item: item[1]))
    first, second, *rest = ids
    listed = [[token, -1.0] for token in ids]
    other, none = "has other tokens than the target's", "has no vocabulary"
    for vocab, message in (
        (ids, "the target's"),
        (listed, "the target's"),
        (ids | {first: ids[second], second: ids[first]}, other),
        ([[second, -1.0], [first, -1.0], *([token, -1.0] for token in rest)], other),
        ([["zzz", -1.0]], other),
        ([1], none),
        ("x", none),
        (None, none),
    ):
        (copy / "tokenizer.json").write_text(json.dumps({"model": {"vocab": vocab}}))
        lines = {line.name: line for line in check_folder(copy, tiny("llama"))}
        assert message in lines["tokenizer"].text and lines["tokenizer"].ok == (message == "the target's"), vocab
    (copy / "tokenizer.json").write_text('{"model": 5}')
    assert f"FAIL  tokenizer     tokenizer.json {none}" in failed(check_folder(copy, tiny("llama")))


def test_what_push_refuses_is_reported(exports: dict[tuple[str, str], tuple[Path, Head]], tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(exports["vllm", "eagle3"][0], copy)
    (copy / "sub").mkdir()
    (copy / "notes.txt").write_text("mine")
    lines = {line.name: line.text for line in check_folder(copy, tiny("llama"))}
    assert lines["extra files"] == "notes.txt, sub: not of the export; servers may ignore them, spechead push refuses"
