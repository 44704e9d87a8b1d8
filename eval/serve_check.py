"""Parity with a real server: vLLM with and without our heads.

    python eval/serve_check.py --vllm .venv-vllm/bin/python --head runs/eagle3-smollm2/head    # `make serve-check`

Each head is exported for vLLM in float32, and vLLM answers the held-out prompts greedily: once alone, then with each
head drafting a chain. Its text must be the same, and the share of passes in which the draft of depth 1, 2, ... was
accepted, read from the server's own counters, must be ours on the same prompts (within `TOLERANCE`). Exit code 1 where
one of them is not. Knows nothing of how a head drafts or of what an export holds.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from http.client import HTTPException
from pathlib import Path
from typing import Any

from spechead.cli.main import one_line_errors
from spechead.data.prompts import balanced, read_prompts
from spechead.decoding.generate import Speculation
from spechead.decoding.tree import chain
from spechead.errors import UserError, first_line
from spechead.evaluation.measure import DEFAULT_PROMPTS, Question, decode, describe_machine, encode_prompts
from spechead.evaluation.options import ModelOptions
from spechead.files import make_folder, shipped, write_json
from spechead.formats.export import ExportOptions, export
from spechead.heads import Head
from spechead.options import parse
from spechead.progress import Progress
from spechead.target import bundled
from spechead.target.model import Target
from spechead.training.distributed import free_port

TOLERANCE = 0.02
START_S, ANSWER_S = 900, 600  # longest waits


@dataclass(kw_only=True)
class ServeOptions:
    """Compare vLLM's text and acceptance with ours, for each head."""

    vllm: str
    """Python of an environment with vLLM."""
    head: list[str] = field(default_factory=list)
    """Folder of a trained head. May be given several times; heads of one target."""
    prompts: int = 20
    """How many of the held-out prompts, spread over the kinds."""
    max_new_tokens: int = 128
    """Longest answer, in tokens."""
    drafts: int = 3
    """Length of the drafted chain."""
    work: str = "runs/serve-check"
    """Folder for the exported heads and the server's logs."""
    json: str = ""
    """File to write the numbers to. Empty: they are only printed."""

    def __post_init__(self) -> None:
        if not self.head:
            raise UserError("no head: give --head, once or several times")
        for name in ("prompts", "max_new_tokens", "drafts"):
            if getattr(self, name) < 1:
                raise UserError(f"option {name}: must be at least 1, got {getattr(self, name)}")
        if not os.access(self.vllm, os.X_OK):
            raise UserError(f"vllm {self.vllm}: is no program; give the Python of an environment with vLLM")


def main(argv: Sequence[str]) -> int:
    options = parse(ServeOptions, argv, "serve_check.py")
    make_folder(Path(options.work))
    models = ModelOptions(
        head=options.head[0], max_new_tokens=options.max_new_tokens, draft_dtype="float32", device="cpu"
    )
    target = models.load_target()
    asked = encode_prompts(balanced(read_prompts(shipped(DEFAULT_PROMPTS)), options.prompts), target, models)
    plain = ask(options, target, asked, "plain").texts
    found: dict[str, dict[str, Any]] = {}
    for folder in options.head:
        models.head = folder
        head = models.load_head(target)
        if head.kind in found:
            raise UserError(f"head {folder}: is the second of kind {head.kind}; compare it in a run of its own")
        found[head.kind] = compare(options, target, asked, head, folder, plain)
        show(head.kind, found[head.kind])
    if options.json:
        machine = describe_machine(target.device)
        write_json(Path(options.json), {"settings": asdict(options), "machine": machine, "heads": found})
    return 0 if all(row["passed"] for row in found.values()) else 1


# ------------------------------------------------------------------------------------------------ comparing


def compare(
    options: ServeOptions, target: Target, asked: Sequence[Question], head: Head, folder: str, plain: list[list[int]]
) -> dict[str, Any]:
    """vLLM with the head beside vLLM without it and beside us."""
    out = Path(options.work) / head.kind
    export(ExportOptions(head=folder, to="vllm", out=str(out), dtype="float32"))
    settings = {"method": head.kind, "model": str(out.resolve()), "num_speculative_tokens": options.drafts}
    served = ask(options, target, asked, head.kind, settings)
    ours = survival(target, asked, head, options.drafts)
    same = sum(a == b for a, b in zip(served.texts, plain, strict=True))
    near = all(abs(a - b) <= TOLERANCE for a, b in zip(served.survival, ours, strict=True))
    numbers = {"server_survival": served.survival, "survival": ours}
    return {"prompts": len(asked), "identical": same, **numbers, "passed": near and same == len(asked)}


def survival(target: Target, asked: Sequence[Question], head: Head, drafts: int) -> list[float]:
    """Share of our passes in which the draft of depth 1, 2, ... was accepted."""
    accepted: list[int] = []
    with Progress("ours", len(asked), unit="prompt") as progress:
        for question in asked:
            run = decode(target, question, drafter=head, speculation=Speculation(chain(drafts)))
            accepted += run.stats.accepted
            progress.advance()
    return [sum(depth >= k for depth in accepted) / max(1, len(accepted)) for k in range(1, drafts + 1)]


