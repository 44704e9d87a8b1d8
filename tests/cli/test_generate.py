"""`spechead generate`: colours by depth on a terminal, plain text elsewhere, and honest closing figures."""

import io
from typing import Any

import pytest
import torch
from rich.console import Console

from spechead.cli import generate
from spechead.cli.generate import Display, GenerateOptions, statistics
from spechead.decoding.generate import Generation, Stats
from spechead.errors import UserError
from spechead.evaluation import options as decoding
from spechead.heads.files import HeadInfo
from spechead.options import parse
from spechead.target.model import Target
from tests.helpers.targets import make_target


class Bytes:
    """One token a byte."""

    def decode(self, ids: list[int], *, skip_special_tokens: bool) -> str:
        return bytes(ids).decode("utf-8", errors="replace")


def generation(tokens: list[int], passes: int, seconds: float) -> Generation:
    phases = {"prefill": 9.0, "draft": seconds / 2, "verify": seconds / 2, "commit": 0.0, "other": 0.0}
    return Generation(tokens, "eos", Stats(passes=passes, tokens=len(tokens) - 1, seconds=phases), [])


def options(**more: Any) -> GenerateOptions:
    return GenerateOptions(**({"head": "h", "prompt": "p"} | more))


def shown(terminal: bool, commits: list[tuple[bytes, int]], *stop: str) -> tuple[str, str]:
    """What a display writes to standard output and to standard error."""
    out, err = io.StringIO(), io.StringIO()
    look: dict[str, Any] = {
        "force_terminal": terminal,
        "color_system": "256" if terminal else None,
        "width": 20,
    }
    display = Display(Bytes(), Console(file=out, **look), Console(file=err, **look), stop)
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


def test_a_stop_string_is_not_shown_and_what_waited_keeps_its_colour() -> None:
    assert shown(False, [(b"one", 0), (b"#", 1), (b"# two", 2)], "##") == ("one\n", "")
    out, _ = shown(True, [(b"a", 0), (b"b#", 2), (b"cd#", 1)], "##")
    assert out == "a" + painted("b", 1) + painted("#", 2) + painted("c", 1) + "d#\n"


def test_showing_is_timed_as_a_whole_and_only_in_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    class Slow(Bytes):
        """Decoding a text takes 1 s."""

        now = 0.0

        def decode(self, ids: list[int], *, skip_special_tokens: bool) -> str:
            Slow.now += 1.0
            return super().decode(ids, skip_special_tokens=skip_special_tokens)

    monkeypatch.setattr(generate.time, "perf_counter", lambda: Slow.now)
    with Display(Slow(), Console(file=io.StringIO()), Console(file=io.StringIO())) as display:
        display.commit([65], 0)
        assert (display.seconds, Slow.now) == (0.0, 2.0), "the prefill's token is in no figure"
        display.commit([66, 67], 1)
        assert display.seconds == 4.0
    assert Slow.now > 6.0 and display.seconds == 4.0, "what is shown at the end is shown after the clock"


def test_statistics() -> None:
    drafted, plain = generation([1, 2, 3, 4, 5, 6, 7], 3, 1.5), generation([1, 2, 3, 4, 5, 6, 7], 6, 2.0)
    assert statistics(options(), drafted, plain, display_seconds=0.5).splitlines() == [
        "2.00 tokens per pass (6 tokens in 3 passes)",
        "6.0 tokens per second, plain decoding 3.0: x2.00",
        "the text is identical to plain decoding's",
    ]
    assert statistics(options(), drafted, None).splitlines()[1:] == ["4.0 tokens per second"]
    other = generation([1, 2, 9], 2, 1.0)
    assert statistics(options(), drafted, other).endswith("the text from token 2 on differs from plain decoding's")
    assert (
        statistics(options(), generation([1], 0, 0.0), plain)
        == "the answer ended with its first token: nothing was drafted"
    )


@pytest.mark.parametrize(
    ("reason", "said"), [("eos", ""), ("stop", "; ended by a stop string"), ("length", "; cut off at max_new_tokens")]
)
def test_statistics_name_the_reason_of_an_unusual_end(reason: str, said: str) -> None:
    drafted = generation([1, 2, 3], 1, 1.0)
    drafted.finish_reason = reason
    assert f"(2 tokens in 1 passes{said}" in statistics(options(), drafted, None)


