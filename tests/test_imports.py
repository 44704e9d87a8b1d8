"""Who may import whom: nobody upwards, and each third-party library in its own edge files."""

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import spechead

PACKAGE = Path(spechead.__file__).parent
MODULES = {".".join(p.relative_to(PACKAGE).with_suffix("").parts): p for p in PACKAGE.rglob("*.py")}

# When a library renames an argument, these are the files that change.
EDGES = {
    "transformers": {"target", "embedded", "cache", "attention"},
    "peft": {"adapter"},
    "gguf": {"formats.gguf_file"},
    "datasets": {"dataset"},
    "deepspeed": {"engine"},
    "huggingface_hub": {"push"},
    "wandb": {"log"},
    "safetensors": {"formats.native", "formats.folder"},
    "matplotlib": {"log", "plots"},
    "jsonargparse": {"options"},
    "yaml": {"options"},
}
# The lowest layer imports only itself, the middle one only itself and the lowest; the rest may import all
# but the command line.
LOWEST = {"__init__", "errors", "files", "tree", "verify", "sampling", "cache", "layers", "losses", "metrics"}
LOWEST |= {"chance", "attention", "packed", "stream", "options", "marks"}
MIDDLE = {"text", "adapter", "target", "embedded", "chat", "dataset", "generate", "log"}
MIDDLE |= {name for name in MODULES if name.partition(".")[0] in ("heads", "drafters", "formats")}


def imports(path: Path) -> Iterator[str]:
    """The dotted names that a file imports, wherever in it."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: imports are absolute"
            yield str(node.module)
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def own(path: Path) -> set[str]:
    """The modules of this package that a file imports."""
    names = {name.removeprefix("spechead.") for name in imports(path) if name.startswith("spechead.")}
    return {name for name in names if name in MODULES or f"{name}.__init__" in MODULES}


@pytest.mark.parametrize("library", EDGES)
def test_a_library_is_imported_by_its_edge_alone(library: str) -> None:
    users = {name for name, path in MODULES.items() if library in {n.partition(".")[0] for n in imports(path)}}
    assert users <= EDGES[library]


@pytest.mark.parametrize("library", EDGES)
def test_the_document_names_the_edges(library: str) -> None:
    text = (Path(__file__).parent.parent / "docs" / "architecture.md").read_text(encoding="utf-8")
    rows = [line.split("|")[1:3] for line in text.partition("| library | edge |")[2].splitlines() if line[:1] == "|"]
    [files] = [files for libraries, files in rows if library in re.split(r"[ ,]+", libraries)]
    assert {name.replace("/", ".") for name in re.findall(r"`([\w/]+)\.py`", files)} == EDGES[library]


@pytest.mark.parametrize("name", sorted(MODULES))
def test_nobody_imports_upwards(name: str) -> None:
    allowed = {m.removesuffix(".__init__") for m in MODULES} - {"cli"}
    if name in LOWEST:
        allowed = LOWEST
    elif name in MIDDLE:
        allowed = LOWEST | {m.removesuffix(".__init__") for m in MIDDLE}
    assert own(MODULES[name]) - allowed == set()


def test_the_layers_name_files_that_exist() -> None:
    assert (LOWEST | MIDDLE).union(*EDGES.values()) - set(MODULES) == set()


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
    out = python("import spechead.cli; spechead.cli.main(['--help'])", heavy)
    assert "usage: spechead COMMAND" in out
    assert python("import spechead; print(spechead.__version__)", heavy) == f"{spechead.__version__}\n"


def test_help_of_a_recipe_needs_no_torch() -> None:
    out = python("from spechead.cli import main; main(['train', '--help'])", {"torch", "transformers"})
    assert "--optim.lr" in out


def test_decoding_and_measuring_need_no_training_library() -> None:
    code = "import spechead.answer, spechead.evaluate, spechead.synthesize, spechead.inspect_data; print('fine')"
    assert python(code, {"deepspeed", "wandb", "peft", "datasets"}) == "fine\n"
