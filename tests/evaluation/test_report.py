"""The console's table and remarks of a report."""

import copy
import io
import json
import re
from pathlib import Path
from typing import Any

from rich.console import Console

from spechead.evaluation import report
from tests.helpers.reports import full_report, verified_by


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


def test_training_on_answers_of_other_models_is_a_remark() -> None:
    found = full_report()
    assert not any("answers of other models" in sentence for _, sentence in report.remarks(found))
    found["settings"]["foreign_data"] = "3 of 9 answers are not marked as written by smollm2-135m"
    assert (
        False,
        f"the head was trained on answers of other models: {found['settings']['foreign_data']}",
    ) in report.remarks(found)


def test_a_rule_with_other_samples_says_nothing_of_equality() -> None:
    text = printed(verified_by("rejection", full_report()))
    sentence = "under the rule rejection the text follows plain decoding's distribution (tests enumerate it)"
    assert sentence in text and "not compared" in text
    assert "equality is not expected" in text
    assert "identical to plain decoding" not in text and "0/0" not in text and "lossy" not in text.lower()


def test_a_lossy_rule_is_marked_wherever_its_numbers_stand() -> None:
    lossy = verified_by("typical", full_report())
    text = printed(lossy)
    assert "eagle3 head on smollm2-135m (lossy), float32" in text
    assert "LOSSY: under the rule typical the text does not follow the target's distribution" in text
    numbers = [line for line in text.splitlines() if re.search(r"\d\.\d\d", line)]
    assert len(numbers) == 6 and all("(lossy)" in line for line in numbers)


def test_lossy_numbers_have_a_table_of_their_own() -> None:
    other = "held_out@static:[[0],[1],[0,0]]"
    both = verified_by("typical", full_report(), other)
    assert [list(table) for table in report.tables(both)] == [
        ["held_out", "held_out/writing", "held_out/coding", "held_out/maths"],
        [f"{other} (lossy)"],
    ]
    assert list(report.whole_suites(both)) == ["held_out", f"{other} (lossy)"]
    lines = printed(both).splitlines()
    header = [number for number, line in enumerate(lines) if "tokens per pass [95 %]" in line]
    assert len(header) == 2 and f"{other} (lossy)" in lines[header[1] + 1]
    assert "text identical to plain decoding: 9/9 prompts" in lines


def test_a_drafter_without_a_head_gives_the_title() -> None:
    bare = full_report() | {"head": "", "kind": "prompt_lookup"}
    assert "prompt_lookup on smollm2-135m, float32" in printed(bare)


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


def test_the_report_is_json_without_nan() -> None:
    json.dumps(full_report(), allow_nan=False)
