"""Which settings are worth having: train variants of a recipe for the same number of steps and compare their drafts.

    python eval/ablate.py --steps 500 --out eval/results/ablation.json

Every variant changes `BASE` in one place and sees the same samples in the same order. The number compared is the
acceptance length of a chain of `DEPTHS` that the held-out samples imply, however many steps a variant unrolls. OUT is
written behind every variant; started again, variants that it holds are not trained again.
"""

from __future__ import annotations

import argparse
import shutil
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch.nn.functional import pad

from spechead.cli.main import one_line_errors
from spechead.data.dataset import Sample
from spechead.decoding.tree import chain
from spechead.errors import UserError
from spechead.evaluation.measure import describe_machine
from spechead.files import read_json, write_json
from spechead.target.loading import choose_device
from spechead.training.engine import start
from spechead.training.feature_cache import FeatureCache
from spechead.training.recipe import load_recipe
from spechead.training.train import fit, set_up, validate

# spelled out, so that results stay comparable when the recipe moves
BASE = [
    *("--optim.lr", "1e-3", "--optim.betas", "[0.9,0.999]", "--optim.epochs", "3"),
    *("--head.options.layers", "[2,15,29]", "--head.options.steps", "3", "--head.options.step_decay", "0.8"),
    *("--head.options.draft_vocab_size", "8192", "--data.validation_share", "0.05"),
    *("--log.validate_every", "0", "--log.checkpoint_every", "1000000"),
]
UNSHIFTED = "loss mask not shifted with the labels"
VARIANTS: dict[str, list[str]] = {
    "the base": [],
    "random initialisation": ["--head.init_from_target", "false"],
    "half the rate": ["--optim.lr", "5e-4"],
    "twice the rate": ["--optim.lr", "2e-3"],
    "a shorter second moment": ["--optim.betas", "[0.9,0.95]"],
    "four samples a step": ["--optim.batch_size", "4", "--optim.steps", "{quarter}"],
    "1 unrolled step": ["--head.options.steps", "1"],
    "2 unrolled steps": ["--head.options.steps", "2"],
    "5 unrolled steps": ["--head.options.steps", "5"],
    "taps 2, 15, 27": ["--head.options.layers", "[2,15,27]"],
    "taps 10, 20, 29": ["--head.options.layers", "[10,20,29]"],
    "draft vocabulary 4096": ["--head.options.draft_vocab_size", "4096"],
    "draft vocabulary 16384": ["--head.options.draft_vocab_size", "16384"],
    "whole vocabulary": ["--head.options.draft_vocab_size", "0"],
    "hard labels": ["--head.options.loss", "hard_ce"],
    "tv": ["--head.options.loss", "tv"],
    "lk_alpha": ["--head.options.loss", "lk_alpha"],
    "lk_lambda": ["--head.options.loss", "lk_lambda"],
    "lk_alpha, half the steps": ["--head.options.loss", "lk_alpha", "--optim.steps", "{half}"],
    UNSHIFTED: [],
}
DEPTHS = 3  # that all are judged by
MEMORY_GB = 6.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", default="eagle3-smollm2", help="recipe that the variants change")
    parser.add_argument("--steps", type=int, default=500, help="optimizer steps of one sample")
    parser.add_argument("--only", nargs="*", default=list(VARIANTS), choices=list(VARIANTS), help="variants to train")
    parser.add_argument("--out", type=Path, default=Path("runs/ablation.json"), help="JSON file to write")
    options = parser.parse_args()
    made = {"config": options.config, "steps": options.steps, "depths": DEPTHS, "base": BASE}
    results = earlier(options.out, made)
    memories: dict[str, FeatureCache] = {}
    for name in options.only:
        if name not in results:
            results[name] = run(options.config, options.steps, name, memories)
        machine = describe_machine(choose_device("auto"))
        write_json(options.out, made | {"machine": machine, "variants": results})
    width = max(map(len, results))
    for name, found in results.items():
        print(f"{name:<{width}}  {found['acceptance_length']:.3f} tokens per pass  {found['seconds']:.0f} s")


def earlier(out: Path, made: dict[str, Any]) -> dict[str, Any]:
    """The variants that OUT holds; refused where they were made otherwise."""
    if not out.is_file():
        return {}
    found = read_json(out)
    if any(found.get(key) != value for key, value in made.items()):
        raise UserError(
            f"out {out}: holds variants of another recipe, base, or number of steps or depths; choose another file"
        )
    for name, variant in found["variants"].items():
        if variant["flags"] != flags_of(name, made["steps"]):
            raise UserError(f"out {out}: its {name!r} was made with {variant['flags']}; choose another file")
    return dict(found["variants"])


def flags_of(name: str, steps: int) -> list[str]:
    return [word.format(quarter=steps // 4, half=steps // 2) for word in VARIANTS.get(name, [])]


def unshifted(sample: Sample) -> Sample:
    """The sample as EAGLE's code reads it: row t counts where token t is supervised, though it predicts token t+2."""
    return replace(sample, supervised=pad(sample.supervised, (2, 0))[:-2])


def run(config: str, steps: int, name: str, memories: dict[str, FeatureCache]) -> dict[str, Any]:
    """Train one variant in a scratch folder; the target's outputs are shared by variants with the same taps."""
    flags = flags_of(name, steps)
    scratch = Path(tempfile.mkdtemp())
    try:
        recipe = load_recipe(config, ["--optim.steps", str(steps), *BASE, *flags, "--out", str(scratch / "run")])
        memory = memories.setdefault(str(recipe.head.options.get("layers")), FeatureCache(MEMORY_GB))
        begin = time.monotonic()
        trained = set_up(recipe, start(choose_device(recipe.target.device)), memory)
        if name == UNSHIFTED:  # the draft vocabulary stays the base's
            trained.training = [unshifted(sample) for sample in trained.training]
        held_out, trained.validation = trained.validation, []  # it is asked once, at the depths of all
        fit(trained)
        trained.validation = held_out
        trained.head.tree = chain(DEPTHS)
        return validate(trained, steps) | {"flags": flags, "seconds": round(time.monotonic() - begin, 1)}
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


if __name__ == "__main__":
    with one_line_errors():
        main()
