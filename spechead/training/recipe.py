"""The recipe of a training run: a tree of dataclasses that YAML files, `--a.b value` flags and --help share.

Loading a recipe checks its values, the head's options included, without importing torch until a head is checked.
"""

import dataclasses
import math
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

from spechead import files, options
from spechead.errors import UserError
from spechead.options import Range, check_ranges

Count = Annotated[int, Range(0)]
AtLeastOne = Annotated[int, Range(1)]
Positive = Annotated[float, Range(above=0)]
Share = Annotated[float, Range(0, below=1)]


@dataclass
class TargetConfig:
    """The language model that the head drafts for."""

    name: str = "smollm2-135m"
    """smollm2-135m (bundled), a local folder, or a hub id."""
    adapter: str = ""
    """Folder or hub id of a peft adapter to merge into its weights."""
    four_bits: bool = False
    """Keep its linear layers in 4 bits (needs bitsandbytes); with adapter.peft, this is QLoRA."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """Number format of its weights; auto: bfloat16 where the head trains in bf16, else float32."""
    device: str = "auto"
    """auto, cpu, cuda or cuda:0; auto uses the accelerator of this process where there is one."""
    trust_remote_code: bool = False
    """Run modeling code from the model's own repository."""
    template_kwargs: dict[str, Any] = field(default_factory=dict)
    """Keyword arguments of the chat template, such as {enable_thinking: false}; recorded with the head."""
    chat_template: str = ""
    """Chat template in place of the tokenizer's own, or for a target without one: a file, a Jinja text, or the name of
    one of the tokenizer's; recorded with the head."""
    template_date: str = ""
    """The date that a chat template prints as today, YYYY-MM-DD; empty: the day on which the run begins."""


@dataclass
class DataConfig:
    """The conversations to train on."""

    train: list[str] | str = "shipped:data/sample.jsonl"
    """JSONL, JSON or Parquet files, folders of them, hub datasets as hf:NAME[:SPLIT], files that ship with spechead as
    shipped:PATH; or one folder that `spechead data prepare` wrote."""
    weights: Annotated[list[float], Range(above=0)] = field(default_factory=list)
    """How often an epoch sees each conversation of each source, such as [1, 0.5]: all of the first and a random half of
    the second. Empty: once."""
    max_length: AtLeastOne = 512
    """Conversations are cut after this many tokens; those with no answer left are dropped and counted."""
    history: Literal["each", "last"] = "each"
    """Where the chat template rewrites earlier turns: each, train on every turn as it is served, in samples of their
    own; last, only on the last one."""
    validation_share: Share = 0.03
    """Share of the conversations held out for validation."""
    limit: Count = 0
    """Read only this many conversations; 0 reads all."""
    strict: bool = False
    """Refuse the first conversation that cannot be used, instead of dropping and counting them."""
    streaming: bool = False
    """Read hub datasets as they arrive, without a copy on the disk."""
    workers: Count = 0
    """Processes that tokenise; 0: one for each core where the data are large."""

    def sources(self) -> list[str]:
        """The training sources, with shipped: names resolved to paths."""
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
    """Default draft tree of the finished head, such as chain:3 or dynamic:nodes=31,depth=5,topk=4; empty: the
    default of its kind."""
    init_from_target: bool = True
    """Initialise output rows, final norm and layer from the target's where shapes allow."""
    init_from: str = ""
    """Folder of a head of the same kind and shape to start from, of this target or of one of the same shape."""
    init_vocabulary: Literal["keep", "extend", "remap"] = "keep"
    """The draft vocabulary with init_from: keep, the same tokens; extend, these and more; remap, chosen again from the
    data. New tokens start as without init_from."""


@dataclass
class AdapterConfig:
    """Training the target along with the head (Medusa-2): a peft adapter on it, saved with the head."""

    peft: dict[str, Any] = field(default_factory=dict)
    """Fields of a peft config, such as {r: 32, lora_alpha: 16, target_modules: all-linear}; peft_type is LORA by
    default. Empty: the target stays frozen."""
    start_share: Share = 0.5
    """Share of the steps that train the head alone, before both are trained."""
    lr: Positive = 5e-4
    """Peak learning rate of the adapter; the head's is optim.lr."""
    loss: Literal["distill", "text"] = "distill"
    """Loss of the target: distill, divergence from itself without the adapter; text, cross-entropy on the answers."""
    head_weight: Positive = 0.2
    """λ, the weight of the head's loss relative to the target's."""
    head_schedule: Literal["constant", "linear", "sine"] = "constant"
    """How λ rises over the steps that train both."""


