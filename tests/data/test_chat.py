"""Which tokens of a chat the assistant wrote, for templates of several shapes, by hand-made cases."""

from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from spechead.data.chat import TemplateError, encode, prompt_ids, tokenize
from spechead.errors import UserError

TURN = "{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}"
ASSISTANT = "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
DEFAULT_SYSTEM = "{% if messages[0]['role'] != 'system' %}<|im_start|>system\nBe kind.<|im_end|>\n{% endif %}"
TEMPLATES = {
    "chatml": DEFAULT_SYSTEM + "{% for m in messages %}" + TURN + "{% endfor %}" + ASSISTANT,
    # The content is trimmed, the turn ends with a token that is not the tokenizer's eos.
    "llama3": "<s>{% for m in messages %}"
    "{{ '<h>' + m['role'] + '</h>\n\n' + m['content'] | trim + '<eot>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<h>assistant</h>\n\n' }}{% endif %}",
    # Thoughts are kept in the last turn and stripped from earlier ones.
    "thinking": "{% for m in messages %}{% set c = m['content'] %}"
    "{% if m['role'] == 'assistant' and not loop.last %}{% set c = c.split('</think>')[-1] %}{% endif %}"
    "{{ '<|im_start|>' + m['role'] + '\n' + c + '<|im_end|>\n' }}{% endfor %}" + ASSISTANT,
    # As Qwen3: the last answer gets an empty thought where it has none.
    "forced thought": "{% for m in messages %}{% set c = m['content'] %}"
    "{% if m['role'] == 'assistant' and loop.last and '</think>' not in c %}"
    "{% set c = '<think></think>' + c %}{% endif %}"
    "{{ '<|im_start|>' + m['role'] + '\n' + c + '<|im_end|>\n' }}{% endfor %}" + ASSISTANT,
    # Ignores add_generation_prompt.
    "no prompt": "{% for m in messages %}" + TURN + "{% endfor %}",
    # The user's closing is also the assistant's opening, as Mistral's.
    "instruct": "<s>{% for m in messages %}{% if m['role'] == 'user' %}[INST] {{ m['content'] }} [/INST]"
    "{% else %} {{ m['content'] }}</s>{% endif %}{% endfor %}",
    # Nothing but text marks the turns.
    "plain": "{% for m in messages %}{{ m['role'] + ': ' + m['content'] + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}",
}
ONLY = "{{% for m in messages %}}{{% if m['role'] == '{}' %}}{{{{ m['content'] }}}}{{% endif %}}{{% endfor %}}"
SPECIAL = ["<s>", "</s>", "<|im_start|>", "<|im_end|>", "<h>", "</h>", "<eot>"]


def make_tokenizer(template: str) -> PreTrainedTokenizerFast:
    """One token a byte, except that a run of line breaks or two dots is merged."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = [("Ċ", "Ċ"), ("ĊĊ", "Ċ"), (".", ".")]
    vocabulary = {token: i for i, token in enumerate([*letters, "ĊĊ", "ĊĊĊ", ".."])}
    tokenizer = Tokenizer(models.BPE(vocabulary, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>")
    fast.add_special_tokens({"additional_special_tokens": SPECIAL[2:]})
    fast.chat_template = TEMPLATES.get(template, template)
    return fast


def chat(*contents: str) -> list[dict[str, str]]:
    """User and assistant by turns."""
    return [{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(contents)]


def runs(tokenizer: Any, messages: list[dict[str, str]], **options: Any) -> list[str]:
    """The text of each supervised run."""
    encoded = encode(tokenizer, messages, **options)
    assert len(encoded.ids) == len(encoded.supervised)
    found: list[list[int]] = []
    before = False
    for token, supervised in zip(encoded.ids, encoded.supervised, strict=True):
        if supervised:
            found = found if before else [*found, []]
            found[-1].append(token)
        before = supervised
    return [tokenizer.decode(run, skip_special_tokens=False) for run in found]


EXPECTED = {
    "chatml": ["Hello.<|im_end|>", "Fine, you?<|im_end|>"],
    "llama3": ["Hello.<eot>", "Fine, you?<eot>"],
    "thinking": ["Hello.<|im_end|>", "Fine, you?<|im_end|>"],
    "forced thought": ["Hello.<|im_end|>", "<think></think>Fine, you?<|im_end|>"],
    "no prompt": ["Hello.<|im_end|>", "Fine, you?<|im_end|>"],
    "instruct": [" Hello.</s>", " Fine, you?</s>"],
    "plain": ["Hello.", "Fine, you?"],
}


@pytest.mark.parametrize("template", TEMPLATES)
def test_answers_and_their_terminators_are_supervised(template: str) -> None:
    assert runs(make_tokenizer(template), chat("Hi", "Hello.", "How?", "Fine, you?")) == EXPECTED[template]


@pytest.mark.parametrize("template", TEMPLATES)
@pytest.mark.parametrize("answer", ["Hello.", "\n\nHello.\n", "Hello. How are you", "é☃", "."])
def test_the_prompt_is_a_prefix_and_what_follows_is_supervised(template: str, answer: str) -> None:
    tokenizer = make_tokenizer(template)
    for before in (chat("Hi\n"), chat("Hi", "Hello", "So..")):
        prompt = prompt_ids(tokenizer, before)
        encoded = encode(tokenizer, [*before, {"role": "assistant", "content": answer}])
        assert encoded.ids[: len(prompt)] == prompt
        # The answer begins where decoding begins, and nowhere else.
        assert encoded.supervised[len(prompt)] and not encoded.supervised[len(prompt) - 1]


def test_hand_made_mask() -> None:
    """Pitfall: exactly these tokens, the line break behind the turn's end not among them."""
    tokenizer = make_tokenizer("no prompt")
    encoded = encode(tokenizer, chat("Hi", "Yo"))
    text = "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\nYo<|im_end|>\n"
    assert encoded.ids == tokenize(tokenizer, text)
    # 1 + 5 + 2 + 1 + 1 tokens of the user and 1 + 10 of the header stand before the 3 of the answer
    assert encoded.supervised == [False] * 21 + [True] * 3 + [False]


