"""Conversations to token ids with the mask of what the target wrote: each answer as it is served.

The sample of a turn is the prompt as the chat template renders it for generation, followed by the tokens that the
target wrote. While each prompt continues the one before it, id by id, one sample carries the turns:

    <|im_start|>user\\nHi<|im_end|>\\n<|im_start|>assistant\\nHello<|im_end|>\\n<|im_start|>user\\n...
    |------------------ prompt ------------------------|           |
                                                       |-supervised-|

Where the template writes earlier turns otherwise than they were served (it drops their thoughts, or moves the system
text), a turn begins a sample of its own.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from spechead.data.answer_text import answer_text, complete, opened_thought, squeezed, turns_in
from spechead.data.conversation import Conversation, Unusable
from spechead.data.one_render import spans_in_one_render
from spechead.target.chat_template import ChatTemplate, TemplateError

FEW_TURNS = 4  # up to which the prompt of every turn is rendered
KEPT = "answers with ids kept"


@dataclass
class Encoded:
    """A tokenised chat. supervised[i]: the target wrote token i, the end of its turn included."""

    ids: list[int]
    supervised: list[bool]

    def add(self, ids: Sequence[int], supervised: bool) -> None:
        self.ids += ids
        self.supervised += [supervised] * len(ids)


def encode(
    chat: ChatTemplate, conversation: Conversation, *, history: str = "each", counts: Counter[str] | None = None
) -> list[Encoded]:
    """The samples of a conversation; more than one where the template rewrites earlier turns.

    `history`, where it does: "each" returns every turn as it was served, "last" only the sample with the last turn.
    `counts`: what is worth reporting is added to it. Raises Unusable where nothing can be trained on.
    """
    counts = Counter() if counts is None else counts
    if conversation.text:
        ids = list(chat.tokenizer(conversation.text)["input_ids"])
        return [Encoded(ids, [True] * len(ids))]
    try:
        turns = _Turns(chat, conversation, counts)
        turns.refuse_ignored()
        samples = turns.in_one_render() or turns.one_by_one()
    except TemplateError as error:
        raise Unusable("refused by the chat template", str(error)) from error
    if not samples:
        raise Unusable("the chat template hides every answer", chat.name)
    if any(all(sample.supervised) for sample in samples):
        raise Unusable("the chat template attributes all of a chat to the assistant", chat.name)
    if len(samples) > 1:
        counts["samples of turns that the template rewrites later"] += len(samples)
        if history == "last":
            counts["samples left out, since the template rewrites their turns"] += len(samples) - 1
            return samples[-1:]
    return samples


class _Turns:
    """The assistant's turns of a conversation."""

    def __init__(self, chat: ChatTemplate, conversation: Conversation, counts: Counter[str]) -> None:
        self.chat, self.counts = chat, counts
        self.messages, self.tools, self.keywords = conversation.messages, conversation.tools, conversation.keywords
        self.places = [i for i, message in enumerate(self.messages) if message["role"] == "assistant"]
        self.cut = conversation.meta.get("finish") == "length"  # the length cap cut the last answer
        self._prompts: dict[int, str] = {}
        self.kept = self._kept_ids(conversation)

    def refuse_ignored(self) -> None:
        """Raise Unusable for tools, or a message, without a trace in the prompt of an answer after them."""
        before, prompt = self.messages[: self.places[-1]], self.prompt(self.places[-1])
        if self.chat.ignores_tools(before, self.tools, self.keywords, prompt):
            raise Unusable("tools that the chat template ignores", self.chat.name)
        printed = squeezed(prompt)
        for i, message in enumerate(before):
            if message["role"] == "assistant" or squeezed(message["content"]) in printed:
                continue
            place = next(place for place in self.places if place > i)  # later prompts may leave it out
            without = self.messages[:i] + self.messages[i + 1 : place]
            try:
                ignored = self.chat.prompt_text(without, self.tools, self.keywords) == self.prompt(place)
            except TemplateError:
                continue  # the template needs it
            if ignored:
                raise Unusable(f"a {message['role']} message that the chat template ignores", self.chat.name)

    def count(self, what: str, number: int) -> None:
        if number:
            self.counts[what] += number

    def prompt(self, place: int) -> str:
        """The text that the target is given before it writes the message at `place`."""
        if place not in self._prompts:
            self._prompts[place] = self.chat.prompt_text(self.messages[:place], self.tools, self.keywords)
        return self._prompts[place]

    # -------------------------------------------------------------------------------------------- all at once

    def in_one_render(self) -> list[Encoded]:
        """The one sample of a long conversation, in time linear in its turns; empty where that is not certain."""
        if len(self.places) <= FEW_TURNS or self.cut:
            return []
        found = spans_in_one_render(self.chat, self.messages, self.places, self.tools, self.keywords, self.prompt)
        if found is None:
            return []
        ids, spans = found
        for kept, (first, end) in zip(self.kept, spans, strict=True):
            if kept and kept != ids[first:end]:
                return []  # later prompts contain other ids than the target wrote
        self.count(KEPT, sum(map(bool, self.kept)))
        supervised = [False] * len(ids)
        for first, end in spans:
            supervised[first:end] = [True] * (end - first)
        return [Encoded(ids, supervised)]

    # -------------------------------------------------------------------------------------------- turn by turn

    def one_by_one(self) -> list[Encoded]:
        """Render the prompt of each turn: exact for any template, in time that grows with the square of the turns."""
        samples: list[Encoded] = []
        for place, kept in zip(self.places, self.kept, strict=True):
            prompt = self.chat.tokenize(self.prompt(place))
            ids = self.tokenized(place, prompt)
            self.count(KEPT, bool(kept))
            self.count("answers with ids that differ from those of their text", bool(kept) and kept != ids)
            answer = kept or ids
            if not answer:
                self.count("answers that are blank, or that the chat template hides", 1)
                continue
            if not samples or prompt[: len(samples[-1].ids)] != samples[-1].ids:
                samples.append(Encoded([], []))
            samples[-1].add(prompt[len(samples[-1].ids) :], supervised=False)
            samples[-1].add(answer, supervised=True)
        return samples

    def tokenized(self, place: int, prompt: list[int]) -> list[int]:
        """The ids of the answer's text; empty where that cannot be determined."""
        text = self.answer_text(place)
        if not text:
            return []
        whole = self.chat.tokenize(self.prompt(place) + text)
        # While decoding, the prompt is tokenised alone: no token may straddle its end.
        return whole[len(prompt) :] if whole[: len(prompt)] == prompt else self.chat.tokenize(text)

    def answer_text(self, place: int) -> str:
        """The text that the target wrote after the prompt, the end of its turn included; empty where unknown."""
        message, prompt = self.messages[place], self.prompt(place)
        if not (message["content"].strip() or message.get("tool_calls") or message.get("reasoning_content")):
            return ""
        turns = turns_in(self.chat, self.messages[: place + 1], self.tools, self.keywords, prompt)
        return answer_text(self.chat, prompt, turns, message, cut=self.cut and place == self.places[-1])

    # -------------------------------------------------------------------------------------------- kept ids

    def _kept_ids(self, conversation: Conversation) -> list[list[int]]:
        """The ids of each answer as the target wrote them; an empty list where they are unknown."""
        none: list[list[int]] = [[] for _ in self.places]
        if not conversation.answer_ids:
            return none
        if conversation.meta.get("tokenizer", self.chat.tokenizer_digest) != self.chat.tokenizer_digest:
            self.count("answers with ids of another tokenizer", len(none))
            return none
        kept = []
        for ids, place in zip(conversation.answer_ids, self.places, strict=True):
            fit = not ids or self._fit(ids, place)
            self.count("answers with ids that do not fit their text", not fit)
            kept.append(list(ids) if fit else [])
        return kept

    def _fit(self, ids: list[int], place: int) -> bool:
        try:
            text = self.chat.tokenizer.decode(ids, skip_special_tokens=False)
            return complete(text, self.messages[place]) or complete(
                opened_thought(self.prompt(place)) + text, self.messages[place]
            )
        except (IndexError, OverflowError, TypeError):  # no ids of this tokenizer
            return False
