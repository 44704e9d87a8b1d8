"""Compare all kinds of heads: the same target, data and training time for each, then the same measurement.

    python eval/compare.py                                      # `make compare`: ten minutes of training for each head
    python eval/compare.py --budget-s 20 --prompts 4 --only medusa --only hydra --work runs/quick --out runs/quick.json

How a head is trained for BUDGET seconds: a discarded trial of `TRIAL` steps measures tokens per second after its first
third; the run then gets as many steps as fit into the budget at that rate, and its learning rate runs through the whole
schedule over these. Trial, loading and the final validation are not part of the budget. The target runs at each step
(`engine.feature_memory_gb` is 0), so that steps of all epochs cost the same. The number of steps is saved, and a
resumed run keeps it.

All are trained before the first is measured, so that the measurements are close in time. The files are in WORK/NAME/:
plan.json, run/, eval/. Finished work is not repeated. OUT, and the page of the same name with .html, contain all
finished heads of WORK.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from importlib.metadata import version
from pathlib import Path
from statistics import mean
from typing import Annotated, Any

import torch

from spechead import __version__
from spechead.cli.main import one_line_errors
from spechead.data.preparation.prepare import prepare
from spechead.data.preparation.prepared import split_validation
from spechead.errors import UserError
from spechead.evaluation.evaluate import EvalOptions, evaluate
from spechead.evaluation.measure import describe_machine
from spechead.evaluation.page import render
from spechead.evaluation.plots import intervals
from spechead.evaluation.report import identical, number, with_interval
from spechead.files import claim, read_json, remove, write_json, write_text
from spechead.options import Options, Range, parse
from spechead.target.bundled import NAME as BUNDLED
from spechead.target.loading import choose_device
from spechead.target.model import Target
from spechead.training.build import bare_head, preparation_of
from spechead.training.log import read_log
from spechead.training.recipe import Recipe, load_recipe
from spechead.training.train import train

VARIANTS: dict[str, tuple[str, list[str]]] = {  # name -> recipe, and changes to it
    "eagle3": ("eagle3-smollm2", []),
    "eagle": ("eagle-smollm2", []),
    "hass": ("hass-smollm2", []),
    "hydra": ("hydra-smollm2", []),
    "hydra++": (
        "hydra-smollm2",
        [*("--head.options.prefix", "true", "--head.options.n_layers", "4", "--head.options.dropout", "0.2")],
    ),
    "medusa": ("medusa-smollm2", []),
}
TREE, CHAIN = "dynamic:nodes=8,depth=3,topk=4", "chain:3"
TRIAL = 30  # steps
# overrides of every recipe
COMMON = ["--optim.batch_size", "1", "--optim.micro_batch_size", "1", "--engine.feature_memory_gb", "0"]
COMMON += ["--log.validate_every", "0", "--head.tree", TREE]


@dataclass(kw_only=True)
class CompareOptions(Options):
    """Train every kind of head for the same time on the same data, and measure all in the same way."""

    budget_s: Annotated[float, Range(above=0)] = 600.0
    """Seconds of training for each head."""
    only: list[str] = field(default_factory=list)
    """Heads to train now, by name; empty: all."""
    target: str = BUNDLED
    """Model that decodes: smollm2-135m, a local folder or a hub id."""
    data: str = "shipped:data/sample.jsonl"
    """Conversations to train on."""
    prompts: Annotated[int, Range(0)] = 0
    """How many prompts to measure on, spread over the categories; 0: all."""
    prompt_file: str = ""
    """JSONL file of prompts; empty: spechead's own 40."""
    max_new_tokens: int = 128
    """Longest answer, in tokens."""
    threads: Annotated[int, Range(0)] = 0
    """CPU threads of the training; 0: all. Decoding is always measured with all."""
    device: str = "auto"
    """auto, cpu, cuda or cuda:N."""
    seed: int = 0
    """Seed of the weights and the order of the samples."""
    work: str = "runs/compare"
    """Folder for the runs."""
    out: str = "runs/compare.json"
    """JSON file to write; the page is written next to it."""

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in self.only:
            if name not in VARIANTS:
                raise UserError(f"option only: {name!r} is unknown, use {', '.join(VARIANTS)}")
        if not self.out.endswith(".json"):
            raise UserError(f"option out: must end with .json, got {self.out}")


