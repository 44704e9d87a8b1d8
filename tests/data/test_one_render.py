"""Long conversations are encoded from one render, in linear time, with the result of rendering every turn."""

from __future__ import annotations

from typing import Any

import pytest

from spechead.data import encode as module
from spechead.data.conversation import Conversation
from spechead.data.encode import encode
from spechead.target.chat_template import ChatTemplate, Message
from tests.data.test_encode import TEMPLATES, chat, make_tokenizer

LONG = chat(*[f"{'answer' if turn % 2 else 'question'} {turn}.." for turn in range(24)])


@pytest.mark.parametrize("template", TEMPLATES)
def test_it_gives_what_every_turn_rendered_gives(template: str, monkeypatch: pytest.MonkeyPatch) -> None:
    served = ChatTemplate(make_tokenizer(template))
    fast = encode(served, Conversation(LONG))
    monkeypatch.setattr(module, "FEW_TURNS", 10**6)
    assert fast == encode(served, Conversation(LONG))


class Counting(ChatTemplate):
    """Counts the characters that are rendered and tokenised."""

    work = 0

    def render(self, *arguments: Any, **options: Any) -> str:
        text = super().render(*arguments, **options)
        type(self).work += len(text)
        return text

    def tokenize(self, text: str) -> list[int]:
        type(self).work += len(text)
        return super().tokenize(text)


def work(template: str, messages: list[Message]) -> int:
    Counting.work = 0
    encode(Counting(make_tokenizer(template)), Conversation(messages))
    return Counting.work


@pytest.mark.parametrize("template", ["chatml", "llama3", "no prompt"])
def test_the_work_grows_with_the_number_of_turns_alone(template: str) -> None:
    turns = chat(*["x" * 50 for _ in range(256)])
    assert work(template, turns) < 2.3 * work(template, turns[:128])
    assert work(template, turns) < 20 * sum(len(message["content"]) for message in turns)


RARE = (
    "{% for m in messages %}{% set c = m['content'] %}"
    "{% if not loop.last and 'secret' in c %}{% set c = 'hidden' %}{% endif %}"
    "{{ '<|im_start|>' + m['role'] + '\n' + c + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def test_one_answer_that_is_rewritten_among_many_is_noticed() -> None:
    messages = [*LONG]
    messages[9] = {"role": "assistant", "content": "secret"}
    served = ChatTemplate(make_tokenizer(RARE))
    samples = encode(served, Conversation(messages))
    assert len(samples) == 2
    secret = served.tokenize("secret")
    first = samples[0]
    assert first.ids[-len(secret) - 1 : -1] == secret and first.supervised[-len(secret) :] == [True] * len(secret)
    assert len(encode(served, Conversation(LONG))) == 1


def test_ids_that_differ_from_their_text_are_kept() -> None:
    served = ChatTemplate(make_tokenizer("chatml"))
    ids: list[list[int]] = [[] for _ in range(12)]
    ids[3] = [token for letter in LONG[7]["content"] for token in served.tokenize(letter)] + sorted(served.stop_ids)
    first, second = encode(served, Conversation(LONG, answer_ids=ids))
    assert first.ids[-len(ids[3]) :] == ids[3] and len(second.ids) > len(first.ids)