@dataclass
class OptimConfig:
    """The optimizer (AdamW) and its schedule. Counts are in optimizer steps."""

    lr: Positive = 1e-3
    """Peak learning rate."""
    betas: Annotated[tuple[float, float], Range(0, below=1)] = (0.9, 0.95)
    """Decay of the two moments."""
    weight_decay: Annotated[float, Range(0)] = 0.0
    """Decoupled weight decay."""
    schedule: Literal["cosine", "linear", "constant"] = "cosine"
    """Shape of the learning rate after warm-up."""
    warmup_share: Share = 0.03
    """Share of the steps over which the rate rises from zero."""
    min_lr_share: Annotated[float, Range(0, most=1)] = 0.1
    """Final learning rate, as a share of the peak."""
    clip_norm: Annotated[float, Range(0)] = 1.0
    """Largest norm of the gradient; 0 disables clipping."""
    ema: Share = 0.0
    """Decay of a running average of the weights, such as 0.999; the average is validated and saved as the head.
    0: no average."""
    batch_size: AtLeastOne = 1
    """Samples per optimizer step, over all processes and accumulation."""
    micro_batch_size: AtLeastOne = 1
    """Samples in one forward pass of one process; raise it while memory lasts."""
    epochs: Positive = 3.0
    """Passes over the data."""
    steps: Annotated[int, Range(0, below=1 << 31)] = 0
    """Optimizer steps; 0: as many as the epochs need."""
    patience: Count = 0
    """Stop after this many validations in a row without a better acceptance length; 0: never."""

    def accumulation(self, world: int) -> int:
        """Micro steps of one optimizer step on each of `world` processes."""
        per_round = self.micro_batch_size * world
        if self.batch_size % per_round:
            raise UserError(
                f"option optim.batch_size: {self.batch_size} is not a multiple of optim.micro_batch_size "
                f"{self.micro_batch_size} x {world} processes, change one of them"
            )
        return self.batch_size // per_round

    def total_steps(self, samples: int) -> int:
        """Optimizer steps of a run over `samples` training samples."""
        return self.steps or max(1, math.ceil(self.epochs * samples / self.batch_size))


@dataclass
class EngineConfig:
    """How the training is carried out."""

    zero_stage: Literal[0, 1, 2] = 0
    """DeepSpeed ZeRO stage: 0 replicates, 1 shards optimizer state, 2 also gradients."""
    precision: Literal["auto", "float32", "bf16"] = "auto"
    """Of the arithmetic; master weights are float32. auto: bf16 where the device supports it natively."""
    feature_memory_gb: Annotated[float, Range(0)] = 0.0
    """Memory of each process to cache the target's outputs, so that later epochs skip its forward pass; useful when
    a micro batch is one sample (about 5 KB a token for SmolLM2 in bf16)."""
    gradient_checkpointing: bool = False
    """Recompute the head's decoder steps for the gradient instead of keeping their activations: less memory, more
    time, the same weights."""
    threads: Annotated[int, Range(0, most=os.cpu_count() or math.inf)] = 0
    """CPU threads of each process; 0: torch's default."""


@dataclass
class LogConfig:
    """What is logged and saved, and how often (in optimizer steps)."""

    every: AtLeastOne = 10
    """Steps between lines of the log."""
    validate_every: Count = 200
    """Steps between validations; 0: only at the end."""
    checkpoint_every: AtLeastOne = 100
    """Steps between checkpoints to resume from."""
    keep: AtLeastOne = 2
    """Newest checkpoints to keep, along with that of the best validation."""
    best: bool = True
    """Save the head of the best validation (acceptance length), where samples are held out; false: of the last step."""
    wandb: Literal["disabled", "offline", "online"] = "disabled"
    """Also log to Weights & Biases."""
    project: str = "spechead"
    """Project on Weights & Biases."""


