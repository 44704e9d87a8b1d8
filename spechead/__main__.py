"""`python -m spechead COMMAND`, also under `torchrun -m`."""

from spechead.cli.main import main

if __name__ == "__main__":
    main()
