"""The shape of the package: who may import whom, how large folders and functions are, and where its tests are."""

from __future__ import annotations

import ast
import functools
import re
import subprocess
import sys
import tomllib
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

import spechead
from spechead.errors import EXTRAS

PACKAGE = Path(spechead.__file__).parent
TESTS = Path(__file__).parent
MODULES = {".".join(p.relative_to(PACKAGE).with_suffix("").parts): p for p in PACKAGE.rglob("*.py")}
FOLDERS = {path.parent for path in MODULES.values()}

# Lowest first. A folder imports those before it and the ones beside it.
ORDER = [
    {"errors"},
    {"files", "options", "metrics", "pool", "progress"},
    {"target"},
    {"decoding", "drafters"},
    {"heads", "data"},
    {"training"},
    {"evaluation", "formats"},
    {"cli"},
    {"__main__"},
]
LEVEL = {name: level for level, names in enumerate(ORDER) for name in names}

# Modules that have no test file of their own, with the reason. Everything else has tests/FOLDER/test_MODULE*.py.
ELSEWHERE = {
    "__init__": "test_structure.py and test_pages.py use the public names",
    "__main__": "test_structure.py runs it",
}
OF_NO_MODULE = {"test_docs", "test_package", "test_pages", "test_structure"}

# When a library renames an argument, these are the files that change.
EDGES = {
    "transformers": {f"target.{name}" for name in ("loading", "model", "rotary", "bundled", "cache", "attention")},
    "peft": {"target.adapter"},
    "gguf": {"formats.gguf_file", "target.bundled"},
    "datasets": {"data.sources"},
    "deepspeed": {"training.engine", "training.distributed"},
    "huggingface_hub": {"formats.card", "formats.push"},
    "wandb": {"training.log"},
    "safetensors": {"heads.files"},
    "matplotlib": {"training.log", "evaluation.plots"},
    "httpx": {"data.synthesis.server"},
    "jsonargparse": {"options"},
    "yaml": {"options"},
}