def show(kind: str, found: dict[str, Any]) -> None:
    def shares(name: str) -> str:
        return " ".join(f"{share:.3f}" for share in found[name])

    print(f"{kind}: vLLM's text is the same with the head as without it for {found['identical']}/{found['prompts']}")
    print(f"  accepted at depth 1, 2, ...  vLLM {shares('server_survival')}   here {shares('survival')}")
    print(f"  {'passed' if found['passed'] else 'FAILED'}")


# ------------------------------------------------------------------------------------------------ the server


@dataclass
class ForeignHead:
    """What a server answered, and what its counters say."""

    texts: list[list[int]]  # new tokens of each prompt
    survival: list[float]  # share of passes in which the draft of depth 1, 2, ... was accepted


def ask(
    options: ServeOptions,
    target: Target,
    asked: Sequence[Question],
    name: str,
    speculation: dict[str, Any] | None = None,
) -> ForeignHead:
    """Start a server, let it answer, stop it."""
    log = Path(options.work) / f"{name}.log"
    with server(options.vllm, model_folder(target), log, speculation) as address:
        texts = []
        try:
            with Progress(f"vLLM, {name}", len(asked), unit="prompt") as progress:
                for question in asked:
                    texts.append(answer(address, question))
                    progress.advance()
            share = accepted_share(fetch(f"{address}/metrics"))
        except (OSError, HTTPException, ValueError, LookupError, TypeError) as error:
            raise UserError(f"vLLM gave no answer that can be read ({first_line(error)}); see {log}") from error
    if speculation is not None and len(share) != options.drafts:
        raise UserError(
            f"vLLM's /metrics counts accepted drafts at {len(share)} depths, not at {options.drafts}; see {log}"
        )
    return ForeignHead(texts, share)


@contextmanager
def server(python: str, model: str, log: Path, speculation: dict[str, Any] | None) -> Iterator[str]:
    """The address of a vLLM server of one sequence in float32, while it runs."""
    port = free_port()
    words = [python, "-m", "vllm.entrypoints.openai.api_server", "--model", model, "--dtype", "float32"]
    words += ["--enforce-eager", "--max-num-seqs", "1", "--max-model-len", "2048", "--no-enable-prefix-caching"]
    words += ["--host", "127.0.0.1", "--port", str(port), "--served-model-name", "target"]
    if speculation is not None:
        words += ["--speculative-config", json.dumps(speculation)]
    environment = {"VLLM_CPU_KVCACHE_SPACE": "1", "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", **os.environ}
    with log.open("w") as file:
        process = subprocess.Popen(
            words, env=environment, stdout=file, stderr=subprocess.STDOUT, start_new_session=True
        )
    try:
        _wait(process, f"http://127.0.0.1:{port}/health", log)
        yield f"http://127.0.0.1:{port}"
    finally:
        _stop(process)


def _wait(process: subprocess.Popen[bytes], address: str, log: Path) -> None:
    deadline = time.monotonic() + START_S
    print(f"starting vLLM, which takes a minute or two; it writes to {log}", file=sys.stderr)
    while time.monotonic() < deadline:
        if process.poll() is not None:
            raise UserError(f"vLLM ended with code {process.returncode} before it served; see {log}")
        try:
            fetch(address)
        except OSError:
            time.sleep(1)
        else:
            return
    raise UserError(f"vLLM did not serve within {START_S} s; see {log}")


def _stop(process: subprocess.Popen[bytes]) -> None:
    """End the server and the engine that it started, which share a session."""
    for how in (signal.SIGTERM, signal.SIGKILL):
        try:
            os.killpg(process.pid, how)
            process.wait(30)
        except ProcessLookupError:
            return
        except subprocess.TimeoutExpired:
            continue


def answer(address: str, question: Question) -> list[int]:
    """The server's greedy answer, as token ids."""
    asked = {
        "model": "target",
        "prompt": question.ids,
        "max_tokens": question.max_new_tokens,
        "temperature": 0,
        "return_token_ids": True,
    }
    request = urllib.request.Request(
        f"{address}/v1/completions", json.dumps(asked).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=ANSWER_S) as reply:
        return list(json.load(reply)["choices"][0]["token_ids"])


def fetch(address: str) -> str:
    with urllib.request.urlopen(address, timeout=30) as reply:
        return str(reply.read().decode())


def accepted_share(counters: str) -> list[float]:
    """Accepted drafts by position over passes, out of a page of Prometheus counters; empty without drafts."""
    passes = re.search(r"^vllm:spec_decode_num_drafts_total{[^}]*} (\S+)$", counters, re.M)
    if passes is None:
        return []
    found = re.findall(
        r"^vllm:spec_decode_num_accepted_tokens_per_pos_total{[^}]*position=\"(\d+)\"[^}]*} (\S+)$", counters, re.M
    )
    return [float(count) / max(1.0, float(passes[1])) for _, count in sorted(found, key=lambda row: int(row[0]))]


def model_folder(target: Target) -> str:
    """Where the server finds the target."""
    return str(bundled.folder()) if target.base == bundled.NAME else target.base


if __name__ == "__main__":
    with one_line_errors():
        sys.exit(main(sys.argv[1:]))
