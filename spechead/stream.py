"""Turn tokens into text as they come, never cutting a character. Knows nothing of terminals or models."""

from typing import Protocol


class Decoder(Protocol):
    """The part of a tokenizer that turns ids into text."""

    def decode(self, ids: list[int], *, skip_special_tokens: bool) -> str: ...


class TextStream:
    """Pieces of text whose concatenation is the decoded sequence.

    A token may end inside a character, which decodes to U+FFFD at the end; such a piece is held back until
    the next token completes it. Each piece is decoded behind the piece before it, since some tokenizers
    write a word differently at the start of a text.
    """

    def __init__(self, tokenizer: Decoder) -> None:
        self.tokenizer = tokenizer
        self.ids: list[int] = []
        self.start = 0  # of the piece before
        self.shown = 0  # tokens whose text has been given out

    def push(self, token: int) -> str:
        """Add a token; the text that is now certain, which may be empty."""
        self.ids.append(token)
        before, now = self._window()
        if now.endswith("\ufffd") or len(now) <= len(before):
            return ""
        self.start, self.shown = self.shown, len(self.ids)
        return now[len(before) :]

    def close(self) -> str:
        """The rest, with U+FFFD for what never became a character."""
        before, now = self._window()
        self.start = self.shown = len(self.ids)
        return now[len(before) :]

    def _window(self) -> tuple[str, str]:
        before = self.tokenizer.decode(self.ids[self.start : self.shown], skip_special_tokens=True)
        return before, self.tokenizer.decode(self.ids[self.start :], skip_special_tokens=True)
