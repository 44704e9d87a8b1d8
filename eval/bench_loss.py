"""Peak memory of the loss of a training step: with logits computed in chunks of rows, and all at once.

    python eval/bench_loss.py --json bench_loss.json
    python eval/bench_loss.py --vocab_size 128256 --hidden_size 4096 --lengths [2048,4096,8192] --device cuda

One sequence of each length, fully supervised; head and output layer have the given shape and are untrained; hidden
states are random, since the target's own forward is not measured. Each figure comes from a new process: the peak during
one step, forward and backward, above the memory in use before it. On a CPU it is the process's resident memory, on an
accelerator that of torch's allocator.
"""

from __future__ import annotations

import resource
import sys
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, field
from multiprocessing import get_context
from pathlib import Path
from typing import Annotated, Any

import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from spechead.cli.main import one_line_errors
from spechead.data.dataset import Batch
from spechead.evaluation.measure import describe_machine
from spechead.files import write_json
from spechead.heads import HEADS, draft_loss
from spechead.heads.base import Head
from spechead.options import Options, Range, parse
from spechead.target.loading import choose_device
from spechead.target.model import Target, TargetOutput
from spechead.training.recipe import HeadRecipe, check_head

WARM_UP = 16  # tokens of an earlier step, in which libraries allocate their buffers


@dataclass
class LossBenchOptions(Options):
    """Peak memory of a training step's loss, by length."""

    lengths: Annotated[list[int], Range(1)] = field(default_factory=lambda: [256, 512, 1024])
    """Tokens of the sequence."""
    kind: str = "eagle3"
    """Kind of head."""
    options: dict[str, Any] = field(default_factory=lambda: {"layers": [0, 1, 2], "draft_vocab_size": 0})
    """Its options."""
    vocab_size: Annotated[int, Range(1)] = 65536
    """Rows of the target's output layer."""
    hidden_size: Annotated[int, Range(1)] = 256
    """Size of hidden states."""
    device: str = "auto"
    """auto, cpu or cuda."""
    json: str = ""
    """File to write the numbers to; empty: only print them."""


def main(argv: list[str]) -> None:
    options = parse(LossBenchOptions, argv, "bench_loss")
    check_head(HeadRecipe(options.kind, options.options))
    peaks: dict[str, dict[int, float]] = {"all at once": {}, "some rows at a time": {}}
    with ProcessPoolExecutor(1, get_context("spawn"), max_tasks_per_child=1) as fresh:
        for length in options.lengths:
            for name, row in peaks.items():
                row[length] = round(fresh.submit(peak, options, length, name == "all at once").result(), 1)
    print_peaks(peaks, options.lengths)
    if options.json:
        machine = describe_machine(choose_device(options.device))
        facts = {"settings": asdict(options), "logits_at_once": draft_loss.LOGITS_AT_ONCE, "machine": machine}
        write_json(Path(options.json), facts | {"peak_mb": peaks})


def peak(options: LossBenchOptions, length: int, at_once: bool) -> float:
    """Peak memory of a step over `length` tokens, in megabytes."""
    torch.manual_seed(0)
    device = choose_device(options.device)
    if at_once:
        draft_loss.LOGITS_AT_ONCE = sys.maxsize
    head = make_head(options, device)
    step(head, WARM_UP)
    before = in_use(device)
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    step(head, length)
    return (highest(device) - before) / 1e6


def make_head(options: LossBenchOptions, device: torch.device) -> Head:
    size = options.hidden_size
    config = LlamaConfig(
        vocab_size=options.vocab_size,
        hidden_size=size,
        intermediate_size=4 * size,
        num_hidden_layers=2,
        num_attention_heads=max(1, size // 64),
        tie_word_embeddings=True,
    )
    target = Target(AutoModelForCausalLM.from_config(config).to(device), None, "random")
    kind = HEADS[options.kind]
    head = kind(kind.Config(**options.options), target)
    if head.reduced:
        head.set_vocabulary(torch.arange(head.draft_size))
    return head.to(device)


def step(head: Head, length: int) -> None:
    """Forward and backward of the loss over random tokens; the gradients are discarded."""
    device, size = head.target.device, head.target.hidden_size
    ids = torch.randint(head.draft_size, (1, length), device=device)
    whole = torch.ones(1, length, dtype=torch.bool, device=device)
    batch = Batch(ids, whole, torch.arange(length, device=device)[None], torch.zeros_like(ids), [0])
    hidden = torch.randn(1, length, size, device=device)
    features = torch.randn(1, length, size * len(head.taps), device=device)
    head.training_step(batch, TargetOutput(hidden, features)).loss.backward()
    head.zero_grad()


def in_use(device: torch.device) -> float:
    """Bytes now; on a CPU the peak so far, that of the warm-up."""
    return torch.cuda.memory_allocated(device) if device.type == "cuda" else highest(device)


def highest(device: torch.device) -> float:
    """Bytes at the peak."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def print_peaks(peaks: dict[str, dict[int, float]], lengths: list[int]) -> None:
    print("peak memory of a step, MB    " + "".join(f"{length:>9}" for length in lengths) + "  tokens")
    for name, row in peaks.items():
        print(f"{name:<28} " + "".join(f"{row[length]:>9.0f}" for length in lengths))


if __name__ == "__main__":
    with one_line_errors():
        main(sys.argv[1:])
