"""`spechead generate`: colours by depth on a terminal, plain text elsewhere, and honest closing figures."""

import io
from typing import Any

import pytest
from rich.console import Console

from spechead import answer
from spechead.answer import AnswerOptions, Display, closing, first_difference
from spechead.errors import UserError
from spechead.generate import Generation, Stats


class Bytes:
    """One token a byte."""

    def decode(self, ids: list[int], *, skip_special_tokens: bool) -> str:
        return bytes(ids).decode("utf-8", errors="replace")


def generation(tokens: list[int], passes: int, seconds: float) -> Generation:
    phases = {"prefill": 9.0, "draft": seconds / 2, "verify": seconds / 2, "commit": 0.0, "other": 0.0}
    return Generation(tokens, "length", Stats(passes=passes, tokens=len(tokens) - 1, seconds=phases), [])


def shown(terminal: bool, commits: list[tuple[bytes, int]]) -> tuple[str, str]:
    """What a display writes to standard output and to standard error."""
    out, err = io.StringIO(), io.StringIO()
    options: dict[str, Any] = {
        "force_terminal": terminal,
        "color_system": "256" if terminal else None,
        "width": 20,
    }
    display = Display(Bytes(), Console(file=out, **options), Console(file=err, **options))
    with display:
        for tokens, accepted in commits:
            display.commit(list(tokens), accepted)
    return out.getvalue(), err.getvalue()


def painted(text: str, depth: int) -> str:
    return f"\x1b[{[32, 36, 34, 35, 31, 33][depth - 1]}m{text}\x1b[0m"


def test_accepted_drafts_are_coloured_by_depth_and_the_bonus_is_not() -> None:
    out, err = shown(True, [(b"a", 0), (b"bcd", 2), (b"e", 0)])
    assert out == "a" + painted("b", 1) + painted("c", 2) + "de\n"
    assert "accepted drafts by depth" in err


def test_deeper_drafts_share_the_last_colour() -> None:
    out, _ = shown(True, [(b"abcdefghij", 9)])
    assert out.endswith(painted("h", 6) + painted("i", 6) + "j\n")


def test_a_character_of_several_tokens_comes_out_whole() -> None:
    out, _ = shown(True, [("é".encode(), 1)])
    assert out == "é\n"
    assert shown(False, [(b"\xc3", 0), (b"\xa9!", 1)]) == ("é!\n", "")


def test_plain_text_off_the_terminal_is_verbatim() -> None:
    text = "one\ttab [bold]no markup[/bold] :smile: and a line far longer than the twenty columns\n\n x "
    assert shown(False, [(text.encode(), 3)]) == (text + "\n", "")


def test_a_terminal_gets_the_text_unwrapped_and_without_markup() -> None:
    text = "[bold]x[/bold] :smile: a line far longer than twenty columns\n\nend"
    assert shown(True, [(text.encode(), 0)])[0] == text + "\n"


def test_escape_sequences_of_the_model_are_not_obeyed() -> None:
    assert shown(True, [(b"a\x1b[2Jb", 0)])[0] == "a␛[2Jb\n"


def test_closing_figures() -> None:
    drafted, plain = generation([1, 2, 3, 4, 5, 6, 7], 3, 1.5), generation([1, 2, 3, 4, 5, 6, 7], 6, 2.0)
    assert closing(drafted, plain, display_seconds=0.5).splitlines() == [
        "2.00 tokens per pass (6 tokens in 3 passes)",
        "6.0 tokens per second, plain decoding 3.0: x2.00",
        "the text is identical to plain decoding's",
    ]
    assert closing(drafted, None).splitlines()[-1] == "4.0 tokens per second"
    other = generation([1, 2, 9], 2, 1.0)
    assert closing(drafted, other).endswith("the text from token 2 on differs from plain decoding's")
    assert closing(generation([1], 0, 0.0), plain) == "the first token ended the answer: nothing was drafted"


@pytest.mark.parametrize(
    ("a", "b", "at"), [([1, 2], [1, 2], None), ([1, 2], [1, 3], 1), ([1], [1, 2], 1), ([], [], None)]
)
def test_first_difference(a: list[int], b: list[int], at: int | None) -> None:
    assert first_difference(a, b) == at


@pytest.mark.parametrize("wrong", [{"max_new_tokens": 0}, {"prompt": "  "}])
def test_options_are_checked(wrong: dict[str, Any]) -> None:
    with pytest.raises(UserError, match=next(iter(wrong))):
        AnswerOptions(**({"head": "h", "prompt": "p"} | wrong))


def test_the_whole_command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """The head's own target is loaded, the prompt encoded with its system turn, and the answer compared."""
    calls: list[tuple[Any, ...]] = []

    class FakeTarget:
        tokenizer = Bytes()

        @classmethod
        def load(cls, name: str, **options: Any) -> "FakeTarget":
            calls.append(("load", name, options["dtype"]))
            return cls()

    def encode(tokenizer: Any, messages: list[dict[str, str]], kwargs: dict[str, Any]) -> list[int]:
        calls.append(("encode", [m["role"] for m in messages], kwargs))
        return [1, 2]

    def fake_generate(target: Any, ids: list[int], drafter: Any, **options: Any) -> Generation:
        calls.append(("generate", drafter, str(options["tree"]), options["sampler"].temperature))
        if options["on_commit"]:
            options["on_commit"]([72], 0)
            options["on_commit"]([105, 33], 1)
        return generation([72, 105, 33], 1 if drafter else 2, 1.0)

    monkeypatch.setattr(answer, "Target", FakeTarget)
    monkeypatch.setattr(answer, "head_target", lambda folder: f"target of {folder}")
    monkeypatch.setattr(answer, "head_template_kwargs", lambda _: {})
    monkeypatch.setattr(answer, "load_head", lambda folder, target, force: "head")
    monkeypatch.setattr(answer, "prompt_ids", encode)
    monkeypatch.setattr(answer, "generate", fake_generate)
    answer.answer(AnswerOptions("folder", "Hi", system="Be brief.", tree="chain:2", temperature=0.5))
    captured = capsys.readouterr()
    assert captured.out == "Hi!\n"
    assert captured.err.splitlines() == [
        "2.00 tokens per pass (2 tokens in 1 passes)",
        "2.0 tokens per second, plain decoding 2.0: x1.00",
        "the text is identical to plain decoding's",
    ]
    assert calls == [
        ("load", "target of folder", "float32"),
        ("encode", ["system", "user"], {}),
        ("generate", "head", "chain:2", 0.5),
        ("generate", "head", "chain:2", 0.5),
        ("generate", None, "None", 0.5),
    ]
