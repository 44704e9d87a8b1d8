"""Train a head: `torchrun --nproc_per_node N recipes/train.py --config eagle3-smollm2 [--a.b value]`.

The same as `torchrun --nproc_per_node N -m spechead train`, as a script.
"""

from spechead.cli.main import one_line_errors
from spechead.training.recipe import Recipe
from spechead.training.train import train

if __name__ == "__main__":
    with one_line_errors():
        train(Recipe.from_cli())
