"""Dataclasses become flags and YAML keys, and each mistake one readable line."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

import pytest

from spechead.errors import UserError
from spechead.options import Options, Range, check_ranges, convert, parse


@dataclass
class Inner:
    """Inner things."""

    lr: float = 1e-3
    """Rate of learning."""
    shape: Literal["cosine", "linear"] = "cosine"
    betas: tuple[float, float] = (0.9, 0.95)
    quick: bool = False


@dataclass
class Outer:
    """Outer things."""

    inner: Inner = field(default_factory=Inner)
    files: list[str] = field(default_factory=list)
    shares: list[float] = field(default_factory=list)
    free: dict[str, Any] = field(default_factory=dict)
    max_tokens: int = 256
    plain: bool = True
    prompt: str = ""
    out: Path = Path("x")


@dataclass
class Needs:
    file: Path
    count: int = 3


def outer(*argv: str, config: str | None = None) -> Outer:
    return parse(Outer, argv, "prog", config=config)


def test_defaults_and_overrides() -> None:
    assert outer() == Outer()
    got = outer("--inner.lr", "1e-4", "--max_tokens=5", "--inner.betas", "[0.8, 0.9]", "--out", "a/b")
    assert got == Outer(Inner(lr=1e-4, betas=(0.8, 0.9)), max_tokens=5, out=Path("a/b"))


def test_dashes_are_underscores() -> None:
    assert outer("--max-tokens", "5").max_tokens == outer("--max-tokens=5").max_tokens == 5


def test_yes_or_no_options() -> None:
    assert outer("--inner.quick").inner.quick
    assert outer("--inner.quick", "true", "--max-tokens", "3").inner.quick
    assert not outer("--plain", "false").plain and not outer("--plain", "False").plain
    assert not outer("--no-plain").plain


def test_lists_are_given_one_by_one_or_at_once() -> None:
    assert outer("--files", "a.jsonl", "--files=b c.jsonl").files == ["a.jsonl", "b c.jsonl"]
    assert outer("--files", "[a, b]").files == ["a", "b"]
    assert outer("--shares", "0.5", "--shares=1").shares == [0.5, 1.0] == outer("--shares", "[0.5, 1]").shares


def test_free_mappings_take_any_key() -> None:
    assert outer("--free.a", "[1, 2]", "--free.b=1e-3", "--free.c", "x").free == {
        "a": [1, 2],
        "b": 1e-3,
        "c": "x",
    }


@pytest.mark.parametrize("text", ["3", "null", "a: b, {c", "[1", "--x", "1e-3", "yes"])
def test_text_stays_text(text: str) -> None:
    assert outer(f"--prompt={text}").prompt == text


def test_bare_words_fill_required_fields() -> None:
    assert parse(Needs, ["a.jsonl", "--count", "4"], "prog", positional=True) == Needs(Path("a.jsonl"), 4)
    with pytest.raises(UserError, match="file"):
        parse(Needs, [], "prog", positional=True)
    with pytest.raises(UserError, match="file"):
        parse(Needs, ["--count", "4"], "prog")


@dataclass
class Many:
    files: list[str]
    count: int = 1


def test_bare_words_are_a_list_where_one_is_required() -> None:
    for words in (["a", "b", "--count", "4"], ["a", "--count=4", "b"], ["--count", "4", '["a", "b"]']):
        assert parse(Many, words, "prog", positional=True) == Many(["a", "b"], 4)
    assert parse(Many, ["a"], "prog", positional=True) == Many(["a"])
    with pytest.raises(UserError, match="the following arguments are required: files"):
        parse(Many, ["--count", "4"], "prog", positional=True)
    with pytest.raises(UserError, match="unknown option cuont"):
        parse(Many, ["a", "--cuont", "4"], "prog", positional=True)


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--inner.lrr", "3"], r"unknown option inner.lrr \(did you mean inner.lr\?\)"),
        (["--max-token=3"], r"unknown option max_token \(did you mean max_tokens\?\)"),
        (
            ["--inner.zzzzz"],
            r"unknown option inner.zzzzz \(known: inner.lr, inner.shape, inner.betas, inner.quick\)",
        ),
        (["--inner.lr", "fast"], "option inner.lr: expected float, got fast"),
        (["--max_tokens", "1.5"], "option max_tokens: expected int, got 1.5"),
        (["--inner.shape=flat"], "option inner.shape: expected one of cosine, linear, got flat"),
        (["--max_tokens"], "expected one argument"),
        (["stray"], "unknown option stray"),
    ],
)
def test_mistakes_are_one_line(argv: list[str], message: str) -> None:
    with pytest.raises(UserError, match=message) as caught:
        outer(*argv)
    assert "\n" not in str(caught.value)


def test_yaml_with_flags_over_it(tmp_path: Path) -> None:
    file = tmp_path / "r.yaml"
    file.write_text("inner:\n  lr: 1e-4  # a number, as people write it\n  shape: linear\nfree: {a: {b: 1}}\n")
    got = outer("--inner.shape", "cosine", config=str(file))
    assert got == Outer(Inner(lr=1e-4), free={"a": {"b": 1}})
    assert outer(config="") == Outer()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("inner:\n  lrr: 1\n", r"unknown key inner.lrr in .*r.yaml \(did you mean inner.lr\?\)"),
        ("innner: {lr: 1}\n", r"unknown key innner in .*r.yaml"),
        ("inner:\n  lr: fast\n", "option inner.lr: expected float, got fast"),
        ("inner: 3\n", "key inner in .*r.yaml must contain options: inner.lr, inner.shape"),
        ("inner:\n", "key inner in .*r.yaml must contain options"),
        ("a: [1\n", r"r.yaml is not valid YAML: .*line 2"),
        ("- 1\n", "r.yaml: contains no options"),
        ("", "r.yaml: contains no options"),
    ],
)
def test_bad_yaml_is_one_line(tmp_path: Path, text: str, message: str) -> None:
    file = tmp_path / "r.yaml"
    file.write_text(text)
    with pytest.raises(UserError, match=message) as caught:
        outer(config=str(file))
    assert "\n" not in str(caught.value)


def test_a_missing_yaml_is_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"cannot read .*gone.yaml: no such file"):
        outer(config=str(tmp_path / "gone.yaml"))


def test_help_comes_from_the_docstrings(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        outer("--help")
    assert caught.value.code == 0
    assert "Rate of learning." in capsys.readouterr().out


def test_convert_gives_the_types_of_the_fields() -> None:
    assert convert(Inner, {"lr": 1, "betas": [0, 1]}) == {"lr": 1.0, "betas": (0.0, 1.0)}
    with pytest.raises(UserError, match=r"unknown option head.lrr \(known: lr, shape, betas, quick\)"):
        convert(Inner, {"lrr": 1}, "head.")
    with pytest.raises(UserError, match="option head.lr: expected float, got fast"):
        convert(Inner, {"lr": "fast"}, "head.")


@dataclass
class Limited(Options):
    share: Annotated[float, Range(0, below=1)] = 0.0
    sizes: Annotated[list[int], Range(1)] = field(default_factory=lambda: [1])
    rate: Annotated[float, Range(above=0, most=2)] = 1.0


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"share": 1.0}, "option share: must be at least 0 and below 1, got 1.0"),
        ({"sizes": [1, 0]}, r"option sizes: must be at least 1, got \[1, 0\]"),
        ({"rate": 0.0}, "option rate: must be above 0 and at most 2, got 0.0"),
    ],
)
def test_values_outside_their_range_are_named(values: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        Limited(**values)
    with pytest.raises(UserError, match=message):
        parse(Limited, [f"--{name}={value}" for name, value in values.items()], "prog")


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf"), 10**400, True, "1"])
def test_a_value_that_is_no_finite_number_in_range_is_refused(value: Any) -> None:
    with pytest.raises(UserError, match="option share: must be at least 0 and below 1, got "):
        Limited(share=value)


@pytest.mark.parametrize("words", [["--rate", "1" * 400], ["--share", "1" * 400], ["--sizes", f"[-{'1' * 400}]"]])
def test_a_number_too_large_for_a_float_is_one_line(words: list[str]) -> None:
    with pytest.raises(UserError):
        parse(Limited, words, "prog")


def test_values_at_the_edge_of_their_range_are_allowed() -> None:
    assert Limited(share=0.0, sizes=[1, 2], rate=2.0).rate == 2.0
    check_ranges(Outer())


def test_the_parsers_own_way_to_append_is_refused_rather_than_dropped() -> None:
    @dataclass
    class Several:
        """Options."""

        stop: list[str] = field(default_factory=list)
        """Strings."""
        weights: list[float] = field(default_factory=list)
        """Numbers."""

    assert parse(Several, ["--stop", "a", "--stop", "b"], "x").stop == ["a", "b"]
    for name in ("stop", "weights"):
        with pytest.raises(UserError, match=rf"unknown option {name}\+: repeat --{name} for several values"):
            parse(Several, [f"--{name}", "1", f"--{name}+", "2"], "x")
