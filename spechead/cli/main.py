"""`spechead COMMAND`: a literal table from name to function. Knows nothing of how a command does its work.

Each function imports what it needs, so that `spechead --help` answers at once.
"""

import contextlib
import difflib
import errno
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence

from spechead import __version__, files
from spechead.errors import UserError


def train(argv: list[str]) -> None:
    from spechead.training.recipe import Recipe

    recipe = Recipe.from_cli(argv, "spechead train")
    from spechead.training.train import train

    train(recipe)


def evaluate(argv: list[str]) -> None:
    from spechead.evaluation.evaluate import EvalOptions, evaluate
    from spechead.options import parse

    evaluate(parse(EvalOptions, argv, "spechead eval"))


def generate(argv: list[str]) -> None:
    from spechead.cli.generate import GenerateOptions, answer
    from spechead.options import parse

    answer(parse(GenerateOptions, argv, "spechead generate"))


def synthesize(argv: list[str]) -> None:
    from spechead.data.synthesis.synthesize import SynthesizeOptions, synthesize
    from spechead.options import parse

    synthesize(parse(SynthesizeOptions, argv, "spechead data synthesize"))


def inspect(argv: list[str]) -> None:
    from spechead.data.inspect import InspectOptions, inspect
    from spechead.options import parse

    inspect(parse(InspectOptions, argv, "spechead data inspect", positional=True))


def extract_head(argv: list[str]) -> None:
    from spechead.options import parse
    from spechead.training.extract_head import ExtractOptions, extract_head

    extract_head(parse(ExtractOptions, argv, "spechead extract-head", positional=True))


def export(argv: list[str]) -> None:
    from spechead.formats.export import ExportOptions, export
    from spechead.options import parse

    export(parse(ExportOptions, out_in_full(argv), "spechead export"))


def import_head(argv: list[str]) -> None:
    from spechead.formats.import_head import ImportOptions, import_head
    from spechead.options import parse

    import_head(parse(ImportOptions, out_in_full(argv), "spechead import", positional=True))


def check(argv: list[str]) -> None:
    from spechead.formats.check import CheckOptions, check
    from spechead.options import parse

    check(parse(CheckOptions, argv, "spechead check", positional=True))


def push(argv: list[str]) -> None:
    from spechead.formats.push import PushOptions, push
    from spechead.options import parse

    push(parse(PushOptions, argv, "spechead push", positional=True))


def out_in_full(argv: list[str]) -> list[str]:
    return ["--out" if word == "-o" else word for word in argv]


def search_layers(argv: list[str]) -> None:
    from spechead.evaluation.search_layers import SearchOptions, search
    from spechead.options import parse

    search(parse(SearchOptions, argv, "spechead search-layers"))


def tune(argv: list[str]) -> None:
    from spechead.evaluation.tune import TuneOptions, tune
    from spechead.options import parse

    tune(parse(TuneOptions, argv, "spechead tune"))


def summary(argv: list[str]) -> None:
    from spechead.evaluation.summary import SummaryOptions, summary
    from spechead.options import parse

    summary(parse(SummaryOptions, argv, "spechead summary", positional=True))


COMMANDS: dict[str, tuple[Callable[[list[str]], None], str]] = {
    "train": (train, "train a head as a recipe says; started again, it goes on where it was"),
    "eval": (evaluate, "measure acceptance, speed-up and losslessness on held-out prompts"),
    "generate": (generate, "stream an answer, with the accepted drafts coloured by depth"),
    "data synthesize": (synthesize, "let the target write conversations to train on"),
    "data inspect": (inspect, "show the supervised spans of a file, and what is dropped and why"),
    "extract-head": (extract_head, "make a head of a checkpoint, also of a run that did not end"),
    "export": (export, "write a head in the form of vLLM, SGLang, llama.cpp and others"),
    "import": (import_head, "make a head of files that another project or server loads"),
    "check": (check, "check an exported head: names, shapes, settings, and the drafts themselves"),
    "push": (push, "upload an exported head to the Hugging Face hub, privately unless told otherwise"),
    "search-layers": (search_layers, "find layers that a target may leave out when it drafts for itself"),
    "tune": (tune, "choose the tree with which a head drafts fastest on this machine"),
    "summary": (summary, "show a run's figures, its files and what to try next"),
}


def main(argv: Sequence[str] | None = None) -> None:
    """Run one command. Exit codes: 0, 2 for a mistake of the user, 130 when interrupted."""
    words = list(sys.argv[1:] if argv is None else argv)
    with one_line_errors():
        if words[:1] == ["--version"]:
            print(f"spechead {__version__}")
            return
        for name, (command, _) in COMMANDS.items():
            length = len(name.split())
            if " ".join(words[:length]) == name:
                return command(words[length:])
        if not words or {"-h", "--help"} & set(words):
            print(usage(words[:1]))
            return
        raise UserError(unknown_command(words))


def usage(group: Sequence[str] = ()) -> str:
    """The table of commands; with a group such as data, only its own."""
    shown = {n: text for n, (_, text) in COMMANDS.items() if n.split()[:1] == list(group)}
    shown = shown or {n: text for n, (_, text) in COMMANDS.items()}
    lines = [f"  {name:<18}{text}" for name, text in shown.items()]
    return "\n".join(
        [
            "usage: spechead COMMAND [options]",
            "",
            *lines,
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
    """End the program with one line, not a traceback, where the user or the machine is to blame."""
    try:
        yield
    except UserError as error:
        fail(str(error))
    except KeyboardInterrupt:
        fail("interrupted", code=130)
    except BrokenPipeError:
        # Whoever read us has left; writing again while Python closes stdout would complain once more.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(141)
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EACCES, errno.EPERM, errno.EROFS):
            raise
        fail(f"cannot write {error.filename or 'output'}: {files.reason(error)}")


def fail(message: str, code: int = 2) -> None:
    """Print the message and exit. Of the processes of a torchrun job only one should speak: the others wait
    for torchrun to end them, and speak if it does not, as when they alone have failed."""
    if os.environ.get("RANK", "0") != "0":
        time.sleep(3)
    print(f"spechead: error: {message}" if code == 2 else f"spechead: {message}", file=sys.stderr)
    sys.exit(code)
