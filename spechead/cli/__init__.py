"""The `spechead` command."""
