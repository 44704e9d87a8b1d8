"""Speed of writing data: spechead's in-process writer against transformers' generate on padded batches.

    python eval/bench_regenerate.py --batch_size 16 --json bench_regenerate.json

Both answer the same prompts with the same caps, greedily, on one model object and after a warm-up; runs are interleaved
in a rotating order. The writer gives the place of a row that has ended to the next prompt; generate pads the prompts of
a batch on the left and decodes until the last of its rows has ended. A token counts up to and including the one that
ends its answer, what generate writes after it does not. generate is measured with its own attention and with
spechead's, and the ratio is that to the faster one.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from importlib.metadata import version
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import torch

from spechead import __version__
from spechead.cli.main import one_line_errors
from spechead.data.prompts import read_prompts
from spechead.data.synthesis.continuous import Continuation, ContinuousDecoder, Request
from spechead.errors import UserError
from spechead.evaluation.measure import DEFAULT_PROMPTS, describe_machine, timed
from spechead.files import make_folder, read_jsonl, shipped, write_json
from spechead.options import Range, parse
from spechead.progress import Progress
from spechead.target import attention
from spechead.target.bundled import NAME as BUNDLED
from spechead.target.model import Target
from spechead.target.options import TargetOptions

OURS, GENERATE, GENERATE_OURS = "spechead", "generate", "generate, spechead's attention"
WARM_UP_TOKENS = 4


@dataclass(kw_only=True)
class RegenerateBenchOptions(TargetOptions):
    """Tokens per second of spechead's writer and of transformers' generate."""

    target: str = BUNDLED
    """Bundled target, local folder or hub id."""
    dtype: str = "auto"
    """float32, bfloat16, float16; auto is bfloat16 where the device computes it natively."""
    prompts: str = ""
    """JSONL file of prompts, {"turns": [...]} per line. Empty: spechead's own 40, then those of its sample data."""
    count: Annotated[int, Range(1)] = 48
    """Prompts to answer."""
    batch_size: Annotated[int, Range(1)] = 16
    """Rows side by side."""
    max_new_tokens: Annotated[int, Range(1)] = 128
    """Longest answer, in tokens."""
    repeats: Annotated[int, Range(1)] = 3
    """Runs of each."""
    json: str = ""
    """File to write the numbers to; empty: only print them."""


@dataclass
class Run:
    """All answers, ends included, and how long they took."""

    answers: list[list[int]]
    seconds: float

    @property
    def speed(self) -> float:
        """Tokens per second."""
        return sum(map(len, self.answers)) / self.seconds


Writer = Callable[[Sequence[list[int]], int], list[list[int]]]  # of prompts and a cap: answers, ends included


def main(argv: Sequence[str]) -> None:
    options = parse(RegenerateBenchOptions, argv, "bench_regenerate.py")
    texts = read_texts(options)
    if options.json:
        if Path(options.json).is_dir():
            raise UserError(f"option json: {options.json} is a folder, name a file")
        make_folder(Path(options.json).parent)
    target = options.load()
    prompts = [target.chat.prompt_ids([{"role": "user", "content": text}]) for text in texts]
    if max(map(len, prompts)) + options.max_new_tokens > target.max_positions:
        raise UserError(
            f"option max_new_tokens: with the longest prompt, it exceeds the {target.max_positions} positions of "
            f"{target.name}"
        )
    runs = measure(target, writers(target, options.batch_size), prompts, options)
    results = numbers(runs) | provenance(target, options)
    print_results(results)
    if options.json:
        write_json(Path(options.json), results)


def read_texts(options: RegenerateBenchOptions) -> list[str]:
    """The prompts; UserError where there are too few."""
    file = Path(options.prompts) if options.prompts else shipped(DEFAULT_PROMPTS)
    texts = [prompt.text for prompt in read_prompts(file)]
    if not options.prompts:
        texts += [row["messages"][0]["content"] for _, row in read_jsonl(shipped("data/sample.jsonl"), "sample")]
    if len(texts) < options.count:
        raise UserError(f"option count: there are only {len(texts)} prompts, got {options.count}")
    return texts[: options.count]


# ------------------------------------------------------------------------------------------------ writers


def writers(target: Target, batch_size: int) -> dict[str, Writer]:
    return {
        OURS: partial(write, target, batch_size),
        GENERATE: partial(write_by_generate, target, batch_size, own_attention=True),
        GENERATE_OURS: partial(write_by_generate, target, batch_size, own_attention=False),
    }


