"""The table, the remarks and the page of a report: what is said, that all is escaped, that the plots draw."""

import copy
import html
import io
import json
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from spechead.data.prompts import Prompt
from spechead.decoding.generate import Stats
from spechead.evaluation import page, plots, report
from spechead.evaluation.aggregate import Comparison, Decoded, Reference, divergence, prediction, suite_entry

SECONDS = {"prefill": 0.2, "draft": 0.3, "verify": 2.0, "commit": 0.1, "other": 0.1}
PLAIN_SECONDS = {"prefill": 0.2, "draft": 0.0, "verify": 4.2, "commit": 0.1, "other": 0.1}


def comparison(number: int, category: str, accepted: list[int], wrong: bool = False) -> Comparison:
    """A chain of 3 that accepts what it is told to; plain takes 4.6 s, speculative 2.7 s."""
    committed = [a + 1 for a in accepted]
    tokens = list(range(1 + sum(committed)))
    stats = Stats(len(accepted), sum(committed), committed, [3] * len(accepted), accepted, SECONDS)
    passes = len(tokens) - 1
    plain = Decoded(tokens, 4.6, Stats(passes, passes, [1] * passes, [0] * passes, [0] * passes, PLAIN_SECONDS))
    ours = Decoded(tokens[:2] + [99] + tokens[3:] if wrong else tokens, 2.7, stats)
    prompt = Prompt(number, category, "?")
    return Comparison(prompt, plain, ours, Reference(tokens, 4.6), divergence(prompt, plain.tokens, ours.tokens))


def about(tree: str, rule: str = "exact_match", drafter: str = "eagle3") -> dict[str, Any]:
    return {"drafter": drafter, "tree": tree, "rule": rule, "lossy": rule == "typical"}


def full_report(wrong: bool = False) -> dict[str, Any]:
    kinds = ["writing", "coding", "maths"]
    pairs = [comparison(i, kinds[i % 3], [3, 1 + i % 2, 0, 2, 1, 0], wrong=wrong and i == 4) for i in range(9)]
    suites = {
        "held_out": suite_entry(pairs, about("chain:3")),
        "held_out@static:[[0],[1],[0,0]]": suite_entry(pairs, about("static:[[0]]")),
    }
    for entry in suites.values():
        entry["predicted"] = prediction(entry, 1.1)
    for kind in kinds:
        suites[f"held_out/{kind}"] = suite_entry([p for p in pairs if p.prompt.category == kind], about("chain:3"))
    return {
        "schema": 1,
        "target": "smollm2-135m",
        "head": "runs/x/head",
        "kind": "eagle3",
        "dtype": "float32",
        "device": "cpu",
        "machine": {"processor": "a <fast> one", "threads": 2},
        "settings": {"temperature": 0.0, "tree": ["chain:3"], "out": ""},
        "suites": suites,
        "examples": [
            {
                "prompt": 1,
                "category": "coding",
                "text": "Is 1 < 2 & 3?",
                "tree": "chain:3",
                "pieces": [["<b>", 0], ["yes", 1], [" it\nis", 2], ["deep", 9]],
            }
        ],
        "runs": [],
    }


def printed(entry: dict[str, Any]) -> str:
    text = io.StringIO()
    report.print_report(entry, Path("out"), Console(file=text))
    return text.getvalue()


# ------------------------------------------------------------------------------------------------ console


def test_a_dtype_of_drafts_that_differs_is_said() -> None:
    entry = full_report()
    assert printed(entry).splitlines()[0].rstrip() == "eagle3 head on smollm2-135m, float32"
    entry["settings"]["draft_dtype"] = "float32"
    assert report.precision(entry) == "float32"
    entry["settings"]["draft_dtype"] = "bfloat16"
    assert printed(entry).splitlines()[0].rstrip() == "eagle3 head on smollm2-135m, float32, drafts in bfloat16"
    entry["head"], entry["settings"]["drafter"] = "", ["prompt_lookup", "self:0-9"]
    assert report.precision(entry) == "float32", "nothing was loaded to draft"
    entry["settings"]["drafter"].append("staged:draft_model:x+prompt_lookup")
    assert report.precision(entry) == "float32, drafts in bfloat16"


