"""Text comes out piece by piece: never a broken character, never a stop string."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spechead.decoding.detokenize import Piece, StreamDetokenizer, first_stop

SPECIAL = 256


class Bytes:
    """One token a byte, as the worst case of byte-level tokenizers; 256 is a special token."""

    def decode(self, ids: list[int], *, skip_special_tokens: bool) -> str:
        special = b"" if skip_special_tokens else b"<end>"
        return b"".join(special if i == SPECIAL else bytes([i]) for i in ids).decode("utf-8", errors="replace")


class Words:
    """One token a word, with a space before each but the first, as sentencepiece writes them."""

    def decode(self, ids: list[int], *, skip_special_tokens: bool) -> str:
        return " ".join("abcdefgh"[i] for i in ids)


class Chunks:
    """Tokens of several characters."""

    def __init__(self, *chunks: str) -> None:
        self.chunks = chunks

    def decode(self, ids: list[int], *, skip_special_tokens: bool) -> str:
        return "".join(self.chunks[i] for i in ids)


def text(found: list[Piece]) -> str:
    return "".join(piece for piece, _ in found)


def pieces(tokenizer: Bytes | Words | Chunks, ids: list[int], *stop: str) -> list[str]:
    """What each token brings to light, and what the end does."""
    stream = StreamDetokenizer(tokenizer, stop)
    return [*(text(stream.push(i)) for i in ids), text(stream.close())]


def spelled(word: str, *stop: str) -> list[str]:
    return pieces(Bytes(), list(word.encode()), *stop)


def test_a_character_waits_for_its_last_byte() -> None:
    assert pieces(Bytes(), list("aé€".encode())) == ["a", "", "é", "", "", "€", ""]


def test_a_special_token_is_silent_and_breaks_nothing() -> None:
    assert pieces(Bytes(), [97, 256, 98, 256]) == ["a", "", "b", "", ""]


def test_what_never_becomes_a_character_comes_at_the_end() -> None:
    assert pieces(Bytes(), [97, 0xE2, 0x82]) == ["a", "", "", "\ufffd"]


def test_a_character_of_replacement_that_the_model_wrote_is_kept() -> None:
    assert "".join(pieces(Bytes(), list("a\ufffdb\ufffd".encode()))) == "a\ufffdb\ufffd"


def test_words_keep_their_spaces() -> None:
    assert pieces(Words(), [0, 1, 2]) == ["a", " b", " c", ""]


@pytest.mark.parametrize("tokenizer", [Bytes()])
@given(ids=st.lists(st.sampled_from([*"é€😀a b\n".encode(), 256, 0xFF]), max_size=40))
def test_the_pieces_make_the_text(tokenizer: Bytes, ids: list[int]) -> None:
    assert "".join(pieces(tokenizer, ids)) == tokenizer.decode(ids, skip_special_tokens=True)


# ---------------------------------------------------------------------------------------------- stop strings


def test_the_beginning_of_a_stop_string_waits_until_it_is_none() -> None:
    assert spelled("a##b", "###") == ["a", "", "", "##b", ""]
    assert spelled("a##", "###") == ["a", "", "", "##"]
    assert spelled("a#b##", "###", "b#") == ["a", "", "#", "", "", ""]


def test_nothing_is_shown_from_a_stop_string_on() -> None:
    assert spelled("ab##cd", "##") == ["a", "b", "", "", "", "", ""]
    assert spelled("##", "##") == ["", "", ""]
    assert spelled("aab", "ab") == ["", "a", "", ""]
    assert spelled("x€y", "€") == ["x", "", "", "", "", ""]


def test_a_stop_string_inside_a_token_cuts_it() -> None:
    tokens = Chunks("one st", "op two", "p", "o two")
    assert pieces(tokens, [0, 1, 2], "stop") == ["one ", "", "", ""]
    assert pieces(tokens, [0, 3], "stop") == ["one ", "sto two", ""]
    assert pieces(tokens, [1], "two", "p") == ["o", ""]


def test_a_stop_string_may_hold_special_tokens_which_are_never_shown() -> None:
    assert pieces(Bytes(), [97, 10, SPECIAL, 98], "\n<end>") == ["a", "", "", "", ""]
    assert pieces(Bytes(), [97, 10, 98, SPECIAL], "\n<end>") == ["a", "", "\nb", "", ""]
    # A special token between two letters keeps them apart, for decoding as for the stream.
    assert pieces(Bytes(), [97, SPECIAL, 98], "ab") == ["", "a", "b", ""]


def test_a_stop_string_before_a_broken_character_cuts_at_the_end() -> None:
    assert pieces(Chunks("a", "stop\ufffd"), [0, 1], "stop") == ["a", "", ""]


def test_pieces_keep_the_marks_of_their_tokens() -> None:
    stream = StreamDetokenizer(Bytes(), ["12!"])
    assert [stream.push(ord(c), mark) for mark, c in enumerate("012", 5)] == [[("0", 5)], [], []]
    assert stream.push(ord("3"), 9) == [("1", 6), ("2", 7), ("3", 9)]


def test_an_empty_stop_string_is_none() -> None:
    assert spelled("ab", "") == ["a", "b", ""]


@given(word=st.text("ab", max_size=12), stop=st.lists(st.text("ab", min_size=1, max_size=4), max_size=3))
def test_what_is_shown_is_the_text_before_the_first_stop_string(word: str, stop: list[str]) -> None:
    # decoding ends at the token that completes a stop string; the shown text ends where that string begins
    ended = next((word[:n] for n in range(len(word) + 1) if any(one in word[:n] for one in stop)), word)
    expected = ended[: min((ended.index(one) for one in stop if one in ended), default=len(ended))]
    assert "".join(spelled(ended, *stop)) == expected
    stream, shown = StreamDetokenizer(Bytes(), stop), ""
    for letter in ended.encode():
        shown += text(stream.push(letter))
        assert expected.startswith(shown)


def test_first_stop() -> None:
    assert first_stop("abc", []) == (3, False)
    assert first_stop("abc", ["cd", "bcd"]) == (1, False)
    assert first_stop("abcd", ["cd", "b"]) == (1, True)
