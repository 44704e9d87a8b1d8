"""Chats to token ids, and the mask of the tokens that the assistant wrote, for any chat template.

The keywords of a template, such as enable_thinking, change the text before an answer. A head trained with some and
used with others drafts worse without any other sign, so that they are recorded and compared.

Most templates do not mark the assistant's text, so it is located by rendering: the prompt of a turn is a prefix of
the whole chat, and a sentinel in place of an answer shows the text around it. Where neither works, that is an error:
a wrong mask would silently train on the wrong tokens.

    <|im_start|>user\\nHi<|im_end|>\\n<|im_start|>assistant\\nHello<|im_end|>\\n
    |------------------ prompt ------------------------|           |
                                                       |-supervised-|
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jinja2.exceptions import TemplateError as JinjaError

from spechead.errors import UserError
from spechead.files import read_json

SENTINEL = "spechead7sentinel"
Message = dict[str, str]
Keywords = dict[str, Any]


class TemplateError(UserError):
    """A chat template that refuses a chat, or in which an assistant turn cannot be located."""


@dataclass
class Encoded:
    """A tokenised chat. supervised[i]: the assistant wrote token i, the end of its turn included."""

    ids: list[int]
    supervised: list[bool]


def encode(
    tokenizer: Any, messages: list[Message], template_kwargs: Keywords | None = None, *, unfinished: bool = False
) -> Encoded:
    """Tokenise a whole chat. `unfinished`: the length cap cut the last answer, so that its end is not supervised."""
    text = render(tokenizer, messages, template_kwargs)
    tokens = Tokenized(tokenizer, text)
    spans: list[tuple[int, int]] = []
    turns = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
    for turn in turns:
        start, content_end, end = find_span(tokenizer, messages, turn, text, template_kwargs)
        first = tokens.cut(start)
        spans.append((first, tokens.count_before(content_end if unfinished and turn == turns[-1] else end)))
    supervised = [False] * len(tokens.ids)
    for first, last in spans:
        supervised[first:last] = [True] * (last - first)
    if sum(supervised) in (0, len(supervised)):
        share = "none" if not any(supervised) else "all"
        raise TemplateError(
            f"the chat template of {template_name(tokenizer)} attributes {share} of a chat to the assistant"
        )
    return Encoded(tokens.ids, supervised)


def prompt_ids(tokenizer: Any, messages: list[Message], template_kwargs: Keywords | None = None) -> list[int]:
    """Token ids of the chat up to the assistant's answer."""
    return tokenize(tokenizer, prompt_text(tokenizer, messages, template_kwargs))


def render(
    tokenizer: Any, messages: list[Message], template_kwargs: Keywords | None = None, *, generate: bool = False
) -> str:
    """The chat as text; `generate`: with the opening of an assistant turn at its end."""
    try:
        text = tokenizer.apply_chat_template(
            messages, tokenize=False, add_generation_prompt=generate, **(template_kwargs or {})
        )
    except (JinjaError, ValueError, TypeError, KeyError) as error:
        reason = " ".join(str(error).split())
        raise TemplateError(f"the chat template of {template_name(tokenizer)} refuses a chat: {reason}") from error
    return str(text)


def tokenize(tokenizer: Any, text: str) -> list[int]:
    """Ids of a rendered text; the template has already added the tokens that begin a sequence."""
    return list(tokenizer(text, add_special_tokens=False)["input_ids"])


def prompt_text(tokenizer: Any, messages: list[Message], template_kwargs: Keywords | None = None) -> str:
    """The chat up to the assistant's answer, also for templates that ignore add_generation_prompt."""
    prompt = render(tokenizer, messages, template_kwargs, generate=True)
    plain = render(tokenizer, messages, template_kwargs)
    if prompt != plain:
        return prompt
    answered = [*messages, {"role": "assistant", "content": SENTINEL}]
    opened, sentinel, _ = render(tokenizer, answered, template_kwargs).partition(SENTINEL)
    if not sentinel or not opened.startswith(plain):
        raise no_span(tokenizer)
    # A space before the answer belongs to the answer's first token, not to the prompt.
    return opened if opened[len(plain) :].strip() else plain


# ------------------------------------------------------------------------------------------------ spans


