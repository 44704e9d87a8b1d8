"""Adapters on the target: merged as peft means them, trained with a head, saved so that stock peft reads them."""

from __future__ import annotations

import importlib.util
import json
import shlex
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import FourierFTConfig, LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from spechead.cli.main import main
from spechead.data.dataset import collate
from spechead.data.preparation.prepare import prepare
from spechead.data.preparation.settings import Preparation
from spechead.decoding.generate import Speculation, generate
from spechead.decoding.tree import parse_tree
from spechead.errors import UserError
from spechead.evaluation.options import DecodingOptions
from spechead.formats.export import ExportOptions, export
from spechead.heads import HEADS
from spechead.heads.base import ahead
from spechead.target.model import Target
from spechead.training.extract_head import ExtractOptions, extract_head
from spechead.training.joint import JointModule, head_weight
from spechead.training.log import read_log
from spechead.training.module import FeatureCache
from spechead.training.recipe import AdapterConfig
from spechead.training.train import train
from tests.helpers.training import flags, kill_after_a_checkpoint, launch, recipe, weights, write_tiny

LORA = "{r: 4, lora_alpha: 8, target_modules: all-linear}"
JOINT = {"adapter.peft": LORA, "adapter.lr": 0.01}
IDS = torch.arange(3, 15)[None]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def medusa(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run of heads and adapter. Not to be changed."""
    out = tmp_path_factory.mktemp("medusa") / "run"
    train(recipe(folder, out, "medusa", **JOINT))
    return out


def stock(folder: Path, adapter: Path | None = None) -> Tensor:
    """The logits of transformers and peft alone on IDS."""
    model = AutoModelForCausalLM.from_pretrained(folder / "target")
    with torch.no_grad():
        return (model if adapter is None else PeftModel.from_pretrained(model, adapter))(IDS).logits


def adapter_of(out: Path) -> dict[str, Tensor]:
    return load_file(out / "head" / "adapter" / "adapter_model.safetensors")


@pytest.mark.parametrize("changes", [{}, {"use_rslora": True}, {"target_modules": ["q_proj", "down_proj"]}])
def test_a_merged_adapter_computes_what_peft_computes(changes: dict[str, Any], folder: Path, tmp_path: Path) -> None:
    torch.manual_seed(0)
    options: dict[str, Any] = {
        "r": 4,
        "lora_alpha": 16,
        "target_modules": "all-linear",
        "init_lora_weights": False,
    } | changes
    model = AutoModelForCausalLM.from_pretrained(folder / "target")
    get_peft_model(model, LoraConfig(**options)).save_pretrained(str(tmp_path / "lora"))
    plain, adapted = (
        Target.load(str(folder / "target")),
        Target.load(str(folder / "target"), adapter=str(tmp_path / "lora")),
    )
    ours = adapted.logits(adapted.forward(IDS).hidden)
    assert torch.allclose(ours, stock(folder, tmp_path / "lora"), atol=1e-4)
    assert not torch.allclose(ours, stock(folder), atol=1e-2)
    assert adapted.fingerprint != plain.fingerprint
    half = Target.load(str(folder / "target"), adapter=str(tmp_path / "lora"), dtype="bfloat16")
    assert half.fingerprint == adapted.fingerprint
    assert adapted.name == f"{folder / 'target'} with {tmp_path / 'lora'}"


@pytest.mark.parametrize("kind", ["medusa", "eagle3"])
def test_head_and_adapter_train_save_reload_and_decode_losslessly(kind: str, folder: Path, tmp_path: Path) -> None:
    train(recipe(folder, tmp_path / "run", kind, **JOINT, **{"log.best": "false"}))
    head = tmp_path / "run" / "head"
    options = DecodingOptions(head=str(head))
    target = options.load_target()
    drafter = options.load_head(target)  # refused, were it another target
    assert target.name.endswith("adapter")
    adapted = stock(folder, head / "adapter")
    assert torch.allclose(target.logits(target.forward(IDS).hidden), adapted, atol=1e-4)
    assert not torch.allclose(adapted, stock(folder), atol=1e-2)
    speculation = Speculation(parse_tree("dynamic:nodes=6,depth=2,topk=3"))
    plain = generate(target, IDS[0].tolist(), max_new_tokens=24)
    drafted = generate(target, IDS[0].tolist(), drafter, max_new_tokens=24, speculation=speculation)
    assert plain.tokens == drafted.tokens
    config = json.loads((head / "adapter" / "adapter_config.json").read_text())
    assert config["base_model_name_or_path"] == str(folder / "target")


def test_an_adapter_that_was_edited_is_not_taken_for_the_one_of_the_head(medusa: Path, tmp_path: Path) -> None:
    shutil.copytree(medusa / "head", tmp_path / "head")
    path = tmp_path / "head" / "adapter" / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"lora_alpha": 77}))
    options = DecodingOptions(head=str(tmp_path / "head"))
    with pytest.raises(UserError, match="head/adapter is no longer the adapter .*; restore that"):
        options.load_head(options.load_target())


def test_a_target_asked_for_by_name_gets_no_adapter_unasked(medusa: Path, folder: Path, tmp_path: Path) -> None:
    adapter = medusa / "head" / "adapter"
    model = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(folder / "target"), adapter)
    model.merge_and_unload().save_pretrained(tmp_path / "merged")
    Target.load(str(folder / "target")).tokenizer.save_pretrained(tmp_path / "merged")
    merged = DecodingOptions(head=str(medusa / "head"), target=str(tmp_path / "merged"), force=True)
    target = merged.load_target()
    assert torch.allclose(target.logits(target.forward(IDS).hidden), stock(folder, adapter), atol=1e-4)
    assert merged.load_head(target).kind == "medusa"
    both = DecodingOptions(head=str(medusa / "head"), target=str(folder / "target"), adapter=str(adapter))
    assert both.load_head(both.load_target()).kind == "medusa"


def test_the_merged_target_is_exported_with_the_head(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    train(recipe(folder, tmp_path / "run", "medusa", **JOINT, **{"head.options.draft_vocab_size": 0}))
    head, merged, out = tmp_path / "run" / "head", tmp_path / "merged", tmp_path / "out"
    chosen: dict[str, Any] = {"head": str(head), "merged_target": str(merged)}
    with pytest.raises(UserError, match="SGLang .* supports no medusa heads"):
        export(ExportOptions(to="sglang", out=str(out), **chosen))
    assert not merged.exists()
    export(ExportOptions(to="vllm", out=str(out), **chosen))
    shown = capsys.readouterr().out
    assert f"vllm serve {merged} --speculative-config" in shown
    assert "vllm serve merged " in (out / "README.md").read_text()
    main(shlex.split(shown.splitlines()[-1].partition("spechead ")[2]))  # the check that it names
    assert "the weights of" in capsys.readouterr().out
    model = AutoModelForCausalLM.from_pretrained(merged)
    assert torch.allclose(model(IDS).logits, stock(folder, head / "adapter"), atol=1e-4)
    assert Target.load(str(merged)).tokenizer.get_vocab() == Target.load(str(folder / "target")).tokenizer.get_vocab()
    assert "attn_implementation" not in (merged / "config.json").read_text()
    with pytest.raises(UserError, match="option merged_target: .* exists"):
        export(ExportOptions(to="vllm", out=str(out), **chosen))


def test_a_head_without_an_adapter_has_no_merged_target(medusa: Path, tmp_path: Path) -> None:
    shutil.copytree(medusa / "head", tmp_path / "head", ignore=shutil.ignore_patterns("adapter"))
    config = json.loads((tmp_path / "head" / "config.json").read_text())
    config["meta"].pop("adapter")
    (tmp_path / "head" / "config.json").write_text(json.dumps(config))
    chosen: dict[str, Any] = {"head": str(tmp_path / "head"), "merged_target": str(tmp_path / "merged")}
    with pytest.raises(UserError, match="option merged_target: the target of .* has no adapter"):
        export(ExportOptions(to="vllm", out=str(tmp_path / "out"), **chosen))
    assert not (tmp_path / "merged").exists()


def test_a_head_written_over_another_loses_the_adapter_of_that(folder: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    (out / "head" / "adapter").mkdir(parents=True)
    train(recipe(folder, out, "medusa"))
    assert not (out / "head" / "adapter").exists()


def test_the_head_does_not_fit_the_target_without_the_adapter(medusa: Path, folder: Path) -> None:
    target = Target.load(str(folder / "target"))
    with pytest.raises(UserError, match="was trained for .* with the adapter"):
        DecodingOptions(head=str(medusa / "head")).load_head(target)


def test_the_first_stage_leaves_the_adapter_alone_and_the_second_moves_all_of_it(folder: Path, tmp_path: Path) -> None:
    changes = {"optim.steps": 5, "adapter.start_share": 0.8, "log.checkpoint_every": 4}
    train(recipe(folder, tmp_path / "run", "medusa", **JOINT | changes))
    for step, moved in ((4, False), (5, True)):
        extract_head(ExtractOptions(str(tmp_path / "run"), step=step, out=str(tmp_path / f"{step}" / "head")))
        for name, tensor in adapter_of(tmp_path / f"{step}").items():
            if "lora_B" in name:  # zero until it is trained
                assert bool(tensor.any()) is moved, name


@pytest.mark.parametrize("zero,precision", [(0, "float32"), pytest.param(2, "bf16", marks=pytest.mark.slow)])
def test_the_adapters_first_step_is_as_long_as_its_rate(
    zero: int, precision: str, folder: Path, tmp_path: Path
) -> None:
    """However many steps the head was trained alone."""
    changes = {"optim.steps": 40, "adapter.start_share": 0.975, "optim.warmup_share": 0, "log.best": "false"}
    changes |= {"engine.zero_stage": zero, "engine.precision": precision, "adapter.loss": "text"}
    train(recipe(folder, tmp_path / "run", "medusa", **JOINT | changes))
    moved = [float(tensor.abs().max()) for name, tensor in adapter_of(tmp_path / "run").items() if "lora_B" in name]
    assert max(moved) == pytest.approx(0.01, rel=0.05)


@pytest.mark.parametrize("precision", ["float32", "bf16"])
def test_every_weight_of_both_moves(precision: str, folder: Path, tmp_path: Path) -> None:
    changes = JOINT | {"engine.precision": precision, "adapter.start_share": 0, "adapter.lr": 1e-4}
    train(
        recipe(
            folder, tmp_path / "none", "medusa", **changes | {"optim.steps": 1, "optim.lr": 1e-30, "adapter.lr": 1e-30}
        )
    )
    train(recipe(folder, tmp_path / "some", "medusa", **changes))
    for find in (adapter_of, weights):
        before, after = find(tmp_path / "none"), find(tmp_path / "some")
        for name in before.keys() - {"d2t", "t2d"}:
            assert after[name].dtype == torch.float32
            assert not torch.equal(before[name], after[name]), name


@pytest.mark.slow
@pytest.mark.parametrize("zero", [2, 0])
def test_two_processes_equal_one(zero: int, folder: Path, tmp_path: Path) -> None:
    changes = JOINT | {"engine.zero_stage": zero, "adapter.loss": "text", "adapter.lr": 1e-3}  # else rounding decides
    train(recipe(folder, tmp_path / "one", "medusa", **changes))
    process = launch(flags(folder, tmp_path / "two", "medusa", **changes), 2)
    output, _ = process.communicate(timeout=240)
    assert process.returncode == 0, output
    for a, b in zip(read_log(tmp_path / "one"), read_log(tmp_path / "two"), strict=True):
        for name in a.keys() & {"loss", "head_loss", "target_loss", "validation/target_loss"}:
            assert a[name] == pytest.approx(b[name], rel=1e-5)
    two = adapter_of(tmp_path / "two")
    for name, tensor in adapter_of(tmp_path / "one").items():
        assert torch.allclose(tensor, two[name], atol=1e-5), name


@pytest.mark.slow
@pytest.mark.parametrize("every", [6, 2])  # killed in the second stage, or in the first
def test_a_killed_run_resumes_bit_exactly(every: int, medusa: Path, folder: Path, tmp_path: Path) -> None:
    out, changes = tmp_path / "killed", JOINT | {"log.checkpoint_every": every}
    kill_after_a_checkpoint(flags(folder, out, "medusa", **changes), out)
    (out / "run.json").unlink(missing_ok=True)  # where the kill came after the end
    train(recipe(folder, out, "medusa", **changes))
    for find in (adapter_of, weights):
        straight, resumed = find(medusa), find(out)
        for name, tensor in straight.items():
            assert torch.equal(tensor, resumed[name]), name


def test_the_log_tells_the_losses_of_head_and_target_apart(medusa: Path) -> None:
    rows, config = read_log(medusa), AdapterConfig()
    alone = round(config.start_share * len(rows))
    assert 0 < alone < len(rows)
    for row in rows:
        weight = head_weight(config, (row["step"] - 1 - alone) / (len(rows) - alone))
        for prefix in ("", "validation/") if "validation/loss" in row else ("",):
            loss, head, target = (row.get(f"{prefix}{name}loss") for name in ("", "head_", "target_"))
            if row["step"] <= alone:
                assert head is None and target is None
            else:
                assert head is not None and target is not None
                assert loss == pytest.approx(weight * head + target, rel=1e-5)


def test_a_checkpoint_gives_the_runs_own_adapter(medusa: Path, tmp_path: Path) -> None:
    out = extract_head(ExtractOptions(str(medusa), out=str(tmp_path / "head")))
    for path in (medusa / "head").rglob("*.*"):
        assert path.read_bytes() == (out / path.relative_to(medusa / "head")).read_bytes(), path


def test_the_distillation_pulls_at_nothing_while_the_adapter_says_nothing(folder: Path) -> None:
    target = Target.load(str(folder / "target"), pack=False)
    head = HEADS["medusa"](HEADS["medusa"].Config(n_heads=2), target)
    adapter = target.adapt({"r": 4, "target_modules": "all-linear"})
    samples = prepare(Preparation([str(folder / "data.jsonl")], target.chat, 64)).samples
    batch = collate(samples[:2], 64)
    pull, losses = {}, {}
    for loss in ("distill", "text"):
        module = JointModule(head, FeatureCache(0), adapter, AdapterConfig(loss=loss, start_share=0), total=2)
        found = torch.autograd.grad(
            module.target_loss(batch, module.target_output(batch, gradient=True)), adapter.parameters
        )
        pull[loss] = max(float(gradient.abs().max()) for gradient in found)
        losses[loss] = list(module(batch, step=2).parts.values())
    assert pull["distill"] < 1e-4 < 1 < pull["text"]
    assert losses["distill"][0] == losses["text"][0]
    ids, predicts = ahead(batch, 1)
    logp = target.logits(module.target_output(batch).hidden[predicts]).log_softmax(-1)  # [n, V]
    assert losses["distill"][1] == pytest.approx(float(-(logp.exp() * logp).sum()), rel=1e-5), "its own entropy"
    assert losses["text"][1] == pytest.approx(-float(logp.gather(1, ids[predicts][:, None]).sum()), rel=1e-5)


def test_a_head_trains_on_a_target_with_an_adapter_as_on_the_merged_model(
    medusa: Path, folder: Path, tmp_path: Path
) -> None:
    adapter = medusa / "head" / "adapter"
    model = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(folder / "target"), adapter)
    model.merge_and_unload().save_pretrained(tmp_path / "merged")
    Target.load(str(folder / "target")).tokenizer.save_pretrained(tmp_path / "merged")
    train(recipe(folder, tmp_path / "on", **{"target.adapter": adapter}))
    train(recipe(folder, tmp_path / "merged-run", **{"target.name": tmp_path / "merged"}))
    for name, tensor in weights(tmp_path / "merged-run").items():
        assert torch.equal(tensor, weights(tmp_path / "on")[name]), name
    options = DecodingOptions(head=str(tmp_path / "on" / "head"))
    assert options.load_head(options.load_target()).kind == "eagle3"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("{peft_type: NONE}", "NONE"),
        ("{rank: 4}", "rank"),
        ("{r: 4, target_modules: [no_such]}", "no_such"),
        ("{peft_type: PROMPT_TUNING, num_virtual_tokens: 4}", "tokens"),
        ("{r: 4, target_modules: [lm_head]}", "output layer"),
        ("{r: 4, target_modules: all-linear, bias: all}", "bias"),
        ("{r: 4, target_modules: all-linear, init_lora_weights: false}", "output unchanged"),
        ("{r: 4, target_modules: all-linear, init_lora_weights: olora}", "output unchanged"),
        ("{r: 4, target_modules: [q_proj], modules_to_save: [embed_tokens]}", "output layer"),
        ("{peft_type: lore}", r"peft_type: must be one of .*LORA.*, got lore"),
        ("{r: four}", "r: expected int, got four"),
        ("{r: 4, target_modules: [q_proj], layer_replication: [[0, 2], [1, 5]]}", "remove layer_replication"),
        ("{r: 4, target_modules: [q_proj], layer_replication: [[0, 2], [0, 3]]}", "remove layer_replication"),
        ("{r: 4, target_modules: [q_proj], lora_bias: true}", "cannot be merged: .*lora_bias"),
        ("{r: 4, target_modules: [q_proj], alora_invocation_tokens: [1]}", "cannot be merged: aLoRA"),
        ("{peft_type: adaption_prompt, adapter_len: 2, adapter_layers: 2}", "cannot be merged"),
        ("{r: 4, target_modules: [q_proj], inference_mode: true}", "no weights to train; remove inference_mode"),
        ("{peft_type: POLY, r: 4, target_modules: [q_proj]}", "POLY fails: task_ids"),
        ("{peft_type: adalora, target_modules: [q_proj], total_step: 8}", "ADALORA reallocates ranks"),
        ("{r: 4, target_modules: [q_proj], init_lora_weights: eva}", "init_lora_weights: eva needs data"),
    ],
)
def test_an_adapter_that_cannot_be_trained_is_refused(options: str, message: str, folder: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=rf"adapter\.peft.*{message}"):
        train(recipe(folder, tmp_path / "run", "medusa", **{"adapter.peft": options}))


def test_an_adapter_that_cannot_be_loaded_is_refused(folder: Path, medusa: Path, tmp_path: Path) -> None:
    broken = tmp_path / "broken"
    broken.mkdir()
    (broken / "adapter_config.json").write_bytes((medusa / "head" / "adapter" / "adapter_config.json").read_bytes())
    (broken / "adapter_model.safetensors").write_bytes(b"no tensors")
    for source in (tmp_path / "nothing", broken):
        with pytest.raises(UserError, match=r"option adapter: '.*' does not fit this target"):
            Target.load(str(folder / "target"), adapter=str(source))
    with pytest.raises(UserError, match="already has target.adapter"):
        recipe(folder, tmp_path / "run", "medusa", **{"adapter.peft": LORA, "target.adapter": "some"})


def saved_lora(folder: Path, out: Path, **options: Any) -> Path:
    """A random adapter as peft saves it."""
    model = AutoModelForCausalLM.from_pretrained(folder / "target")
    config = LoraConfig(r=4, target_modules=["q_proj"], init_lora_weights=False, **options)
    get_peft_model(model, config).save_pretrained(str(out))
    return out


def test_an_adapter_whose_tensors_match_nothing_is_refused(folder: Path, tmp_path: Path) -> None:
    """peft would load it, and change nothing."""
    out = saved_lora(folder, tmp_path / "lora")
    tensors = load_file(out / "adapter_model.safetensors")
    first, *others = sorted(tensors)
    save_file({name: tensors[name] for name in others}, out / "adapter_model.safetensors")
    with pytest.raises(UserError, match=r"it lacks base_model\.model\.model\.layers\.0\.self_attn\.q_proj"):
        Target.load(str(folder / "target"), adapter=str(out))
    save_file({name.replace("layers", "blocks"): tensors[name] for name in tensors}, out / "adapter_model.safetensors")
    with pytest.raises(UserError, match=r"match nothing: .*model\.blocks\.0\.self_attn\.q_proj.* and 11 more"):
        Target.load(str(folder / "target"), adapter=str(out))


def test_the_fingerprint_holds_the_settings_that_say_how_the_tensors_act(folder: Path, tmp_path: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(folder / "target")
    fourier = FourierFTConfig(n_frequency=20, target_modules=["q_proj", "v_proj"], random_loc_seed=1)
    get_peft_model(model, fourier).save_pretrained(str(tmp_path / "fourier"))
    lora = saved_lora(folder, tmp_path / "lora")
    for out, changes in ((tmp_path / "fourier", {"random_loc_seed": 2}), (lora, {"lora_alpha": 9})):
        config = json.loads((out / "adapter_config.json").read_text())
        names = {"base_model_name_or_path": None, "peft_version": "0", "revision": "main", "inference_mode": False}
        order = {"target_modules": config["target_modules"][::-1]}
        found = []
        for change in ({}, names | order, changes):
            (out / "adapter_config.json").write_text(json.dumps(config | change))
            target = Target.load(str(folder / "target"), adapter=str(out))
            found.append((target.fingerprint, target.logits(target.forward(IDS).hidden)))
        (first, logits), (renamed, same), (other, different) = found
        assert first == renamed and torch.equal(logits, same)
        assert first != other and not torch.allclose(logits, different, atol=1e-3)


def test_an_adapter_that_repeats_layers_is_refused(folder: Path, tmp_path: Path) -> None:
    out = saved_lora(folder, tmp_path / "lora", layer_replication=[[0, 2], [0, 3]])
    with pytest.raises(UserError, match="repeats layers"):
        Target.load(str(folder / "target"), adapter=str(out))


def test_an_adapter_made_for_another_model_is_reported(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = saved_lora(folder, tmp_path / "lora")
    Target.load(str(folder / "target"), adapter=str(out))
    assert "made for" not in capsys.readouterr().err
    config = json.loads((out / "adapter_config.json").read_text())
    (out / "adapter_config.json").write_text(json.dumps(config | {"base_model_name_or_path": "some/other"}))
    Target.load(str(folder / "target"), adapter=str(out))
    assert capsys.readouterr().err.count("lora was made for 'some/other', here it is added to ") == 1


def test_a_head_whose_adapter_is_missing_is_reported(medusa: Path, tmp_path: Path) -> None:
    shutil.copytree(medusa / "head", tmp_path / "head")
    shutil.rmtree(tmp_path / "head" / "adapter")
    with pytest.raises(UserError, match="trained together with an adapter, .*head/adapter is missing"):
        DecodingOptions(head=str(tmp_path / "head")).load_target()


def test_four_bits_without_the_package_that_knows_them_are_refused(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *more: None if name == "bitsandbytes" else found(name)
    )
    with pytest.raises(UserError, match="pip install bitsandbytes"):
        train(recipe(folder, tmp_path / "run", "medusa", **{"target.four_bits": "true"}))
    with pytest.raises(UserError, match="four_bits: cannot merge"):
        recipe(folder, tmp_path / "run", "medusa", **{"target.four_bits": "true", "target.adapter": "some"})
