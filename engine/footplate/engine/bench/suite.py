"""Which loads `footplate bench engine` runs, and how a row's figure follows from their times."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from footplate.engine.bench.loads import build

WORKLOADS = ("single", "decode", "prefill", "mixed", "prefix")
Size = Literal["full", "small"]
_WARM_SEED = 9_000  # of prefixes that are met again and again


@dataclass(frozen=True, slots=True)
class Row:
    """One line of the table.

    With `less`, the figure is milliseconds a step: the time of `load` less that of `less`, over the steps
    that it has more. Else it is milliseconds for the whole, or with `unit` a rate, output tokens a second.
    """

    workload: str
    unit: str
    load: dict[str, Any]
    less: dict[str, Any] | None = None
    needs_warmth: bool = False  # measured only after a run that filled the prefix cache

    @property
    def steps(self) -> int:
        return self.load["out"] - self.less["out"] if self.less is not None else 1

    def value(self, wall_s: float, out_tokens: int) -> float:
        """The figure from the time of one run, `less` taken off."""
        return out_tokens / wall_s if self.unit == "output tokens/s" else 1000 * wall_s / self.steps

    @property
    def longest(self) -> int:
        """Tokens of the longest sequence, prompt and output."""
        prompts, outputs = build(self.load, seed=0)
        return max(len(p) + o for p, o in zip(prompts, outputs, strict=True))


def rows(wanted: Sequence[str], size: Size, high: int) -> Iterator[Row]:
    """The rows of these workloads, token ids below `high`; `small` takes a minute or two on two cores."""
    small = size == "small"
    if "single" in wanted:
        yield _steps("single", {"kind": "single"}, 64 if small else 256, high, "ms a token")
    if "decode" in wanted:
        for batch in (8, 32) if small else (8, 32, 128, 256):
            step: dict[str, Any] = {"kind": "decode", "batch": batch, "length": 64 if small else 512}
            yield _steps(f"decode {batch}", step, 17 if small else 256, high, "ms a step")
    if "prefill" in wanted:
        for length in (512, 1024) if small else (8192, 32768):
            yield Row(f"prefill {length}", "ms", {"kind": "prefill", "length": length, "high": high})
    if "mixed" in wanted:
        sizes = {"count": 24, "scale": 0.25} if small else {"count": 1000, "scale": 1.0}
        yield Row("mixed", "output tokens/s", {"kind": "mixed", "high": high} | sizes)
    if "prefix" in wanted:
        sizes = {"groups": 2, "per_group": 4, "shared": 256, "fresh": 32, "out": 16} if small else {}
        load: dict[str, Any] = {"kind": "prefix", "high": high} | sizes
        yield Row("prefix cold", "output tokens/s", load)
        warm = load | {"shared_seed": _WARM_SEED}
        yield Row("prefix warm", "output tokens/s", warm, needs_warmth=True)


def _steps(name: str, load: dict[str, Any], out: int, high: int, unit: str) -> Row:
    load = load | {"high": high}
    return Row(name, unit, load | {"out": out}, less=load | {"out": 1})
