"""The recipe of a training run: a tree of dataclasses that YAML files, `--a.b value` flags and --help share.

Knows nothing of torch: loading a recipe only checks that its values make sense, head options included.
"""

import dataclasses
import functools
import math
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from spechead import files, options
from spechead.errors import UserError


@dataclass
class TargetConfig:
    """The language model that the head drafts for."""

    name: str = "smollm2-135m"
    """The embedded smollm2-135m, a local folder, or a hub id."""
    adapter: str = ""
    """Folder or hub id of a peft adapter that it carries, merged into its weights."""
    four_bits: bool = False
    """Hold its linear layers in 4 bits (needs bitsandbytes); with adapter.peft, this is QLoRA."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """Number format of its weights; auto: bfloat16 where the head trains in bf16, else float32."""
    device: str = "auto"
    """auto, cpu, cuda or cuda:0; auto takes the accelerator of this process where there is one."""
    trust_remote_code: bool = False
    """Run modeling code that the model's own repository brings."""
    template_kwargs: dict[str, Any] = field(default_factory=dict)
    """Keywords for the chat template, such as {enable_thinking: false}; recorded with the head."""


@dataclass
class DataConfig:
    """The conversations to train on."""

    train: list[str] | str = "shipped:data/sample.jsonl"
    """JSONL files, hub datasets as hf:NAME[:SPLIT], or files that ship with spechead as shipped:PATH."""
    max_length: int = 512
    """Conversations are cut after this many tokens; what has no answer before it is dropped and counted."""
    validation_share: float = 0.03
    """Share of the conversations held out for validation."""
    limit: int = 0
    """Read only this many conversations; 0 reads all."""

    def sources(self) -> list[str]:
        """The training sources with shipped: names turned into paths."""
        names = [self.train] if isinstance(self.train, str) else self.train
        prefix = "shipped:"
        return [str(files.shipped(n.removeprefix(prefix))) if n.startswith(prefix) else n for n in names]


@dataclass
class HeadRecipe:
    """The head to train."""

    kind: str = "eagle3"
    """Name of the head, such as eagle3 or medusa; spechead/heads/__init__.py lists them."""
    options: dict[str, Any] = field(default_factory=dict)
    """Fields of that head's Config, each also as --head.options.NAME VALUE."""
    tree: str = ""
    """Tree that the finished head drafts unless asked otherwise, such as chain:3 or
    dynamic:nodes=31,depth=5,topk=4; empty: the head's own default."""
    init_from_target: bool = True
    """Start output rows, final norm and layer from the target's where shapes allow."""
    init_from: str = ""
    """Folder of a head of the same kind and shape to start from, of this target or of one of the same shape."""
    init_vocabulary: Literal["keep", "extend", "remap"] = "keep"
    """The draft vocabulary with init_from: keep, the same tokens; extend, more besides; remap, counted anew. New tokens
    start as without init_from."""


@dataclass
class AdapterConfig:
    """Training the target along with the head (Medusa-2): a peft adapter on it, saved beside the head."""

    peft: dict[str, Any] = field(default_factory=dict)
    """Fields of a peft config, such as {r: 32, lora_alpha: 16, target_modules: all-linear}; peft_type is LORA unless
    named. Empty: the target stays as it is."""
    start_share: float = 0.5
    """Share of the steps that train the head alone, before both are trained."""
    lr: float = 5e-4
    """Peak learning rate of the adapter; the head's is optim.lr."""
    loss: Literal["distill", "text"] = "distill"
    """What keeps the target good: distill, its own distribution without the adapter; text, the training answers."""
    head_weight: float = 0.2
    """λ: what the head's loss weighs beside the target's."""
    head_schedule: Literal["constant", "linear", "sine"] = "constant"
    """How λ comes in over the steps that train both."""