def main(argv: Sequence[str]) -> None:
    options = parse(CompareOptions, argv, "compare.py")
    begin(options)
    threads, names = torch.get_num_threads(), options.only or list(VARIANTS)
    for name in names:
        folder = Path(options.work) / name
        if not finished(folder):
            train(planned(name, options, folder))
    torch.set_num_threads(threads)
    for name in names:
        folder = Path(options.work) / name
        if not finished(folder):
            measure(options, folder)
        write(options)
    print(f"\n{options.out}\n{page_path(options)}")


# ------------------------------------------------------------------------------------------------ one head


def finished(folder: Path) -> bool:
    return (folder / "eval" / "report.json").is_file()


def begin(options: CompareOptions) -> None:
    """Write the settings of the comparison to the work folder, or refuse to mix it with another."""
    machine = describe_machine(choose_device(options.device))
    facts = settings(options) | {name: machine.get(name) for name in ("processor", "accelerator")}
    claim(Path(options.work) / "settings.json", facts, remedy="choose another --work, or remove that folder")


def settings(options: CompareOptions) -> dict[str, Any]:
    """The settings that all numbers of a comparison share."""
    free = ("only", "work", "out")
    chosen = {name: value for name, value in asdict(options).items() if name not in free}
    fixed = {
        "tree": TREE,
        "chain": CHAIN,
        "common": COMMON,
        "changes": {n: flags for n, (_, flags) in VARIANTS.items()},
    }
    versions = {"spechead": __version__} | {name: version(name) for name in ("torch", "transformers")}
    return chosen | fixed | {"versions": versions}


def planned(name: str, options: CompareOptions, folder: Path) -> Recipe:
    """The recipe of a head, with as many steps as fit into the budget; a trial measures how many, once."""
    plan = folder / "plan.json"
    if not plan.is_file():
        print(f"\n{name}: a trial of {TRIAL} steps", flush=True)
        rate = trial(name, options, folder / "trial")
        sizes = head_sizes(recipe_of(name, options, []))
        steps = max(1, int(options.budget_s * rate / sizes["tokens_per_step"]))
        write_json(plan, sizes | {"trial_tokens_per_s": rate, "steps": steps})
    steps = int(read_json(plan)["steps"])
    print(f"\n{name}: {steps} steps in about {options.budget_s:g} s", flush=True)
    flags = ["--optim.steps", str(steps), "--log.every", str(steps), "--log.checkpoint_every", "200"]
    return recipe_of(name, options, [*flags, "--out", str(folder / "run")])


def recipe_of(name: str, options: CompareOptions, flags: Sequence[str]) -> Recipe:
    config, changes = VARIANTS[name]
    shared = ["--target.name", options.target, "--target.device", options.device, "--data.train", options.data]
    shared += ["--engine.threads", str(options.threads), "--seed", str(options.seed)]
    return load_recipe(config, [*COMMON, *changes, *shared, *flags])


