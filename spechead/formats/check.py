"""`spechead check`: whether a server will draft from the files in a folder as the head itself does.

It checks files, names, shapes and settings, one line for each; then it computes drafts from the files without this
project's head classes and compares them with the head's.

Legend: K drafts, V target vocabulary.
"""

from __future__ import annotations

import copy
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from spechead.decoding.random_source import SeededSource
from spechead.decoding.sampling import Drawing
from spechead.decoding.tree import chain
from spechead.errors import UserError
from spechead.formats import eagle_layout
from spechead.formats.capabilities import ExportInfo, refuse_adapter
from spechead.formats.files import CONFIG, MANIFEST, PICKLED, absolute_paths, read_config, shorten
from spechead.formats.foreign_head import ForeignHead, own_embedding
from spechead.formats.gguf_file import read_gguf
from spechead.formats.manifest import contents, differences, extra_files, read_manifest, template_change
from spechead.formats.options import ExchangeOptions
from spechead.formats.reference_forward import log_probabilities
from spechead.formats.registry import WRONG_TYPE, Format, detect, format_of, read_head, wrong_type
from spechead.heads import Head
from spechead.heads.files import load_head, read_info
from spechead.target.loading import DTYPES, dtype_name
from spechead.target.model import Target

TOLERANCE = 1e-4  # of log probabilities in float32
_LENGTHS = (5, 9, 17)  # of the texts before the drafts, in tokens
_DRAFTS = 3
_NEGLIGIBLE = -30.0  # log probability below which float32 is imprecise