def test_table_without_a_terminal_is_plain_text_with_every_suite() -> None:
    text = printed(full_report())
    assert "\x1b" not in text and text.isascii()
    lines = text.splitlines()
    main = next(line for line in lines if " held_out " in line)
    assert re.search(r"^\s*9\s+held_out\s+2\.\d\d \[2\.\d\d, 2\.\d\d\]\s+x1\.70 \[1\.70, 1\.70\]", main)
    assert main.rstrip().endswith("9/9        x1.00")
    assert "held_out@static:[[0],[1],[0,0]]" in text and "held_out/maths" in text
    assert "text identical to plain decoding: 9/9 prompts" in lines
    assert f"report: {Path('out') / 'report.html'}" in lines


def test_a_difference_in_float32_is_an_alarm_and_in_half_precision_a_remark() -> None:
    wrong = full_report(wrong=True)
    wrong["suites"]["held_out"]["lossless"]["divergences"][0]["gap"] = 0.0123
    alarm, sentence = report.remarks(wrong)[0]
    assert alarm and sentence.startswith("NOT LOSSLESS: held_out: 1 of 9 prompts differ from plain decoding in float32")
    assert "prompt 4, token 2" in sentence and "0.0123" in sentence
    assert "NOT LOSSLESS" in printed(wrong) and "8/9 prompts" in printed(wrong)
    wrong["dtype"] = "bfloat16"
    alarm, sentence = report.remarks(wrong)[0]
    assert not alarm and "in bfloat16" in sentence


def test_a_further_tree_that_differs_is_named_too() -> None:
    wrong = full_report()
    entry = wrong["suites"]["held_out@static:[[0],[1],[0,0]]"]
    entry["lossless"] = full_report(wrong=True)["suites"]["held_out"]["lossless"]
    assert report.remarks(wrong)[0][1].startswith("NOT LOSSLESS: held_out@static")


def test_remarks_on_speed() -> None:
    entry = full_report()
    cost = "a pass costs 1.27 plain passes (verify 1.02, draft 0.15, rest 0.10) and yields 2.24 tokens"
    assert report.remarks(entry) == [(False, cost)]
    slow = copy.deepcopy(entry)
    slow["suites"]["held_out"] |= {
        "speedup": 0.8,
        "generate_ratio": 1.3,
        "generate_equal": {"checked": 3, "equal": 2},
    }
    sentences = " | ".join(sentence for _, sentence in report.remarks(slow))
    assert "slower than plain decoding here: x0.80" in sentences
    assert "1.30 times as long as transformers' generate" in sentences
    assert "same text on 2/3 prompts" in sentences


def judged_by(rule: str, report: dict[str, Any], *names: str) -> dict[str, Any]:
    """The report with those suites (default: all) judged by a rule whose text is not plain decoding's own."""
    for name in names or report["suites"]:
        nothing = {"checked": 0, "equal": 0, "divergences": []}
        report["suites"][name] |= {"rule": rule, "lossy": rule == "typical", "lossless": nothing}
    return report


def test_a_head_that_learned_from_answers_of_others_says_so() -> None:
    found = full_report()
    assert not any("answers of others" in sentence for _, sentence in report.remarks(found))
    found["settings"]["foreign_data"] = "3 of 9 answers are not marked as written by smollm2-135m"
    assert (False, f"the head learned from answers of others: {found['settings']['foreign_data']}") in report.remarks(
        found
    )


def test_a_rule_with_other_draws_is_said_to_follow_the_distribution_and_nothing_is_said_of_equality() -> None:
    sampled = judged_by("rejection", full_report())
    sentence = "under the rule rejection the text follows plain decoding's distribution (tests enumerate it)"
    for text in (printed(sampled), html.unescape(page.render_html(sampled))):
        assert sentence in text and "not compared" in text
        assert "equality is not expected" in text
        assert "identical to plain decoding" not in text and "0/0" not in text and "lossy" not in text.lower()


def test_a_lossy_rule_is_marked_wherever_its_numbers_stand() -> None:
    lossy = judged_by("typical", full_report())
    text = printed(lossy)
    assert "eagle3 head on smollm2-135m (lossy), float32" in text
    assert "LOSSY: under the rule typical the text does not follow the target's distribution" in text
    numbers = [line for line in text.splitlines() if re.search(r"\d\.\d\d", line)]
    assert len(numbers) == 6 and all("(lossy)" in line for line in numbers)
    web = page.render_html(lossy)
    cards = re.findall(r'<div class="card">.*?</div>', web)
    assert len(cards) == 4 and all("(lossy)" in card for card in cards)
    captions = re.findall(r"<figcaption>(.*?)</figcaption>", web)
    assert len(captions) == 4 and all(caption.endswith("(lossy)") for caption in captions)
    assert re.findall(r'<li class="(\w+)">(LOSSY|a pass costs)', web) == [("alarm", "LOSSY"), ("note", "a pass costs")]


