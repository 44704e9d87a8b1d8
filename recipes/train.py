"""Train a head: `torchrun --nproc_per_node N recipes/train.py --config eagle3-smollm2 [--a.b value]`.

The same as `spechead train`, in a file that torchrun can start.
"""

from spechead.cli import one_line_errors
from spechead.recipe import Recipe
from spechead.train import train

if __name__ == "__main__":
    with one_line_errors():
        train(Recipe.from_cli())