@dataclass
class CheckOptions(ExchangeOptions):
    """Check an exported head against its target."""

    folder: str
    """Folder of the export."""
    head: str = ""
    """Folder of the head that was exported, to compare every tensor and setting with. Its target is the default."""
    format: str = ""
    """Format of the files: vllm, sglang, eagle, medusa, speculators, tgi, trtllm, llama.cpp. Empty: detected."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.target and not self.head:
            raise UserError("option target: is missing; give --target, or --head, whose own target is then used")
        if self.format:
            format_of(self.format)


@dataclass(frozen=True)
class Line:
    """The result of one check."""

    name: str
    ok: bool
    text: str

    def __str__(self) -> str:
        return f"{'pass' if self.ok else 'FAIL'}  {self.name:<14}{self.text}"


def check(options: CheckOptions) -> None:
    """Print a line for each check. Raises UserError if one fails."""
    folder, name, head = Path(options.folder), options.target, None
    if options.head:
        info = read_info(Path(options.head))
        name = name or info.target
        if not (options.target and options.force):
            refuse_adapter(info.adapter, "a server")
    target = options.load_target(name)
    if options.head:
        head = load_head(Path(options.head), target, force=options.force, dtype=torch.float32)
    lines = list(check_folder(folder, target, head, options.format))
    print("\n".join(map(str, lines)))
    failed = [line.name for line in lines if not line.ok]
    if failed:
        raise UserError(f"{folder}: {len(failed)} of {len(lines)} checks failed ({', '.join(dict.fromkeys(failed))})")
    print(f"{folder}: all {len(lines)} checks passed")


def check_folder(folder: Path, target: Target, head: Head | None = None, name: str = "") -> Iterator[Line]:
    """All checks of a folder in the format `name`, by default the detected one. Unreadable files end the list."""
    try:
        manifest = read_manifest(folder)
        name = name or detect(folder)
        form = format_of(name)
    except UserError as error:
        yield Line("files", False, str(error))
        return
    try:
        yield from _files(folder, manifest)
        yield from _paths(folder)
        yield from _same_as_exported(folder, target, head, form, manifest)
        yield from _target(manifest, target)
        foreign, built = read_head(name, folder, target)
        yield Line("contents", True, f"a head of kind {foreign.kind} for {form.SERVER}, {len(foreign.tensors)} tensors")
        yield from _settings(folder, foreign, target)
        yield from _tokenizer(folder, target)
        if head is not None:
            yield _weights(foreign, head)
        yield _forward(foreign, head if head is not None else built, target)
    except UserError as error:
        yield Line("contents", False, str(error))
    except WRONG_TYPE as error:
        yield Line("contents", False, wrong_type(error, name))


def check_written(folder: Path, head: Head, name: str) -> None:
    """Raise UserError if the files that were just written in the format `name` do not draft as `head` does.

    Runs the checks that can fail here: rounding may overflow, and target name and tokenizer come from options.
    """
    foreign, _ = read_head(name, folder, head.target)
    lines = [*_paths(folder), *_tokenizer(folder, head.target), _weights(foreign, head)]
    for line in [*lines, _forward(foreign, head, head.target)]:
        if not line.ok:
            raise UserError(line.text)


# ------------------------------------------------------------------------------------------------ files


def _files(folder: Path, manifest: dict[str, Any] | None) -> Iterator[Line]:
    names = sorted(path.name for path in folder.iterdir())
    pickled = [name for name in names if Path(name).suffix in PICKLED]
    links = [path.name for path in folder.iterdir() if path.is_symlink()]
    if pickled:
        yield Line("files", False, f"{', '.join(pickled)}: pickled files can run code, and some servers prefer them")
    elif links:
        yield Line("files", False, f"{', '.join(links)}: a link, which is not copied with the folder")
    else:
        yield Line("files", True, ", ".join(names))
    if manifest is not None and (extra := extra_files(manifest, folder)):
        text = f"{', '.join(extra)}: not of the export; servers may ignore them, spechead push refuses"
        yield Line("extra files", True, text)


def _paths(folder: Path) -> Iterator[Line]:
    """A failure for each settings file that cannot be read, or that names a path of one machine."""
    for path in (folder / CONFIG, folder / MANIFEST):
        try:
            settings = read_config(path) if path.is_file() else {}
        except UserError as error:
            yield Line("paths", False, str(error))
            continue
        if paths := absolute_paths({name: value for name, value in settings.items() if name != "files"}):
            yield Line("paths", False, f"{path.name}: {', '.join(paths)} is a path of one machine")


def _same_as_exported(
    folder: Path, target: Target, head: Head | None, form: Format, manifest: dict[str, Any] | None
) -> Iterator[Line]:
    """Compare every key and tensor with the manifest, and with another export of the head."""
    sources: list[tuple[str, dict[str, dict[str, Any]]]] = []
    if manifest is not None:
        sources.append(("the manifest", manifest["files"]))
    if head is not None:
        with tempfile.TemporaryDirectory() as scratch:
            form.save(head, Path(scratch), _info(manifest, folder, target))
            sources.append(("the head", contents(Path(scratch))))
    if not sources:
        yield Line("manifest", True, f"neither {MANIFEST} nor --head: keys and tensors are not compared with the head")
    for source, expected in sources:
        changed = differences(expected, folder, form.IF_MISSING, form.IF_UNKNOWN)
        changed += template_change(manifest or {}, folder)
        for line in changed:
            yield Line("manifest", False, line)
        if not changed:
            yield Line("manifest", True, f"every key and tensor is that of {source}")


def _info(manifest: dict[str, Any] | None, folder: Path, target: Target) -> ExportInfo:
    """What another export of the head needs to write the same files."""
    gguf = next(iter(sorted(folder.glob("*.gguf"))), None)
    if manifest is not None:
        return ExportInfo(str(manifest["target"]["name"]), DTYPES.get(manifest.get("dtype", ""), torch.float32), gguf)
    config = read_config(folder / CONFIG) if (folder / CONFIG).is_file() else {}
    verifier = (config.get("speculators_config") or {}).get("verifier") or {}
    inner = config.get("transformer_layer_config") or config
    dtype = DTYPES.get(str(inner.get("torch_dtype", "")), torch.float32)
    return ExportInfo(
        str(config.get("base_model_name_or_path") or verifier.get("name_or_path") or target.name), dtype, gguf
    )


def _target(manifest: dict[str, Any] | None, target: Target) -> Iterator[Line]:
    if manifest is None:
        return
    exported = manifest["target"]
    if exported["fingerprint"] != target.fingerprint:
        yield Line("target", False, f"exported for {exported['name']}, and {target.name} has other weights")
    else:
        yield Line("target", True, f"the weights of {target.name} are those that the head was exported for")


# ------------------------------------------------------------------------------------------------ settings


def _settings(folder: Path, foreign: ForeignHead, target: Target) -> Iterator[Line]:
    """Compare the settings with the target and the tensors."""
    path = folder / CONFIG
    config = read_config(path) if path.is_file() else {}
    config = config.get("transformer_layer_config") or config
    c, tensors = foreign.config, foreign.tensors
    size, agree = (len(tensors["d2t"]), ", d2t and t2d agree") if "d2t" in tensors else (target.vocab_size, "")
    yield Line("vocabulary", True, f"{size} draft tokens of {target.vocab_size}{agree}")
    if "layers" in c:
        yield Line("layers", True, f"reads hidden_states {c['layers']} of 0 to {target.n_layers}")
    if "rope_theta" in c:  # a decoder layer, which reads embeddings
        scaling = c.get("rope_scaling") or "no scaling"
        yield Line("rotary", True, f"base {c['rope_theta']:g}, {scaling}, heads of {c['head_dim']}")
        yield from _longest_text(config.get("max_position_embeddings"), eagle_layout.max_positions(target))
        ok = foreign.embedding is not None or own_embedding(target) is None
        own = "its own" if foreign.embedding is not None else "the target's"
        yield Line("embedding", ok, own if ok else "the target's stored rows, but the target scales them")
    own_output = any(name.startswith("lm_head") for name in tensors)
    yield Line("output layer", True, "its own" if own_output else "the target's")
    floats = {dtype_name(tensor.dtype) for tensor in tensors.values() if tensor.is_floating_point()}
    dtype, actual = config.get("torch_dtype", config.get("dtype")), ", ".join(sorted(floats))
    if dtype is not None and floats != {dtype}:
        yield Line("dtype", False, f"torch_dtype is {dtype}, the tensors are {actual}")
    else:
        yield Line("dtype", True, actual)


def _longest_text(length: Any, longest: int) -> Iterator[Line]:
    """Whether a server drafts up to the target's `longest` text, given `max_position_embeddings`, if any."""
    if length is not None and not isinstance(length, int):
        text = f"max_position_embeddings is {shorten(length)}: a whole number is expected"
        yield Line("longest text", False, text)
    elif length is not None and length < longest:
        text = f"{length} tokens, the target reads {longest}: the server stops drafting there, or rotates wrongly"
        yield Line("longest text", False, text)
    elif length is not None:
        yield Line("longest text", True, f"{length} tokens")


