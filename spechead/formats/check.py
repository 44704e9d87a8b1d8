"""`spechead check OUT --target T`: whether a folder holds what a server will draft with as the head itself does.

Files, names, shapes and settings, each in a line; then the drafts themselves, computed from the files without our head
classes and compared with the head's. Knows nothing of how the formats write.

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
from spechead.formats.files import CONFIG, PICKLED, RECORD, absolute_paths, as_text, read_config
from spechead.formats.foreign_head import ForeignHead, own_embedding
from spechead.formats.gguf_file import read_gguf
from spechead.formats.manifest import beside, contents, differences, read_manifest
from spechead.formats.options import ServerTargetOptions
from spechead.formats.reference_forward import log_probabilities
from spechead.formats.registry import WRONG_KIND, Format, detect, format_of, read_head, wrong_kind
from spechead.heads import Head
from spechead.heads.files import load_head, read_info
from spechead.target.loading import DTYPES
from spechead.target.model import Target

TOLERANCE = 1e-4  # of log probabilities in float32
_LENGTHS = (5, 9, 17)  # of the texts that are drafted behind, in tokens
_DRAFTS = 3
_NEGLIGIBLE = -30.0  # log probability below which float32 says little


@dataclass
class CheckOptions(ServerTargetOptions):
    """Check an exported head against its target."""

    folder: str
    """Folder of the export."""
    head: str = ""
    """Folder of the head that was exported, to compare every tensor and setting with."""
    format: str = ""
    """Whose form: vllm, sglang, eagle, medusa, speculators, tgi, trtllm, llama.cpp. Empty: what it says itself."""

    def __post_init__(self) -> None:
        if not self.target and not self.head:
            raise UserError("no target: give --target, or --head, whose own target is then used")
        if self.format:
            format_of(self.format)


@dataclass(frozen=True)
class Line:
    """One thing that was looked at."""

    name: str
    ok: bool
    text: str

    def __str__(self) -> str:
        return f"{'pass' if self.ok else 'FAIL'}  {self.name:<14}{self.text}"


def check(options: CheckOptions) -> None:
    """Print a line for each thing looked at; UserError where one is wrong."""
    folder = Path(options.folder)
    name = options.target or read_info(Path(options.head)).target
    if options.head and not (options.target and options.force):
        refuse_adapter(read_info(Path(options.head)).adapter, "a server")
    target = options.load_target(name)
    head = None
    if options.head:
        head = load_head(Path(options.head), target, force=options.force, dtype=torch.float32)
    lines = list(check_folder(folder, target, head, options.format))
    print("\n".join(map(str, lines)))
    wrong = [line.name for line in lines if not line.ok]
    if wrong:
        raise UserError(f"{folder}: {len(wrong)} of {len(lines)} checks failed ({', '.join(dict.fromkeys(wrong))})")
    print(f"{folder}: all {len(lines)} checks passed")


def check_folder(folder: Path, target: Target, head: Head | None = None, name: str = "") -> Iterator[Line]:
    """Each thing looked at. What cannot be read ends the list."""
    try:
        record = read_manifest(folder)
        name = name or detect(folder)
        format_of(name)
    except UserError as error:
        yield Line("files", False, str(error))
        return
    try:
        yield from _files(folder, record)
        yield from _contents(folder, target, head, name, record)
    except UserError as error:
        yield Line("contents", False, str(error))
    except WRONG_KIND as error:
        yield Line("contents", False, wrong_kind(error, name))


def _contents(
    folder: Path, target: Target, head: Head | None, name: str, record: dict[str, Any] | None
) -> Iterator[Line]:
    """What the files hold. Raises UserError where they make no head, and may raise WRONG_KIND."""
    form = format_of(name)
    yield from _same_as_exported(folder, target, head, form, record)
    yield from _target(record, target)
    served, read = read_head(name, folder, target)
    yield Line("contents", True, f"a head of kind {served.kind} for {form.SERVER}, {len(served.tensors)} tensors")
    yield from _settings(folder, served, target)
    yield from _weights(served, head, target)
    yield _forward(served, head if head is not None else read, target)


# ------------------------------------------------------------------------------------------------ files


def _files(folder: Path, record: dict[str, Any] | None) -> Iterator[Line]:
    names = sorted(path.name for path in folder.iterdir())
    pickled = [name for name in names if Path(name).suffix in PICKLED]
    links = [path.name for path in folder.iterdir() if path.is_symlink()]
    if pickled:
        yield Line("files", False, f"{', '.join(pickled)}: pickled files can run code, and some servers prefer them")
    elif links:
        yield Line("files", False, f"{', '.join(links)}: a link, which does not travel with the folder")
    else:
        yield Line("files", True, ", ".join(names))
    if record is not None and (others := beside(record, folder)):
        yield Line("beside", True, f"{', '.join(others)}: not of the export; servers may not mind, spechead push does")
    for path in (folder / CONFIG, folder / RECORD):
        try:
            told = read_config(path) if path.is_file() else {}
            found = absolute_paths({name: value for name, value in told.items() if name != "files"})
        except UserError as error:
            yield Line("paths", False, str(error))
            continue
        if found:
            yield Line("paths", False, f"{path.name}: {', '.join(found)} is a path of one machine")


def _same_as_exported(
    folder: Path, target: Target, head: Head | None, form: Format, record: dict[str, Any] | None
) -> Iterator[Line]:
    """Every key and tensor: as another export of the head writes them, and as the record has them."""
    sources: list[tuple[str, dict[str, dict[str, Any]]]] = []
    if record is not None:
        sources.append(("the record", record["files"]))
    if head is not None:
        about = _about(record, folder, target)
        with tempfile.TemporaryDirectory() as scratch:
            form.save(head, Path(scratch), about)
            sources.append(("the head", contents(Path(scratch))))
    if not sources:
        yield Line("record", True, f"neither {RECORD} nor --head: keys and tensors are not compared with the head's")
    for source, wanted in sources:
        wrong = differences(wanted, folder, form.MISSING, form.UNKNOWN)
        for line in wrong:
            yield Line("record", False, line)
        if not wrong:
            yield Line("record", True, f"every key and tensor is that of {source}")


def _about(record: dict[str, Any] | None, folder: Path, target: Target) -> ExportInfo:
    """What another export of the head has to be told, to write the same files."""
    gguf = next(iter(sorted(folder.glob("*.gguf"))), None)
    if record is not None:
        return ExportInfo(str(record["target"]["name"]), DTYPES.get(record.get("dtype", ""), torch.float32), gguf)
    config = read_config(folder / CONFIG) if (folder / CONFIG).is_file() else {}
    verifier = (config.get("speculators_config") or {}).get("verifier") or {}
    inner = config.get("transformer_layer_config") or config
    dtype = DTYPES.get(str(inner.get("torch_dtype", "")), torch.float32)
    return ExportInfo(
        str(config.get("base_model_name_or_path") or verifier.get("name_or_path") or target.name), dtype, gguf
    )


def _target(record: dict[str, Any] | None, target: Target) -> Iterator[Line]:
    if record is None:
        return
    told = record.get("target", {})
    if told.get("fingerprint") != target.fingerprint:
        yield Line("target", False, f"exported for {told.get('name')}, and {target.name} has other weights")
    else:
        yield Line("target", True, f"the weights of {target.name} are those that the head is for")


# ------------------------------------------------------------------------------------------------ settings


def _settings(folder: Path, served: ForeignHead, target: Target) -> Iterator[Line]:
    path = folder / CONFIG
    config = read_config(path) if path.is_file() else {}
    config = config.get("transformer_layer_config") or config
    c, reduced = served.config, "d2t" in served.tensors
    size = served.tensors["d2t"].shape[0] if reduced else target.vocab_size
    yield Line(
        "vocabulary", True, f"{size} draft tokens of {target.vocab_size}" + (", d2t and t2d agree" if reduced else "")
    )
    if served.kind == "eagle3":
        yield Line("layers", True, f"reads hidden_states {c['layers']} of 0 to {target.n_layers}")
    if served.kind != "medusa":
        scaling = c.get("rope_scaling") or "no scaling"
        yield Line("rotary", True, f"base {c['rope_theta']:g}, {scaling}, heads of {c['head_dim']}")
        told, longest = config.get("max_position_embeddings"), eagle_layout.longest(target)
        if told is not None and not isinstance(told, int):
            yield Line("longest text", False, f"max_position_embeddings is {as_text(told)}: a whole number is expected")
        elif told is not None and told < longest:
            text = f"{told} tokens, the target reads {longest}: the server stops drafting there, or rotates wrongly"
            yield Line("longest text", False, text)
        elif told is not None:
            yield Line("longest text", True, f"{told} tokens")
    own = "brings its own" if served.embedding is not None else "the target's"
    if served.kind != "medusa":
        ok = served.embedding is not None or own_embedding(target) is None
        yield Line("embedding", ok, own if ok else "the target's stored rows, but the target scales them")
    shared = served.kind == "eagle" or c.get("output") == "shared"
    yield Line("output layer", True, "the target's" if shared else "its own")
    floats = {
        str(tensor.dtype).removeprefix("torch.") for tensor in served.tensors.values() if tensor.is_floating_point()
    }
    told_dtype = config.get("torch_dtype", config.get("dtype"))
    if told_dtype is not None and floats != {told_dtype}:
        yield Line("dtype", False, f"torch_dtype is {told_dtype}, the tensors are {', '.join(sorted(floats))}")
    else:
        yield Line("dtype", True, ", ".join(sorted(floats)))
    yield from _tokenizer(folder, target)


def _tokenizer(folder: Path, target: Target) -> Iterator[Line]:
    """Most servers take the target's; one that lies in the folder all the same must not be another."""
    gguf, path = next(iter(sorted(folder.glob("*.gguf"))), None), folder / "tokenizer.json"
    if gguf is not None:
        theirs = read_gguf(gguf, settings_only=True).settings.get("tokenizer.ggml.tokens") or []
        ours = target.tokenizer.convert_ids_to_tokens(range(len(target.tokenizer)))
        other = [i for i, (a, b) in enumerate(zip(theirs, ours, strict=False)) if a != b]
        if len(theirs) < len(ours) or other:
            where = f"token {other[0]} is {theirs[other[0]]!r}" if other else f"{len(theirs)} tokens of {len(ours)}"
            yield Line("tokenizer", False, f"{where}: llama.cpp drafts only where both tokenizers agree")
        else:
            yield Line("tokenizer", True, f"{len(theirs)} tokens, the target's")
    elif path.is_file():
        numbered, ours = _numbered(read_config(path).get("model")), target.tokenizer.get_vocab()
        if numbered is None:
            yield Line("tokenizer", False, "tokenizer.json holds no vocabulary")
            return
        same = all(ours.get(token) == number for token, number in numbered.items())
        yield Line("tokenizer", same, "the target's" if same else "tokenizer.json has other tokens than the target's")
    else:
        yield Line("tokenizer", True, "none in the folder: the server takes the target's")


