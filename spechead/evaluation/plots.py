"""The plots of an evaluation report and of a comparison: inline SVG that takes the text colour of the page around it.

Colours are Okabe and Ito's, each with a second cue (marker, hatch). matplotlib escapes the labels.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from io import StringIO
from typing import Any

from matplotlib import rc_context
from matplotlib.figure import Figure

INK = "#010203"  # placeholder for the text colour of the page, see `_svg`
BLUE, ORANGE, GREEN, PINK = "#0072b2", "#e69f00", "#009e73", "#cc79a7"
PHASES = {"verify": (BLUE, ""), "draft": (ORANGE, "//"), "commit": (GREEN, ".."), "other": (PINK, "xx")}
LOOK: Any = {
    "svg.fonttype": "none",
    "text.parse_math": False,
    "font.size": 11,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "legend.frameon": False,
    "hatch.linewidth": 0.6,
    **dict.fromkeys(
        ["text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color", "hatch.color"], INK
    ),
}


def acceptance(entry: Mapping[str, Any]) -> str:
    """Survival and conditional acceptance by depth."""
    survival = entry["survival"]
    conditional = [(k, rate) for k, rate in enumerate(entry["conditional_acceptance"], 1) if rate is not None]

    def draw(axes: Any) -> None:
        axes.plot(*_columns(conditional), "s--", color=ORANGE, label="conditional: given that all before were accepted")
        axes.plot(range(1, len(survival) + 1), survival, "o-", color=BLUE, label="survival: all up to here accepted")
        axes.set_ylim(0, 1.02)
        axes.set_xticks(range(1, len(survival) + 1))
        axes.set_xlabel("depth of the draft")
        axes.set_ylabel("share of passes")
        axes.grid(axis="y", color=INK, alpha=0.15)
        axes.legend(loc="lower center", bbox_to_anchor=(0.5, 1.0), fontsize=10)

    return _svg("acceptance", draw)


def phases(entry: Mapping[str, Any]) -> str:
    """Milliseconds of a pass by phase, plain and speculative, without the prefill."""
    kinds = (("plain", "plain_seconds", "plain_passes"), ("speculative", "seconds", "passes"))
    bars = [(label, entry[seconds], entry[passes]) for label, seconds, passes in kinds if entry[passes]]

    def draw(axes: Any) -> None:
        for row, (_, seconds, passes) in enumerate(bars):
            left = 0.0
            for phase, (colour, hatch) in PHASES.items():
                width = 1000 * seconds[phase] / passes
                axes.barh(row, width, 0.6, left, color=colour, hatch=hatch, label=phase if row == 0 else None)
                left += width
            label = f"{left:.1f} ms"
            axes.annotate(label, (left, row), (5, 0), textcoords="offset points", va="center")
        axes.set_yticks(range(len(bars)), [label for label, _, _ in bars])
        axes.invert_yaxis()
        axes.margins(x=0.15)
        axes.set_xlabel("milliseconds per pass")
        if bars:
            axes.legend(loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=4, fontsize=10)

    return _svg("phases", draw)


def speedups(suites: Mapping[str, Mapping[str, Any]]) -> str:
    """Speed-up of every suite with its interval, and the line of plain decoding."""
    main = next(iter(suites))
    labels = {name: _short(name.removeprefix(main).lstrip("/@") or "all") for name in suites}
    rows = [(labels[name], entry["speedup"], entry["speedup_ci"]) for name, entry in suites.items()]
    return intervals("speedups", rows, "times as fast as plain")


def intervals(name: str, rows: Sequence[tuple[str, float | None, Sequence[float] | None]], axis: str) -> str:
    """One line per row: label, value, its interval. The first row stands out; the line at 1 is plain decoding."""
    shown = [(label, value, bounds or (value, value)) for label, value, bounds in rows if value is not None]

    def draw(axes: Any) -> None:
        axes.axvline(1, color=INK, alpha=0.5, linewidth=1)
        for row, (_, value, bounds) in enumerate(shown):
            axes.plot(bounds, [row, row], "-", color=BLUE if row else ORANGE, linewidth=2)
            axes.plot(value, row, "o" if row else "D", color=BLUE if row else ORANGE)
        axes.set_yticks(range(len(shown)), [label for label, _, _ in shown])
        axes.invert_yaxis()
        axes.set_xlabel(axis)
        axes.grid(axis="x", color=INK, alpha=0.15)

    return _svg(name, draw, height=max(3.2, 0.36 * len(shown) + 0.9))


def tokens_per_pass(entry: Mapping[str, Any]) -> str:
    """The tokens that a pass commits, as shares of all passes."""
    counts = {int(n): count for n, count in entry["tokens_per_pass"].items()}
    total = sum(counts.values())

    def draw(axes: Any) -> None:
        for n, count in counts.items():
            axes.bar(n, count / total, 0.8, color=BLUE)
            axes.text(n, count / total, f"{100 * count / total:.0f} %", ha="center", va="bottom")
        if entry["acceptance_length"] is not None:
            mean = f"mean {entry['acceptance_length']:.2f}"
            axes.text(1, 1, mean, ha="right", va="top", transform=axes.transAxes)
        axes.set_xticks(sorted(counts))
        axes.set_xlabel("tokens committed by a pass")
        axes.set_ylabel("share of passes")
        axes.margins(y=0.15)

    return _svg("tokens", draw)


def _short(name: str, length: int = 34) -> str:
    return name if len(name) <= length else name[: length - 3] + "..."


def _columns(points: Sequence[tuple[float, float]]) -> tuple[list[float], list[float]]:
    return [x for x, _ in points], [y for _, y in points]


def _svg(name: str, draw: Callable[[Any], None], height: float = 3.6) -> str:
    """Draw on new axes; INK becomes the page's text colour, the width that of the page."""
    text = StringIO()
    with rc_context(LOOK | {"svg.hashsalt": name}):
        figure = Figure(figsize=(5.6, height), layout="constrained")
        draw(figure.subplots())
        no_metadata = dict.fromkeys(["Date", "Creator", "Format", "Type"])
        figure.savefig(text, format="svg", transparent=True, metadata=no_metadata)
    svg = text.getvalue()
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r' (width|height)="[\d.]+pt"', "", svg, count=2)
    return svg.replace(INK, "currentColor")
