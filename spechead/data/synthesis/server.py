"""Answers from a server with OpenAI's protocol (vLLM, SGLang, llama.cpp), many requests at a time.

Requests that fail for a passing reason are repeated after growing pauses.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import re
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from email.utils import parsedate_to_datetime
from typing import Any
from urllib.parse import urlsplit

from spechead.data.messages import Cleaner, Unusable
from spechead.data.synthesis.dialogue import Answer, Dialogue
from spechead.errors import UserError, first_line
from spechead.files import clean

KEY = "OPENAI_API_KEY"
BROKEN_OFF = ("abort", "error", "cancelled")  # finish reasons of an answer that the server has not finished
PASSING = {408, 409, 425, 429}  # besides all from 500 on
LONGEST_PAUSE_S, LONGEST_ASKED_PAUSE_S = 60.0, 600.0
START_S = 30.0  # for the list of models
LOST_AFTER = 32  # conversations that failed one after another, with no answer between them: the server is gone


class Refused(Exception):
    """The server refuses this request, and would refuse it again."""


class Failed(Exception):
    """The server did not answer this request in any of the attempts."""


class Malformed(ValueError):
    """An answer outside the protocol."""


@dataclass(kw_only=True)
class ChatServer:
    """A server, and how it is asked."""

    url: str  # up to /v1
    model: str
    settings: dict[str, Any]  # of every request: max_tokens, top_p, ...
    template_kwargs: dict[str, Any] = field(default_factory=dict)
    concurrency: int = 16
    timeout_s: float = 600.0  # of one request
    retries: int = 5
    pause_s: float = 1.0  # before the first retry; each further one doubles it
    prompt_ids: Callable[..., list[int]] | None = None  # of our own chat template, to be compared with the server's
    token_ids: bool = True  # ask for ids; ends where the server refuses to be asked
    _failures: int = field(default=0, init=False)  # since the last answer

    def __post_init__(self) -> None:
        self.url = self.url.rstrip("/")
        try:
            parts = urlsplit(self.url)
        except ValueError as error:
            raise UserError(f"option server: {clean(self.url)} is no address: {first_line(error)}") from error
        if parts.scheme not in ("http", "https") or not parts.netloc:
            raise UserError(f"option server: {self.url} is no address, expected one like http://127.0.0.1:8000/v1")
        if parts.username is not None or parts.query or parts.fragment:  # messages name the address
            raise UserError(f"option server: must end in the path, without a name, key or query; set {KEY} instead")
        if not parts.path.strip("/"):
            raise UserError(f"option server: {self.url} lacks the path, give {self.url}/v1")

    # -------------------------------------------------------------------------------------------- the model

    def choose_model(self, likely: str = "") -> None:
        """Check that the server is there and serves `model`; an empty name becomes that of its only model, or `likely`
        where that is one of several."""
        import httpx

        address = f"{self.url}/models"
        try:
            reply = httpx.get(address, headers=headers(), timeout=START_S)
        except (httpx.HTTPError, httpx.InvalidURL, ValueError) as error:  # the latter of a proxy's address
            raise UserError(
                f"option server: nothing answers at {address} ({first_line(error)}); start the server, or correct it"
            ) from error
        try:
            names = [clean(str(model["id"])) for model in reply.json()["data"]] if reply.is_success else []
        except (ValueError, LookupError, TypeError, RecursionError) as error:
            raise UserError(f"option server: {address} lists no models; does the address end in /v1?") from error
        if not reply.is_success:
            raise self._unusable(reply.status_code, address)
        if not self.model and (len(names) == 1 or likely in names):
            self.model = likely if likely in names else names[0]
        if self.model not in names:
            given = f"{self.model!r} is not served" if self.model else "is needed"
            raise UserError(f"option model: {given} at {self.url}, which has {', '.join(names[:5]) or 'none'}")

    def _unusable(self, status: int, address: str) -> UserError:
        if status in (401, 403):
            return UserError(f"option server: {address} refuses the key ({status}); set {KEY} in the environment")
        return UserError(f"option server: {address} answers with status {status}; does the address end in /v1?")

    # -------------------------------------------------------------------------------------------- dialogues

    async def answer(
        self,
        dialogues: Iterator[Dialogue],
        record: Callable[[Dialogue], None],
        fail: Callable[[Dialogue, str], None],
        wrote: Callable[[int], None],
    ) -> None:
        """Answer all turns of all dialogues; each is handed to `record`, or, with the reason, to `fail`.

        `wrote` gets the size of each answer. Raises UserError where the server refuses all requests, or is gone.
        """
        import httpx

        async def worker() -> None:
            for dialogue in dialogues:
                try:
                    await self._converse(client, dialogue, wrote)
                except Failed as error:
                    fail(dialogue, str(error))
                    self._failures += 1
                    if self._failures >= LOST_AFTER:
                        raise UserError(
                            f"option server: {self.url} answers no more ({error}); the finished conversations are "
                            "kept, give the same command once it does"
                        ) from error
                else:
                    record(dialogue)

        limits = httpx.Limits(max_connections=self.concurrency, max_keepalive_connections=self.concurrency)
        async with httpx.AsyncClient(headers=headers(), timeout=None, limits=limits) as client:
            await asyncio.gather(*(worker() for _ in range(self.concurrency)))

    async def _converse(self, client: Any, dialogue: Dialogue, wrote: Callable[[int], None]) -> None:
        while dialogue.open():
            try:
                body = await self._ask(client, self._request(dialogue), dialogue.counts)
            except Refused as error:
                dialogue.counts["refused"] += 1
                dialogue.stop(f"refused by the server: {error}")
                return
            choice = body["choices"][0]
            refusal = choice["message"].get("refusal")
            if refusal or choice.get("finish_reason") in ("content_filter", "refusal"):
                dialogue.counts["refused"] += 1
                dialogue.stop(
                    "refused by the target" if refusal else f"refused by the server: {choice['finish_reason']}"
                )
                return
            self._compare_prompt(body.get("prompt_token_ids"), dialogue)
            answer = answer_of(body)
            wrote(answer.tokens or len(answer.ids))
            dialogue.add(answer)

    def _request(self, dialogue: Dialogue) -> dict[str, Any]:
        request = {"model": self.model, "messages": dialogue.messages, "temperature": dialogue.temperature}
        request |= self.settings | {"seed": dialogue.turn_seed}
        if dialogue.tools:
            request["tools"] = dialogue.tools
        if keywords := self.template_kwargs | dialogue.keywords:
            request["chat_template_kwargs"] = keywords
        return request

    def _compare_prompt(self, ids: Any, dialogue: Dialogue) -> None:
        """Count the prompts whose ids the server returns, and those that our chat template renders differently."""
        if self.prompt_ids is None or not isinstance(ids, list):
            return
        dialogue.counts["prompts compared"] += 1
        try:
            ours = self.prompt_ids(dialogue.messages, dialogue.tools, dialogue.keywords)
        except UserError:
            ours = []
        dialogue.counts["prompts that differ"] += ours != ids

    # -------------------------------------------------------------------------------------------- one request

    async def _ask(self, client: Any, request: dict[str, Any], counts: Counter[str]) -> dict[str, Any]:
        """The body of the reply. Raises Refused, Failed, or UserError where the server refuses all requests."""
        attempt = 0
        while True:
            asked_ids = self.token_ids
            reply, problem, asked_pause = await self._post(
                client, request | {"return_token_ids": True} if asked_ids else request
            )
            if reply is not None and reply.is_success:
                try:
                    body = checked(reply.content)
                    self._failures = 0
                    return body
                except Malformed as error:
                    problem = f"unreadable answer: {error}"
                    counts["unreadable answers"] += 1
            elif reply is not None and reply.status_code < 500 and reply.status_code not in PASSING:
                if asked_ids and reply.status_code in (400, 422) and b"return_token_ids" in reply.content:
                    self.token_ids = False
                    continue
                if reply.status_code < 400 or reply.status_code in (401, 403, 404, 405):
                    raise self._unusable(reply.status_code, str(reply.url))
                self._failures = 0
                raise Refused(message_of(reply))
            if attempt == self.retries:
                raise Failed(problem)
            counts["retries"] += 1
            pause = min(LONGEST_PAUSE_S, self.pause_s * 2**attempt) * random.uniform(0.5, 1.0)
            await asyncio.sleep(max(pause, asked_pause))
            attempt += 1

    async def _post(self, client: Any, request: dict[str, Any]) -> tuple[Any, str, float]:
        """The reply or None, what is wrong with it, and the pause in seconds that it asks for."""
        import httpx

        try:
            async with asyncio.timeout(self.timeout_s):
                reply = await client.post(f"{self.url}/chat/completions", json=request)
        except TimeoutError:
            return None, f"no answer within {self.timeout_s:g} s", 0.0
        except httpx.HTTPError as error:
            return None, f"no connection: {first_line(error)}", 0.0
        return reply, f"status {reply.status_code}", pause_of(reply.headers.get("Retry-After", ""))


# ------------------------------------------------------------------------------------------------ replies


def headers() -> dict[str, str]:
    """The key of the environment. Raises UserError where no request can hold it: other messages would show it."""
    key = os.environ.get(KEY, "").strip()
    if not re.fullmatch("[!-~]*", key):
        raise UserError(f"the key in the environment variable {KEY} has blanks or characters beyond ASCII; correct it")
    return {"Authorization": f"Bearer {key}"} if key else {}


def checked(content: bytes) -> dict[str, Any]:
    """A reply's body, if it is a chat completion."""
    try:
        body = json.loads(content)
        choice = body["choices"][0]
        message = choice["message"]
        texts = [message.get("content"), thoughts(message)]
        calls, ids = message.get("tool_calls"), choice.get("token_ids")
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise Malformed(first_line(error)) from error
    if choice.get("finish_reason") in BROKEN_OFF:
        raise Malformed(f"it ended by {choice['finish_reason']}")
    if any(not isinstance(text, str | None) for text in texts) or not isinstance(calls, list | None):
        raise Malformed("a message must be text")
    if texts == [None, None] and not calls and not message.get("refusal") and choice.get("finish_reason") != "length":
        raise Malformed("an empty message")
    if ids is not None and not (isinstance(ids, list) and all(type(token) is int for token in ids)):
        raise Malformed("token_ids must be numbers")
    try:
        choice["message"] = Cleaner().clean(message)
    except Unusable as error:
        raise Malformed(str(error)) from error
    return dict(body)


