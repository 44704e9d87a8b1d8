"""Reports of evaluations made by hand."""

from typing import Any

from spechead.data.prompts import Prompt
from spechead.decoding.generate import Stats
from spechead.evaluation.aggregate import Comparison, Decoded, Reference, divergence, prediction, suite_entry

SECONDS = {"prefill": 0.2, "draft": 0.3, "verify": 2.0, "commit": 0.1, "other": 0.1}
PLAIN_SECONDS = {"prefill": 0.2, "draft": 0.0, "verify": 4.2, "commit": 0.1, "other": 0.1}


def comparison(number: int, category: str, accepted: list[int], wrong: bool = False) -> Comparison:
    """A chain of 3 of which each pass accepts as many; plain takes 4.6 s, speculative 2.7 s."""
    committed = [a + 1 for a in accepted]
    tokens = list(range(1 + sum(committed)))
    stats = Stats(len(accepted), sum(committed), committed, [3] * len(accepted), accepted, SECONDS)
    passes = len(tokens) - 1
    plain = Decoded(tokens, 4.6, Stats(passes, passes, [1] * passes, [0] * passes, [0] * passes, PLAIN_SECONDS))
    ours = Decoded(tokens[:2] + [99] + tokens[3:] if wrong else tokens, 2.7, stats)
    prompt = Prompt(number, category, "?")
    return Comparison(prompt, plain, ours, Reference(tokens, 4.6), divergence(prompt, plain.tokens, ours.tokens))


def labels(tree: str, rule: str = "exact_match", drafter: str = "eagle3") -> dict[str, Any]:
    return {"drafter": drafter, "tree": tree, "rule": rule, "lossy": rule == "typical"}


def full_report(wrong: bool = False) -> dict[str, Any]:
    kinds = ["writing", "coding", "maths"]
    pairs = [comparison(i, kinds[i % 3], [3, 1 + i % 2, 0, 2, 1, 0], wrong=wrong and i == 4) for i in range(9)]
    suites = {
        "held_out": suite_entry(pairs, labels("chain:3")),
        "held_out@static:[[0],[1],[0,0]]": suite_entry(pairs, labels("static:[[0]]")),
    }
    for entry in suites.values():
        entry["predicted"] = prediction(entry, 1.1)
    for kind in kinds:
        suites[f"held_out/{kind}"] = suite_entry([p for p in pairs if p.prompt.category == kind], labels("chain:3"))
    return {
        "schema": 1,
        "target": "smollm2-135m",
        "head": "runs/x/head",
        "kind": "eagle3",
        "dtype": "float32",
        "device": "cpu",
        "machine": {"processor": "a <fast> one", "threads": 2},
        "settings": {"temperature": 0.0, "tree": ["chain:3"], "out": ""},
        "suites": suites,
        "examples": [
            {
                "prompt": 1,
                "category": "coding",
                "text": "Is 1 < 2 & 3?",
                "tree": "chain:3",
                "pieces": [["<b>", 0], ["yes", 1], [" it\nis", 2], ["deep", 9]],
            }
        ],
        "runs": [],
    }


def verified_by(rule: str, report: dict[str, Any], *names: str) -> dict[str, Any]:
    """The report with those suites (default: all) verified by a rule whose text is not plain decoding's own."""
    for name in names or report["suites"]:
        nothing = {"checked": 0, "equal": 0, "divergences": []}
        report["suites"][name] |= {"rule": rule, "lossy": rule == "typical", "lossless": nothing}
    return report