def _tokenizer(folder: Path, target: Target) -> Iterator[Line]:
    """Most servers use the target's tokenizer; if the folder contains one, it must be the same."""
    gguf, path = next(iter(sorted(folder.glob("*.gguf"))), None), folder / "tokenizer.json"
    if gguf is not None:
        tokens = read_gguf(gguf, settings_only=True).settings.get("tokenizer.ggml.tokens") or []
        expected = target.tokenizer.convert_ids_to_tokens(range(len(target.tokenizer)))
        other = [i for i, (a, b) in enumerate(zip(tokens, expected, strict=False)) if a != b]
        if len(tokens) < len(expected) or other:
            where = f"token {other[0]} is {tokens[other[0]]!r}" if other else f"{len(tokens)} tokens of {len(expected)}"
            yield Line("tokenizer", False, f"{where}: llama.cpp drafts only if both tokenizers agree")
        else:
            yield Line("tokenizer", True, f"{len(tokens)} tokens, the target's")
    elif path.is_file():
        vocabulary, expected = _token_ids(read_config(path).get("model")), target.tokenizer.get_vocab()
        if vocabulary is None:
            yield Line("tokenizer", False, "tokenizer.json has no vocabulary")
            return
        same = all(expected.get(token) == number for token, number in vocabulary.items())
        yield Line("tokenizer", same, "the target's" if same else "tokenizer.json has other tokens than the target's")
    else:
        yield Line("tokenizer", True, "none in the folder: the server uses the target's")


