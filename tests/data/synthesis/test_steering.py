"""Steering a target to write a user's message, in any template."""

import pytest

from spechead.data.synthesis.prompt_kinds import KINDS
from spechead.data.synthesis.steering import closing_tokens, steering, system_text
from spechead.errors import UserError
from spechead.target.chat_template import ChatTemplate
from tests.helpers.targets import make_toy_tokenizer


def test_steering_finds_the_user_turn() -> None:
    found = steering(ChatTemplate(make_toy_tokenizer()), "Be brief.")
    assert found.opening == "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\n"
    assert found.closing == "<|im_end|>\n"
    assert closing_tokens(ChatTemplate(make_toy_tokenizer()), found.closing) == {2}
    assert closing_tokens(ChatTemplate(make_toy_tokenizer()), " [/INST]") == set()


def test_steering_without_system_turn_opens_the_users_turn_with_it() -> None:
    tokenizer = make_toy_tokenizer()
    tokenizer.chat_template = (
        "{% if messages[0]['role'] == 'system' %}{{ raise_exception('no system') }}{% endif %}"
        "{% for m in messages %}[INST] {{ m['content'] }} [/INST]{% endfor %}"
    )
    found = steering(ChatTemplate(tokenizer), "Be brief.")
    assert (found.opening, found.closing) == ("[INST] Be brief.\n\n", " [/INST]")
    assert steering(ChatTemplate(tokenizer), "").opening == "[INST] "


EARLIER = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]


def test_a_further_turn_follows_the_conversation_so_far() -> None:
    found = steering(ChatTemplate(make_toy_tokenizer()), "Be brief.", earlier=EARLIER)
    assert found.opening == (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n"
        "<|im_start|>assistant\nHello<|im_end|>\n<|im_start|>user\n"
    )
    tokenizer = make_toy_tokenizer()
    tokenizer.chat_template = (
        "{% if messages[0]['role'] == 'system' %}{{ raise_exception('no system') }}{% endif %}"
        "{% for m in messages %}[{{ m['content'] }}]{% endfor %}"
    )
    assert steering(ChatTemplate(tokenizer), "Be brief.", earlier=EARLIER).opening == "[Be brief.\n\nHi][Hello]["


def test_a_template_that_refuses_further_turns_or_drops_them_is_named() -> None:
    tokenizer = make_toy_tokenizer()
    tokenizer.chat_template = "{% if messages|length > 2 %}{{ raise_exception('one turn') }}{% endif %}"
    with pytest.raises(UserError, match="refuses a chat: one turn"):
        steering(ChatTemplate(tokenizer), "", earlier=EARLIER)
    with pytest.raises(UserError, match="drops the content of a user turn"):
        steering(ChatTemplate(tokenizer), "")


def test_another_language_is_asked_for_in_the_system_turn() -> None:
    assert system_text("coding", "") == KINDS["coding"].system and system_text("general", "") == ""
    for kind in KINDS:
        text = system_text(kind, "German")
        assert text.startswith(KINDS[kind].system or "You are an AI assistant.") and text.count("in German") == 2
