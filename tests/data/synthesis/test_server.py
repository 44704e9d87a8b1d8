"""Asking a server: what is sent, what is kept, and what happens when it fails in each way it can."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable
from email.utils import formatdate
from typing import Any

import pytest

from spechead.data.conversation import Conversation
from spechead.data.synthesis.dialogue import Dialogue
from spechead.data.synthesis.server import ChatServer, pause_of, warning_of
from spechead.errors import UserError
from tests.helpers.chat_server import ChatServerScript, Reply, Script, chat_server, completion, echo

CALL = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}


def dialogue(*turns: str, number: int = 0, **more: Any) -> Dialogue:
    temperatures = more.pop("temperatures", (0.0,))
    messages = [{"role": "user", "content": turn} for turn in turns]
    return Dialogue(number, f"row {number}", Conversation(messages, **more), temperatures=temperatures)


def ask(
    script: Script, dialogues: list[Dialogue], **options: Any
) -> tuple[list[Dialogue], dict[int, str], ChatServerScript]:
    """The answered dialogues as they finished, the reasons of the failed, and the server."""
    answered: list[Dialogue] = []
    failed: dict[int, str] = {}
    settings = {"max_tokens": 9, "top_p": 1.0}
    with chat_server(script) as server:
        client = ChatServer(url=server.address, model="target", settings=settings, pause_s=0.01, **options)

        def fail(one: Dialogue, reason: str) -> None:
            failed[one.number] = reason

        asyncio.run(client.answer(iter(dialogues), answered.append, fail, lambda _: None))
    return answered, failed, server


def one_by_one(*replies: Reply) -> Script:
    """The replies in turn, whatever is asked; the last for ever."""
    waiting = list(replies)
    return lambda request, times: waiting.pop(0) if len(waiting) > 1 else waiting[0]


def said(one: Dialogue) -> list[str]:
    return [message["content"] for message in one.messages if message["role"] == "assistant"]


# ------------------------------------------------------------------------------------------------ what is sent


def test_a_request_has_the_conversation_so_far_and_all_settings() -> None:
    tools = [{"type": "function", "function": {"name": "f"}}]
    one = dialogue("Hi", "And?", tools=tools, keywords={"enable_thinking": False}, temperatures=[0.7])
    [one], _, server = ask(echo, [one], template_kwargs={"lang": "en", "enable_thinking": True})
    first, second = server.requests
    assert said(one) == ["You said Hi", "You said And?"]
    assert [message["content"] for message in second["messages"]] == ["Hi", "You said Hi", "And?"]
    assert first["seed"] != second["seed"]
    del first["messages"], first["seed"]
    assert first == {
        "model": "target",
        "temperature": 0.7,
        "max_tokens": 9,
        "top_p": 1.0,
        "tools": tools,
        "chat_template_kwargs": {"lang": "en", "enable_thinking": False},
        "return_token_ids": True,
    }


def test_the_key_comes_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    with chat_server() as server:
        monkeypatch.setenv("OPENAI_API_KEY", " abc\n")
        ChatServer(url=server.address, model="target", settings={}).choose_model()
        monkeypatch.delenv("OPENAI_API_KEY")
        ChatServer(url=server.address, model="target", settings={}).choose_model()
    assert server.keys == ["Bearer abc", None]


def test_the_key_is_never_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    with chat_server() as server:
        for key in ("sk-a\nb", "sk-a b", "sk-é", "sk-\udce9"):
            monkeypatch.setenv("OPENAI_API_KEY", key)
            with pytest.raises(UserError, match="the key in the environment variable OPENAI_API_KEY has") as error:
                ChatServer(url=server.address, model="target", settings={}).choose_model()
            assert "sk-" not in str(error.value)
        for address in (server.address.replace("//", "//me:sk-a@"), server.address + "?key=sk-a"):
            with pytest.raises(UserError, match="option server: must end in the path") as error:
                ChatServer(url=address, model="target", settings={})
            assert "sk-" not in str(error.value)
    monkeypatch.setenv("OPENAI_API_KEY", "sk-a")
    [one], _, _ = ask(one_by_one(Reply({"error": "no quota for sk-a"}, 400)), [dialogue("Hi")])
    assert one.ended == "refused by the server: no quota for <key> (status 400)"


def test_no_more_requests_at_a_time_than_allowed_and_no_fewer() -> None:
    def slow(request: dict[str, Any], times: int) -> Reply:
        reply = echo(request, times)
        reply.delay_s = 0.05
        return reply

    answered, _, server = ask(slow, [dialogue(f"q{i}", number=i) for i in range(12)], concurrency=4)
    assert len(answered) == 12 and server.most_running == 4


# ------------------------------------------------------------------------------------------------ what is kept


def test_ids_thoughts_calls_and_lengths_are_kept() -> None:
    body = completion("Four", token_ids=[5, 6, 2], message={"reasoning": "2+2"}) | {"usage": {"completion_tokens": 3}}
    [one], _, _ = ask(one_by_one(Reply(body)), [dialogue("Hi")])
    assert one.messages[-1] == {"role": "assistant", "content": "Four", "reasoning_content": "2+2"}
    assert one.answers[0].ids == [5, 6, 2] and one.answers[0].finished and one.count()["tokens"] == 3
    body = completion(None, "tool_calls", message={"tool_calls": [CALL]})
    [one], _, _ = ask(one_by_one(Reply(body)), [dialogue("Hi", "And?")])
    assert one.messages[-1] == {"role": "assistant", "content": "", "tool_calls": [CALL]} and len(one.answers) == 1


def test_a_cut_answer_ends_its_conversation() -> None:
    [one], _, server = ask(one_by_one(Reply(completion("Fo", "length"))), [dialogue("Hi", "And?")])
    assert not one.answers[0].finished and len(server.requests) == 1 and one.count()["truncated"] == 1


def test_halves_of_characters_are_replaced() -> None:
    body = b'{"choices": [{"message": {"content": "a\\ud83d b\\ud83d\\ude00"}, "finish_reason": "stop"}]}'
    [one], _, _ = ask(one_by_one(Reply(body)), [dialogue("Hi")])
    assert said(one) == ["a\ufffd b\U0001f600"]


def test_prompts_are_compared_with_our_template() -> None:
    def script(request: dict[str, Any], times: int) -> Reply:
        ids = [len(message["content"]) for message in request["messages"]]
        other = [1] * (request["messages"][-1]["content"] == "odd")
        return Reply(completion("ok") | {"prompt_token_ids": other + ids})

    def ours(messages: list[dict[str, Any]], tools: Any, keywords: Any) -> list[int]:
        return [len(message["content"]) for message in messages]

    [one], _, _ = ask(script, [dialogue("Hi", "odd")], prompt_ids=ours)
    assert one.counts == {"prompts compared": 2, "prompts that differ": 1}
    assert warning_of(one.counts, "tiny").startswith("1 of 2 prompts of the server differ from those that tiny renders")
    assert warning_of(Counter({"prompts compared": 2}), "tiny") == ""
    [one], _, _ = ask(echo, [dialogue("Hi")], prompt_ids=ours)  # a server that does not tell
    assert not one.counts


# ------------------------------------------------------------------------------------------------ failures

FAULTS: dict[str, Reply] = {
    "status 500": Reply({"error": "oh"}, 500),
    "status 503": Reply(b"busy", 503),
    "status 408": Reply(b"", 408),
    "status 429": Reply({"error": {"message": "slow down"}}, 429),
    "no answer within": Reply(completion("late"), delay_s=0.6),
    "no connection": Reply(b"", status=0),
    "unreadable answer: Expecting value": Reply(b"<html>"),
    "unreadable answer: Extra data": Reply(b'{"choices": []}{"choices": []}'),  # a body sent twice
    "unreadable answer: list index": Reply({"choices": []}),
    "unreadable answer: 'choices'": Reply({"object": "error"}),
    "unreadable answer: a message must be text": Reply(completion([{"type": "text"}])),  # type: ignore[arg-type]
    "unreadable answer: an empty message": Reply(completion(None)),
    "unreadable answer: token_ids": Reply(completion("ok", token_ids=["a"])),
    "unreadable answer: NaN": Reply(b'{"choices": [{"message": {"content": "a", "tool_calls": [NaN]}}]}'),
    "unreadable answer: maximum recursion depth": Reply(b'{"choices":' + b"[" * 200_000),
    "unreadable answer: it ended by abort": Reply(completion("hal", "abort")),  # a scheduler that gave up
    "unreadable answer: it ended by error": Reply(completion("hal", "error")),
    "unreadable answer": Reply(b'{"choices": [{"message": "ok"}]}'),
    "no connection: peer closed": Reply(b"{", headers={"Content-Length": "99"}),
}


@pytest.mark.parametrize("reason", FAULTS)
def test_a_passing_fault_is_tried_again_and_a_lasting_one_fails_the_conversation(reason: str) -> None:
    fault = FAULTS[reason]
    fine = Reply(completion("fine"))
    limit = 0.3 if fault.delay_s else 60.0
    answered, failed, server = ask(one_by_one(fault, fault, fine), [dialogue("Hi")], timeout_s=limit)
    assert said(answered[0]) == ["fine"] and not failed and answered[0].counts["retries"] == 2
    answered, failed, server = ask(one_by_one(fault), [dialogue("Hi")], timeout_s=limit, retries=1)
    assert not answered and failed[0].startswith(reason) and len(server.requests) == 2


def test_a_later_turn_that_fails_fails_the_conversation() -> None:
    answered, failed, _ = ask(
        lambda request, times: Reply({}, 500) if request["messages"][-1]["content"] == "bad" else echo(request, times),
        [dialogue("Hi", "bad", number=0), dialogue("Hi", "good", number=1)],
        retries=0,
    )
    assert [one.number for one in answered] == [1] and failed == {0: "status 500"}


@pytest.mark.slow
def test_a_server_that_is_gone_ends_the_command() -> None:
    def script(request: dict[str, Any], times: int) -> Reply:
        number = int(request["messages"][-1]["content"])
        return Reply({}, 503) if number % 50 >= 10 else echo(request, times)

    def asked(count: int) -> list[Dialogue]:
        return [dialogue(str(i), number=i) for i in range(count)]

    with pytest.raises(UserError, match=r"answers no more \(status 503\); the finished conversations are kept"):
        ask(script, asked(100), retries=0, concurrency=1)
    answered, failed, _ = ask(script, asked(40), retries=0, concurrency=1)
    assert len(answered) == 10 and len(failed) == 30


def test_the_pause_that_a_server_asks_for_is_kept() -> None:
    script = one_by_one(Reply({}, 429, {"Retry-After": "0.4"}), Reply(completion("fine")))
    started = time.monotonic()
    [one], _, _ = ask(script, [dialogue("Hi")])
    assert said(one) == ["fine"] and time.monotonic() - started >= 0.4


@pytest.mark.parametrize(
    ("header", "least", "most"),
    [
        ("3", 3, 3),
        ("", 0, 0),
        ("soon", 0, 0),
        ("-5", 0, 0),
        ("nan", 0, 0),
        ("1e9", 600, 600),
        (lambda: formatdate(time.time() + 60, usegmt=True), 55, 60),
        (lambda: formatdate(time.time() - 60, usegmt=True), 0, 0),
    ],
)
def test_pauses_are_given_in_seconds_or_as_a_date(header: str | Callable[[], str], least: float, most: float) -> None:
    assert least <= pause_of(header if isinstance(header, str) else header()) <= most


# ------------------------------------------------------------------------------------------------ refusals


@pytest.mark.parametrize(
    ("reply", "reason"),
    [
        (Reply({"error": {"message": "too\nlong"}}, 400), "refused by the server: too long (status 400)"),
        (Reply({"error": "too long"}, 413), "refused by the server: too long (status 413)"),
        (Reply({"detail": "no tools"}, 422), "refused by the server: no tools (status 422)"),
        (Reply({"object": "error", "message": "bad"}, 400), "refused by the server: bad (status 400)"),
        (Reply(b"what?", 400), "refused by the server: what? (status 400)"),
        (Reply([1], 400), "refused by the server: [1] (status 400)"),
        (Reply({"error": {"message": "half \ud800"}}, 400), "refused by the server: half \ufffd (status 400)"),
        (Reply(b"[" * 200_000, 400), f"refused by the server: {'[' * 200} (status 400)"),
        (Reply(completion("I", "content_filter")), "refused by the server: content_filter"),
        (Reply(completion(None, message={"refusal": "I will not."})), "refused by the target"),
    ],
)
def test_a_refusal_is_not_tried_again(reply: Reply, reason: str) -> None:
    [one], failed, server = ask(one_by_one(reply), [dialogue("Hi", "And?")])
    assert (one.dropped, one.counts["refused"], failed, len(server.requests)) == (reason, 1, {}, 1)
    [one], _, _ = ask(one_by_one(Reply(completion("fine")), reply), [dialogue("Hi", "And?")])
    assert (one.dropped, one.ended, said(one), one.messages[-1]["content"]) == ("", reason, ["fine"], "fine")


@pytest.mark.parametrize(
    ("status", "message"),
    [
        (401, "refuses the key .401.; set OPENAI_API_KEY"),
        (403, "refuses the key"),
        (404, "status 404"),
        (307, "status 307; does the address end in /v1"),
    ],
)
def test_a_refusal_of_everything_ends_the_command(status: int, message: str) -> None:
    with pytest.raises(UserError, match=message):
        ask(one_by_one(Reply({}, status)), [dialogue(f"q{i}", number=i) for i in range(30)])


def test_a_server_that_knows_no_token_ids_is_asked_without() -> None:
    def strict(request: dict[str, Any], times: int) -> Reply:
        if "return_token_ids" in request:
            return Reply({"error": {"message": "Unrecognized request argument: return_token_ids"}}, 400)
        return echo(request, times)

    answered, failed, server = ask(strict, [dialogue(f"q{i}", number=i) for i in range(9)], concurrency=3, retries=0)
    assert len(answered) == 9 and not failed and not any(one.counts for one in answered)
    assert sum("return_token_ids" in request for request in server.requests) <= 3


# ------------------------------------------------------------------------------------------------ its model


@pytest.mark.parametrize(
    ("path", "model", "message"),
    [
        ("", "target", r"option server: http://127.0.0.1:\d+ lacks the path, give http://127.0.0.1:\d+/v1"),
        ("/api", "target", r"option server: .*/api/models answers with status 404; does the address end in /v1\?"),
        ("/v1", "other", "option model: 'other' is not served at .*, which has target, second"),
        ("/v1/", "", "option model: is needed at .*, which has target, second"),
    ],
)
def test_a_wrong_address_or_model_is_one_line(path: str, model: str, message: str) -> None:
    with chat_server(models=["target", "second"]) as server, pytest.raises(UserError, match=message) as error:
        ChatServer(url=server.address.removesuffix("/v1") + path, model=model, settings={}).choose_model()
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    "url",
    ["localhost:8000/v1", "ftp://x/v1", "http:///v1", "/v1", "http://x:port/v1", "http://[x/v1", "http://x/v1\udce9"],
)
def test_what_is_no_address_is_one_line(url: str) -> None:
    with pytest.raises(UserError, match="option server: "):
        ChatServer(url=url, model="target", settings={}).choose_model()


def test_a_proxy_without_an_address_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HTTP_PROXY", "nowhere://x")
    monkeypatch.setenv("NO_PROXY", "")
    with pytest.raises(UserError, match="nothing answers at .*proxy"):
        ChatServer(url="http://127.0.0.1:9/v1", model="target", settings={}).choose_model()


def test_names_of_models_are_text() -> None:
    with chat_server(models=["a\ud800"]) as server:
        client = ChatServer(url=server.address, model="", settings={})
        client.choose_model()
    assert client.model == "a\ufffd"


def test_a_length_below_nothing_is_not_counted() -> None:
    [one], _, _ = ask(one_by_one(Reply(completion("ok") | {"usage": {"completion_tokens": -5}})), [dialogue("Hi")])
    assert "tokens" not in one.count()


def test_a_server_that_is_not_there_is_one_line() -> None:
    with chat_server() as server:
        address = server.address
    with pytest.raises(UserError, match=f"option server: nothing answers at {address}/models .*; start the server"):
        ChatServer(url=address, model="target", settings={}).choose_model()


@pytest.mark.parametrize(("models", "likely"), [(["tiny"], ""), (["tiny"], "org/x"), (["a", "tiny", "b"], "tiny")])
def test_the_only_model_of_a_server_or_the_likely_one_needs_no_name(models: list[str], likely: str) -> None:
    with chat_server(models=models) as server:
        client = ChatServer(url=server.address, model="", settings={})
        client.choose_model(likely)
    assert client.model == "tiny"
