"""What a level of load comes to: pure functions from the times of requests to figures.

Times are seconds of one monotonic clock; figures are milliseconds. Definitions:

- TTFT: from a request's clock start to the first arrival with output in it. The role chunk has none. In open
  loop the clock starts when the request was due, not when it could be sent (no coordinated omission).
- gap: between two arrivals. What comes in one read of the socket is one arrival: its reader waited once.
- ITL: a gap divided by the tokens that it brought, counted once for each of them.
- TPOT: a request's mean ITL: last arrival less first, over the tokens that came after the first arrival.
  aiperf and guidellm (0.13.0, 0.8.1) call this ITL.
- e2e: from the clock start to the end of the stream.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import numpy as np

PERCENTILES = (50, 90, 95, 99)
SLO_NAMES = ("ttft", "itl", "tpot", "gap", "e2e")


@dataclass(frozen=True, slots=True)
class Arrival:
    """Output that came in one read: how many events held some, and how many tokens if they said so."""

    at_s: float
    num_events: int = 1
    num_tokens: int | None = None


@dataclass(frozen=True, slots=True)
class Sample:
    """One request as its client saw it. `num_output_tokens` is what the server counted, None where it didn't.

    `due_s` is when its clock started, `sent_s` when its first byte could go.
    """

    due_s: float
    sent_s: float
    ended_s: float
    arrivals: Sequence[Arrival] = ()
    num_input_tokens: int | None = None
    num_cached_tokens: int | None = None
    num_output_tokens: int | None = None
    error: str | None = None

    @property
    def output_tokens(self) -> int:
        """As counted by the server; else as told by the events, at least one for each."""
        if self.num_output_tokens is not None:
            return self.num_output_tokens
        return sum(a.num_events if a.num_tokens is None else a.num_tokens for a in self.arrivals)


@dataclass(frozen=True, slots=True)
class TokenTimes:
    """A request's times in ms. `itl` are pairs of a gap per token and the number of tokens it stands for.

    `is_estimated`: the server did not say how many tokens an event held, and there are more tokens than
    events; those after the first arrival are then spread evenly over the events.
    """

    ttft: float
    e2e: float
    gap: list[float]
    itl: list[tuple[float, float]]
    tpot: float | None
    is_estimated: bool


def token_times(sample: Sample) -> TokenTimes:
    """The times of a request that gave some output."""
    arrivals = sample.arrivals
    assert arrivals, "a request without output is an error, and has no times"
    first = arrivals[0]
    weights, is_estimated = _tokens_after_first(sample)
    gaps = [1e3 * (b.at_s - a.at_s) for a, b in pairwise(arrivals)]
    itl = [(gap / weight, weight) for gap, weight in zip(gaps, weights, strict=True) if weight > 0]
    after_first = sum(weights)
    return TokenTimes(
        ttft=1e3 * (first.at_s - sample.due_s),
        e2e=1e3 * (sample.ended_s - sample.due_s),
        gap=gaps,
        itl=itl,
        tpot=sum(gaps) / after_first if after_first > 0 else None,
        is_estimated=is_estimated,
    )


def _tokens_after_first(sample: Sample) -> tuple[list[float], bool]:
    """Tokens of each arrival but the first, and whether they are an estimate."""
    first, *rest = sample.arrivals
    told = [arrival.num_tokens for arrival in sample.arrivals]
    if None not in told:
        return [float(arrival.num_tokens or 0) for arrival in rest], False
    num_events = sum(arrival.num_events for arrival in rest)
    # A first token is sent by itself by every server that we know; what came with it came as events.
    num_tokens = sample.output_tokens - first.num_events
    if num_events == 0 or num_tokens <= num_events:
        return [float(arrival.num_events) for arrival in rest], False
    return [arrival.num_events * num_tokens / num_events for arrival in rest], True


def distribution(values: Sequence[float], weights: Sequence[float] | None = None) -> dict[str, float] | None:
    """Percentiles, mean, extremes and number; None of nothing.

    With weights each value counts that often, and a percentile is the least value that so many lie at or
    below; without, it lies between the two nearest ones, as numpy and the other tools have it.
    """
    if not values:
        return None
    found = np.asarray(values, dtype=np.float64)
    if weights is None:
        marks = np.percentile(found, PERCENTILES)
        mean, count = float(found.mean()), len(values)
    else:
        each = np.asarray(weights, dtype=np.float64)
        marks = np.percentile(found, PERCENTILES, weights=each, method="inverted_cdf")
        mean, count = float((found * each).sum() / each.sum()), round(float(each.sum()))
    named = {f"p{p}": round(float(mark), 3) for p, mark in zip(PERCENTILES, marks, strict=True)}
    return named | {
        "mean": round(mean, 3),
        "min": round(float(found.min()), 3),
        "max": round(float(found.max()), 3),
        "count": count,
    }


def parse_slos(text: str) -> dict[str, float]:
    """Limits in ms from `ttft:500,itl:50`; none from an empty text.

    Raises:
        ValueError: a part is not NAME:MS, or its name is unknown or told twice.
    """
    slos: dict[str, float] = {}
    for part in filter(None, (piece.strip() for piece in text.split(","))):
        name, colon, number = part.partition(":")
        if not colon or name not in SLO_NAMES or name in slos:
            raise ValueError(f"{part!r}: write NAME:MILLISECONDS once for each of {', '.join(SLO_NAMES)}")
        try:
            slos[name] = float(number)
        except ValueError:
            raise ValueError(f"{part!r}: {number!r} is no number of milliseconds") from None
        if not 0 < slos[name] < float("inf"):
            raise ValueError(f"{part!r}: must be above 0 and finite")
    return slos


def missed_slos(times: TokenTimes, slos: Mapping[str, float]) -> list[str]:
    """Which of the limits a request does not hold.

    `itl` is held by 95 % of its tokens, `gap` by its longest one; a request of one token holds both.
    """
    itl = distribution(*map(list, zip(*times.itl, strict=True))) if times.itl else None
    measured = {
        "ttft": times.ttft,
        "e2e": times.e2e,
        "tpot": times.tpot or 0.0,
        "gap": max(times.gap, default=0.0),
        "itl": itl["p95"] if itl else 0.0,
    }
    return [name for name, limit in slos.items() if measured[name] > limit]


@dataclass(frozen=True, slots=True)
class Client:
    """How the measuring process itself fared. Lags: how late its event loop came, at regular checks."""

    lags_s: Sequence[float]
    cpu_s: float


@dataclass(frozen=True, slots=True)
class Level:
    """All that was seen at one level of load. `wall_s`: from the first clock start to the last end."""

    name: str
    value: float
    samples: Sequence[Sample]
    wall_s: float
    client: Client
    num_unfinished: int = 0
    slos: Mapping[str, float] = field(default_factory=dict)


def summary(level: Level) -> dict[str, Any]:
    """A level's figures; goodput is None where no limits are set or the client was late."""
    good = [sample for sample in level.samples if sample.error is None]
    times = [token_times(sample) for sample in good]
    itl = [pair for each in times for pair in each.itl]
    wall_s = max(level.wall_s, 1e-9)
    figures: dict[str, Any] = {
        level.name: level.value,
        "requests": len(level.samples),
        "completed": len(good),
        "errors": dict(sorted(Counter(s.error for s in level.samples if s.error is not None).items())),
        "unfinished": level.num_unfinished,
        "wall_s": round(level.wall_s, 3),
        "requests_s": round(len(good) / wall_s, 4),
        "output_tokens_s": round(sum(sample.output_tokens for sample in good) / wall_s, 3),
        "input_tokens": _lengths([s.num_input_tokens for s in good]),
        "cached_tokens": _lengths([s.num_cached_tokens for s in good]),
        "output_tokens": _lengths([s.output_tokens for s in good]),
        "output_tokens_counted_by": "server"
        if all(s.num_output_tokens is not None for s in good)
        else "events",
        "itl_estimated_requests": sum(each.is_estimated for each in times),
        "ttft_ms": distribution([each.ttft for each in times]),
        "itl_ms": distribution([gap for gap, _ in itl], [weight for _, weight in itl]),
        "gap_ms": distribution([gap for each in times for gap in each.gap]),
        "tpot_ms": distribution([each.tpot for each in times if each.tpot is not None]),
        "e2e_ms": distribution([each.e2e for each in times]),
    }
    figures["client"] = client_verdict(level, figures)
    is_told = level.slos and level.samples and not figures["client"]["is_late"]
    figures["goodput"] = _goodput(level, times, wall_s) if is_told else None
    return figures


