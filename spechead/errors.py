"""The one exception that stands for a mistake of the user, and one line of any other. Knows nothing of where it is
printed."""


class UserError(Exception):
    """A mistake of the user: printed as one or two lines naming option, value and remedy; exit code 2."""


def first_line(error: BaseException) -> str:
    """The first line that another's exception says, for the end of a `UserError`; its class where it says nothing."""
    lines = str(error).strip().splitlines()
    return lines[0].rstrip() if lines else type(error).__name__
