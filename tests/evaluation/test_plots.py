"""The plots draw whatever a report contains, in the text colour of the page, and escape their labels."""

import pytest

from spechead.evaluation import plots
from spechead.evaluation.aggregate import suite_entry
from tests.helpers.reports import comparison, full_report, labels


def test_plots_take_the_ink_of_the_page_and_repeat_exactly() -> None:
    entry = full_report()["suites"]["held_out"]
    svg = plots.acceptance(entry)
    assert svg.startswith("<svg") and "currentColor" in svg and plots.INK not in svg
    assert svg == plots.acceptance(entry)


@pytest.mark.parametrize("empty", [True, False])
def test_plots_draw_without_drafts_and_with_gaps(empty: bool) -> None:
    entry = suite_entry([comparison(1, "a", [] if empty else [0, 0])], labels("chain:3"))
    for svg in (
        plots.acceptance(entry),
        plots.phases(entry),
        plots.tokens_per_pass(entry),
        plots.speedups({"a": entry}),
    ):
        assert svg.startswith("<svg")


def test_labels_are_escaped() -> None:
    svg = plots.intervals("x", [("<script>alert('1')</script> & $x$", 1.5, [1.0, 2.0])], "<b>times</b>")
    assert "<script" not in svg and "&lt;script&gt;" in svg and "&lt;b&gt;times" in svg