def test_lossy_numbers_have_a_table_of_their_own() -> None:
    other = "held_out@static:[[0],[1],[0,0]]"
    both = judged_by("typical", full_report(), other)
    assert [list(table) for table in report.tables(both)] == [
        ["held_out", "held_out/writing", "held_out/coding", "held_out/maths"],
        [f"{other} (lossy)"],
    ]
    assert list(report.whole_suites(both)) == ["held_out", f"{other} (lossy)"]
    lines = printed(both).splitlines()
    header = [number for number, line in enumerate(lines) if "tokens per pass [95 %]" in line]
    assert len(header) == 2 and f"{other} (lossy)" in lines[header[1] + 1]
    assert "text identical to plain decoding: 9/9 prompts" in lines
    assert page.render_html(both).count("<table>") == 2


def test_a_drafter_without_a_head_gives_the_title() -> None:
    bare = full_report() | {"head": "", "kind": "prompt_lookup"}
    assert "prompt_lookup on smollm2-135m, float32" in printed(bare)
    assert "<h1>prompt_lookup on smollm2-135m</h1>" in page.render_html(bare)


def test_missing_numbers_are_dashes() -> None:
    bare = full_report()
    bare["suites"]["held_out"] |= {
        "acceptance_length": None,
        "acceptance_length_ci": None,
        "speedup": None,
        "speedup_ci": None,
        "generate_ratio": None,
        "costs": None,
    }
    assert report.cells("held_out", bare["suites"]["held_out"])[2:] == ["-", "-", "3.1 -> 5.3", "9/9", "-"]
    assert "held_out" in printed(bare)
    page.render_html(bare)


# ------------------------------------------------------------------------------------------------ html


class Wellformed(HTMLParser):
    """Collects the tags, and the external addresses that a self-contained page must not have."""

    def __init__(self) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.outside: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.outside += [v for k, v in attrs if k in ("src", "href", "xlink:href") and v and not v.startswith("#")]


def test_page_is_self_contained_with_four_plots() -> None:
    text = page.render_html(full_report())
    parser = Wellformed()
    parser.feed(text)
    assert parser.tags.count("svg") == 4 and parser.outside == []
    assert "script" not in parser.tags and "@import" not in text
    assert "held_out/maths" in text and "x1.70" in text


def test_every_text_is_escaped() -> None:
    evil = "<script>alert('1')</script> & $x_1$ \"q\""
    bad = full_report()
    bad["target"] = bad["head"] = bad["kind"] = evil
    bad["settings"][evil] = evil
    bad["machine"]["processor"] = evil
    bad["suites"] = {evil: bad["suites"]["held_out"], f"{evil}/{evil}": bad["suites"]["held_out/coding"]}
    bad["suites"][evil]["tree"] = evil
    bad["examples"] = [{"prompt": evil, "category": evil, "text": evil, "tree": evil, "pieces": [[evil, 1], [evil, 0]]}]
    text = page.render_html(bad)
    assert "<script" not in text
    assert "&lt;script&gt;" in text
    printed(bad)


def test_accepted_drafts_are_coloured_by_depth() -> None:
    text = page.render_html(full_report())
    assert '&lt;b&gt;<span class="d1" title="accepted draft of depth 1">yes</span>' in text
    assert '<span class="d6" title="accepted draft of depth 9">deep</span>' in text


def test_plots_take_the_ink_of_the_page_and_repeat_exactly() -> None:
    entry = full_report()["suites"]["held_out"]
    svg = plots.acceptance(entry)
    assert svg.startswith("<svg") and "currentColor" in svg and plots.INK not in svg
    assert svg == plots.acceptance(entry)


@pytest.mark.parametrize("empty", [True, False])
def test_plots_draw_without_drafts_and_with_gaps(empty: bool) -> None:
    entry = suite_entry([comparison(1, "a", [] if empty else [0, 0])], about("chain:3"))
    for svg in (
        plots.acceptance(entry),
        plots.phases(entry),
        plots.tokens_per_pass(entry),
        plots.speedups({"a": entry}),
    ):
        assert svg.startswith("<svg")


def test_the_report_is_json_without_nan() -> None:
    json.dumps(full_report(), allow_nan=False)
