"""Ablations: train variants of a recipe for the same number of steps and compare their acceptance lengths.

    python eval/ablate.py --steps 500 --out eval/results/ablation.json

Every variant changes `BASE` in one place and sees the same samples in the same order. The number compared is the
acceptance length of a chain of `DEPTHS` drafts on the held-out samples, however many steps a variant unrolls. OUT is
written after every variant; when started again, only the variants that it lacks are trained.
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
from spechead.files import difference, read_json, write_json
from spechead.target.loading import choose_device
from spechead.training.distributed import start
from spechead.training.module import FeatureCache
from spechead.training.recipe import load_recipe
from spechead.training.train import fit, set_up, validate

# Spelled out, so that results stay comparable when the recipe moves
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
DEPTHS = 3  # of the drafts that all variants are measured by
CACHE_GB = 6.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", default="eagle3-smollm2", help="recipe that the variants modify")
    parser.add_argument("--steps", type=int, default=500, help="optimizer steps of one sample")
    parser.add_argument("--only", nargs="*", default=list(VARIANTS), choices=list(VARIANTS), help="variants to train")
    parser.add_argument("--out", type=Path, default=Path("runs/ablation.json"), help="JSON file to write")
    options = parser.parse_args()
    settings = {"config": options.config, "steps": options.steps, "depths": DEPTHS, "base": BASE}
    results = earlier_results(options.out, settings)
    caches: dict[str, FeatureCache] = {}
    for name in options.only:
        if name not in results:
            results[name] = run(options.config, options.steps, name, caches)
        machine = describe_machine(choose_device("auto"))
        write_json(options.out, settings | {"machine": machine, "variants": results})
    width = max(map(len, results))
    for name, result in results.items():
        print(f"{name:<{width}}  {result['acceptance_length']:.3f} tokens per pass  {result['seconds']:.0f} s")


def earlier_results(out: Path, settings: dict[str, Any]) -> dict[str, Any]:
    """The variants in OUT. Raises UserError if they were trained with other settings."""
    if not out.is_file():
        return {}
    earlier = read_json(out)
    variants = dict(earlier["variants"])
    now = settings | {name: {"flags": flags_of(name, settings["steps"])} for name in variants}
    before = {name: earlier.get(name) for name in settings} | {n: {"flags": v["flags"]} for n, v in variants.items()}
    changed = difference(now, before)
    if changed is not None:
        name, value, earlier_value = changed
        raise UserError(
            f"option out: {out} has variants with {name} = {earlier_value!r}, now {value!r}: choose another file"
        )
    return variants


def flags_of(name: str, steps: int) -> list[str]:
    return [word.format(quarter=steps // 4, half=steps // 2) for word in VARIANTS.get(name, [])]


def unshifted(sample: Sample) -> Sample:
    """The sample as EAGLE's code reads it: row t counts where token t is supervised, though it predicts token t+2."""
    return replace(sample, supervised=pad(sample.supervised, (2, 0))[:-2])


def run(config: str, steps: int, name: str, caches: dict[str, FeatureCache]) -> dict[str, Any]:
    """Train one variant in a temporary folder; variants with the same taps share the target's outputs."""
    flags = flags_of(name, steps)
    scratch = Path(tempfile.mkdtemp())
    try:
        recipe = load_recipe(config, ["--optim.steps", str(steps), *BASE, *flags, "--out", str(scratch / "run")])
        cache = caches.setdefault(str(recipe.head.options.get("layers")), FeatureCache(CACHE_GB))
        begin = time.monotonic()
        training = set_up(recipe, start(choose_device(recipe.target.device)), cache)
        data = training.data
        if name == UNSHIFTED:  # the draft vocabulary stays the base's
            data.training = [unshifted(sample) for sample in data.training]
        held_out, data.validation = data.validation, []  # validated once, after training, at the depths of all
        fit(training)
        data.validation = held_out
        training.module.head.tree = chain(DEPTHS)
        return validate(training, steps) | {"flags": flags, "seconds": round(time.monotonic() - begin, 1)}
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


if __name__ == "__main__":
    with one_line_errors():
        main()
