"""README.md and docs/: their links resolve, their commands parse, and their Python runs."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

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


def python_blocks(name: str) -> list[str]:
    return re.findall(r"```python\n(.*?)```", text_of(name), re.DOTALL)


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
    for block in python_blocks(name):
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
