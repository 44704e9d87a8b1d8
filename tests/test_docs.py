"""docs/add-a-head.md: the head on that page goes through tests that every head goes through."""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

from spechead.cli.main import COMMANDS
from spechead.decoding.tree import chain
from spechead.errors import UserError
from spechead.formats.capabilities import ExportInfo, refuse_unsupported
from spechead.formats.card import write_card
from spechead.formats.foreign_head import ForeignHead
from spechead.formats.registry import FORMATS
from spechead.heads import HEADS, Head
from spechead.target.model import Target
from spechead.training.recipe import load_recipe
from tests.evaluation import test_rank_paths
from tests.heads import test_base, test_base_sampled, test_files, test_init_from
from tests.helpers.heads import make_head
from tests.helpers.targets import make_target

PAGE = (Path(__file__).parents[1] / "docs" / "add-a-head.md").read_text(encoding="utf-8")
[CODE] = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
KIND = "recurrent"


@pytest.fixture(autouse=True)
def registered(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The head of the page, in HEADS under its name."""
    module = ModuleType("spechead.heads.recurrent")
    monkeypatch.setitem(sys.modules, module.__name__, module)  # where dataclasses look for their own module
    exec(compile(CODE, "docs/add-a-head.md", "exec"), module.__dict__)
    monkeypatch.setitem(HEADS, KIND, module.Recurrent)
    yield


def test_the_page_counts_right_and_names_commands_that_exist() -> None:
    assert f"{len(CODE.splitlines())} lines." in PAGE
    commands = re.findall(r"^spechead ([a-z-]+)", PAGE, re.MULTILINE)
    assert commands and set(commands) <= set(COMMANDS)
    [train] = re.findall(r"^spechead train (.*)$", PAGE, re.MULTILINE)
    recipe = load_recipe("", train.split())
    assert recipe.head.kind == KIND and recipe.head.options["draft_vocab_size"] == 8192


def test_the_page_names_all_that_a_head_must_have() -> None:
    table = PAGE[: PAGE.index("## The file")]
    assert set(re.findall(r"`(\w+)[`(]", table)) >= Head.__abstractmethods__ | {
        "kind",
        "title",
        "Config",
        "taps",
        "depths",
    }


def test_the_file_is_a_head_as_others_are() -> None:
    imported = {node.module for node in ast.walk(ast.parse(CODE)) if isinstance(node, ast.ImportFrom) and node.module}
    assert not {"transformers", "spechead.training.train", "spechead.training.engine"} & imported
    assert max(map(len, CODE.splitlines())) <= 120
    with pytest.raises(UserError, match="head.options.depth: must be at least 1, got 0"):
        HEADS[KIND](HEADS[KIND].Config(depth=0), make_target())


@pytest.mark.parametrize("family", ["llama", "gemma2", "gpt2"])
def test_it_is_lossless(family: str) -> None:
    test_base.test_lossless_in_every_family(KIND, family)


def test_it_overfits_and_then_drafts_at_full_depth(target: Target) -> None:
    test_base.test_overfit_decodes_at_its_full_depth(KIND, target)


def test_its_rows_and_labels_are_aligned(target: Target) -> None:
    test_base.test_prompt_and_padding_leave_the_loss_alone(KIND, target)
    test_base.test_every_parameter_gets_a_gradient(KIND, target)
    test_rank_paths.test_what_training_counts_as_right_is_what_drafting_ranks_first(KIND, target)


def test_it_is_saved_and_comes_back(target: Target, tmp_path: Path) -> None:
    test_files.test_saved_heads_come_back(KIND, target, tmp_path)


def test_it_can_start_a_head(target: Target, tmp_path: Path) -> None:
    test_init_from.test_weights_and_vocabulary_are_kept(KIND, test_init_from.OLD, target, tmp_path)
    with pytest.raises(UserError, match=r"option head\.init_from: .*it has up.weight of shape \(64, 64\), not"):
        test_init_from.started(KIND, target, tmp_path, draft_vocab_size=8, inner_size=5)


def test_formats_refuse_it_by_name_until_one_supports_it(target: Target, tmp_path: Path) -> None:
    """Then its sizes and what only training reads need no line of their own."""
    head = make_head(KIND, target, depth=2, decay=0.5)
    for name, form in FORMATS.items():
        with pytest.raises(UserError, match="supports no recurrent heads in this format"):
            form.save(head, tmp_path, ExportInfo("org/model"))
        assert list(tmp_path.iterdir()) == [], name
    refuse_unsupported(head, "a server", {KIND: frozenset()}, {})
    again = ForeignHead(KIND, vars(head.config), head.state_dict()).head(target)
    test_files.check_same(head, again)
    write_card(tmp_path / "README.md", head, "org/model", "a server", "serve", meta={}, report=None, license="")
    assert "# Recurrent head for org/model" in (tmp_path / "README.md").read_text()


def test_it_samples_from_what_it_says(target: Target) -> None:
    test_base_sampled.test_sampled_drafts_come_with_their_distribution(target, KIND, chain(4))
