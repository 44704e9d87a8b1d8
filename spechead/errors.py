"""The exception for mistakes of the user, and one line of any other exception."""

EXTRAS = {
    "datasets": "train",
    "pyarrow": "train",
    "deepspeed": "train",
    "peft": "train",
    "wandb": "train",
    "gguf": "gguf",
}
"""The extra that installs a package, of those that `pip install spechead` leaves out."""


class UserError(Exception):
    """A mistake of the user: printed as one or two lines naming option, value and remedy; exit code 2."""


def first_line(error: BaseException) -> str:
    """The first line of a library's exception, for the end of a `UserError`; its class where it has no message.

    A missing package is followed by the extra that installs it.
    """
    lines = str(error).strip().splitlines()
    line = lines[0].rstrip() if lines else type(error).__name__
    extra = EXTRAS.get(error.name or "") if isinstance(error, ModuleNotFoundError) else None
    return f"{line}: pip install 'spechead[{extra}]'" if extra else line
