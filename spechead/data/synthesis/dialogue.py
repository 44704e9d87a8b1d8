"""A conversation whose user turns are answered one after another, each with the answers before it.

The assistant's turns of the source are dropped. A tool's result belongs to a call that this target did not make, so
that a conversation ends before it.
"""

from __future__ import annotations

import hashlib
import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from spechead.data.conversation import Conversation
from spechead.data.messages import Message, Unusable
from spechead.files import clean

RESULTS = ("tool", "ipython", "function")


@dataclass
class Answer:
    """One answer of the target."""

    content: str  # without the token that ended it
    ids: list[int]  # with the token that ended it; empty where a server did not tell
    finished: bool  # False: the length cap cut it
    tokens: int = 0  # its length; 0: that of `ids`
    reasoning: str = ""  # thoughts that a server split off
    tool_calls: list[Any] = field(default_factory=list)

    def message(self) -> Message:
        message: Message = {"role": "assistant", "content": self.content}
        if self.reasoning:
            message["reasoning_content"] = self.reasoning
        if self.tool_calls:
            message["tool_calls"] = self.tool_calls
        return message


class Dialogue:
    """The state of one conversation: `open` a turn, `add` its answer, and so on until `open` returns False.

    `number` is that of the row in its source. Temperature and seeds follow from it and from the seed of the command,
    so that they are the same whoever answers, and when. Raises Unusable where there is no turn to answer.
    """

    def __init__(
        self,
        number: int,
        where: str,
        conversation: Conversation,
        *,
        temperatures: Sequence[float] = (0.0,),
        seed: int = 0,
        max_turns: int = 0,
    ) -> None:
        turns, self.ended = split_turns(conversation)
        if max_turns and len(turns) > max_turns:
            turns, self.ended = turns[:max_turns], "at the largest number of turns"
        self.number, self.where = number, where
        self.tools, self.keywords, self.kind = conversation.tools, conversation.keywords, conversation.meta.get("kind")
        self.temperature = random.Random(f"{seed}/{number}").choice(list(temperatures))
        self.messages: list[Message] = []
        self.answers: list[Answer] = []
        self.counts: Counter[str] = Counter()
        self._waiting = turns
        self._seed = seed

    def open(self) -> bool:
        """Append the messages of the next turn; False: the conversation has ended."""
        if not self._waiting:
            return False
        self.messages += self._waiting.pop(0)
        return True

    def add(self, answer: Answer) -> None:
        """Append the answer to the open turn; one that was cut, or that calls a tool, is the last."""
        self.messages.append(answer.message())
        self.answers.append(answer)
        if not answer.finished:
            self._end("with an answer cut by the cap")
        elif answer.tool_calls:
            self._end("with a tool call")

    def stop(self, reason: str) -> None:
        """End the conversation before the open turn, which cannot be answered."""
        while self.messages and self.messages[-1]["role"] != "assistant":
            self.messages.pop()
        self._end(reason)

    def _end(self, how: str) -> None:
        self._waiting, self.ended = [], how

    @property
    def dropped(self) -> str:
        """Why there is no answer in it that a head can be trained on, else ""."""
        if not self.answers:
            return self.ended
        says = any(answer.content.strip() or answer.reasoning.strip() or answer.tool_calls for answer in self.answers)
        return "" if says else "empty answer"

    @property
    def turn_seed(self) -> int:
        """The seed of the open turn, from 0 to 2^31 - 1."""
        name = f"{self._seed}/{self.number}/{len(self.answers)}"
        return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=4).digest()) >> 1

    def row(self, target: str, tokenizer: str) -> dict[str, Any]:
        """The finished conversation as a row of a data set. `tokenizer`: its digest, empty where it is unknown."""
        meta: dict[str, Any] = {
            "finish": "eos" if self.answers[-1].finished else "length",
            "target": target,
            "temperature": self.temperature,
            "source": clean(self.where),  # the name of a file may be any bytes
        }
        if tokenizer:
            meta["tokenizer"] = tokenizer
        if self.kind is not None:
            meta["kind"] = self.kind
        row: dict[str, Any] = {"messages": self.messages}
        if self.tools:
            row["tools"] = self.tools
        if self.keywords:
            row["chat_template_kwargs"] = self.keywords
        return row | {"answer_ids": [answer.ids for answer in self.answers], "meta": meta}

    def count(self) -> dict[str, int]:
        """What the record of the command sums up over its conversations; turns and tokens of its rows only."""
        counts = Counter(self.counts)
        if not self.dropped:
            counts["turns"] = len(self.answers)
            counts["tokens"] = sum(answer.tokens or len(answer.ids) for answer in self.answers)
            counts["truncated"] = sum(not answer.finished for answer in self.answers)
        return {name: count for name, count in counts.items() if count}


def split_turns(conversation: Conversation) -> tuple[list[list[Message]], str]:
    """The messages before each answer, and how the conversation ends early ("" where it does not).

    A turn ends with the message before an assistant's or a user's, if a user has spoken in it.
    """
    if not conversation.messages:
        raise Unusable("a plain text")
    turns: list[list[Message]] = []
    turn: list[Message] = []
    ended, asked = "", False
    for message in conversation.messages:
        role = message["role"]
        if asked and role in ("user", "assistant", *RESULTS):
            turns.append(turn)
            turn, asked = [], False
        if role in RESULTS:
            ended = "before a tool's result"
            break
        if role != "assistant":
            turn.append(message)
            asked = asked or role == "user"
    if asked:
        turns.append(turn)
    if not turns:
        raise Unusable("no user turn")
    return turns, ended