def trial(name: str, options: CompareOptions, scratch: Path) -> float:
    """Training tokens per second, without the first steps."""
    remove(scratch)  # left by an interrupted trial
    flags = ["--optim.steps", str(TRIAL), "--log.every", str(TRIAL // 3), "--log.checkpoint_every", "1000000"]
    flags += ["--data.validation_share", "0"]
    train(recipe_of(name, options, [*flags, "--out", str(scratch)]))
    rates = [row["tokens_per_s"] for row in read_log(scratch)][1:]
    remove(scratch)
    return mean(rates)


def head_sizes(recipe: Recipe) -> dict[str, float]:
    """The head's parameters, and the mean length of a training sample: a step takes one."""
    target = Target.load(recipe.target.name, device=recipe.target.device, pack=False)
    samples = prepare(preparation_of(recipe.data, target, recipe.seed)).samples
    training, _ = split_validation(samples, recipe.data.validation_share, recipe.seed)
    parameters = sum(p.numel() for p in bare_head(recipe, target).parameters())
    return {"parameters": parameters, "tokens_per_step": float(training.lengths.mean())}


def measure(options: CompareOptions, folder: Path) -> None:
    evaluate(
        EvalOptions(
            head=str(folder / "run" / "head"),
            tree=[TREE, CHAIN],
            prompts=options.prompt_file,
            limit=options.prompts,
            max_new_tokens=options.max_new_tokens,
            device=options.device,
            out=str(folder / "eval"),
        )
    )


# ------------------------------------------------------------------------------------------------ all heads


def write(options: CompareOptions) -> None:
    """Write OUT and its page, with all finished heads of the work folder."""
    heads = {name: row(Path(options.work) / name) for name in VARIANTS if finished(Path(options.work) / name)}
    machine = describe_machine(choose_device(options.device))
    results = {"budget_s": options.budget_s, "heads": heads, "settings": settings(options), "machine": machine}
    write_json(Path(options.out), results)
    write_text(page_path(options), page(results))


def row(folder: Path) -> dict[str, Any]:
    """One head's numbers, from the files of its run and its evaluation."""
    plan, last = read_json(folder / "plan.json"), read_log(folder / "run")[-1]
    report = read_json(folder / "eval" / "report.json")
    tree, chain = (
        next(s for n, s in report["suites"].items() if "/" not in n and s["tree"] == t) for t in (TREE, CHAIN)
    )
    return {
        "parameters": plan["parameters"],
        "steps": plan["steps"],
        "train_s": plan["steps"] * plan["tokens_per_step"] / last["tokens_per_s"],
        "train_tokens_per_s": last["tokens_per_s"],
        "acceptance_length_chain": chain["acceptance_length"],
        "acceptance_length_chain_ci": chain["acceptance_length_ci"],
        "acceptance_length_tree": tree["acceptance_length"],
        "acceptance_length_tree_ci": tree["acceptance_length_ci"],
        "speedup": tree["speedup"],
        "speedup_ci": tree["speedup_ci"],
        "speedup_chain": chain["speedup"],
        "draft_s": tree["seconds"]["draft"] / tree["passes"] if tree["passes"] else None,  # per pass
        "identical": identical(tree),
    }


# ------------------------------------------------------------------------------------------------ the page


def page_path(options: CompareOptions) -> Path:
    return Path(options.out).with_suffix(".html")


COLUMNS = (
    *("head", "speed-up [95 %]", "tokens/pass, tree", "tokens/pass, chain", "ms drafting", "identical"),
    *("parameters", "training tokens/s"),
)


def page(results: dict[str, Any]) -> str:
    """One file that needs nothing else; the fastest head comes first and stands out."""
    heads = dict(sorted(results["heads"].items(), key=lambda item: -(item[1]["speedup"] or 0)))
    settings = results["settings"]
    budget = f"{results['budget_s']:g} s of training for each head"
    plots = [
        ("Speed-up over plain decoding, tree", "speedup", "times as fast as plain"),
        ("Tokens per pass, tree", "acceptance_length_tree", "tokens committed by a pass"),
        ("Tokens per pass, chain", "acceptance_length_chain", "tokens committed by a pass"),
    ]
    return render(
        "compare.html.j2",
        title="Heads side by side",
        subtitle=f"{settings['target']}, {budget}, {settings['tree']} and {settings['chain']}",
        columns=COLUMNS,
        rows=[cells(name, head) for name, head in heads.items()],
        plots=[
            (label, intervals(key, [(name, head[key], head[f"{key}_ci"]) for name, head in heads.items()], axis))
            for label, key, axis in plots
        ],
        settings=settings,
        machine=results["machine"],
    )


def cells(name: str, head: dict[str, Any]) -> list[str]:
    """One row, in the order of COLUMNS."""
    return [
        name,
        with_interval(head["speedup"], head["speedup_ci"], "x"),
        with_interval(head["acceptance_length_tree"], head["acceptance_length_tree_ci"]),
        with_interval(head["acceptance_length_chain"], head["acceptance_length_chain_ci"]),
        number(None if head["draft_s"] is None else 1000 * head["draft_s"]),
        head["identical"],
        f"{head['parameters'] / 1e6:.2f} M",
        f"{head['train_tokens_per_s']:.0f}",
    ]


if __name__ == "__main__":
    with one_line_errors():
        main(sys.argv[1:])