@functools.cache
def imports(path: Path) -> list[str]:
    """The dotted names that a file imports, wherever in it."""
    names: list[str] = []
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names += (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: imports are absolute"
            names += [str(node.module), *(f"{node.module}.{alias.name}" for alias in node.names)]
    return names


def own(path: Path) -> set[str]:
    """The modules of this package that a file imports."""
    names = {name.removeprefix("spechead.") for name in imports(path) if name.startswith("spechead.")}
    return {name for name in names if name in MODULES} | {f"{n}.__init__" for n in names if f"{n}.__init__" in MODULES}


def folder_of(module: str) -> str:
    return module.partition(".")[0]


@pytest.mark.parametrize("module", sorted(set(MODULES) - {"__init__"}))
def test_no_folder_imports_one_above_it(module: str) -> None:
    level = LEVEL[folder_of(module)]
    assert [name for name in own(MODULES[module]) if LEVEL[folder_of(name)] > level] == []


def test_no_modules_import_each_other_in_a_circle() -> None:
    files = {name: {m for m in own(path) if not m.endswith("__init__")} for name, path in MODULES.items()}
    assert len(list(TopologicalSorter(files).static_order())) == len(files)  # raises CycleError


@pytest.mark.parametrize("library", EDGES)
def test_a_library_is_imported_by_its_edge_alone(library: str) -> None:
    users = {name for name, path in MODULES.items() if library in {n.partition(".")[0] for n in imports(path)}}
    assert users == EDGES[library]


@pytest.mark.parametrize("library", EDGES)
def test_the_document_names_the_edges(library: str) -> None:
    text = (TESTS.parent / "docs" / "architecture.md").read_text(encoding="utf-8")
    rows = [line.split("|")[1:3] for line in text.partition("| library | edge |")[2].splitlines() if line[:1] == "|"]
    [files] = [files for libraries, files in rows if library in re.split(r"[ ,]+", libraries)]
    assert {name.replace("/", ".") for name in re.findall(r"`([\w/]+)\.py`", files)} == EDGES[library]


@pytest.mark.parametrize("folder", sorted(FOLDERS), ids=lambda path: path.name)
def test_a_folder_fits_a_glance(folder: Path) -> None:
    assert len(list(folder.glob("*.py"))) <= (12 if folder == PACKAGE else 15)


@pytest.mark.parametrize("module", sorted(MODULES))
def test_a_function_fits_a_screen(module: str) -> None:
    for node in ast.walk(ast.parse(MODULES[module].read_text(encoding="utf-8"))):
        if isinstance(node, ast.FunctionDef):
            assert (node.end_lineno or 0) - node.lineno < 60, node.name


def test_a_decoding_step_is_five_calls() -> None:
    tree = ast.parse(MODULES["decoding.generate"].read_text(encoding="utf-8"))
    [loop] = [node for node in ast.walk(tree) if isinstance(node, ast.While)]
    calls = [node.func for part in loop.body for node in ast.walk(part) if isinstance(node, ast.Call)]
    names = [call.attr for call in calls if isinstance(call, ast.Attribute)]
    assert names == ["propose", "verify", "accept", "keep", "commit"] and len(calls) == 5


# ------------------------------------------------------------------------------------------------ tests


def own_tests(module: str) -> list[Path]:
    folder, _, name = module.rpartition(".")
    folder = folder.replace(".", "/")
    return [*(TESTS / folder).glob(f"test_{name}.py"), *(TESTS / folder).glob(f"test_{name}_*.py")]


def test_a_module_has_its_test_file() -> None:
    without = {name for name in MODULES if not own_tests(name) and not name.endswith(".__init__")}
    assert without == set(ELSEWHERE)


def test_a_test_file_is_of_a_module() -> None:
    mirrored = {path for name in MODULES for path in own_tests(name)}
    folders = {TESTS / folder.relative_to(PACKAGE) for folder in FOLDERS}
    files = {path for folder in folders for path in folder.glob("test_*.py")}
    assert {path.stem for path in files - mirrored} == OF_NO_MODULE


# ------------------------------------------------------------------------------------------------ public names


def test_the_public_names_are_those_that_type_checkers_see() -> None:
    tree = ast.parse((PACKAGE / "__init__.py").read_text(encoding="utf-8"))
    shown = {
        alias.asname: f"{node.module}".removeprefix("spechead.")
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and f"{node.module}".startswith("spechead.")
        for alias in node.names
    }
    assert shown == spechead._MODULES
    for name in spechead.__all__:
        assert getattr(spechead, name).__name__ == name
    assert set(spechead.__all__) <= set(dir(spechead))
    with pytest.raises(AttributeError, match="has no attribute 'tree'"):
        _ = spechead.tree  # type: ignore[attr-defined]


# ------------------------------------------------------------------------------------------------ libraries


def distribution(requirement: str) -> str:
    """`jsonargparse[signatures]>=4.49` -> jsonargparse"""
    return re.split(r"[\[<>=]", requirement)[0].replace("-", "_").lower()


def test_every_library_is_declared() -> None:
    project = tomllib.loads((TESTS.parent / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = project["optional-dependencies"]
    wanted = [*project["dependencies"], *extras["train"], *extras["gguf"]]
    declared = {distribution(requirement) for requirement in wanted}
    used = {name.partition(".")[0] for path in MODULES.values() for name in imports(path)}
    used = {{"yaml": "pyyaml"}.get(name, name) for name in used - sys.stdlib_module_names - {"spechead"}}
    assert used == declared
    optional = {distribution(requirement): extra for extra in ("train", "gguf") for requirement in extras[extra]}
    assert optional == EXTRAS


HIDE = """
from importlib.machinery import PathFinder
find = PathFinder.find_spec
def find_others(name, path=None, target=None):
    return None if name.partition(".")[0] in {hidden!r} else find(name, path, target)
PathFinder.find_spec = staticmethod(find_others)
"""


def python(code: str, hidden: set[str]) -> str:
    """Run `code` where the `hidden` libraries seem not to be installed; what it printed."""
    done = subprocess.run(
        [sys.executable, "-c", HIDE.format(hidden=hidden) + code],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_import_and_help_load_nothing_heavy() -> None:
    heavy = {*EDGES, "torch", "numpy", "rich"}
    out = python("from spechead.cli.main import main; main(['--help'])", heavy)
    assert "usage: spechead COMMAND" in out
    assert python("import spechead; print(spechead.__version__)", heavy) == f"{spechead.__version__}\n"
    version = "import runpy, sys; sys.argv = ['', '--version']; runpy.run_module('spechead', run_name='__main__')"
    assert python(version, heavy) == f"spechead {spechead.__version__}\n"


def test_help_of_a_recipe_needs_no_torch() -> None:
    out = python("from spechead.cli.main import main; main(['train', '--help'])", {"torch", "transformers"})
    assert "--optim.lr" in out


def test_decoding_and_measuring_need_no_training_library() -> None:
    modules = (
        "cli.generate",
        "evaluation.evaluate",
        "data.synthesis.synthesize",
        "data.synthesis.regenerate",
        "data.inspect",
    )
    code = "; ".join(f"import spechead.{module}" for module in modules)
    assert python(f"{code}; print('fine')", {"deepspeed", "wandb", "peft", "datasets", "gguf"}) == "fine\n"
