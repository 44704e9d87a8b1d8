"""The command that searches layers: what it prints is what `--drafter` takes."""

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spechead.cli import main
from spechead.data.prompts import read_prompts
from spechead.decoding.generate import generate
from spechead.drafters.parse import load_drafter
from spechead.drafters.self_speculative import SelfSpeculative
from spechead.errors import UserError
from spechead.evaluation import search_layers
from spechead.evaluation.search_layers import KeptLayers, ranges, sample_prompts
from spechead.files import shipped
from spechead.target.model import Target
from tests.helpers.drafters import prompt_of
from tests.helpers.targets import make_target


@pytest.fixture
def idle(monkeypatch: pytest.MonkeyPatch) -> Target:
    """A target whose layers 2 and 5 do nothing, loaded whatever name is asked for."""
    target = make_target()
    for layer in (2, 5):
        for name in ("self_attn.o_proj", "mlp.down_proj"):
            target._blocks[layer].get_parameter(f"{name}.weight").zero_()
    monkeypatch.setattr(Target, "load", lambda name, **_: target)
    return target


def test_the_layers_kept_can_be_pasted(idle: Target, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    prompts = tmp_path / "prompts.jsonl"
    rows = [{"question_id": i, "category": "any", "turns": [f"Say {i}"]} for i in range(3)]
    prompts.write_text("".join(json.dumps(row) + "\n" for row in rows))
    words = ["--target", "tiny", "--skip", "2", "--prompts", str(prompts), "--limit", "2", "--max-new-tokens", "6"]
    main.main(["search-layers", *words])
    out, err = capsys.readouterr()
    assert out == "self:0-1,3-4,6\n"
    assert "5 of 7 layers kept; agreement 1.000" in err
    assert "13/13 trial" in err  # one of 7 layers, then one of 6
    assert 'spechead generate --target tiny --drafter self:0-1,3-4,6 --prompt "..."' in err
    drafter = load_drafter(out.strip(), idle)
    assert isinstance(drafter, SelfSpeculative) and drafter.draft.n_layers == 5


def test_prompts_of_the_sample_data_are_the_default(idle: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: dict[str, Any] = {}

    def note(target: Target, prompts: list[list[int]], skip: int, **options: Any) -> KeptLayers:
        seen.update(prompts=prompts, skip=skip, **options)
        return KeptLayers([0, 1], 0.5)

    monkeypatch.setattr(search_layers, "search_layers", note)
    main.main(["search-layers", "--target", "tiny", "--skip", "5"])
    assert (len(seen["prompts"]), seen["skip"], seen["max_new_tokens"]) == (4, 5, 64)
    assert len({tuple(prompt) for prompt in seen["prompts"]}) == 4
    prompts = sample_prompts()
    assert len(prompts) > 1000 and len({prompt.category for prompt in prompts}) == 9
    measured = {prompt.text for prompt in read_prompts(shipped("eval/prompts/held_out.jsonl"))}
    assert not measured & {prompt.text for prompt in prompts}, "eval's prompts are not searched on"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--skip", "2"], "target"),
        (["--target", "tiny"], "skip"),
        (["--target", "tiny", "--skip", "7"], "option skip: must be at least 0 and at most 6"),
        (["--target", "tiny", "--skip", "1", "--limit", "0"], "option limit: must be at least 1, got 0"),
        (["--target", "tiny", "--skip", "1", "--prompts", "none.jsonl"], "cannot read the prompts none.jsonl"),
    ],
)
def test_mistakes_are_one_line(
    words: list[str], message: str, idle: Target, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        main.main(["search-layers", *words])
    err = capsys.readouterr().err
    assert message in err and err.count("spechead: error:") == 1 and "Traceback" not in err


@given(st.sets(st.integers(0, 30), min_size=1))
def test_ranges_say_each_layer_once(layers: set[int]) -> None:
    text = ranges(sorted(layers))
    spans = [part.split("-") for part in text.split(",")]
    said = [layer for span in spans for layer in range(int(span[0]), int(span[-1]) + 1)]
    assert said == sorted(layers)
    assert all(int(after[0]) > int(before[-1]) + 1 for before, after in zip(spans, spans[1:], strict=False))


def test_ranges_by_hand() -> None:
    assert ranges([0, 1, 2, 5]) == "0-2,5"
    assert ranges([3]) == "3"


def test_the_search_leaves_out_layers_that_do_nothing() -> None:
    target = make_target()
    for layer in (2, 5):
        for name in ("self_attn.o_proj", "mlp.down_proj"):
            target._blocks[layer].get_parameter(f"{name}.weight").zero_()
    prompts = [prompt_of(6), prompt_of(9, seed=2)]
    found = search_layers.search_layers(target, prompts, 2, max_new_tokens=8)
    assert (found.layers, found.agreement) == ([0, 1, 3, 4, 6], 1.0)
    further = search_layers.search_layers(target, prompts, 3, max_new_tokens=8)
    assert len(further.layers) == 4 and set(further.layers) < set(found.layers) and further.agreement < 1
    assert further == search_layers.search_layers(target, prompts, 3, max_new_tokens=8)
    stats = generate(target, prompts[0], SelfSpeculative(target, found.layers), max_new_tokens=8).stats
    assert stats.accepted == stats.drafted


def test_searches_that_cannot_be_made(target: Target) -> None:
    with pytest.raises(UserError, match="option skip: must be at least 0 and at most 6"):
        search_layers.search_layers(target, [[5]], 7)
    with pytest.raises(UserError, match="option prompts: at least one prompt"):
        search_layers.search_layers(target, [], 1)
