"""Turn a dataclass into command-line flags, YAML keys and --help, and check the values of its options.

Types come from the fields, help from the docstring under each field, and limits from a `Range` in the annotation.
Every mistake becomes a UserError that names the option and, for a misspelt one, the nearest that exists.
"""

import dataclasses
import difflib
import json
import math
import re
import types
import typing
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeVar

import yaml
from jsonargparse import ArgumentError, ArgumentParser, set_parsing_settings

from spechead.errors import UserError
from spechead.files import reason

T = TypeVar("T")


@dataclasses.dataclass(frozen=True, repr=False)
class Range:
    """The values that a numeric option may have, given in its annotation: `decay: Annotated[float, Range(0)] = 0.8`.

    For a list it applies to each number. `least` and `most` are included, `above` and `below` are not.
    """

    least: float = -math.inf
    below: float = math.inf
    above: float = -math.inf
    most: float = math.inf

    def allows(self, value: Any) -> bool:
        number = isinstance(value, int | float) and not isinstance(value, bool)
        return number and self.least <= value <= self.most and self.above < value < self.below  # never NaN or infinity

    def __str__(self) -> str:
        low = f"above {self.above:.10g}" if self.above > -math.inf else f"at least {self.least:.10g}"
        if self.most < math.inf:
            return f"{low} and at most {self.most:.10g}"
        return f"{low} and below {self.below:.10g}" if self.below < math.inf else low

    __repr__ = __str__  # as --help shows it


def check_ranges(options: Any, prefix: str = "") -> None:
    """Raise UserError for the first option of a dataclass, or of a dataclass in it, that is outside its `Range`."""
    hints = typing.get_type_hints(type(options), include_extras=True)
    for field in dataclasses.fields(options):
        name, value = prefix + field.name, getattr(options, field.name)
        if dataclasses.is_dataclass(value):
            check_ranges(value, f"{name}.")
        values = value if isinstance(value, list | tuple) else [value]
        for limits in getattr(hints[field.name], "__metadata__", ()):
            if isinstance(limits, Range) and not all(map(limits.allows, values)):
                raise UserError(f"option {name}: must be {limits}, got {value}")


class Options:
    """Base of the dataclasses of a command's options: checked alike from the command line and from Python."""

    def __post_init__(self) -> None:
        check_ranges(self)


def parse(cls: type[T], argv: Sequence[str], prog: str, *, positional: bool = False, config: str | None = None) -> T:
    """Build `cls` from flags. `positional`: its required fields are bare words. `config`: the path of a YAML
    file whose values the flags override ("": the command has --config, but it was not given)."""
    set_parsing_settings(docstring_parse_attribute_docstrings=True)
    hints = leaf_types(cls)
    parser = ArgumentParser(prog=prog, exit_on_error=False, allow_abbrev=False)
    if config is not None:
        parser.add_argument("--config", action="config", help="YAML file with the values below; flags override it.")
    parser.add_class_arguments(cls, as_positional=positional)
    flags = normalise_flags(argv, hints)
    if positional:
        flags = join_words(flags, cls, hints)
    if config:
        refuse_unknown_keys(Path(config), hints)
        flags = ["--config", config, *flags]
    try:
        values = vars(parser.instantiate(parser.parse_args(flags)))
    except (ArgumentError, OverflowError, TypeError, ValueError) as error:
        raise UserError(readable(str(error), hints)) from error
    return cls(**{field.name: values[field.name] for field in dataclasses.fields(cls)})  # type: ignore[arg-type]


