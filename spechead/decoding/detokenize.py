"""Incremental detokenisation: text is emitted as tokens arrive, without cut characters and without stop strings."""

from collections.abc import Sequence
from typing import Protocol

Piece = tuple[str, int]
"""Some text, and the mark of its token."""


class Decoder(Protocol):
    """The method of a tokenizer that is used here."""

    def decode(self, ids: list[int], *, skip_special_tokens: bool) -> str: ...


class StreamDetokenizer:
    """Emits pieces of text whose concatenation is the decoded sequence, up to the first of the `stop` strings.

    Text that may begin a stop string is held back until that is decided. Special tokens are not emitted, but stop
    strings may contain them, as in `decoding.sequence`.
    """

    def __init__(self, tokenizer: Decoder, stop: Sequence[str] = ()) -> None:
        self._stop = [text for text in stop if text]
        self._stopped = False
        self._visible = _Detokenizer(tokenizer, skip_special_tokens=True)
        self._whole = _Detokenizer(tokenizer, skip_special_tokens=False)
        self._waiting: list[tuple[str, str, int]] = []  # visible text, whole text, mark

    def push(self, token: int, mark: int = 0) -> list[Piece]:
        """Add a token; returns the text that can now be emitted, piece by piece."""
        whole = self._whole.push(token) if self._stop else ""
        return self._certain((self._visible.push(token), whole, mark))

    def close(self) -> list[Piece]:
        """The remaining text, with U+FFFD for incomplete characters."""
        pieces = self._certain((self._visible.rest(), self._whole.rest() if self._stop else "", 0))
        if not self._stopped:
            pieces += [(visible, mark) for visible, _, mark in self._waiting]
        self._waiting = []
        return [(text, mark) for text, mark in pieces if text]

    def _certain(self, newest: tuple[str, str, int]) -> list[Piece]:
        if self._stopped:
            return []
        self._waiting.append(newest)
        certain, self._stopped = first_stop("".join(whole for _, whole, _ in self._waiting), self._stop)
        pieces: list[Piece] = []
        while self._waiting and len(self._waiting[0][1]) <= certain:
            visible, whole, mark = self._waiting.pop(0)
            pieces.append((visible, mark))
            certain -= len(whole)
        if self._waiting and certain:  # a stop string begins inside a token
            visible, whole, mark = self._waiting[0]
            if visible == whole:
                pieces.append((visible[:certain], mark))
                self._waiting[0] = (visible[certain:], whole[certain:], mark)
        return [(text, mark) for text, mark in pieces if text]


class _Detokenizer:
    """The text of tokens that arrive one by one.

    A token may end inside a character, which decodes to U+FFFD at the end; such a piece is held back until the next
    token completes it. Each piece is decoded together with the one before it, since some tokenizers write a word
    differently at the start of a text.
    """

    def __init__(self, tokenizer: Decoder, skip_special_tokens: bool) -> None:
        self._tokenizer, self._skip = tokenizer, skip_special_tokens
        self._ids: list[int] = []
        self._start = 0  # first token of the last emitted piece
        self._emitted = 0  # tokens whose text has been returned

    def push(self, token: int) -> str:
        """Add a token; returns the text that is now complete, which may be empty."""
        self._ids.append(token)
        before, now = self._window()
        if now.endswith("\ufffd") or len(now) <= len(before):
            return ""
        self._start, self._emitted = self._emitted, len(self._ids)
        return now[len(before) :]

    def rest(self) -> str:
        """The text that is not complete."""
        before, now = self._window()
        self._start = self._emitted = len(self._ids)
        return now[len(before) :]

    def _window(self) -> tuple[str, str]:
        before = self._tokenizer.decode(self._ids[self._start : self._emitted], skip_special_tokens=self._skip)
        return before, self._tokenizer.decode(self._ids[self._start :], skip_special_tokens=self._skip)


def first_stop(text: str, stop: Sequence[str]) -> tuple[int, bool]:
    """The start of the first stop string in `text`, and True; without one, where its end may begin one, and False."""
    starts = [text.index(one) for one in stop if one in text]
    if starts:
        return min(starts), True
    ends = [at for one in stop for at in range(max(0, len(text) - len(one) + 1), len(text))]
    return min((at for at in ends if any(one.startswith(text[at:]) for one in stop)), default=len(text)), False
