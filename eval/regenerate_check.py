"""Data regenerated in process and by a real server: the same tokens.

    python eval/regenerate_check.py --vllm .venv-vllm/bin/python    # `make regenerate-check`

`spechead data regenerate` answers the held-out prompts greedily in float32, once with the target in this process and
once with vLLM, which also returns the ids of its prompts. Nearly all answers must have the same ids (two logits may tie
within the rounding of float32), and all prompts must be those of our chat template. Exit code 1 otherwise.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

from eval import serve_check
from spechead.cli.main import one_line_errors
from spechead.data.synthesis.journal import Journal
from spechead.data.synthesis.regenerate import RegenerateOptions, regenerate
from spechead.errors import UserError
from spechead.evaluation.measure import DEFAULT_PROMPTS, describe_machine
from spechead.files import make_folder, read_jsonl, remove, shipped, write_json
from spechead.options import Options, Range, parse
from spechead.target import bundled
from spechead.target.loading import choose_device

DIFFERENT = 0.05  # largest share of answers that may differ


@dataclass(kw_only=True)
class CheckOptions(Options):
    """Compare answers decoded here with those of vLLM."""

    vllm: str
    """Python of an environment with vLLM."""
    target: str = bundled.NAME
    """Bundled target, local folder or hub id."""
    prompts: str = ""
    """Prompts to answer, in any layout of data sets. Empty: the held-out prompts."""
    max_new_tokens: Annotated[int, Range(1)] = 128
    """Longest answer, in tokens."""
    work: str = "runs/serve-check"
    """Folder for the answers and the server's log."""
    json: str = ""
    """File to write the numbers to. Empty: only print them."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not os.access(self.vllm, os.X_OK):
            raise UserError(f"option vllm: {self.vllm} is no program, give the Python of an environment with vLLM")


def main(argv: Sequence[str]) -> int:
    options = parse(CheckOptions, argv, "regenerate_check.py")
    work = Path(options.work)
    make_folder(work)
    here, _ = answers(options, work / "here.jsonl")
    model = str(bundled.folder()) if options.target == bundled.NAME else options.target
    with serve_check.server(options.vllm, model, work / "regenerate.log", None) as address:
        served, meta = answers(options, work / "served.jsonl", server=f"{address}/v1", model="target")
    result = compare(here, served, meta)
    print(
        f"vLLM's ids are the same for {result['identical']}/{result['answers']} answers\n"
        f"  prompts that differ from our template's: {result['prompts_that_differ']}/{result['prompts_compared']}\n"
        f"  {'passed' if result['passed'] else 'FAILED'}"
    )
    if options.json:
        machine = describe_machine(choose_device("cpu"))
        write_json(Path(options.json), {"settings": asdict(options), "machine": machine} | result)
    return 0 if result["passed"] else 1


def answers(
    options: CheckOptions, out: Path, *, server: str = "", model: str = ""
) -> tuple[list[list[int]], dict[str, Any]]:
    """The ids of every answer in the order of the prompts, and the record of the command. `server`: ask it."""
    journal = Journal(out)
    for earlier in (out, journal.meta, journal.partial):
        remove(earlier)
    meta = regenerate(
        RegenerateOptions(
            prompts=options.prompts or str(shipped(DEFAULT_PROMPTS)),
            out=out,
            target=options.target,
            dtype="float32",
            device="cpu",
            max_new_tokens=options.max_new_tokens,
            batch_size=16,
            server=server,
            model=model,
        )
    )
    return [ids for _, row in read_jsonl(out, "answers") for ids in row["answer_ids"]], meta


def compare(here: list[list[int]], served: list[list[int]], meta: dict[str, Any]) -> dict[str, Any]:
    """The numbers of the check. `meta`: the record of the served answers."""
    same = sum(a == b for a, b in zip(here, served, strict=False))
    count = max(len(here), len(served))
    compared, differ = (meta["server"].get(name, 0) for name in ("prompts compared", "prompts that differ"))
    return {
        "answers": count,
        "identical": same,
        "first_difference": [
            next((i for i, pair in enumerate(zip(a, b, strict=False)) if pair[0] != pair[1]), min(len(a), len(b)))
            for a, b in zip(here, served, strict=False)
            if a != b
        ],
        "prompts_compared": compared,
        "prompts_that_differ": differ,
        "passed": count - same <= DIFFERENT * count and compared >= count and not differ,
    }


if __name__ == "__main__":
    with one_line_errors():
        sys.exit(main(sys.argv[1:]))
