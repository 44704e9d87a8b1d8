"""The exception for mistakes of the user, and one line of any other exception."""


class UserError(Exception):
    """A mistake of the user: printed as one or two lines naming option, value and remedy; exit code 2."""


def first_line(error: BaseException) -> str:
    """The first line of a library's exception, for the end of a `UserError`; its class where it has no message."""
    lines = str(error).strip().splitlines()
    return lines[0].rstrip() if lines else type(error).__name__
