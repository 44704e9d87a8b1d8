"""Parity with a real server: vLLM with and without our heads.

    python eval/serve_check.py --vllm .venv-vllm/bin/python --head runs/eagle3-smollm2/head    # `make serve-check`

Each head is exported for vLLM in float32, and vLLM answers the held-out prompts greedily: once alone, then with each
head drafting a chain. Its text must be the same, and the share of passes in which the draft of depth 1, 2, ... was
accepted, read from the server's own counters, must equal ours on the same prompts (within `TOLERANCE`). Exit code 1
if a head fails.
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
from typing import Annotated, Any

from spechead import metrics
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
from spechead.options import Options, Range, parse
from spechead.progress import Progress
from spechead.target import bundled
from spechead.target.model import Target
from spechead.training.distributed import free_port

TOLERANCE = 0.02
START_S, ANSWER_S = 900, 600  # time-outs


@dataclass(kw_only=True)
class ServeOptions(Options):
    """Compare vLLM's text and acceptance with ours, for each head."""

    vllm: str
    """Python of an environment with vLLM."""
    head: list[str] = field(default_factory=list)
    """Folder of a trained head. May be given several times; heads of one target."""
    prompts: Annotated[int, Range(1)] = 20
    """How many of the held-out prompts, spread over the categories."""
    max_new_tokens: Annotated[int, Range(1)] = 128
    """Longest answer, in tokens."""
    drafts: Annotated[int, Range(1)] = 3
    """Length of the drafted chain."""
    work: str = "runs/serve-check"
    """Folder for the exported heads and the server's logs."""
    json: str = ""
    """File to write the numbers to. Empty: only print them."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.head:
            raise UserError("option head: is empty, give it once or several times")
        if not os.access(self.vllm, os.X_OK):
            raise UserError(f"option vllm: {self.vllm} is no program, give the Python of an environment with vLLM")


def main(argv: Sequence[str]) -> int:
    options = parse(ServeOptions, argv, "serve_check.py")
    make_folder(Path(options.work))
    models = ModelOptions(
        head=options.head[0], max_new_tokens=options.max_new_tokens, draft_dtype="float32", device="cpu"
    )
    target = models.load_target()
    questions = encode_prompts(balanced(read_prompts(shipped(DEFAULT_PROMPTS)), options.prompts), target, models)
    plain = query_server(options, target, questions, "plain").texts
    results: dict[str, dict[str, Any]] = {}
    for folder in options.head:
        models.head = folder
        head = models.load_head(target)
        if head.kind in results:
            raise UserError(f"option head: {folder} is the second of kind {head.kind}, compare it in another run")
        results[head.kind] = compare(options, target, questions, head, folder, plain)
        print_result(head.kind, results[head.kind])
    if options.json:
        machine = describe_machine(target.device)
        write_json(Path(options.json), {"settings": asdict(options), "machine": machine, "heads": results})
    return 0 if all(row["passed"] for row in results.values()) else 1


# ------------------------------------------------------------------------------------------------ comparing


def compare(
    options: ServeOptions,
    target: Target,
    questions: Sequence[Question],
    head: Head,
    folder: str,
    plain: list[list[int]],
) -> dict[str, Any]:
    """vLLM with the head against vLLM without it and against spechead."""
    out = Path(options.work) / head.kind
    export(ExportOptions(head=folder, to="vllm", out=str(out), dtype="float32"))
    settings = {"method": head.kind, "model": str(out.resolve()), "num_speculative_tokens": options.drafts}
    served = query_server(options, target, questions, head.kind, settings)
    ours = survival(target, questions, head, options.drafts)
    same = sum(a == b for a, b in zip(served.texts, plain, strict=True))
    close = all(abs(a - b) <= TOLERANCE for a, b in zip(served.survival, ours, strict=True))
    numbers = {"server_survival": served.survival, "survival": ours}
    return {"prompts": len(questions), "identical": same, **numbers, "passed": close and same == len(questions)}


def survival(target: Target, questions: Sequence[Question], head: Head, drafts: int) -> list[float]:
    """survival@k of spechead, over all passes as the server counts them, also those that offer fewer drafts."""
    accepted: list[int] = []
    with Progress("spechead", len(questions), unit="prompt") as progress:
        for question in questions:
            output = decode(target, question, drafter=head, speculation=Speculation(chain(drafts)))
            accepted += output.stats.accepted
            progress.advance()
    return metrics.survival([drafts] * len(accepted), accepted) or [0.0] * drafts


def print_result(kind: str, result: dict[str, Any]) -> None:
    def shares(name: str) -> str:
        return " ".join(f"{share:.3f}" for share in result[name])

    print(f"{kind}: vLLM's text is the same with and without the head for {result['identical']}/{result['prompts']}")
    print(f"  accepted at depth 1, 2, ...  vLLM {shares('server_survival')}   here {shares('survival')}")
    print(f"  {'passed' if result['passed'] else 'FAILED'}")


# ------------------------------------------------------------------------------------------------ the server


@dataclass
class Served:
    """A server's answers, and its acceptance by its own counters."""

    texts: list[list[int]]  # new tokens of each prompt
    survival: list[float]  # share of passes in which the draft of depth 1, 2, ... was accepted


