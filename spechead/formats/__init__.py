"""File formats of heads: `native`, and one file for each foreign format."""
