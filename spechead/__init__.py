"""Train, measure and export speculative decoding heads.

The names below are the public API (docs/python.md). They are imported on first use, so that `import spechead` itself
loads no library.
"""

from importlib import import_module
from typing import TYPE_CHECKING

__version__ = "0.2.0"

_MODULES = {
    "EvalOptions": "evaluation.evaluate",
    "Sampler": "decoding.sampling",
    "Speculation": "decoding.generate",
    "Target": "target.model",
    "evaluate": "evaluation.evaluate",
    "generate": "decoding.generate",
    "generate_batch": "decoding.generate",
    "load_head": "heads.files",
    "load_recipe": "training.recipe",
    "parse_tree": "decoding.tree",
    "prompt_ids": "target.chat_template",
    "train": "training.train",
}
__all__ = list(_MODULES)

if TYPE_CHECKING:
    from spechead.decoding.generate import Speculation as Speculation
    from spechead.decoding.generate import generate as generate
    from spechead.decoding.generate import generate_batch as generate_batch
    from spechead.decoding.sampling import Sampler as Sampler
    from spechead.decoding.tree import parse_tree as parse_tree
    from spechead.evaluation.evaluate import EvalOptions as EvalOptions
    from spechead.evaluation.evaluate import evaluate as evaluate
    from spechead.heads.files import load_head as load_head
    from spechead.target.chat_template import prompt_ids as prompt_ids
    from spechead.target.model import Target as Target
    from spechead.training.recipe import load_recipe as load_recipe
    from spechead.training.train import train as train
else:

    def __getattr__(name: str) -> object:
        if name not in _MODULES:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        return getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)

    def __dir__() -> list[str]:
        return sorted([*globals(), *__all__])