def query_server(
    options: ServeOptions,
    target: Target,
    questions: Sequence[Question],
    name: str,
    speculation: dict[str, Any] | None = None,
) -> Served:
    """Start a server, send it the questions, stop it."""
    log = Path(options.work) / f"{name}.log"
    with server(options.vllm, model_folder(target), log, speculation) as address:
        texts = []
        try:
            with Progress(f"vLLM, {name}", len(questions), unit="prompt") as progress:
                for question in questions:
                    texts.append(answer(address, question))
                    progress.advance()
            share = accepted_share(fetch(f"{address}/metrics"))
        except (OSError, HTTPException, ValueError, LookupError, TypeError) as error:
            raise UserError(f"vLLM: unreadable answer ({first_line(error)}); see {log}") from error
    if speculation is not None and len(share) != options.drafts:
        raise UserError(
            f"vLLM: /metrics counts accepted drafts at {len(share)} depths, not at {options.drafts}; see {log}"
        )
    return Served(texts, share)


@contextmanager
def server(python: str, model: str, log: Path, speculation: dict[str, Any] | None) -> Iterator[str]:
    """The address of a vLLM server of one sequence in float32, while it runs."""
    port = free_port()
    command = [python, "-m", "vllm.entrypoints.openai.api_server", "--model", model, "--dtype", "float32"]
    command += ["--enforce-eager", "--max-num-seqs", "1", "--max-model-len", "2048", "--no-enable-prefix-caching"]
    command += ["--host", "127.0.0.1", "--port", str(port), "--served-model-name", "target"]
    if speculation is not None:
        command += ["--speculative-config", json.dumps(speculation)]
    environment = {"VLLM_CPU_KVCACHE_SPACE": "1", "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", **os.environ}
    with log.open("w") as file:
        process = subprocess.Popen(
            command, env=environment, stdout=file, stderr=subprocess.STDOUT, start_new_session=True
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
            raise UserError(f"vLLM: ended with code {process.returncode} before it served; see {log}")
        try:
            fetch(address)
        except OSError:
            time.sleep(1)
        else:
            return
    raise UserError(f"vLLM: did not serve within {START_S} s; see {log}")


def _stop(process: subprocess.Popen[bytes]) -> None:
    """End the server and the engine that it started, which are in one session."""
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
    body = {
        "model": "target",
        "prompt": question.ids,
        "max_tokens": question.max_new_tokens,
        "temperature": 0,
        "return_token_ids": True,
    }
    request = urllib.request.Request(
        f"{address}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=ANSWER_S) as reply:
        return list(json.load(reply)["choices"][0]["token_ids"])


def fetch(address: str) -> str:
    with urllib.request.urlopen(address, timeout=30) as reply:
        return str(reply.read().decode())


def accepted_share(counters: str) -> list[float]:
    """Accepted drafts by position over passes, from a page of Prometheus counters; empty without drafts."""
    passes = re.search(r"^vllm:spec_decode_num_drafts_total{[^}]*} (\S+)$", counters, re.M)
    if passes is None:
        return []
    counts = re.findall(
        r"^vllm:spec_decode_num_accepted_tokens_per_pos_total{[^}]*position=\"(\d+)\"[^}]*} (\S+)$", counters, re.M
    )
    return [float(count) / max(1.0, float(passes[1])) for _, count in sorted(counts, key=lambda row: int(row[0]))]


def model_folder(target: Target) -> str:
    """The folder or hub id of the target for the server."""
    return str(bundled.folder()) if target.base == bundled.NAME else target.base


if __name__ == "__main__":
    with one_line_errors():
        sys.exit(main(sys.argv[1:]))