def _token_ids(model: Any) -> dict[str, int] | None:
    """Token -> id from the model of a tokenizer.json, a mapping or a list of [token, score]; None for neither."""
    vocab = model.get("vocab") if isinstance(model, dict) else None
    if isinstance(vocab, list) and all(isinstance(pair, list) and pair and isinstance(pair[0], str) for pair in vocab):
        return {pair[0]: number for number, pair in enumerate(vocab)}
    return vocab if isinstance(vocab, dict) else None


# ------------------------------------------------------------------------------------------------ drafts


def _weights(foreign: ForeignHead, head: Head) -> Line:
    """Whether the tensors are the head's, in the precision of the files."""
    wrong = [
        name
        for name, tensor in head.state_dict().items()
        if name not in foreign.tensors or not torch.equal(foreign.tensors[name], tensor.to(foreign.tensors[name].dtype))
    ]
    text = "every tensor is the head's, bit for bit" if not wrong else f"{', '.join(wrong)}: not those of the head"
    return Line("weights", not wrong, text)


def _forward(foreign: ForeignHead, head: Head, target: Target) -> Line:
    """Compare the log probabilities of drafts, computed from the files and by the head, after random texts."""
    generator, worst, allowed = torch.Generator().manual_seed(0), 0.0, TOLERANCE
    rounded = _in_precision(head, foreign)
    for length in _LENGTHS:
        text = torch.randint(target.vocab_size, (length,), generator=generator)
        drafts, expected = drafted(rounded, target, text, _DRAFTS)
        computed = log_probabilities(foreign, target, text.tolist(), drafts)
        likely = (expected > _NEGLIGIBLE) | (computed > _NEGLIGIBLE)
        gap = (expected.clamp(min=_NEGLIGIBLE) - computed.clamp(min=_NEGLIGIBLE))[likely].abs().max()
        worst = max(worst, float(gap))
        spread = -float(expected[expected > float("-inf")].min())  # if unusually large, so is the rounding of logits
        allowed = max(allowed, TOLERANCE * spread / -_NEGLIGIBLE)
    gaps = f"log probabilities of drafts differ by at most {worst:.1e}"
    return Line("forward", worst <= allowed, gaps if worst <= allowed else f"{gaps}: the server drafts otherwise")


def drafted(head: Head, target: Target, text: Tensor, count: int) -> tuple[list[int], Tensor]:
    """Up to `count` tokens that the head drafts after `text`, and the log probabilities [K, V] they were drawn from."""
    out = target.forward(text[None, :-1], taps=head.taps)
    tree = head.propose(head.new_state(text[:-1]), text[1:], out, chain(count), Drawing(1.0, SeededSource(0)))
    assert tree.drawn_from is not None
    drafts = tree.tokens[1:].tolist()
    return drafts, tree.drawn_from[: len(drafts)].log()


def _in_precision(head: Head, foreign: ForeignHead) -> Head:
    """The head with weights, and the embedding of the files, if any, rounded as the files' are; computes in float32."""
    state = {}
    for name, tensor in head.state_dict().items():
        stored = foreign.tensors.get(name, tensor)
        state[name] = tensor.to(stored.dtype).to(tensor.dtype)
    target = head.target
    if foreign.embedding is not None:
        target = copy.copy(target)
        target.embed = partial(F.embedding, weight=foreign.embedding.float())  # type: ignore[method-assign]
    rounded = type(head)(copy.deepcopy(head.config), target)
    rounded.load_state_dict(state)
    return rounded.to(head.dtype).eval().requires_grad_(False)