MIN_LAG_MS = 2.0  # epoll's timers alone come up to one millisecond late
SHARE_OF_FIGURE = 0.1
MAX_CPU_SHARE = 0.8


def client_verdict(level: Level, figures: Mapping[str, Any]) -> dict[str, Any]:
    """Whether the client came too late for its figures to be the server's, and why.

    Late is a 99th percentile of its own lag above 2 ms and above a tenth of the smaller of the 99th
    percentiles of TTFT and gap, or a request sent that late, or a core used for more than 80 % of the time.
    """
    lag = distribution([1e3 * lag for lag in level.client.lags_s])
    late_sends = distribution([1e3 * (s.sent_s - s.due_s) for s in level.samples])
    measured = [figures[name]["p99"] for name in ("ttft_ms", "gap_ms") if figures[name]]
    bound = max(MIN_LAG_MS, SHARE_OF_FIGURE * min(measured, default=0.0))
    share = level.client.cpu_s / max(level.wall_s, 1e-9)
    reasons = []
    if lag and lag["p99"] > bound:
        reasons.append(f"its event loop was {lag['p99']:.1f} ms late (p99), {bound:.1f} allowed")
    if late_sends and late_sends["p99"] > bound:
        reasons.append(f"requests were sent {late_sends['p99']:.1f} ms late (p99), {bound:.1f} allowed")
    if share > MAX_CPU_SHARE:
        reasons.append(f"it used {share:.0%} of a core")
    return {
        "is_late": bool(reasons),
        "reasons": reasons,
        "lag_ms": lag,
        "sent_late_ms": late_sends,
        "cpu_share": round(share, 3),
    }


def _goodput(level: Level, times: Sequence[TokenTimes], wall_s: float) -> dict[str, Any]:
    missed = [missed_slos(each, level.slos) for each in times]
    num_good = sum(not names for names in missed)
    return {
        "slo_ms": dict(level.slos),
        # Requests that failed held nothing.
        "share": round(num_good / len(level.samples), 4),
        "requests_s": round(num_good / wall_s, 4),
        "missed": dict(Counter(name for names in missed for name in names)),
    }


def _lengths(counts: Sequence[int | None]) -> dict[str, float] | None:
    known = [count for count in counts if count is not None]
    if not known:
        return None
    return {"mean": round(sum(known) / len(known), 2), "min": min(known), "max": max(known)}