@dataclass
class Recipe:
    """All settings of a training run."""

    target: TargetConfig = field(default_factory=TargetConfig)
    data: DataConfig = field(default_factory=DataConfig)
    head: HeadRecipe = field(default_factory=HeadRecipe)
    adapter: AdapterConfig = field(default_factory=AdapterConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    engine: EngineConfig = field(default_factory=EngineConfig)
    log: LogConfig = field(default_factory=LogConfig)
    seed: Annotated[int, Range(0, below=2**32)] = 0
    """Random seed of the initial weights, the split and the order of the samples."""
    out: str = ""
    """Output folder; empty: runs/ and the recipe's name."""

    @classmethod
    def from_cli(cls, argv: Sequence[str] | None = None, prog: str = "train") -> "Recipe":
        """Read `--config NAME_OR_FILE` and the flags that override it."""
        config, flags = split_config(sys.argv[1:] if argv is None else argv)
        return load_recipe(config, flags, prog)

    def to_dict(self) -> dict[str, Any]:
        """Plain values for recipe.json, run.json and wandb; the same tree can be read as a YAML recipe."""
        tree = dataclasses.asdict(self)
        tree["optim"]["betas"] = list(self.optim.betas)
        return tree


def split_config(argv: Sequence[str]) -> tuple[str, list[str]]:
    """Separate `--config X` (or `--config=X`) from the other flags; the last one counts."""
    config, flags, words = "", [], iter(argv)
    for word in words:
        if word == "--config":
            config = next(words, "")
            if not config:
                raise UserError("option config: specify the name of a recipe or a YAML file")
        elif word.startswith("--config="):
            config = word.removeprefix("--config=")
        else:
            flags.append(word)
    return config, flags


def load_recipe(config: str = "", overrides: Sequence[str] = (), prog: str = "train") -> Recipe:
    """Load a YAML file, or a shipped recipe by name, then override and check it."""
    path = find_recipe(config) if config else None
    recipe = options.parse(Recipe, overrides, prog, config=str(path or ""))
    recipe.out = recipe.out or f"runs/{path.stem if path else recipe.head.kind}"
    check(recipe)
    return recipe


def find_recipe(config: str) -> Path:
    """The path of a YAML file, or of a shipped recipe: eagle3-smollm2 or recipes/eagle3-smollm2.yaml."""
    path = Path(config)
    if path.is_file():
        return path
    if path.parent in (Path(), Path("recipes")):
        try:
            return files.shipped(f"recipes/{path.name.removesuffix('.yaml')}.yaml")
        except UserError:
            pass
    names = sorted(shipped.stem for shipped in files.shipped("recipes").glob("*.yaml"))
    raise UserError(f"option config: no recipe {config}, specify a YAML file or one of {', '.join(names)}")


def check(recipe: Recipe) -> None:
    """Raise UserError for a value outside its range, and for options that contradict each other."""
    check_ranges(recipe)
    sources = [recipe.data.train] if isinstance(recipe.data.train, str) else recipe.data.train
    if not (sources and all(sources)):
        raise UserError(f"option data.train: must name at least one source, got {recipe.data.train}")
    if recipe.optim.batch_size % recipe.optim.micro_batch_size:
        recipe.optim.accumulation(1)
    if recipe.adapter.peft and recipe.target.adapter:
        raise UserError(
            f"option adapter.peft: the target already has target.adapter {recipe.target.adapter!r}; "
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
            f"option head.init_vocabulary: {recipe.head.init_vocabulary} applies to the vocabulary of another head: "
            "set head.init_from"
        )
    check_head(recipe.head, recipe.engine.gradient_checkpointing)


def check_head(head: HeadRecipe, gradient_checkpointing: bool = False) -> None:
    """Raise UserError for an unknown head, option or tree, and for gradient checkpointing that the head lacks.

    The heads are imported here, not above, so that --help stays quick.
    """
    from spechead.decoding.tree import parse_tree
    from spechead.heads import HEADS

    if head.kind not in HEADS:
        raise UserError(f"option head.kind: no head {head.kind} (known: {', '.join(HEADS)})")
    if gradient_checkpointing and HEADS[head.kind].recompute is None:
        raise UserError(
            f"option engine.gradient_checkpointing: a {head.kind} head has no decoder steps to recompute; "
            "a smaller optim.micro_batch_size or data.max_length saves memory"
        )
    head.options = options.convert(HEADS[head.kind].Config, head.options, "head.options.")
    check_ranges(HEADS[head.kind].Config(**head.options), "head.options.")
    if head.tree:
        parse_tree(head.tree)
