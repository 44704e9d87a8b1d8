"""The page of a report: everything is escaped, nothing is loaded from elsewhere, the plots are in it."""

import html
import re
from html.parser import HTMLParser

import pytest
from jinja2 import UndefinedError

from spechead.evaluation import page
from tests.helpers.reports import full_report, verified_by


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


def test_accepted_drafts_are_coloured_by_depth() -> None:
    text = page.render_html(full_report())
    assert '&lt;b&gt;<span class="d1" title="accepted draft of depth 1">yes</span>' in text
    assert '<span class="d6" title="accepted draft of depth 9">deep</span>' in text


def test_a_lossy_rule_is_marked_on_every_card_and_plot() -> None:
    web = page.render_html(verified_by("typical", full_report()))
    cards = re.findall(r'<div class="card">.*?</div>', web)
    assert len(cards) == 4 and all("(lossy)" in card for card in cards)
    captions = re.findall(r"<figcaption>(.*?)</figcaption>", web)
    assert len(captions) == 4 and all(caption.endswith("(lossy)") for caption in captions)
    assert re.findall(r'<li class="(\w+)">(LOSSY|a pass costs)', web) == [("alarm", "LOSSY"), ("note", "a pass costs")]


def test_lossy_numbers_have_a_table_of_their_own() -> None:
    both = verified_by("typical", full_report(), "held_out@static:[[0],[1],[0,0]]")
    assert page.render_html(both).count("<table>") == 2


def test_a_rule_with_other_samples_says_nothing_of_equality() -> None:
    text = html.unescape(page.render_html(verified_by("rejection", full_report())))
    assert "under the rule rejection the text follows plain decoding's distribution (tests enumerate it)" in text
    assert "equality is not expected" in text and "not compared" in text and "0/0" not in text
    assert "identical to plain decoding" not in text and "lossy" not in text.lower()


def test_a_report_of_the_first_version_is_rendered() -> None:
    old = verified_by("own_draw", full_report())
    for entry in old["suites"].values():
        del entry["lossy"]
    assert "rule own_draw" in page.render_html(old)


def test_missing_numbers_are_dashes() -> None:
    bare = full_report()
    missing = ("acceptance_length", "acceptance_length_ci", "speedup", "speedup_ci", "generate_ratio", "costs")
    bare["suites"]["held_out"] |= dict.fromkeys(missing)
    assert '<div class="card"><b>-</b>tokens per pass<small></small></div>' in page.render_html(bare)


def test_a_name_that_a_template_lacks_is_an_error() -> None:
    with pytest.raises(UndefinedError):
        page.render("compare.html.j2", title="x")
