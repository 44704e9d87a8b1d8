"""Starting from an earlier head: its weights, its draft vocabulary kept, extended or made anew, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig

from spechead.data.dataset import Sample
from spechead.data.draft_vocabulary import draft_vocabulary
from spechead.errors import UserError
from spechead.heads import HEADS, Head
from spechead.heads.files import save_head
from spechead.heads.init_from import target_warning
from spechead.target.model import Target
from spechead.training.build import make_head
from spechead.training.recipe import HeadRecipe, Recipe
from spechead.training.train import train
from tests.helpers.heads import draft_ids
from tests.helpers.targets import BASE, FAMILIES, make_target
from tests.helpers.training import recipe, weights, write_tiny

OLD = torch.tensor([3, 10, 11, 12, 50, 60, 70, 80])
TEXT = torch.tensor([3] * 9 + [20] * 8 + [21] * 7 + [22] * 6 + [10] * 5 + [90] * 4)
TRAINING = [Sample(TEXT, torch.ones(len(TEXT), dtype=torch.bool), 0)]


def earlier(kind: str, target: Target, folder: Path, ids: torch.Tensor | None = OLD, **options: Any) -> Head:
    """A saved head of random weights over the draft vocabulary `ids`, or the target's."""
    torch.manual_seed(7)
    head = HEADS[kind](HEADS[kind].Config(draft_vocab_size=0 if ids is None else len(ids), **options), target)
    if ids is not None:
        head.set_vocabulary(ids)
    save_head(head, folder, {})
    return head


def started(kind: str, target: Target, folder: Path, vocabulary: str = "keep", **options: Any) -> Head:
    head = HeadRecipe(kind, options, init_from=str(folder), init_vocabulary=vocabulary)  # type: ignore[arg-type]
    return make_head(Recipe(head=head), target, TRAINING)


def outputs(head: Head) -> dict[str, torch.Tensor]:
    return {name: tensor for name, tensor in head.state_dict().items() if name.startswith("lm_head")}


@pytest.mark.parametrize("kind", HEADS)
@pytest.mark.parametrize("ids", [OLD, None])
def test_weights_and_vocabulary_are_kept(kind: str, ids: torch.Tensor | None, target: Target, tmp_path: Path) -> None:
    old = earlier(kind, target, tmp_path, ids)
    new = started(kind, target, tmp_path, draft_vocab_size=0 if ids is None else 8)
    assert new.state_dict().keys() == old.state_dict().keys()
    for name, tensor in old.state_dict().items():
        assert torch.equal(new.state_dict()[name], tensor), name
    if ids is not None:
        assert draft_ids(new).tolist() == OLD.tolist()


@pytest.mark.parametrize("kind", ["eagle3", "medusa"])
def test_a_vocabulary_is_extended(kind: str, target: Target, tmp_path: Path) -> None:
    """By the most frequent tokens that it lacks; their rows are the target's, all others stay."""
    old = earlier(kind, target, tmp_path)
    new = started(kind, target, tmp_path, "extend", draft_vocab_size=10)
    ids = new.draft_ids()
    assert ids is not None and ids.tolist() == [3, 10, 11, 12, 20, 21, 50, 60, 70, 80]
    kept = torch.isin(ids, OLD)
    assert outputs(new).keys() == outputs(old).keys() != set()
    for name, rows in outputs(new).items():
        assert torch.equal(rows[kept], outputs(old)[name])
        assert torch.equal(rows[~kept], target.output_rows(None)[0][ids[~kept]])


@pytest.mark.parametrize("kind", ["eagle3", "medusa"])
def test_a_vocabulary_is_made_anew(kind: str, target: Target, tmp_path: Path) -> None:
    old = earlier(kind, target, tmp_path)
    new = started(kind, target, tmp_path, "remap", draft_vocab_size=5)
    ids = new.draft_ids()
    assert ids is not None and ids.tolist() == [3, 10, 20, 21, 22]
    for name, rows in outputs(new).items():
        assert torch.equal(rows[:2], outputs(old)[name][:2])  # tokens 3 and 10 have lost no training
        assert torch.equal(rows[2:], target.output_rows(None)[0][ids[2:]])


def test_to_and_from_the_whole_vocabulary(target: Target, tmp_path: Path) -> None:
    old = earlier("eagle3", target, tmp_path / "reduced")
    new = started("eagle3", target, tmp_path / "reduced", "extend", draft_vocab_size=0)
    assert not new.reduced
    assert torch.equal(new.state_dict()["lm_head.weight"][OLD], old.state_dict()["lm_head.weight"])
    old = earlier("eagle3", target, tmp_path / "whole", None)
    new = started("eagle3", target, tmp_path / "whole", "remap", draft_vocab_size=5)
    ids = new.draft_ids()
    assert torch.equal(new.state_dict()["lm_head.weight"], old.state_dict()["lm_head.weight"][ids])