def write(target: Target, batch_size: int, prompts: Sequence[list[int]], cap: int) -> list[list[int]]:
    answers: dict[Any, list[int]] = {}

    def done(request: Request, written: Continuation) -> tuple[()]:
        answers[request.key] = written.tokens + ([] if written.end is None else [written.end])
        return ()

    target.model.set_attn_implementation(attention.NAME)
    decoder = ContinuousDecoder(target, batch_size=batch_size, stop_ids=target.eos_ids)
    decoder.run((Request(i, prompt, cap, 0.0, 0) for i, prompt in enumerate(prompts)), done)
    return [answers[i] for i in range(len(prompts))]


def write_by_generate(
    target: Target, batch_size: int, prompts: Sequence[list[int]], cap: int, *, own_attention: bool
) -> list[list[int]]:
    target.model.set_attn_implementation(attention.NAME)
    if own_attention:
        sdpa = getattr(target.model, "_supports_sdpa", False)
        target.model.set_attn_implementation("sdpa" if sdpa else "eager")
    answers = []
    for start in range(0, len(prompts), batch_size):
        batch = prompts[start : start + batch_size]
        width = max(map(len, batch))
        ids = torch.zeros(len(batch), width, dtype=torch.long)
        mask = torch.zeros_like(ids)
        for row, prompt in enumerate(batch):
            ids[row, width - len(prompt) :] = torch.tensor(prompt)
            mask[row, width - len(prompt) :] = 1
        whole = target.model.generate(
            input_ids=ids.to(target.device),
            attention_mask=mask.to(target.device),
            max_new_tokens=cap,
            eos_token_id=sorted(target.eos_ids) or None,
            pad_token_id=min(target.eos_ids, default=0),
            do_sample=False,
            repetition_penalty=1.0,
            **dict.fromkeys(("temperature", "top_k", "top_p", "min_p")),
        )
        answers += [ended(row, target.eos_ids) for row in whole[:, width:].tolist()]
    return answers


def ended(tokens: list[int], stops: frozenset[int]) -> list[int]:
    """The tokens up to and including the first of `stops`."""
    return tokens[: next((place + 1 for place, token in enumerate(tokens) if token in stops), len(tokens))]


# ------------------------------------------------------------------------------------------------ measuring


def measure(
    target: Target, writers: Mapping[str, Writer], prompts: Sequence[list[int]], options: RegenerateBenchOptions
) -> dict[str, list[Run]]:
    """`repeats` runs of each writer, after a short one."""
    runs: dict[str, list[Run]] = {name: [] for name in writers}
    names = list(writers)
    for name in names:
        writers[name](prompts[: options.batch_size], WARM_UP_TOKENS)
    with Progress("benchmark", len(names) * options.repeats, unit="run") as progress:
        for turn in range(options.repeats):
            first = turn % len(names)
            for name in names[first:] + names[:first]:
                answers, seconds = timed(target, partial(writers[name], prompts, options.max_new_tokens))
                runs[name].append(Run(answers, seconds))
                progress.advance()
    return runs


# ------------------------------------------------------------------------------------------------ numbers


def numbers(runs: Mapping[str, Sequence[Run]]) -> dict[str, Any]:
    """Tokens per second, and how many times as fast as generate the writer is: medians over the runs."""
    ours = runs[OURS]
    rows = {
        name: {
            "tokens_per_second": median(run.speed for run in some),
            "tokens": sum(map(len, some[0].answers)),
            "texts_as_generate": sum(map(list.__eq__, some[0].answers, runs[GENERATE][0].answers)),
        }
        for name, some in runs.items()
    }
    others = [name for name in runs if name != OURS]
    ratios = {
        name: median(mine.speed / other.speed for mine, other in zip(ours, runs[name], strict=True)) for name in others
    }
    return {"over_generate": min(ratios.values()), "over": ratios, "writers": rows, "prompts": len(ours[0].answers)}


def provenance(target: Target, options: RegenerateBenchOptions) -> dict[str, Any]:
    """What the numbers depend on."""
    return {
        "target": target.name,
        "settings": asdict(options) | {"dtype": options.precision},
        "machine": describe_machine(target.device) | {"device": str(target.device)},
        "versions": {"spechead": __version__} | {name: version(name) for name in ("torch", "transformers")},
    }


def print_results(results: Mapping[str, Any]) -> None:
    width = max(map(len, results["writers"]))
    print(f"{'writer':<{width}}  tokens/s  tokens  text as generate's")
    for name, row in results["writers"].items():
        same = f"{row['texts_as_generate']}/{results['prompts']}"
        print(f"{name:<{width}}  {row['tokens_per_second']:>8.1f}  {row['tokens']:>6}  {same:>18}")
    over = ", ".join(f"{value:.2f} times {name}" for name, value in results["over"].items())
    print(f"\ntokens per second, spechead: {over}")


if __name__ == "__main__":
    with one_line_errors():
        main(sys.argv[1:])