@dataclass
class OptimConfig:
    """The optimizer (AdamW) and its schedule. Every count is in optimizer steps."""

    lr: float = 1e-3
    """Peak learning rate."""
    betas: tuple[float, float] = (0.9, 0.95)
    """Decay of the two moments."""
    weight_decay: float = 0.0
    """Decoupled weight decay."""
    schedule: Literal["cosine", "linear", "constant"] = "cosine"
    """Shape of the learning rate after warm-up."""
    warmup_share: float = 0.03
    """Share of the steps over which the rate rises from zero."""
    min_lr_share: float = 0.1
    """Where the schedule ends, as a share of the peak."""
    clip_norm: float = 1.0
    """Largest norm of the gradient; 0 leaves it alone."""
    ema: float = 0.0
    """Decay of the running average of the weights, such as 0.999; it is what is validated and what the head gets.
    0: no average."""
    batch_size: int = 1
    """Samples per optimizer step, over all processes and accumulation."""
    micro_batch_size: int = 1
    """Samples that one process takes through the model at once; raise it while memory lasts."""
    epochs: float = 3.0
    """Passes over the data."""
    steps: int = 0
    """Optimizer steps; 0 takes as many as the epochs need."""
    patience: int = 0
    """Stop after this many validations in a row without a better acceptance length; 0 never does."""

    def accumulation(self, world: int) -> int:
        """Micro steps that make one optimizer step on each of `world` processes."""
        per_round = self.micro_batch_size * world
        if self.batch_size % per_round:
            raise UserError(
                f"optim.batch_size {self.batch_size} is not a multiple of optim.micro_batch_size "
                f"{self.micro_batch_size} x {world} processes: change one of them"
            )
        return self.batch_size // per_round

    def total_steps(self, samples: int) -> int:
        """Optimizer steps of the whole run over `samples` training samples."""
        return self.steps or max(1, math.ceil(self.epochs * samples / self.batch_size))


@dataclass
class EngineConfig:
    """How the training is carried out."""

    zero_stage: Literal[0, 1, 2] = 0
    """DeepSpeed ZeRO stage: 0 replicates, 1 shards optimizer state, 2 also gradients."""
    precision: Literal["auto", "float32", "bf16"] = "auto"
    """Of the arithmetic, over float32 master weights; auto: bf16 where the device computes it natively."""
    feature_memory_gb: float = 0.0
    """Memory of each process for the target's outputs, so that later epochs skip its forward; helps when a
    micro batch is one sample (about 5 KB a token for SmolLM2 in bf16)."""
    gradient_checkpointing: bool = False
    """Compute the head's decoder steps again for the gradient rather than keep their activations: less memory, more
    time, the same weights."""
    threads: int = 0
    """CPU threads of each process; 0 leaves torch's choice."""


@dataclass
class LogConfig:
    """What is written down, and how often (in optimizer steps)."""

    every: int = 10
    """Steps between lines of the log."""
    validate_every: int = 200
    """Steps between validations; 0: only at the end."""
    checkpoint_every: int = 100
    """Steps between checkpoints to resume from."""
    keep: int = 2
    """Newest checkpoints kept, beside that of the best validation."""
    best: bool = True
    """The finished head is that of the best validation (acceptance length), where any samples are held out; false: of
    the last step."""
    wandb: Literal["disabled", "offline", "online"] = "disabled"
    """Also log to Weights & Biases."""
    project: str = "spechead"
    """Project there."""


@dataclass
class Recipe:
    """Everything that decides a training run."""

    target: TargetConfig = field(default_factory=TargetConfig)
    """The language model that the head drafts for."""
    data: DataConfig = field(default_factory=DataConfig)
    """The conversations to train on."""
    head: HeadRecipe = field(default_factory=HeadRecipe)
    """The head to train."""
    adapter: AdapterConfig = field(default_factory=AdapterConfig)
    """Training the target along with the head."""
    optim: OptimConfig = field(default_factory=OptimConfig)
    """The optimizer and its schedule."""
    engine: EngineConfig = field(default_factory=EngineConfig)
    """How the training is carried out."""
    log: LogConfig = field(default_factory=LogConfig)
    """What is written down, and how often."""
    seed: int = 0
    """Of the initial weights, the split and the order of the samples."""
    out: str = ""
    """Output folder; empty: runs/ and the recipe's name."""

    @classmethod
    def from_cli(cls, argv: Sequence[str] | None = None, prog: str = "train") -> "Recipe":
        """Read `--config NAME_OR_FILE` and the flags that override it."""
        config, flags = split_config(sys.argv[1:] if argv is None else argv)
        return load_recipe(config, flags, prog)

    def to_dict(self) -> dict[str, Any]:
        """Plain values for the provenance file and wandb; `Recipe` reads the same tree as YAML."""
        tree = dataclasses.asdict(self)
        tree["optim"]["betas"] = list(self.optim.betas)
        return tree


def split_config(argv: Sequence[str]) -> tuple[str, list[str]]:
    """Take `--config X` (or `--config=X`) out of the flags; the last one counts."""
    config, flags, words = "", [], iter(argv)
    for word in words:
        if word == "--config":
            config = next(words, "")
            if not config:
                raise UserError("--config needs the name of a recipe or a YAML file")
        elif word.startswith("--config="):
            config = word.removeprefix("--config=")
        else:
            flags.append(word)
    return config, flags


def load_recipe(config: str = "", overrides: Sequence[str] = (), prog: str = "train") -> Recipe:
    """Load a YAML file, or a shipped recipe by its name, override and check it."""
    path = find_recipe(config) if config else None
    recipe = options.parse(Recipe, overrides, prog, config=str(path or ""))
    recipe.out = recipe.out or f"runs/{path.stem if path else recipe.head.kind}"
    check(recipe)
    return recipe


