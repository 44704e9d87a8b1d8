"""What identifies a preparation: every part of the key counts, and nothing else does."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from spechead import files
from spechead.data.preparation import settings
from spechead.data.preparation.settings import Preparation, identify, prepared_cache
from spechead.errors import UserError
from spechead.target.chat_template import ChatTemplate
from tests.helpers.targets import make_toy_tokenizer


@pytest.fixture
def preparation(tmp_path: Path) -> Preparation:
    for name in ("one", "two"):
        (tmp_path / f"{name}.jsonl").write_text(f'{{"prompt": "{name}", "response": "a"}}\n' * 40)
    sources = [str(tmp_path / f"{name}.jsonl") for name in ("one", "two")]
    return Preparation(sources, ChatTemplate(make_toy_tokenizer()), 100, weights=[1, 0.5], vocab_size=97)


def other_tokenizer() -> ChatTemplate:
    tokenizer = make_toy_tokenizer()
    tokenizer.add_tokens(["abc"])
    return ChatTemplate(tokenizer)


DATED = "{{ strftime_now('%Y-%m-%d') }}" + str(make_toy_tokenizer().chat_template)
CHANGES: dict[str, Callable[[], dict[str, Any]]] = {
    "tokenizer": lambda: {"chat": other_tokenizer()},
    "template": lambda: {"chat": ChatTemplate(make_toy_tokenizer(), "{{ messages }}")},
    "keywords": lambda: {"chat": ChatTemplate(make_toy_tokenizer(), keywords={"a": 1})},
    "max_length": lambda: {"max_length": 99},
    "positions": lambda: {"positions": 50},
    "history": lambda: {"history": "last"},
    "weights": lambda: {"weights": [1, 0.6]},
    "no weights": lambda: {"weights": []},
    "limit": lambda: {"limit": 70},
    "seed": lambda: {"seed": 1},
    "vocab_size": lambda: {"vocab_size": 98},
}


@pytest.mark.parametrize("part", CHANGES)
def test_a_part_that_samples_depend_on_changes_the_key(preparation: Preparation, part: str) -> None:
    assert identify(replace(preparation, **CHANGES[part]())).key != identify(preparation).key


def test_nothing_else_changes_the_key(preparation: Preparation, tmp_path: Path) -> None:
    same = replace(preparation, strict=True, workers=7, positions=1000, prefix="data.", streaming=True)
    assert identify(same) == identify(replace(preparation, chat=ChatTemplate(make_toy_tokenizer())))
    moved = [tmp_path / "elsewhere.jsonl", tmp_path / "two.jsonl"]
    (tmp_path / "one.jsonl").rename(moved[0])
    os.utime(moved[1], (1, 1))
    assert identify(replace(preparation, sources=list(map(str, moved)))) == identify(same_content(preparation, moved))
    whole = replace(preparation, sources=list(map(str, moved)), weights=[1, 2])
    assert identify(whole) == identify(replace(whole, seed=5)), "nothing is drawn"


def same_content(preparation: Preparation, paths: list[Path]) -> Preparation:
    """The same bytes under the names that they had before."""
    for name, path in zip(preparation.sources, paths, strict=True):
        Path(name).write_bytes(path.read_bytes())
    return preparation


def test_the_date_counts_where_the_template_prints_it(preparation: Preparation) -> None:
    for text, differs in ((DATED, True), ("", False)):
        keys = {
            identify(replace(preparation, chat=ChatTemplate(make_toy_tokenizer(), text, date=day))).key
            for day in ("2026-01-01", "2026-01-02")
        }
        assert len(keys) == (2 if differs else 1)


def test_a_byte_of_the_data_changes_the_key(preparation: Preparation) -> None:
    before = identify(preparation)
    path = Path(preparation.sources[1])
    path.write_bytes(path.read_bytes().replace(b"two", b"six", 1))
    assert identify(preparation).key != before.key and identify(preparation).rows == before.rows == 80
    assert identify(replace(preparation, limit=7)).rows == 7
    assert identify(replace(preparation, sources=preparation.sources[::-1])).key != identify(preparation).key


def test_the_files_of_a_folder_count_with_their_names(preparation: Preparation, tmp_path: Path) -> None:
    folder = replace(preparation, sources=[str(tmp_path)], weights=[])
    before = identify(folder).key
    (tmp_path / "notes.txt").write_text("no data")
    assert identify(folder).key == before
    (tmp_path / "two.jsonl").rename(tmp_path / "three.jsonl")
    assert identify(folder).key != before


def test_the_code_counts(preparation: Preparation, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("data", "target"):
        shutil.copytree(files.PACKAGE / name, tmp_path / "package" / name)
    monkeypatch.setattr(settings, "code_version", settings.code_version.__wrapped__)  # not cached
    before = identify(preparation).key
    monkeypatch.setattr(settings, "PACKAGE", tmp_path / "package")
    assert identify(preparation).key == before
    for name in ("data/encode", "data/sources", "data/preparation/row_encoder", "target/chat_template"):
        with (tmp_path / "package" / f"{name}.py").open("a") as file:
            file.write("#\n")
        assert identify(preparation).key != before
        before = identify(preparation).key


def test_a_hub_dataset_counts_with_its_contents(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    (tmp_path / "chats").mkdir()
    file = tmp_path / "chats" / "train.jsonl"
    file.write_text('{"prompt": "a", "response": "b"}\n')
    hub = Preparation([f"hf:{tmp_path / 'chats'}"], ChatTemplate(make_toy_tokenizer()), 100)
    before = identify(hub).key
    assert identify(hub).key == before
    assert identify(replace(hub, sources=[f"{hub.sources[0]}:test"])).key != before
    file.write_text('{"prompt": "a", "response": "c"}\n')
    os.utime(file, (1, 1))
    assert identify(hub).key != before
    with pytest.raises(UserError, match=r"dataset hf:.*absent cannot be loaded"):
        identify(replace(hub, sources=[f"hf:{tmp_path / 'absent'}"]))


def test_a_source_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"cannot read .*none\.jsonl: no such file"):
        identify(Preparation([str(tmp_path / "none.jsonl")], ChatTemplate(make_toy_tokenizer()), 100))


# ------------------------------------------------------------------------------------------------ weights


def counted(preparation: Preparation) -> list[list[int]]:
    """How often each row of each source is seen; rows never seen are left out."""
    repeats: list[list[int]] = [[] for _ in preparation.sources]
    for task in preparation.tasks():
        repeats[task.source].append(task.repeats)
    return repeats


def test_weights_say_how_often_a_row_is_seen(preparation: Preparation) -> None:
    assert counted(replace(preparation, weights=[])) == [[1] * 40, [1] * 40]
    assert counted(replace(preparation, weights=[2, 3])) == [[2] * 40, [3] * 40]
    first, second = counted(replace(preparation, weights=[0.5, 1.5]))
    assert set(first) == {1} and 10 < len(first) < 30
    assert set(second) == {1, 2} and len(second) == 40 and 50 < sum(second) < 70


@pytest.mark.parametrize("weight", [-1, 1000.5, 1e308, float("inf"), float("nan")])
def test_a_weight_that_no_table_holds_is_refused(preparation: Preparation, weight: float) -> None:
    with pytest.raises(UserError, match="weights: each must be from 0 to 1000, got"):
        replace(preparation, weights=[1, weight])


def test_a_source_is_needed(preparation: Preparation) -> None:
    with pytest.raises(UserError, match="no source of conversations is given"):
        replace(preparation, sources=[], weights=[])


def test_the_share_is_drawn_from_the_seed(preparation: Preparation) -> None:
    def rows(seed: int) -> list[int]:
        return [task.number for task in replace(preparation, weights=[0.5, 0.5], seed=seed).tasks()]

    assert rows(0) == rows(0) != rows(1)
    one, two = ([n % 40 for n in rows(0) if (n >= 40) == second] for second in (False, True))
    assert one != two, "each source has its own draw"


def test_the_limit_is_of_rows_over_all_sources(preparation: Preparation) -> None:
    tasks = list(replace(preparation, limit=50, weights=[]).tasks())
    assert [task.number for task in tasks] == list(range(50)) and tasks[-1].row.where.endswith("two.jsonl line 10")
    assert len(list(replace(preparation, limit=40, weights=[]).tasks())) == 40


def test_each_source_has_a_weight(preparation: Preparation) -> None:
    with pytest.raises(UserError, match=r"option data.weights: 1 values for 2 sources; give one for each, or none"):
        replace(preparation, weights=[1], prefix="data.")


def test_the_cache_is_beside_the_converted_targets_unless_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SPECHEAD_PREPARED", str(tmp_path / "here"))
    assert prepared_cache() == tmp_path / "here"
    monkeypatch.delenv("SPECHEAD_PREPARED")
    monkeypatch.setenv("SPECHEAD_CACHE", str(tmp_path))
    assert prepared_cache() == tmp_path / "prepared"
