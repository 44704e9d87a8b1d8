"""The table of kinds: what the synthesis relies on."""

from pathlib import Path

from spechead.data.prompts import read_prompts
from spechead.data.synthesis.filters import SPECIAL_MARKER
from spechead.data.synthesis.prompt_kinds import KINDS
from spechead.files import shipped


def test_every_kind_has_a_weight_and_openings_that_are_no_transcript() -> None:
    for kind in KINDS.values():
        assert kind.weight > 0 and kind.openings
        assert not any(SPECIAL_MARKER.search(opening) for opening in kind.openings)
        assert all(opening == opening.lstrip() for opening in kind.openings)
    assert {name for name, kind in KINDS.items() if not kind.system} == {"general"}


def test_no_opening_is_a_prompt_of_the_evaluation() -> None:
    measured = [prompt.text for prompt in read_prompts(shipped("eval/prompts/held_out.jsonl"))]
    openings = {opening for kind in KINDS.values() for opening in kind.openings}
    assert not openings & set(measured)


def test_the_page_on_data_names_every_kind() -> None:
    text = (Path(__file__).parents[3] / "data" / "README.md").read_text(encoding="utf-8")
    assert all(name in text for name in KINDS)
