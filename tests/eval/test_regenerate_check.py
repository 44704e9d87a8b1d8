"""The check of regenerated data against a server; the server here is a stand-in with the tiny target."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from eval import regenerate_check as check
from spechead.decoding.generate import generate
from spechead.errors import UserError
from spechead.target.model import Target
from tests.helpers.chat_server import Reply, chat_server, completion
from tests.helpers.targets import make_target


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[int, dict[str, Any]]]:
    """Runs the check; the server's first `different` answers, or its prompts, are not those of the target."""
    target = make_target()
    monkeypatch.setattr(Target, "load", classmethod(lambda cls, name, **_: target))
    monkeypatch.setattr("spechead.target.options.load_tokenizer", lambda *_, **__: target.tokenizer)
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"turns": [f"question {i}"]}) + "\n" for i in range(20)))

    def run(different: int = 0, prompt: list[int] | None = None) -> tuple[int, dict[str, Any]]:
        def script(request: dict[str, Any], times: int) -> Reply:
            ids = target.chat.prompt_ids(request["messages"])
            tokens = generate(target, ids, max_new_tokens=request["max_tokens"]).tokens
            if int(request["messages"][0]["content"].split()[1]) < different:
                tokens[3] += 1
            text = target.tokenizer.decode(tokens)
            body = completion(text, "length", token_ids=tokens)
            return Reply(body | {"prompt_token_ids": ids if prompt is None else prompt})

        @contextmanager
        def server(python: str, model: str, log: Path, speculation: Any) -> Iterator[str]:
            assert (python, model, speculation) == (sys.executable, "tiny", None)
            with chat_server(script) as running:
                yield running.address.removesuffix("/v1")

        monkeypatch.setattr(check.serve_check, "server", server)
        out = tmp_path / "check.json"
        words = ["--vllm", sys.executable, "--target", "tiny", "--prompts", str(prompts), "--max-new-tokens", "6"]
        code = check.main([*words, "--work", str(tmp_path / "work"), "--json", str(out)])
        return code, json.loads(out.read_text())

    return run


def test_equal_answers_pass_and_an_earlier_check_is_no_matter(run: Callable[..., tuple[int, dict[str, Any]]]) -> None:
    for _ in range(2):
        code, numbers = run()
        assert (code, numbers["answers"], numbers["identical"]) == (0, 20, 20)
        assert (numbers["prompts_compared"], numbers["prompts_that_differ"], numbers["passed"]) == (20, 0, True)


def test_one_answer_in_twenty_may_differ(run: Callable[..., tuple[int, dict[str, Any]]]) -> None:
    code, numbers = run(different=1)
    assert (code, numbers["identical"], numbers["first_difference"]) == (0, 19, [3])
    code, numbers = run(different=2)
    assert (code, numbers["identical"], numbers["passed"]) == (1, 18, False)


def test_other_prompts_do_not_pass(run: Callable[..., tuple[int, dict[str, Any]]]) -> None:
    code, numbers = run(prompt=[1, 2])
    assert (code, numbers["prompts_that_differ"]) == (1, 20)


def test_a_program_that_is_not_there_is_named() -> None:
    with pytest.raises(UserError, match="option vllm: nowhere/python is no program"):
        check.main(["--vllm", "nowhere/python"])
