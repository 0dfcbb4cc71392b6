"""Shows levels as a table, and draws them: matplotlib's only place here."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from footplate.platform.cli.errors import CommandError

_TIMES = ("ttft_ms", "itl_ms", "tpot_ms", "e2e_ms")


def head_line() -> str:
    """Names of the columns that `level_lines` fills."""
    columns = "".join(f"{name[:-3] + ' p50/p99':>18}" for name in _TIMES)
    return f"{'level':>16} {'done':>6} {'failed':>6} {'req/s':>8} {'out tok/s':>10}{columns} {'goodput':>16}"


def level_lines(figures: dict[str, Any]) -> list[str]:
    """One level: its figures, and below them what is to be known about them."""
    name = level_name(figures)
    times = "".join(f"{_pair(figures[each]):>18}" for each in _TIMES)
    goodput = figures["goodput"]
    good = "-" if goodput is None else f"{goodput['share']:.0%} {goodput['requests_s']:.3f}/s"
    client = figures["client"]
    num_failed = sum(figures["errors"].values())
    lines = [
        f"{name:>16} {figures['completed']:>6} {num_failed:>6} {figures['requests_s']:>8.3f} "
        f"{figures['output_tokens_s']:>10.1f}{times} {good:>16}",
    ]
    lag = client["lag_ms"]
    if lag is not None:
        lines.append(
            f"{'':>16} client: lag p50 {lag['p50']:.1f}, p99 {lag['p99']:.1f}, longest {lag['max']:.1f} ms; "
            f"{client['cpu_share']:.0%} of a core"
        )
    lines += [f"{'':>16} NOT GOOD: the client was late: {reason}" for reason in client["reasons"]]
    if num_bad := figures["errors"].get("bad_usage"):
        lines.append(
            f"{'':>16} NOT GOOD: {num_bad} requests left out: the server counts tokens that can't have been"
        )
    if figures["errors"]:
        kinds = ", ".join(f"{kind} {count}" for kind, count in figures["errors"].items())
        lines.append(f"{'':>16} failed: {kinds}")
    if figures["itl_estimated_requests"]:
        lines.append(
            f"{'':>16} itl of {figures['itl_estimated_requests']} requests is spread evenly over "
            "their events: the server does not say how many tokens each held"
        )
    if figures["output_tokens_counted_by"] == "events" and figures["completed"]:
        lines.append(f"{'':>16} the server counts no tokens: each event is taken for one")
    if figures["unfinished"]:
        lines.append(f"{'':>16} given up while they ran: {figures['unfinished']}")
    return lines


def level_name(figures: dict[str, Any]) -> str:
    """Such as `concurrency 4` or `rate 0.5/s`."""
    if "concurrency" in figures:
        return f"concurrency {figures['concurrency']:g}"
    return f"rate {figures['rate']:g}/s"


def _pair(found: dict[str, float] | None) -> str:
    return "-" if found is None else f"{_number(found['p50'])}/{_number(found['p99'])}"


def _number(value: float) -> str:
    return f"{value:.0f}" if value >= 100 else f"{value:.1f}"


def can_draw() -> bool:
    """Whether matplotlib is there."""
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        return False
    return True


def draw(path: Path, levels: Sequence[dict[str, Any]]) -> None:
    """Write a PNG: latencies by level, and below them throughput and goodput. Late levels are hollow.

    Raises:
        CommandError: matplotlib is missing.
    """
    if not can_draw():
        raise CommandError("--plot needs matplotlib: pip install 'footplate[eval]'")
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 7), layout="constrained")
    above, below = figure.subplots(2, 3)
    key = "concurrency" if levels and "concurrency" in levels[0] else "rate"
    label = "requests at a time" if key == "concurrency" else "requests due a second"
    for axes, name in zip(above, ("ttft_ms", "itl_ms", "e2e_ms"), strict=True):
        for mark in ("p50", "p90", "p99"):
            _line(axes, [(each[key], each[name][mark], each) for each in levels if each[name]], mark)
        axes.set_title(f"{name[:-3].upper() if name != 'e2e_ms' else 'end to end'}, ms")
        axes.legend(fontsize=8)
    rates = ("output_tokens_s", "output tokens a second"), ("requests_s", "requests a second")
    for axes, (name, title) in zip(below, rates, strict=False):
        _line(axes, [(each[key], each[name], each) for each in levels], "all")
        axes.set_title(title)
    good = [(each[key], each["goodput"], each) for each in levels if each["goodput"]]
    if good:
        _line(below[1], [(x, found["requests_s"], each) for x, found, each in good], "hold all limits")
        below[1].legend(fontsize=8)
        _line(below[2], [(x, 100 * found["share"], each) for x, found, each in good], "share")
    below[2].set_title("requests that hold all limits, %")
    for axes in (*above, *below):
        axes.set_xlabel(label)
        axes.set_ylim(bottom=0)
        axes.grid(alpha=0.3)
    canvas: Any = FigureCanvasAgg(figure)
    canvas.print_png(path)


def _line(axes: Any, points: Sequence[tuple[float, float, dict[str, Any]]], label: str) -> None:
    [line] = axes.plot([x for x, _, _ in points], [y for _, y, _ in points], label=label, linewidth=1.3)
    for x, y, level in points:
        filled = "none" if level["client"]["is_late"] else line.get_color()
        axes.plot(x, y, "o", color=line.get_color(), markerfacecolor=filled, markersize=5)
