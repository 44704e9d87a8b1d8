"""The one exception that stands for a mistake of the user. Knows nothing of where it is printed."""


class UserError(Exception):
    """A mistake of the user: printed as one or two lines naming option, value and remedy; exit code 2."""