def find_recipe(config: str) -> Path:
    """A file as it stands, else a shipped recipe: eagle3-smollm2 or recipes/eagle3-smollm2.yaml."""
    path = Path(config)
    if path.is_file():
        return path
    if path.parent in (Path(), Path("recipes")):
        try:
            return files.shipped(f"recipes/{path.name.removesuffix('.yaml')}.yaml")
        except UserError:
            pass
    names = sorted(shipped.stem for shipped in files.shipped("recipes").glob("*.yaml"))
    raise UserError(f"no recipe {config}: give a YAML file, or one of {', '.join(names)}")


# What a value must be, how to tell, and the options it holds for.
RULES: list[tuple[str, Callable[[Any], bool], list[str]]] = [
    (
        "at least 1",
        lambda v: v >= 1,
        ["data.max_length", "optim.batch_size", "optim.micro_batch_size"]
        + ["log.every", "log.checkpoint_every", "log.keep"],
    ),
    (
        "0 or more",
        lambda v: 0 <= v < math.inf,
        ["data.limit", "optim.weight_decay", "optim.clip_norm", "optim.steps", "optim.patience"]
        + ["engine.feature_memory_gb", "log.validate_every"],
    ),
    ("from 0 to below 2^32", lambda v: 0 <= v < 1 << 32, ["seed"]),
    (f"from 0 to the {os.cpu_count()} of this machine", lambda v: 0 <= v <= (os.cpu_count() or v), ["engine.threads"]),
    ("above 0", lambda v: 0 < v < math.inf, ["optim.lr", "optim.epochs", "adapter.lr", "adapter.head_weight"]),
    (
        "from 0 to below 1",
        lambda v: 0 <= v < 1,
        ["data.validation_share", "optim.warmup_share", "optim.ema", "adapter.start_share"],
    ),
    ("two numbers from 0 to below 1", lambda v: all(0 <= beta < 1 for beta in v), ["optim.betas"]),
    ("from 0 to 1", lambda v: 0 <= v <= 1, ["optim.min_lr_share"]),
    ("the name of at least one source", lambda v: bool(v) and all([v] if isinstance(v, str) else v), ["data.train"]),
]


def check(recipe: Recipe) -> None:
    """Refuse values that could only fail later, naming the option."""
    for what, holds, names in RULES:
        for name in names:
            value = functools.reduce(getattr, name.split("."), recipe)
            if not holds(value):
                raise UserError(f"option {name}: must be {what}, got {value}")
    if recipe.optim.batch_size % recipe.optim.micro_batch_size:
        recipe.optim.accumulation(1)
    if recipe.adapter.peft and recipe.target.adapter:
        raise UserError(
            f"option adapter.peft: the target carries target.adapter {recipe.target.adapter!r} already; "
            "merge that into the target first (peft's merge_and_unload), or leave one of them out"
        )
    if recipe.target.four_bits and recipe.target.adapter:
        raise UserError("option target.four_bits: cannot merge target.adapter; merge it into the stored weights first")
    if recipe.optim.patience and not (recipe.data.validation_share and recipe.log.validate_every):
        raise UserError(
            f"option optim.patience: {recipe.optim.patience} counts validations, and there are none before the end: "
            "set data.validation_share and log.validate_every"
        )
    if recipe.head.init_vocabulary != "keep" and not recipe.head.init_from:
        raise UserError(
            f"option head.init_vocabulary: {recipe.head.init_vocabulary} is about the vocabulary of an earlier head: "
            "set head.init_from"
        )
    check_head(recipe.head, recipe.engine.gradient_checkpointing)


def check_head(head: HeadRecipe, gradient_checkpointing: bool = False) -> None:
    """Refuse a kind, an option or a tree that no head knows, and a way of training that this one does not.

    The heads are imported here, not above, so that --help stays quick.
    """
    from spechead.decoding.tree import parse_tree
    from spechead.heads import HEADS
    from spechead.options import check_ranges

    if head.kind not in HEADS:
        raise UserError(f"option head.kind: no head {head.kind} (known: {', '.join(HEADS)})")
    if gradient_checkpointing and HEADS[head.kind].recompute is None:
        raise UserError(
            f"option engine.gradient_checkpointing: a {head.kind} head has no decoder steps to compute again; "
            "a smaller optim.micro_batch_size or data.max_length saves memory"
        )
    head.options = options.convert(HEADS[head.kind].Config, head.options, "head.options.")
    check_ranges(HEADS[head.kind].Config(**head.options), "head.options.")
    if head.tree:
        parse_tree(head.tree)
