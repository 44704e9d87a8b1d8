"""Measure a head from a checkout: `python eval/run.py --head DIR`. The same function as `spechead eval`."""

import sys

from spechead.cli import main

if __name__ == "__main__":
    main(["eval", *sys.argv[1:]])
