"""Whether a run is the same one: what may change, and what a run of another version did not know."""

from __future__ import annotations

import datetime
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from spechead.data.preparation.prepare import prepare
from spechead.data.preparation.settings import Preparation
from spechead.errors import UserError
from spechead.target.chat_template import ChatTemplate
from spechead.training.distributed import Ranks
from spechead.training.recipe import load_recipe
from spechead.training.run_folder import claim_run, head_meta, head_weights, refuse_other_recipe, settle_date
from tests.helpers.targets import CHATML, make_toy_tokenizer

ALONE = Ranks(0, 1, torch.device("cpu"))
FACTS = {"target": "0" * 64, "samples": 3}


@pytest.fixture
def out(tmp_path: Path) -> Path:
    """The folder of a run with a checkpoint."""
    claim_run(load_recipe(), tmp_path, ALONE, FACTS)
    (tmp_path / "checkpoints" / "step-00000001").mkdir(parents=True)
    return tmp_path


def begin_again(out: Path, *flags: str, facts: dict[str, Any] = FACTS, ranks: Ranks = ALONE) -> None:
    claim_run(load_recipe(overrides=flags), out, ranks, facts)


@pytest.mark.parametrize("flag", ["log.every=3", "log.best=false", "out=elsewhere", "engine.threads=1"])
def test_a_run_is_resumed_with_other_logging_and_resources(flag: str, out: Path) -> None:
    begin_again(out, f"--{flag}")
    name, _, value = flag.partition("=")
    tree = json.loads((out / "recipe.json").read_text())
    for part in name.split("."):
        tree = tree[part]
    assert str(tree).lower() == value, "the file has the latest"


def test_another_recipe_target_or_number_of_processes_is_refused(out: Path) -> None:
    remedy = "choose another --out, or remove that folder"
    with pytest.raises(UserError, match=rf"option out: .* optim\.lr = 0\.001, now 0\.5: {remedy}"):
        begin_again(out, "--optim.lr", "0.5")
    with pytest.raises(UserError, match=r"facts\.target = '000"):
        begin_again(out, facts=FACTS | {"target": "1"})
    with pytest.raises(UserError, match=r"facts\.processes = 1, now 2"):
        claim_run(load_recipe(), out, Ranks(0, 2, torch.device("cpu")), FACTS)


def test_options_that_an_earlier_version_lacked_had_their_defaults(out: Path) -> None:
    tree = json.loads((out / "recipe.json").read_text())
    del tree["optim"]["ema"], tree["adapter"]
    (out / "recipe.json").write_text(json.dumps(tree))
    begin_again(out)
    (out / "recipe.json").write_text(json.dumps(tree))
    with pytest.raises(UserError, match=r"optim\.ema = 0\.0, now 0\.9"):
        begin_again(out, "--optim.ema", "0.9")


def test_settings_may_change_before_the_first_checkpoint(tmp_path: Path) -> None:
    claim_run(load_recipe(), tmp_path, ALONE, FACTS)
    begin_again(tmp_path, "--optim.lr", "0.5")


def test_the_head_of_a_finished_run_is_chosen(out: Path) -> None:
    refuse_other_recipe(load_recipe(overrides=["--log.keep", "9"]), out)
    with pytest.raises(UserError, match=r"log\.best = True, now False"):
        refuse_other_recipe(load_recipe(overrides=["--log.best", "false"]), out)


def test_a_run_keeps_the_date_on_which_it_began(tmp_path: Path) -> None:
    recipe = load_recipe()
    settle_date(recipe, tmp_path, ALONE)
    assert recipe.target.template_date == datetime.date.today().isoformat()
    yesterday = load_recipe(overrides=["--target.template_date", "2026-01-02"])
    settle_date(yesterday, tmp_path, ALONE)
    claim_run(yesterday, tmp_path, ALONE, FACTS)
    (tmp_path / "checkpoints" / "step-00000001").mkdir(parents=True)
    settle_date(later := load_recipe(), tmp_path, ALONE)
    assert later.target.template_date == "2026-01-02"
    claim_run(load_recipe(overrides=["--target.template_date", "2026-03-04"]), tmp_path, ALONE, FACTS)


def test_prepared_data_bring_their_date(tmp_path: Path) -> None:
    chat = ChatTemplate(make_toy_tokenizer(), "{{ strftime_now('%Y') }}" + CHATML, date="2024-07-26")
    row = {"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Yo"}]}
    (tmp_path / "data.jsonl").write_text(json.dumps(row) + "\n")
    prepare(Preparation([str(tmp_path / "data.jsonl")], chat, 64), tmp_path / "prepared")
    recipe = load_recipe(overrides=["--data.train", str(tmp_path / "prepared")])
    settle_date(recipe, tmp_path / "run", ALONE)
    assert recipe.target.template_date == "2024-07-26"


def test_what_a_head_file_says_of_its_training() -> None:
    recipe = load_recipe(overrides=["--data.limit", "7", "--seed", "5", "--target.four_bits", "true"])
    meta = head_meta(recipe, 12, "3 of 4", ChatTemplate(make_toy_tokenizer(), keywords={"thinking": False}))
    assert meta["template_kwargs"] == {"thinking": False} and meta["template_date"] == ""
    split = {"max_length": 512, "validation_share": 0.03, "limit": 7, "weights": [], "history": "each", "seed": 5}
    assert meta["split"] == split
    assert (meta["steps"], meta["foreign"], meta["four_bits"]) == (12, "3 of 4", True) and "adapter" not in meta
    masters = {"head.fc.weight": torch.ones(1), "adapter_parameters.0": torch.zeros(1)}
    assert list(head_weights(masters)) == ["fc.weight"]
