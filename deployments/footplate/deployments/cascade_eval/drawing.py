"""Quality against cost, drawn: matplotlib's only place."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from footplate.routing.errors import InvalidEvaluation
from footplate.routing.evaluation import Evaluation, Point


def draw(path: Path, evaluations: Mapping[str, Evaluation], names: tuple[str, str]) -> None:
    """Write a PNG: a curve for each policy, its chosen threshold, and the two models alone.

    Raises:
        InvalidEvaluation: matplotlib is missing.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        raise InvalidEvaluation(
            "drawing needs matplotlib: pip install 'footplate[eval]', or use --no-plot"
        ) from None
    figure = Figure(figsize=(8, 5), layout="constrained")
    axes: Any = figure.subplots()
    whole = next(iter(evaluations.values()))
    unit = whole.always_large.cost or 1.0

    def at(point: Point) -> tuple[float, float]:
        return 100 * point.cost / unit, 100 * point.quality

    for policy, found in evaluations.items():
        [line] = axes.plot(*zip(*map(at, found.curve), strict=True), label=policy, linewidth=1.3)
        if found.chosen is not None:
            x, y = at(found.chosen)
            axes.plot(x, y, "o", color=line.get_color(), markersize=8)
            label = f"threshold {found.chosen.threshold:.3f}"
            axes.annotate(label, (x, y), textcoords="offset points", xytext=(8, -12), fontsize=8)
    for name, point, mark in zip(names, (whole.always_small, whole.always_large), "s^", strict=True):
        axes.plot(*at(point), mark, color="black", markersize=8, label=f"always {name}")
    axes.set_xlabel("cost, % of always asking the large model (attempts included)")
    axes.set_ylabel("right answers, %")
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8)
    canvas: Any = FigureCanvasAgg(figure)
    canvas.print_png(path)
