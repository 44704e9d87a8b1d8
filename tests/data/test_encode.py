"""A conversation becomes what is served, for templates of several shapes, by hand-made cases."""

from collections import Counter
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from spechead.data.conversation import Conversation, Unusable
from spechead.data.encode import Encoded, encode
from spechead.target.chat_template import ChatTemplate

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


def samples(
    template: str | ChatTemplate, messages: list[dict[str, Any]], counts: Counter[str] | None = None, **fields: Any
) -> list[Encoded]:
    template = ChatTemplate(make_tokenizer(template)) if isinstance(template, str) else template
    history = fields.pop("history", "each")
    return encode(template, Conversation(messages, **fields), history=history, counts=counts)


def runs(template: str | ChatTemplate, messages: list[dict[str, Any]], **fields: Any) -> list[list[str]]:
    """The text of each supervised run of each sample."""
    template = ChatTemplate(make_tokenizer(template)) if isinstance(template, str) else template
    found: list[list[str]] = []
    for encoded in samples(template, messages, **fields):
        assert len(encoded.ids) == len(encoded.supervised)
        ids: list[list[int]] = []
        before = False
        for token, supervised in zip(encoded.ids, encoded.supervised, strict=True):
            if supervised:
                ids = ids if before else [*ids, []]
                ids[-1].append(token)
            before = supervised
        found.append([template.tokenizer.decode(run, skip_special_tokens=False) for run in ids])
    return found


EXPECTED = {
    "chatml": [["Hello.<|im_end|>", "Fine, you?<|im_end|>"]],
    "llama3": [["Hello.<eot>", "Fine, you?<eot>"]],
    "thinking": [["Hello.<|im_end|>", "Fine, you?<|im_end|>"]],
    "forced thought": [["<think></think>Hello.<|im_end|>"], ["<think></think>Fine, you?<|im_end|>"]],
    "no prompt": [["Hello.<|im_end|>", "Fine, you?<|im_end|>"]],
    "instruct": [[" Hello.</s>", " Fine, you?</s>"]],
    "plain": [["Hello.", "Fine, you?"]],
}


@pytest.mark.parametrize("template", TEMPLATES)
def test_answers_and_their_terminators_are_supervised(template: str) -> None:
    assert runs(template, chat("Hi", "Hello.", "How?", "Fine, you?")) == EXPECTED[template]


@pytest.mark.parametrize("template", TEMPLATES)
@pytest.mark.parametrize("answer", ["Hello.", "\n\nHello.\n", "Hello. How are you", "é☃", "."])
def test_the_prompt_is_a_prefix_and_what_follows_is_supervised(template: str, answer: str) -> None:
    served = ChatTemplate(make_tokenizer(template))
    for before in (chat("Hi\n"), chat("Hi", "Hello", "So..")):
        prompt = served.prompt_ids(before)
        encoded = samples(served, [*before, {"role": "assistant", "content": answer}])[-1]
        assert encoded.ids[: len(prompt)] == prompt
        # The answer begins where decoding begins, and nowhere else.
        assert encoded.supervised[len(prompt)] and not encoded.supervised[len(prompt) - 1]


def test_hand_made_mask() -> None:
    """Pitfall: exactly these tokens; nothing comes after the end of the last turn."""
    [encoded] = samples("no prompt", chat("Hi", "Yo"))
    text = "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\nYo<|im_end|>"
    assert encoded.ids == ChatTemplate(make_tokenizer("no prompt")).tokenize(text)
    # 1 + 5 + 2 + 1 + 1 tokens of the user and 1 + 10 of the header stand before the 3 of the answer
    assert encoded.supervised == [False] * 21 + [True] * 3


def test_an_answer_that_merges_with_the_prompt_is_cut_as_decoding_cuts_it() -> None:
    served = ChatTemplate(make_tokenizer("chatml"))
    merged, line_break = served.tokenize("\n\n"), served.tokenize("\n")
    assert len(merged) == 1
    first, second = samples(served, chat("Hi", "\nYo", "So", "\n\nBye"))
    place = first.supervised.index(True)
    assert first.ids[place - 1 : place + 1] == line_break * 2
    # The second prompt contains the first answer as text, whose line break merges: it cannot continue the first sample.
    assert second.ids[:place] != first.ids[:place]
    assert second.ids[: second.supervised.index(True)] == served.prompt_ids(chat("Hi", "\nYo", "So"))