def answer_of(body: dict[str, Any]) -> Answer:
    """The answer in the body of a chat completion."""
    choice = body["choices"][0]
    message, usage = choice["message"], body.get("usage")
    length = usage.get("completion_tokens") if isinstance(usage, dict) else None
    return Answer(
        content=message.get("content") or "",
        ids=choice.get("token_ids") or [],
        finished=choice.get("finish_reason") != "length",
        tokens=length if type(length) is int and length > 0 else 0,
        reasoning=thoughts(message) or "",
        tool_calls=message.get("tool_calls") or [],
    )


def thoughts(message: dict[str, Any]) -> Any:
    """The thoughts that a server split off, under either of their names."""
    return message.get("reasoning_content") or message.get("reasoning")


def message_of(reply: Any) -> str:
    """The server's own words for a refusal, as one line, without the key, which some repeat."""
    try:
        body = reply.json()
        error = body.get("error", body)
        text = error if isinstance(error, str) else error.get("message") or error.get("detail")
    except (ValueError, AttributeError, RecursionError):
        text = reply.text
    line = clean(" ".join(str(text).split()))
    if key := os.environ.get(KEY, "").strip():
        line = line.replace(key, "<key>")
    return f"{line[:200] or 'no reason'} (status {reply.status_code})"


def pause_of(header: str) -> float:
    """The seconds that a Retry-After header asks for, given as a number or as a date."""
    try:
        seconds = float(header)
    except ValueError:
        try:
            seconds = parsedate_to_datetime(header).timestamp() - time.time()
        except (ValueError, TypeError):
            return 0.0
    return min(max(0.0, seconds), LONGEST_ASKED_PAUSE_S)  # NaN becomes 0


def warning_of(counts: Counter[str], template: str) -> str:
    """One line if prompts of the server differ from those of our chat template, else ""."""
    differ, compared = counts["prompts that differ"], counts["prompts compared"]
    if not differ:
        return ""
    return (
        f"{differ} of {compared} prompts of the server differ from those that {template} renders: its chat template or "
        "the keywords differ, and a head trained with this template drafts worse there"
    )
