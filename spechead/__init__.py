"""spechead trains speculative decoding heads, measures them and exports them.

Importing the package loads nothing heavy: each submodule brings its own libraries.
"""

__version__ = "0.2.0"