def test_thoughts_that_later_prompts_drop_are_trained_in_a_sample_of_their_own() -> None:
    messages = chat("Hi", "<think>hm</think>Hello.", "How?", "<think>well</think>Fine.")
    counts: Counter[str] = Counter()
    both = [["<think>hm</think>Hello.<|im_end|>"], ["<think>well</think>Fine.<|im_end|>"]]
    assert runs("thinking", messages, counts=counts) == both
    assert counts == {"samples of turns that the template rewrites later": 2}
    assert runs("thinking", messages, history="last", counts=counts) == both[1:]
    assert counts["samples left out, since the template rewrites their turns"] == 1


CUTS_ALL = (
    "{% for m in messages %}{% set c = m['content'].split('</think>')[-1] %}"
    "{{ '<|im_start|>' + m['role'] + '\n' + c + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n<think>\n' }}{% endif %}"
)


@pytest.mark.parametrize(
    "answer",
    [
        {"content": "<think>\nhm\n</think>\n\nHello."},
        {"content": "hm\n</think>\n\nHello."},
        {"content": "Hello.", "reasoning_content": "hm"},
    ],
)
def test_reasoning_that_the_template_cuts_even_from_the_last_turn_follows_the_prompt(answer: dict[str, str]) -> None:
    counts: Counter[str] = Counter()
    messages = [*chat("Hi"), {"role": "assistant", **answer}]
    assert runs(CUTS_ALL, messages, counts=counts) == [["hm\n</think>\n\nHello.<|im_end|>"]] and not counts
    with pytest.raises(Unusable, match="the chat template hides every answer"):
        samples(CUTS_ALL, chat("Hi", "no thought"), counts)
    assert counts == {"answers that are blank, or that the chat template hides": 1}


ONLY_AT_THE_END = (
    "<s>{% for m in messages %}{% if m['role'] == 'user' %}[INST] "
    "{% if loop.last and messages[0]['role'] == 'system' %}{{ messages[0]['content'] + '\n\n' }}{% endif %}"
    "{{ m['content'] }}</h>{% elif m['role'] == 'assistant' %}{{ ' ' + m['content'] + '</s>' }}{% endif %}{% endfor %}"
)


def test_system_text_that_moves_with_the_last_user_message_is_trained_where_it_is_served() -> None:
    messages = [{"role": "system", "content": "Be kind."}, *chat("Hi", "Hello.", "How?", "Fine.")]
    served = ChatTemplate(make_tokenizer(ONLY_AT_THE_END))
    first, second = samples(served, messages)
    for encoded, turn, answer in ((first, 2, " Hello.</s>"), (second, 4, " Fine.</s>")):
        place = encoded.supervised.index(True)
        assert encoded.ids[:place] == served.prompt_ids(messages[:turn])
        assert "Be kind." in served.tokenizer.decode(encoded.ids[:place])
        assert served.tokenizer.decode(encoded.ids[place:]) == answer


TOOLS = (
    "{% if tools %}<|im_start|>system\n{{ tools | tojson }}<|im_end|>\n{% endif %}{% for m in messages %}"
    "{{ '<|im_start|>' + m['role'] + '\n' + m['content'] }}{% for c in m.get('tool_calls', []) %}"
    "{{ '<h>' + (c.function | tojson) + '</h>' }}{% endfor %}{{ '<|im_end|>\n' }}{% endfor %}" + ASSISTANT
)
CALLING: list[dict[str, Any]] = [
    {"role": "user", "content": "Hi"},
    {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "f", "arguments": {"a": 1}}}]},
    {"role": "tool", "content": "2"},
    {"role": "assistant", "content": "Two."},
]


def test_a_tool_call_is_supervised_to_the_end_of_its_turn() -> None:
    tools = [{"type": "function", "function": {"name": "f"}}]
    call = '<h>{"name": "f", "arguments": {"a": 1}}</h><|im_end|>'
    assert runs(TOOLS, CALLING, tools=tools) == [[call, "Two.<|im_end|>"]]
    with pytest.raises(Unusable, match="tools that the chat template ignores"):
        samples("chatml", chat("Hi", "Yo"), tools=tools)


def test_a_message_without_a_trace_in_the_prompt_makes_the_chat_unusable() -> None:
    deaf = "{% for m in messages if m['role'] != 'developer' %}" + TURN + "{% endfor %}" + ASSISTANT
    messages = [{"role": "developer", "content": "Be brief."}, *chat("Hi", "Yo")]
    with pytest.raises(Unusable, match="a developer message that the chat template ignores"):
        samples(deaf, messages)
    assert runs("no prompt", messages) == [["Yo<|im_end|>"]]