def _numbered(model: Any) -> dict[str, int] | None:
    """Token -> id in the model of a tokenizer.json, which names them so or lists [token, score]; None for neither."""
    vocab = model.get("vocab") if isinstance(model, dict) else None
    if isinstance(vocab, list) and all(isinstance(pair, list) and pair and isinstance(pair[0], str) for pair in vocab):
        return {pair[0]: number for number, pair in enumerate(vocab)}
    return vocab if isinstance(vocab, dict) else None


# ------------------------------------------------------------------------------------------------ drafts


def _weights(served: ForeignHead, head: Head | None, target: Target) -> Iterator[Line]:
    """Whether the tensors are the head's, in the files' precision."""
    if head is None:
        return
    wrong = [
        name
        for name, ours in head.state_dict().items()
        if name not in served.tensors or not torch.equal(served.tensors[name], ours.to(served.tensors[name].dtype))
    ]
    text = "every tensor is the head's, bit for bit" if not wrong else f"{', '.join(wrong)}: not those of the head"
    yield Line("weights", not wrong, text)


def _forward(served: ForeignHead, head: Head, target: Target) -> Line:
    """The largest difference of drafts' log probabilities, from the files and from the head, behind random texts."""
    generator, worst, allowed = torch.Generator().manual_seed(0), 0.0, TOLERANCE
    rounded = _in_precision(head, served)
    for length in _LENGTHS:
        text = torch.randint(target.vocab_size, (length,), generator=generator)
        drafts, ours = drafted(rounded, target, text, min(_DRAFTS, head.depths) if served.kind == "medusa" else _DRAFTS)
        theirs = log_probabilities(served, target, text.tolist(), drafts)
        likely = (ours > _NEGLIGIBLE) | (theirs > _NEGLIGIBLE)
        gap = (ours.clamp(min=_NEGLIGIBLE) - theirs.clamp(min=_NEGLIGIBLE))[likely].abs().max()
        worst = max(worst, float(gap))
        spread = -float(ours[ours > float("-inf")].min())  # far beyond the usual, logits are large, and so is rounding
        allowed = max(allowed, TOLERANCE * spread / -_NEGLIGIBLE)
    told = f"log probabilities of drafts differ by at most {worst:.1e}"
    return Line("forward", worst <= allowed, told if worst <= allowed else f"{told}: the server drafts otherwise")


def drafted(head: Head, target: Target, text: Tensor, count: int) -> tuple[list[int], Tensor]:
    """Tokens that the head drafts behind `text`, and the log probabilities [K, V] that each was drawn by."""
    out = target.forward(text[None, :-1], taps=head.taps)
    tree = head.propose(head.new_state(text[:-1]), text[1:], out, chain(count), Drawing(1.0, SeededSource(0)))
    assert tree.drawn_from is not None
    return tree.tokens[1:].tolist(), tree.drawn_from[:count].log()


def _in_precision(head: Head, served: ForeignHead) -> Head:
    """The head with its weights, and the embedding that comes with them, rounded as the files' are; computes in
    float32."""
    state = {}
    for name, ours in head.state_dict().items():
        theirs = served.tensors.get(name, ours)
        state[name] = ours.to(theirs.dtype).to(ours.dtype)
    target = head.target
    if served.embedding is not None:
        target = copy.copy(target)
        target.embed = partial(F.embedding, weight=served.embedding.float())  # type: ignore[method-assign]
    twin = type(head)(copy.deepcopy(head.config), target)
    twin.load_state_dict(state)
    return twin.to(head.dtype).eval().requires_grad_(False)