def test_statistics_compare_only_text_that_must_be_equal() -> None:
    drafted, plain = generation([1, 2, 3], 1, 1.0), generation([1, 2, 4], 2, 1.0)
    sampled: dict[str, Any] = {"temperature": 1.0, "draft_temperature": 1.0}
    for rule in ("", "rejection", "block"):
        last = statistics(options(rule=rule, **sampled), drafted, plain).splitlines()[-1]
        assert last.startswith(f"under the rule {rule or 'rejection'} the text follows plain decoding's distribution")
    for more in ({"rule": "exact_match", **sampled}, sampled | {"temperature": 0.0}, {"temperature": 1.0}):
        assert "differs from plain decoding's" in statistics(options(**more), drafted, plain)


def test_every_figure_of_a_lossy_rule_is_marked() -> None:
    drafted = generation([1, 2, 3], 1, 1.0)
    assert statistics(options(rule="typical"), drafted, generation([1, 2, 3], 2, 2.0)).splitlines() == [
        "2.00 tokens per pass (lossy) (2 tokens in 1 passes)",
        "2.0 tokens per second (lossy), plain decoding 1.0: x2.00 (lossy)",
        "LOSSY: under the rule typical the text does not follow the target's distribution",
    ]


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"max_new_tokens": 0}, "max_new_tokens"),
        ({"prompt": "  "}, "prompt"),
        ({"head": ""}, "option target: is empty; give --target, or --head"),
        ({"head": "", "drafter": "prompt_lookup"}, "option target: is empty; give --target, or --head"),
        ({"head": "", "target": "t"}, "either --head or --drafter"),
        ({"drafter": "prompt_lookup"}, "either --head or --drafter"),
        ({"rule": "hope"}, "option rule: must be one of exact_match, rejection, block, typical, got 'hope'"),
        ({"rule": "block"}, "option rule: block needs sampled drafts"),
        ({"draft_temperature": -1.0}, "option draft_temperature: must be at least 0, got -1.0"),
        ({"tree": "dynamic:nodes=8,depth=4,topk=3", "draft_temperature": 1.0}, "cannot sample its drafts"),
        ({"tree": "bush"}, "bush"),
        (
            {"tree": "static:[[0],[1]]", "rule": "block", "draft_temperature": 1.0},
            r"option rule: block needs a chain, not static:\[\[0\],\[1\]\]; use chain:1",
        ),
        ({"head": "", "target": "t", "drafter": "prompt_look"}, "option drafter: 'prompt_look' is not a drafter"),
        (
            {"head": "", "target": "t", "drafter": "prompt_lookup", "tree": "dynamic:nodes=8,depth=4,topk=3"},
            "option tree: dynamic:nodes=8,depth=4,topk=3 branches, prompt_lookup cannot; use chain:4",
        ),
        ({"draft_dtype": "int4"}, "option draft_dtype: 'int4'"),
        ({"min_p": 1.0}, "option min_p: must be at least 0 and below 1, got 1.0"),
        ({"repetition_penalty": 0.0}, "option repetition_penalty: must be above 0, got 0.0"),
    ],
)
def test_mistakes_are_named_before_anything_is_loaded(wrong: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        options(**wrong)


def test_options_reach_the_command_from_flags(capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--prompt", "Hi", "--target", "t", "--drafter", "self:0-3", "--stop", "\n\n", "--stop=User:", "--no-plain"]
    found = parse(GenerateOptions, [*flags, "--min-p", "0.1", "--repetition-penalty", "1.2"], "spechead generate")
    assert (found.drafter, found.stop, found.plain) == ("self:0-3", ["\n\n", "User:"], False)
    sampler = found.sampler()
    assert (sampler.min_p, len(sampler._processors)) == (0.1, 1)
    with pytest.raises(SystemExit):
        parse(GenerateOptions, ["--help"], "spechead generate")
    shown = " ".join(capsys.readouterr().out.split())
    for words in (
        "Folder of a trained head.",
        "typical: Medusa's, LOSSY",
        "String that ends the answer",
        "prompt_lookup:ngram=3,match=latest",
        "Append ,floor=0.1 to stop",
        "its layers are counted within the first",
    ):
        assert words in shown


def test_the_whole_command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """The head's own target is loaded, the prompt encoded with its system turn, and the answer compared."""
    calls: list[tuple[Any, ...]] = []

    class FakeTarget:
        tokenizer, device, dtype = Bytes(), torch.device("cpu"), torch.float32
        name, ignored_generation = "tiny", {"num_beams": 3}

        def __init__(self, keywords: dict[str, Any]) -> None:
            self.chat, self.keywords = self, keywords

        def drafting_dtype(self, name: str) -> str:
            return "float32"

        @classmethod
        def load(cls, name: str, **given: Any) -> "FakeTarget":
            calls.append(("load", name, given["dtype"]))
            return cls(given["template_kwargs"])

        def prompt_ids(self, messages: list[dict[str, str]]) -> list[int]:
            calls.append(("encode", [m["content"] for m in messages], self.keywords))
            return [1, 2]

    def fake_generate(target: Any, ids: list[int], drafter: Any, **given: Any) -> Generation:
        speculation = given["speculation"]
        calls.append(("generate", drafter, str(speculation.tree), speculation.rule, given["sampler"].temperature))
        if given["on_commit"]:
            given["on_commit"]([72], 0)
            given["on_commit"]([105, 33], 1)
        return generation([72, 105, 33], 1 if drafter else 2, 1.0)

    monkeypatch.setattr("spechead.target.options.Target", FakeTarget)
    meta = {"template_kwargs": {"style": "short"}}
    monkeypatch.setattr(decoding, "read_info", lambda folder: HeadInfo(folder, target=f"target of {folder}", meta=meta))
    monkeypatch.setattr(decoding, "load_head", lambda folder, target, **_: "head")
    monkeypatch.setattr(generate, "generate", fake_generate)
    sampled: dict[str, Any] = {"temperature": 0.5, "draft_temperature": 0.7}
    generate.stream_answer(options(head="folder", prompt="Hi \ud83d", system="Be brief.", tree="chain:2", **sampled))
    captured = capsys.readouterr()
    assert captured.out == "Hi!\n"
    assert captured.err.splitlines()[:3] == [
        "note: not applied from the generation config of tiny, in no decoding: num_beams=3; sampling is set by options "
        "such as --temperature",
        "2.00 tokens per pass (2 tokens in 1 passes)",
        "2.0 tokens per second, plain decoding 2.0: x1.00",
    ]
    assert calls == [
        ("load", "target of folder", "float32"),
        ("encode", ["Be brief.", "Hi \ufffd"], {"style": "short"}),
        ("generate", "head", "chain:2", "rejection", 0.5),
        ("generate", "head", "chain:2", "rejection", 0.5),
        ("generate", None, "None", "exact_match", 0.5),
    ]


def test_a_training_free_drafter_and_a_stop_string(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    target = make_target()
    monkeypatch.setattr(Target, "load", classmethod(lambda cls, name, **_: target))
    more = {"head": "", "target": "tiny", "max_new_tokens": 24}
    generate.stream_answer(options(drafter="self:0-6", **more))  # all layers: every draft is right
    whole = capsys.readouterr()
    assert whole.err.splitlines()[-1] == "the text is identical to plain decoding's"
    assert "4.60 tokens per pass (23 tokens in 5 passes; cut off" in whole.err
    stop = whole.out[9:12]
    generate.stream_answer(options(drafter="prompt_lookup", stop=[stop, "nowhere"], **more))
    cut = capsys.readouterr()
    assert cut.out == whole.out[: whole.out.index(stop)] + "\n"
    assert "; ended by a stop string)" in cut.err and cut.err.splitlines()[-1].endswith("identical to plain decoding's")
    with pytest.raises(UserError, match="prompt_lookup cannot sample its drafts"):
        generate.stream_answer(options(drafter="prompt_lookup", draft_temperature=1.0, **more))
