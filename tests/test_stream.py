"""Text comes out piece by piece, and never a broken character."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spechead.stream import TextStream


class Bytes:
    """One token a byte, as the worst case of byte-level tokenizers; 256 is a special token."""

    def decode(self, ids: list[int], *, skip_special_tokens: bool) -> str:
        return bytes(i for i in ids if i < 256).decode("utf-8", errors="replace")


class Words:
    """One token a word, with a space before each but the first, as sentencepiece writes them."""

    def decode(self, ids: list[int], *, skip_special_tokens: bool) -> str:
        return " ".join("abcdefgh"[i] for i in ids)


def pieces(tokenizer: Bytes | Words, ids: list[int]) -> list[str]:
    stream = TextStream(tokenizer)
    return [*(stream.push(i) for i in ids), stream.close()]


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