def test_an_unfinished_answer_does_not_teach_to_stop() -> None:
    messages = chat("Hi", "Hello.", "How?", "Fine, y")
    for template, end in (("chatml", "<|im_end|>"), ("llama3", "<eot>"), ("instruct", "</s>")):
        [[first, last]] = runs(template, messages, meta={"finish": "length"})
        assert first.endswith(end) and last.endswith("Fine, y")


def test_a_next_turns_opening_is_not_taken_for_the_end_of_a_turn() -> None:
    opening_only = "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] }}{% endfor %}"
    assert runs(opening_only + ASSISTANT, chat("Hi", "Hello.", "How?", "Fine.")) == [["Hello.", "Fine."]]


def test_the_keywords_of_a_row_reach_the_template() -> None:
    template = "{% if loud %}<h>{% endif %}" + TEMPLATES["no prompt"]
    served = ChatTemplate(make_tokenizer(template))
    [quiet], [loud] = samples(served, chat("Hi", "Yo")), samples(served, chat("Hi", "Yo"), keywords={"loud": True})
    assert loud.ids == [*served.tokenize("<h>"), *quiet.ids]
    with pytest.raises(Unusable, match="refused by the chat template"):
        samples(served, chat("Hi", "Yo"), keywords={"tokenize": True})


def test_a_document_is_supervised_whole() -> None:
    [encoded] = encode(ChatTemplate(make_tokenizer("chatml")), Conversation([], text="Hi."))
    assert len(encoded.ids) == 3 and all(encoded.supervised)


# ------------------------------------------------------------------------------------------------ kept ids


def kept(text: str, served: ChatTemplate) -> list[int]:
    """Ids of a text that its tokenizer would not give: a token a character."""
    return [token for letter in text for token in served.tokenize(letter)] + sorted(served.stop_ids)


def test_the_ids_that_the_target_wrote_are_trained() -> None:
    served = ChatTemplate(make_tokenizer("chatml"))
    ids = [kept("Hm..", served), kept("Yes.", served)]
    assert ids[0][:-1] != served.tokenize("Hm..")
    counts: Counter[str] = Counter()
    first, second = samples(served, chat("Hi", "Hm..", "So?", "Yes."), counts, answer_ids=ids)
    assert first.ids[first.supervised.index(True) :] == ids[0]
    # The next prompt has the text of the first answer, as a server tokenises it.
    assert second.ids[: second.supervised.index(True)] == served.prompt_ids(chat("Hi", "Hm..", "So?"))
    assert second.ids[second.supervised.index(True) :] == ids[1]
    assert counts["answers with ids kept"] == 2
    assert counts["answers with ids that differ from those of their text"] == 1


@pytest.mark.parametrize(
    ("ids", "meta", "note"),
    [
        ([[1, 2, 3]], {}, "answers with ids that do not fit their text"),
        ([[10**8]], {}, "answers with ids that do not fit their text"),
        (None, {"tokenizer": "another"}, "answers with ids of another tokenizer"),
    ],
)
def test_ids_that_are_not_those_of_the_answer_are_counted_and_not_used(
    ids: list[list[int]] | None, meta: dict[str, str], note: str
) -> None:
    served = ChatTemplate(make_tokenizer("chatml"))
    counts: Counter[str] = Counter()
    answer_ids = ids or [kept("Hm..", served)]
    [encoded] = samples(served, chat("Hi", "Hm.."), counts, answer_ids=answer_ids, meta=meta)
    assert encoded == samples(served, chat("Hi", "Hm.."))[0] and counts == {note: 1}


# ------------------------------------------------------------------------------------------------ refusals


@pytest.mark.parametrize(
    ("template", "message"),
    [
        (ONLY.format("user"), "hides where an assistant turn"),
        ("{% for m in messages %}{{ m['content'] | upper }}{% endfor %}", "hides where an assistant turn"),
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        (ONLY.format("assistant"), "all of a chat"),
    ],
)
def test_a_template_that_hides_the_assistant_makes_a_chat_unusable(template: str, message: str) -> None:
    with pytest.raises(Unusable, match=message) as error:
        samples(template, chat("Hi", "Hello."))
    assert template[:20] in str(error.value)