def convert(cls: type, values: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Convert `values` to the types of the fields of `cls` that they name; a UserError names the first that is
    not a field or has another type, after `prefix`."""
    hints = leaf_types(cls)
    parser = ArgumentParser(exit_on_error=False)
    for name in values:
        if name not in hints:
            raise UserError(f"unknown option {prefix}{name} (known: {', '.join(hints)})")
        parser.add_argument(f"--{name}", type=hints[name])
    try:
        return vars(parser.instantiate(parser.parse_object(values)))
    except (ArgumentError, OverflowError, TypeError, ValueError) as error:
        raise UserError(readable(str(error), hints).replace("option ", f"option {prefix}", 1)) from error


def leaf_types(cls: type, prefix: str = "") -> dict[str, Any]:
    """Map every dotted option name of a tree of dataclasses to its type."""
    hints = typing.get_type_hints(cls)
    leaves: dict[str, Any] = {}
    for field in dataclasses.fields(cls):
        name, hint = prefix + field.name, hints[field.name]
        if isinstance(hint, type) and dataclasses.is_dataclass(hint):
            leaves.update(leaf_types(hint, name + "."))
        else:
            leaves[name] = hint
    return leaves


def normalise_flags(argv: Sequence[str], hints: dict[str, Any]) -> list[str]:
    """Rewrite the usual spellings of flags to the one that the parser accepts.

    --max-new-tokens 5     ->  --max_new_tokens=5
    --flag                 ->  --flag=true        (a yes-or-no option not followed by true or false)
    --no-flag              ->  --flag=false
    --list a --list b      ->  --list=["a", "b"]  (a list given as [a,b] stays as it is)
    """
    flags: list[str] = []
    lists: dict[str, list[str]] = {}
    words = list(argv)
    while words:
        name, equals, value = words.pop(0).partition("=")
        if not name.startswith("--") or name == "--":
            flags.append(name + equals + value)
            continue
        name = name[2:].replace("-", "_")
        has_value = bool(equals) or (bool(words) and not words[0].startswith("--"))
        if hints.get(name) is bool and not equals and "".join(words[:1]).lower() not in ("true", "false"):
            value, has_value = "true", True
        elif name not in hints and hints.get(name.removeprefix("no_")) is bool and not equals:
            name, value, has_value = name.removeprefix("no_"), "false", True
        elif has_value and not equals and name in hints:
            value = words.pop(0)
        if name.endswith("+") and is_list(hints.get(name[:-1])):
            raise UserError(f"unknown option {name}: repeat --{name[:-1]} for several values")
        if name not in hints or not has_value:
            flags.append(f"--{name}{equals}{value}")  # for the parser to accept or refuse
        elif is_list(hints[name]) and not value.startswith("["):
            lists.setdefault(name, []).append(value)
        else:
            flags.append(f"--{name}={value}")
    return [*flags, *(f"--{name}={json.dumps(values)}" for name, values in lists.items())]


def join_words(flags: list[str], cls: type, hints: dict[str, Any]) -> list[str]:
    """All bare words as one JSON list, where the only required field of `cls` is a list."""
    missing = dataclasses.MISSING
    required = [f.name for f in dataclasses.fields(cls) if f.default is missing and f.default_factory is missing]
    words = [word for word in flags if not word.startswith("-")]
    if len(required) != 1 or not is_list(hints[required[0]]) or not words or words[0].startswith("["):
        return flags
    return [*(flag for flag in flags if flag.startswith("-")), json.dumps(words)]


def is_list(hint: Any) -> bool:
    """Whether an option takes any number of strings or numbers."""
    either = typing.get_origin(hint) in (typing.Union, types.UnionType)
    lists = (list[str], list[float], tuple[str, ...])
    return any(one in lists for one in (typing.get_args(hint) if either else [hint]))


def refuse_unknown_keys(path: Path, hints: dict[str, Any]) -> None:
    """Raise UserError for the first key of the YAML file that is no option. A key whose value is a free mapping may
    have any keys below it."""
    try:
        tree = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(f"cannot read {path}: {reason(error)}") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise UserError(f"{path} is not valid YAML: {' '.join(str(error).split())}") from error
    if not isinstance(tree, dict):
        raise UserError(f"{path}: contains no options, expected lines such as 'seed: 0'")

    def walk(node: dict[Any, Any], prefix: str) -> None:
        for key, value in node.items():
            name = f"{prefix}{key}"
            below = [known for known in hints if known.startswith(name + ".")]
            if name not in hints and not below:
                raise UserError(f"unknown key {name} in {path}{nearest(name, hints)}")
            if below and not isinstance(value, dict):
                raise UserError(f"key {name} in {path} must contain options: {', '.join(below)}")
            if below:
                walk(value, name + ".")

    walk(tree, "")


def nearest(name: str, hints: dict[str, Any]) -> str:
    """Suggest the existing option most similar to a misspelt one, else list those of its group."""
    close = difflib.get_close_matches(name, hints, n=1, cutoff=0.7)
    if close:
        return f" (did you mean {close[0]}?)"
    group = [known for known in hints if known.rpartition(".")[0] == name.rpartition(".")[0]]
    return f" (known: {', '.join(group)})" if group else ""


def readable(message: str, hints: dict[str, Any]) -> str:
    """Rewrite the parser's error message as one plain line."""
    message = " ".join(message.split())
    message = re.sub(r"<class '([\w.]+)'>", r"\1", message).replace("typing.", "")
    unknown = re.match(r"unrecognized arguments: (?:--)?([\w.+]+)", message)
    if unknown and unknown[1] not in hints:
        return f"unknown option {unknown[1]}{nearest(unknown[1], hints)}"
    message = re.sub(r'^Parser key "([^"]+)":\s*', r"option \1: ", message)
    message = re.sub(r"Literal\[([^]]*)\]", lambda m: "one of " + m[1].replace("'", ""), message)
    return re.sub(r"Expected an? (.+?)\. Got value: (.*)", r"expected \1, got \2", message)