def test_an_answer_that_merges_with_the_prompt_is_cut_as_decoding_cuts_it() -> None:
    tokenizer = make_tokenizer("chatml")
    merged = tokenize(tokenizer, "\n\n")
    assert len(merged) == 1
    encoded = encode(tokenizer, chat("Hi", "\nYo", "So", "\n\nBye"))
    line_break = tokenize(tokenizer, "\n")[0]
    first = encoded.supervised.index(True)
    assert encoded.ids[first - 1 : first + 1] == [line_break, line_break]
    assert encoded.ids[first + 6 :].count(merged[0]) == 1  # the second answer's own line breaks stay merged


def test_thoughts_of_earlier_turns_are_gone_from_text_and_mask() -> None:
    tokenizer = make_tokenizer("thinking")
    messages = chat("Hi", "<think>hm</think>Hello.", "How?", "<think>well</think>Fine.")
    assert runs(tokenizer, messages) == ["Hello.<|im_end|>", "<think>well</think>Fine.<|im_end|>"]


def test_an_unfinished_answer_does_not_teach_to_stop() -> None:
    messages = chat("Hi", "Hello.", "How?", "Fine, y")
    for template, end in (("chatml", "<|im_end|>"), ("llama3", "<eot>"), ("instruct", "</s>")):
        first, last = runs(make_tokenizer(template), messages, unfinished=True)
        assert first.endswith(end) and last.endswith("Fine, y")


def test_a_next_turns_opening_is_not_taken_for_the_end_of_a_turn() -> None:
    opening_only = "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] }}{% endfor %}"
    tokenizer = make_tokenizer(opening_only + ASSISTANT)
    assert runs(tokenizer, chat("Hi", "Hello.", "How?", "Fine.")) == ["Hello.", "Fine."]


def test_template_options_reach_the_template() -> None:
    tokenizer = make_tokenizer("{% if loud %}<h>{% endif %}" + TEMPLATES["no prompt"])
    quiet = encode(tokenizer, chat("Hi", "Yo"))
    loud = encode(tokenizer, chat("Hi", "Yo"), {"loud": True})
    assert loud.ids == [*tokenize(tokenizer, "<h>"), *quiet.ids]
    assert prompt_ids(tokenizer, chat("Hi"), {"loud": True}) != prompt_ids(tokenizer, chat("Hi"))


@pytest.mark.parametrize(
    ("template", "message"),
    [
        (ONLY.format("user"), "hides where an assistant turn"),
        ("{% for m in messages %}{{ m['content'] | upper }}{% endfor %}", "hides where an assistant turn"),
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        (ONLY.format("assistant"), "all of a chat"),
    ],
)
def test_a_template_that_hides_the_assistant_is_an_error_that_names_it(template: str, message: str) -> None:
    tokenizer = make_tokenizer(template)
    with pytest.raises(TemplateError, match=message) as error:
        encode(tokenizer, chat("Hi", "Hello."))
    assert "chat template of" in str(error.value) and template[:20] in str(error.value)


def test_a_tokenizer_without_template_is_a_user_error() -> None:
    tokenizer = make_tokenizer("chatml")
    tokenizer.chat_template = None
    with pytest.raises(UserError, match="it has none"):
        prompt_ids(tokenizer, chat("Hi"))


def test_a_chat_without_assistant_is_an_error() -> None:
    with pytest.raises(UserError, match="none of a chat"):
        encode(make_tokenizer("chatml"), chat("Hi"))
