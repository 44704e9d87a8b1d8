"""README.md and docs/: their links resolve, their commands parse, and their Python runs."""

from __future__ import annotations

import importlib
import re
import shlex
from functools import wraps
from pathlib import Path
from typing import get_type_hints

import pytest

from spechead.cli.main import COMMANDS, run
from spechead.options import leaf_types
from tests.helpers.targets import make_target
from tests.helpers.training import write_tiny

ROOT = Path(__file__).parents[1]
PAGES = {str(path.relative_to(ROOT)): path for path in sorted([*ROOT.glob("*.md"), *ROOT.glob("*/*.md")])}


def text_of(name: str) -> str:
    return PAGES[name].read_text(encoding="utf-8")


def anchors(path: Path) -> set[str]:
    """The fragments by which the headings of a page are linked."""
    headings = re.findall(r"^#+ (.+)$", path.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


def blocks(name: str, language: str = "") -> list[str]:
    """The fenced blocks of a page in one language."""
    fences = re.findall(r"^```(\w*)\n(.*?)^```$", text_of(name), re.DOTALL | re.MULTILINE)
    return [block for marked, block in fences if marked == language]


@pytest.mark.parametrize("name", PAGES)
def test_links_resolve(name: str) -> None:
    for link in re.findall(r"\]\(([^)\s]+)\)", text_of(name)):
        path, _, anchor = link.partition("#")
        if path.startswith("https://"):
            continue
        target = (PAGES[name].parent / path).resolve() if path else PAGES[name]
        assert target.exists(), link
        assert not anchor or anchor in anchors(target), link


def test_the_index_names_every_page() -> None:
    pages = {path.name for path in (ROOT / "docs").glob("*.md")} - {"index.md"}
    assert set(re.findall(r"\]\((\w[\w-]*\.md)\)", text_of("docs/index.md"))) >= pages


# ------------------------------------------------------------------------------------------------ commands


def command_of(words: list[str]) -> tuple[str, list[str]]:
    """`torchrun ... -m spechead data inspect FILE` -> "data inspect" and its arguments."""
    words = words[words.index("spechead") + 1 :]
    length = 2 if words[0] == "data" else 1
    return " ".join(words[:length]), words[length:]


@pytest.mark.parametrize("name", sorted(set(PAGES) - {"docs/add-a-head.md"}))  # test_docs.py registers its head
def test_commands_parse(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    lines = [line for block in blocks(name) for line in block.replace("\\\n", " ").splitlines()]
    for words in (shlex.split(line, comments=True) for line in lines if re.search(r"(^|-m |\d )spechead ", line)):
        command, argv = command_of(words)
        place = COMMANDS[command]
        module = importlib.import_module(f"spechead.{place.module}")
        monkeypatch.setattr(module, place.function, wraps(getattr(module, place.function))(lambda options: None))
        run(command, argv)


@pytest.mark.parametrize("name", PAGES)
def test_options_in_the_text_exist(name: str) -> None:
    for line in re.findall(r"`spechead ([^`\n]+)`", text_of(name)):
        command, argv = command_of(["spechead", *line.split()])
        if command == "COMMAND":
            continue
        function = getattr(importlib.import_module(f"spechead.{COMMANDS[command].module}"), COMMANDS[command].function)
        options = next(iter(get_type_hints(function).values()))
        known = {*leaf_types(options), "config", "help"}
        flags = {word[2:].replace("-", "_") for word in argv if word.startswith("--")}
        assert flags <= known, line


# ------------------------------------------------------------------------------------------------ Python


SMALL_RECIPE = """
target: {{name: {0}/target}}
data: {{train: {0}/data.jsonl, validation_share: 0.2}}
head: {{kind: eagle3, options: {{steps: 2, draft_vocab_size: 64}}, tree: "chain:2"}}
optim: {{lr: 0.003}}
engine: {{precision: float32}}
log: {{validate_every: 0}}
"""


def run_page(name: str, replaced: dict[str, str]) -> None:
    """Run the Python of a page, block after block, with some of its names replaced."""
    namespace: dict[str, object] = {}
    for block in blocks(name, "python"):
        for old, new in replaced.items():
            block = block.replace(old, new)
        exec(compile(block, name, "exec"), namespace)


def test_the_python_pages_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a tiny target and for a few steps."""
    write_tiny(tmp_path)
    roomy = make_target("llama")
    roomy.model.config.max_position_embeddings = 4096  # the prompts are long in characters
    roomy.model.save_pretrained(tmp_path / "target")
    (tmp_path / "small.yaml").write_text(SMALL_RECIPE.format(tmp_path))
    monkeypatch.chdir(tmp_path)
    replaced = {
        '"smollm2-135m"': repr(f"{tmp_path}/target"),
        '"eagle3-smollm2"': repr("small.yaml"),
        '"200"': repr("4"),
        "runs/eagle3-smollm2/head": "runs/notebook/head",
    }
    run_page("docs/python.md", replaced)
    run_page("README.md", replaced)
    assert (tmp_path / "runs/notebook/eval/report.html").is_file()


@pytest.mark.slow
def test_the_python_page_runs_as_it_stands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    run_page("docs/python.md", {})