def find_span(
    tokenizer: Any, messages: list[Message], turn: int, text: str, template_kwargs: Keywords | None = None
) -> tuple[int, int, int]:
    """Character positions in `text` of an assistant turn: its begin, the end of its content, of its terminator."""
    before, after = around(tokenizer, messages, turn, template_kwargs)
    if not text.endswith(after):
        raise no_span(tokenizer)
    content_end = len(text) - len(after)
    prompt = prompt_text(tokenizer, messages[:turn], template_kwargs)
    if text.startswith(prompt):
        start = len(prompt)
    elif text.startswith(before):  # the template renders earlier turns differently once later ones follow
        start = len(before)
    else:
        raise no_span(tokenizer)
    if start > content_end:
        raise no_span(tokenizer)
    # Rendered with the turn as the last: otherwise the next turn's opening could pass for its terminator.
    _, alone = around(tokenizer, messages[: turn + 1], turn, template_kwargs)
    ending = terminator(tokenizer, alone)
    end = content_end + len(ending) if text.startswith(ending, content_end) else content_end
    return start, content_end, end


def around(tokenizer: Any, messages: list[Message], turn: int, template_kwargs: Keywords | None) -> tuple[str, str]:
    """The rendered text before and after the content of one turn."""
    marked = [*messages[:turn], {**messages[turn], "content": SENTINEL}, *messages[turn + 1 :]]
    before, sentinel, after = render(tokenizer, marked, template_kwargs).partition(SENTINEL)
    if not sentinel:
        raise no_span(tokenizer)
    return before, after


def terminator(tokenizer: Any, after: str) -> str:
    """The control token that `after` begins with, as text with the space before it; empty if none."""
    stripped = after.lstrip()
    first = leading_control(tokenizer, stripped)
    if first is None:
        return ""
    token = str(tokenizer.convert_ids_to_tokens(first))
    return after[: len(after) - len(stripped)] + token if stripped.startswith(token) else ""


def leading_control(tokenizer: Any, text: str) -> int | None:
    """The id of the control token that a text begins with, or None."""
    ids = tokenize(tokenizer, text)[:1]
    control = set(tokenizer.all_special_ids) | set(tokenizer.get_added_vocab().values())
    return ids[0] if ids and ids[0] in control else None


class Tokenized:
    """The ids of a text, tokenised at once, or in pieces where a token would straddle prompt and answer.

    While decoding, the prompt is tokenised without the answer. Where a tokenizer would merge the prompt's end
    with the answer's beginning, the text is cut there.
    """

    def __init__(self, tokenizer: Any, text: str) -> None:
        self.tokenizer, self.text = tokenizer, text
        self.ids = tokenize(tokenizer, text)
        self._fixed: list[int] = []  # ids of the text before self._from
        self._from = 0

    def cut(self, position: int) -> int:
        """Number of tokens before a character position, which becomes a token boundary."""
        before = self._before(position)
        if self.ids[: len(before)] != before:
            self._fixed, self._from = before, position
            self.ids = before + tokenize(self.tokenizer, self.text[position:])
        return len(before)

    def count_before(self, position: int) -> int:
        """Number of tokens that end at or before a character position."""
        before = self._before(position)
        same = 0
        while same < len(before) and before[same] == self.ids[same]:
            same += 1
        return same

    def _before(self, position: int) -> list[int]:
        return self._fixed + tokenize(self.tokenizer, self.text[self._from : position])


# ------------------------------------------------------------------------------------------------ keywords


def template_warning(used: Keywords, recorded: Keywords | None, what: str) -> str:
    """One line if the keywords differ, else "". `what`: subject and verb for `recorded`, such as
    "head runs/a/head was trained"; `recorded` is None where it is unknown."""
    if recorded is None or used == recorded:
        return ""
    return (
        f"{what} with template keywords {json.dumps(recorded)}, here they are {json.dumps(used)}: "
        "where the prompts' form differs, drafts fit worse"
    )


def keywords_of_data(source: str) -> Keywords | None:
    """The keywords with which `spechead data synthesize` wrote the JSONL file `source`, from its .meta.json.

    None without such a record: data of other origin, hub datasets. Raises UserError if the record is not JSON.
    """
    path = Path(source + ".meta.json")
    meta = read_json(path) if path.is_file() else None
    options = meta.get("options") if isinstance(meta, dict) else None
    return dict(options.get("template_kwargs") or {}) if isinstance(options, dict) else None


# ------------------------------------------------------------------------------------------------ errors


def no_span(tokenizer: Any) -> TemplateError:
    return TemplateError(
        f"the chat template of {template_name(tokenizer)} hides where an assistant turn begins or ends"
    )


def template_name(tokenizer: Any) -> str:
    """The tokenizer's name and the beginning of its template."""
    template = getattr(tokenizer, "chat_template", None)
    if not isinstance(template, str):
        return f"{tokenizer.name_or_path or 'the tokenizer'} (it has none)"
    start = " ".join(template.split())[:40]
    return f"{tokenizer.name_or_path or 'the tokenizer'} ({start!r}...)"
