"""Asking a server: its counters, its answers, and that it is stopped; the server here is a stand-in of its protocol."""

from __future__ import annotations

import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest

from eval import serve_check as serve
from eval import server_requirements
from spechead.data.prompts import Prompt
from spechead.errors import UserError
from spechead.evaluation.measure import Question
from tests.helpers.targets import make_target

ROOT = Path(__file__).parents[2]
COUNTERS = """# TYPE vllm:spec_decode_num_drafts_total counter
vllm:spec_decode_num_drafts_total{engine="0",model_name="target"} 8.0
vllm:spec_decode_num_accepted_tokens_total{engine="0",model_name="target"} 7.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",model_name="target",position="1"} 2.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",model_name="target",position="0"} 5.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",model_name="target",position="2"} 0.0
"""
SERVER = """
import json, sys
from http.server import BaseHTTPRequestHandler, HTTPServer

class Handler(BaseHTTPRequestHandler):
    def log_message(self, *_):
        pass
    def reply(self, text):
        self.send_response(200)
        self.end_headers()
        self.wfile.write(text.encode())
    def do_GET(self):
        self.reply(COUNTERS if self.path == "/metrics" else "")
    def do_POST(self):
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        assert asked["temperature"] == 0
        ids = [token + 1 for token in asked["prompt"]][: asked["max_tokens"]]
        self.reply(json.dumps({"choices": [{"token_ids": ids}]}))

HTTPServer(("127.0.0.1", int(sys.argv[sys.argv.index("--port") + 1])), Handler).serve_forever()
"""


def stand_in(root: Path, source: str) -> None:
    """A package that is started as vLLM's server is."""
    folder = root / "vllm" / "entrypoints" / "openai"
    folder.mkdir(parents=True)
    (folder / "api_server.py").write_text(source)


def options(tmp_path: Path) -> Any:
    return serve.ServeOptions(vllm=sys.executable, head=["none"], work=str(tmp_path))


def test_counters_become_shares_of_passes() -> None:
    assert serve.accepted_share(COUNTERS) == [0.625, 0.25, 0.0]
    assert serve.accepted_share("vllm:prompt_tokens_total 3.0\n") == []


def test_a_server_is_asked_and_stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in(tmp_path, f"COUNTERS = {COUNTERS!r}\n{SERVER}")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    asked = [Question(Prompt(n, "other", ""), [n, 5], 2) for n in (1, 7)]
    started: list[Any] = []
    popen = serve.subprocess.Popen

    def start(*arguments: Any, **options: Any) -> Any:
        started.append(popen(*arguments, **options))
        return started[-1]

    monkeypatch.setattr(serve.subprocess, "Popen", start)
    served = serve.query_server(options(tmp_path), make_target("llama"), asked, "name", {"method": "eagle3"})
    assert served.texts == [[2, 6], [8, 6]]
    assert served.survival == [0.625, 0.25, 0.0]
    assert started[0].poll() is not None


def test_a_server_that_does_not_start_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in(tmp_path, "raise SystemExit(3)")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    with pytest.raises(UserError, match="ended with code 3 .*name.log"):
        serve.query_server(options(tmp_path), make_target("llama"), [], "name")


@pytest.mark.parametrize(
    ("counters", "post", "message"),
    [
        ("vllm:prompt_tokens_total 3.0", None, "accepted drafts at 0 depths, not at 3; see .*name.log"),
        (COUNTERS, "self.send_error(500)", "HTTP Error 500.*; see .*name.log"),
        (COUNTERS, 'self.reply("{}")', "unreadable answer .*choices.*; see .*name.log"),
    ],
)
def test_a_server_that_answers_badly_is_reported(
    counters: str, post: str | None, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = SERVER if post is None else SERVER.replace('assert asked["temperature"] == 0', f"return {post}")
    stand_in(tmp_path, f"COUNTERS = {counters!r}\n{source}")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    asked = [Question(Prompt(1, "other", ""), [1, 5], 2)]
    with pytest.raises(UserError, match=message):
        serve.query_server(options(tmp_path), make_target("llama"), asked, "name", {"method": "eagle3"})


def test_options_that_make_no_sense_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="option head: is empty"):
        serve.ServeOptions(vllm=sys.executable)
    for name in ("prompts", "max_new_tokens", "drafts"):
        limits: dict[str, Any] = {name: 0}
        with pytest.raises(UserError, match=f"option {name}: must be at least 1, got 0"):
            serve.ServeOptions(vllm=sys.executable, head=["some"], **limits)
    with pytest.raises(UserError, match="option vllm: .* is no program"):
        serve.ServeOptions(vllm=str(tmp_path / "python"), head=["some"])


def test_what_would_bring_another_torch_is_left_out_of_the_requirements(tmp_path: Path) -> None:
    wheel = tmp_path / "server-1.whl"
    lines = [
        "Name: server",
        *(f"Requires-Dist: {r}" for r in ("regex", "torch==2.13.0", "torchvision", 'av; extra == "audio"')),
    ]
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("server-1.dist-info/METADATA", "\n".join(lines) + "\n\nabout\n")
    assert server_requirements.requirements(str(wheel)) == ["regex"]