@pytest.mark.parametrize(
    ("kind", "vocabulary", "options", "message"),
    [
        ("medusa", "keep", {"draft_vocab_size": 8}, "is a head of kind eagle3, not medusa"),
        (
            "eagle3",
            "keep",
            {"draft_vocab_size": 10},
            "the head has 10 tokens.* 8; make them equal, or set head.init_vocabulary",
        ),
        ("eagle3", "keep", {"draft_vocab_size": 0}, "the head has 97 tokens.* 8"),
        ("eagle3", "extend", {"draft_vocab_size": 5}, "the head has 5 tokens"),
        ("eagle3", "keep", {"draft_vocab_size": 8, "n_layers": 2}, "has head.options.n_layers 1, not 2"),
        ("eagle3", "keep", {"draft_vocab_size": 8, "intermediate_size": 20}, r"has midlayer\.mlp.*\(48, 32\), not"),
        ("eagle3", "keep", {"draft_vocab_size": 8, "layers": [1, 3, 4]}, r"layers \[2, 3, 4\], not \[1, 3, 4\]"),
        ("eagle3", "keep", {"draft_vocab_size": 8, "norm_output": True}, "norm_output False, not True"),
        (
            "eagle3",
            "keep",
            {"draft_vocab_size": 8, "head_dim": 16, "num_attention_heads": 2, "num_key_value_heads": 1},
            "head_dim 8, not 16",
        ),
        ("eagle3", "keep", {"draft_vocab_size": 8, "rope_theta": 7.0}, r"rope_theta 10000\.0, not 7\.0"),
    ],
)
def test_what_does_not_fit_is_refused(
    kind: str, vocabulary: str, options: dict[str, Any], message: str, target: Target, tmp_path: Path
) -> None:
    earlier("eagle3", target, tmp_path)
    with pytest.raises(UserError, match=message):
        started(kind, target, tmp_path, vocabulary, **options)
    with pytest.raises(UserError, match="no head at"):
        started(kind, target, tmp_path / "nowhere", vocabulary, **options)


@pytest.mark.parametrize(("kind", "ids"), [("eagle3", OLD), ("eagle3", None), ("medusa", None)])
def test_a_target_of_another_vocabulary_is_refused(
    kind: str, ids: torch.Tensor | None, target: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(FAMILIES, "fewer-tokens", lambda: LlamaConfig(**BASE | {"vocab_size": 90}))
    smaller = make_target("fewer-tokens")
    earlier(kind, target, tmp_path, ids)
    with pytest.raises(UserError, match=rf"the target .* has {target.vocab_size} tokens, .* has 90"):
        started(kind, smaller, tmp_path, draft_vocab_size=0 if ids is None else 8)


def test_a_target_with_other_weights_gives_a_warning(target: Target, tmp_path: Path) -> None:
    earlier("eagle3", target, tmp_path)
    assert target_warning(tmp_path, target) == ""
    assert "was trained for target" in target_warning(tmp_path, make_target("llama", seed=5))


def test_training_may_differ(target: Target, tmp_path: Path) -> None:
    earlier("eagle3", target, tmp_path, steps=2)
    assert started("eagle3", target, tmp_path, draft_vocab_size=8, steps=5, loss="lk_alpha").config.steps == 5


def test_kept_ids_come_first() -> None:
    for kept, expected in ((None, [3, 20, 21]), (OLD[1:3], [3, 10, 11]), (OLD[:3], [3, 10, 11])):
        assert draft_vocabulary(TRAINING, 3, 97, kept).tolist() == expected


def test_a_run_goes_on_from_another_runs_head(tmp_path: Path) -> None:
    folder = write_tiny(tmp_path)
    first = train(recipe(folder, tmp_path / "first"))
    again = {"head.init_from": first, "optim.lr": 1e-9, "optim.steps": 1}
    train(recipe(folder, tmp_path / "again", **again))
    train(recipe(folder, tmp_path / "anew", **again | {"head.init_from": ""}))
    old, warm, cold = (weights(tmp_path / name) for name in ("first", "again", "anew"))
    assert all(torch.allclose(warm[name].float(), tensor.float(), atol=1e-6) for name, tensor in old.items())
    assert not torch.allclose(cold["fc.weight"], old["fc.weight"], atol=1e-3)


def test_a_run_from_before_an_option_is_the_same_run(tmp_path: Path) -> None:
    folder = write_tiny(tmp_path)
    first = train(recipe(folder, tmp_path / "run", **{"optim.steps": 1}))
    noted = tmp_path / "run" / "recipe.json"
    before = json.loads(noted.read_text())
    del before["head"]["init_from"], before["head"]["init_vocabulary"]
    noted.write_text(json.dumps(before))
    assert train(recipe(folder, tmp_path / "run", **{"optim.steps": 1})) == first
    with pytest.raises(UserError, match=r"head\.init_from = '', now 'some'"):
        train(recipe(folder, tmp_path / "run", **{"optim.steps": 1, "head.init_from": "some"}))
