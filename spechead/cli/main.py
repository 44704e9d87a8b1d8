"""`spechead COMMAND`: the table of commands, and how a command ends.

A command's module is imported when it runs, so that `spechead --help` answers at once.
"""

import contextlib
import difflib
import errno
import importlib
import os
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, get_type_hints

from spechead import __version__, files
from spechead.errors import EXTRAS, UserError, first_line


@dataclass(frozen=True)
class Command:
    """A function of a module of spechead, whose first parameter is the command's dataclass of options."""

    module: str
    function: str
    help: str  # its line in the table
    positional: bool = False  # required options are bare words
    short_out: bool = False  # -o is --out


COMMANDS = {
    "train": Command("training.train", "train", "train a head from a recipe; the same command resumes"),
    "eval": Command("evaluation.evaluate", "evaluate", "measure acceptance, speed-up and losslessness"),
    "generate": Command("cli.generate", "stream_answer", "stream an answer, accepted drafts coloured by depth"),
    "data synthesize": Command(
        "data.synthesis.synthesize", "synthesize", "let the target write training conversations", short_out=True
    ),
    "data regenerate": Command(
        "data.synthesis.regenerate", "regenerate", "let the target answer the prompts of any data set", True, True
    ),
    "data prepare": Command(
        "data.preparation.prepare", "prepare_data", "tokenise conversations once, for training to read", True, True
    ),
    "data inspect": Command("data.inspect", "inspect", "show a file's supervised spans, and what is dropped", True),
    "extract-head": Command(
        "training.extract_head", "extract_head", "extract a head from any checkpoint of a run", True, True
    ),
    "export": Command(
        "formats.export", "export", "write a head in the format of vLLM, SGLang, llama.cpp and others", short_out=True
    ),
    "import": Command(
        "formats.import_head", "import_head", "convert a published head of another project or server", True, True
    ),
    "check": Command("formats.check", "check", "check an exported head: names, shapes, settings, drafts", True),
    "push": Command("formats.push", "push", "upload an exported head to the Hugging Face hub, privately", True),
    "search-layers": Command(
        "evaluation.search_layers", "search", "find layers that a target may skip when it drafts for itself"
    ),
    "tune": Command("evaluation.tune", "tune", "choose the tree with which a head drafts fastest here"),
    "summary": Command("evaluation.summary", "summary", "show a run's figures, its files and what to try next", True),
}


def run(name: str, argv: Sequence[str]) -> None:
    """Parse a command's options and call its function."""
    command, prog = COMMANDS[name], f"spechead {name}"
    options: Any
    if name == "train":  # a recipe's options come from a file, too, and are checked before torch is imported
        options = importlib.import_module("spechead.training.recipe").Recipe.from_cli(list(argv), prog)
    function = getattr(importlib.import_module(f"spechead.{command.module}"), command.function)
    if name != "train":
        from spechead.options import parse

        words = ["--out" if command.short_out and word == "-o" else word for word in argv]
        options = parse(get_type_hints(function)["options"], words, prog, positional=command.positional)
    function(options)


def main(argv: Sequence[str] | None = None) -> None:
    """Run one command. Exit codes: 0, 2 for a mistake of the user, 130 when interrupted."""
    words = list(sys.argv[1:] if argv is None else argv)
    with one_line_errors():
        if words[:1] == ["--version"]:
            print(f"spechead {__version__}")
            return
        for name in COMMANDS:
            length = len(name.split())
            if " ".join(words[:length]) == name:
                return run(name, words[length:])
        if not words or {"-h", "--help"} & set(words):
            print(usage(words[:1]))
            return
        raise UserError(unknown_command(words))


def usage(group: Sequence[str] = ()) -> str:
    """The table of commands; with a group such as data, only its own."""
    shown = [name for name in COMMANDS if name.split()[:1] == list(group)] or list(COMMANDS)
    return "\n".join(
        [
            "usage: spechead COMMAND [options]",
            "",
            *(f"  {name:<18}{COMMANDS[name].help}" for name in shown),
            "",
            "spechead COMMAND --help lists its options; in their names - and _ are the same.",
        ]
    )


def unknown_command(words: Sequence[str]) -> str:
    """Name the command that does not exist, and the nearest that does."""
    group = [name for name in COMMANDS if name.split()[0] == words[0]]
    typed = " ".join(words[: 2 if group else 1])
    close = difflib.get_close_matches(typed, COMMANDS, n=1, cutoff=0.5)
    hint = f"did you mean {close[0]}?" if close else "spechead --help lists them"
    return f"unknown command {typed} ({hint})"


@contextlib.contextmanager
def one_line_errors() -> Iterator[None]:
    """End the program with one line, not a traceback, for a mistake of the user or a failure of the machine."""
    try:
        yield
    except UserError as error:
        fail(str(error))
    except ModuleNotFoundError as error:
        if error.name not in EXTRAS:
            raise
        fail(first_line(error))
    except KeyboardInterrupt:
        fail("interrupted", code=130)
    except BrokenPipeError:
        # The reader has closed the pipe; flushing stdout at exit would raise once more.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(141)
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EACCES, errno.EPERM, errno.EROFS):
            raise
        fail(f"cannot write {error.filename or 'output'}: {files.reason(error)}")


def fail(message: str, code: int = 2) -> None:
    """Print the message and exit. Of the processes of a torchrun job only the first should print: the others wait
    for torchrun to end them, and print if it does not, as when they alone have failed."""
    if os.environ.get("RANK", "0") != "0":
        time.sleep(3)
    print(f"spechead: error: {message}" if code == 2 else f"spechead: {message}", file=sys.stderr)
    sys.exit(code)
