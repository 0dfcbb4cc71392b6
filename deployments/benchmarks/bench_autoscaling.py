"""How many requests miss their objectives under which autoscaling, and what it costs in replicas.

    python deployments/benchmarks/bench_autoscaling.py [--seeds 3] [--trace FILE] [--output FILE]

Loads: a step from one to eight replicas' worth, the same as a ramp of ten minutes, and a working day, each on
simulated replicas (`autoscaling_simulation.py`). FILE is a trace of your own instead: CSV with the columns
started_at (RFC 3339 or seconds), input_tokens, output_tokens.

Compared: our policy; Ray Serve's default policy with Ray's own code and defaults, which aim at two open
requests a replica; the same with the aim set to three quarters of what an engine runs at once; and processor
load, as a Kubernetes HPA would (busy share of 0.7, each 15 s, down after 300 s).
"""

from __future__ import annotations

import argparse
import csv
import json
import math
import statistics
import sys
from collections import deque
from collections.abc import Callable, Iterator
from datetime import datetime
from pathlib import Path
from types import SimpleNamespace
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
from autoscaling_simulation import (
    MAX_RUNNING,
    SLO_FIRST_S,
    SLO_TOKEN_S,
    Arrival,
    Outcome,
    Seen,
    day_rate,
    poisson,
    ramp_rate,
    simulate,
    step_rate,
)
from ray.serve.autoscaling_policy import (
    _apply_delay_logic,
    _apply_scaling_factors,
    _core_replica_queue_length_policy,
)
from ray.serve.config import AutoscalingConfig

from footplate.deployments.autoscaling.policy import ReplicaReport, ReplicaScaler, ScalingTarget
from footplate.engine.bench.record import environment

MOST = 10
# A replica of an 8B model is at its first token 11 to 13 s after its start where its kernels were compiled
# before, and after 22 to 26 s where they were not (engine/README.md).
STARTS_S = (15.0, 30.0)
Decide = Callable[[Seen], int]


def ours(start_s: float) -> Decide:
    """With the defaults of a configuration."""
    scaler = ReplicaScaler(ScalingTarget(1, MOST, lead_s=start_s))

    def decide(seen: Seen) -> int:
        reports = {
            str(each.name): ReplicaReport(
                len(each.waiting),
                each.running,
                min(1.0, max(each.kv_usage, each.running / MAX_RUNNING)),
                each.finished,
            )
            for each in seen.ready
        }
        return scaler.decide(reports, len(seen.ready), seen.num_wanted, 0, seen.now)

    return decide


def serve_default(target_ongoing: float | None) -> Decide:
    """Ray's own code: the mean of open requests over the look-back, its delays, its bounds."""
    given = {} if target_ongoing is None else {"target_ongoing_requests": target_ongoing}
    config = AutoscalingConfig(min_replicas=1, max_replicas=MOST, **given)
    samples: deque[tuple[float, float]] = deque()
    state: dict[str, Any] = {}
    last = -math.inf

    def decide(seen: Seen) -> int:
        nonlocal last
        if seen.now - last >= config.metrics_interval_s:
            last = seen.now
            samples.append((seen.now, float(sum(each.open for each in seen.ready))))
        while samples and samples[0][0] < seen.now - config.look_back_period_s:
            samples.popleft()
        ongoing = sum(value for _, value in samples) / max(1, len(samples))
        context: Any = SimpleNamespace(
            current_num_replicas=len(seen.ready),
            target_num_replicas=seen.num_wanted,
            total_num_requests=ongoing,
            config=config,
        )
        desired, _ = _core_replica_queue_length_policy(context)
        scaled = _apply_scaling_factors(desired, len(seen.ready), config)
        bounded = min(max(scaled, 1), MOST)
        decision, _ = _apply_delay_logic(bounded, seen.num_wanted, config, state, seen.now)
        return decision

    return decide


def processor_load() -> Decide:
    """`ceil(replicas * busy / 0.7)` within a tolerance of a tenth; down to the most of the last 300 s."""
    history: deque[tuple[float, int]] = deque()
    last = -math.inf

    def decide(seen: Seen) -> int:
        nonlocal last
        if seen.now - last < 15 or not seen.ready:
            return seen.num_wanted
        last = seen.now
        ratio = statistics.mean(each.busy for each in seen.ready) / 0.7
        wanted = seen.num_wanted if abs(ratio - 1) <= 0.1 else math.ceil(len(seen.ready) * ratio)
        history.append((seen.now, wanted))
        while history[0][0] < seen.now - 300:
            history.popleft()
        return min(max(1, wanted, *(count for _, count in history)), MOST)

    return decide


POLICIES: dict[str, Callable[[float], Decide]] = {
    "ours": ours,
    "Serve's default": lambda _: serve_default(None),
    "Serve's, aim set to the engine": lambda _: serve_default(0.75 * MAX_RUNNING),
    "processor load": lambda _: processor_load(),
}
# Rate, its bound as a multiple of one replica's, seconds, and the simulation's tick.
LOADS: dict[str, tuple[Callable[[float], float], float, float, float]] = {
    "step 1 to 8": (step_rate, step_rate(1e9), 900, 0.1),
    "ramp 1 to 8": (ramp_rate, ramp_rate(1e9), 1500, 0.1),
    "day": (day_rate, 1.05 * max(map(day_rate, range(0, 86_400, 10))), 86_400, 0.5),
}


def row(load: str, start_s: float, policy: str, outcomes: list[Outcome]) -> dict[str, Any]:
    missed = [outcome.missed for outcome in outcomes]
    return {
        "load": load,
        "start_s": start_s,
        "policy": policy,
        "missed_share": round(statistics.median(missed), 4),
        "missed_spread": [round(min(missed), 4), round(max(missed), 4)],
        "requests": len(outcomes[0].first_s),
        "first_token_s_p99": round(sorted(outcomes[0].first_s)[int(0.99 * len(outcomes[0].first_s))], 2),
        "replica_hours": round(statistics.median(outcome.replica_s for outcome in outcomes) / 3600, 2),
        "most_replicas": max([1, *(change[2] for outcome in outcomes for change in outcome.changes)]),
        "changes": statistics.median(len(outcome.changes) for outcome in outcomes),
        "returns_within_15_min": statistics.median(outcome.returns() for outcome in outcomes),
    }


def recorded(path: Path) -> Iterator[Arrival]:
    """A trace, its clock begun at its first request."""
    with path.open(newline="", encoding="utf-8") as file:
        rows = [
            (_seconds(line["started_at"]), int(line["input_tokens"]), int(line["output_tokens"]))
            for line in csv.DictReader(file)
        ]
    rows.sort()
    for when, prompt, output in rows:
        yield Arrival(when - rows[0][0], max(1, prompt), max(1, output))


def _seconds(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return datetime.fromisoformat(text).timestamp()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--trace", type=Path)
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    rows = []
    for load, (rate, most, end_s, tick_s) in LOADS.items():
        # A day says how often replicas come and go, and takes minutes to play.
        seeds, starts = (1, STARTS_S[-1:]) if load == "day" else (options.seeds, STARTS_S)
        for start_s in starts:
            for name, make in POLICIES.items():
                outcomes = [
                    simulate(poisson(rate, most, end_s, seed), make(start_s), end_s, tick_s, start_s)
                    for seed in range(seeds)
                ]
                rows.append(row(load, start_s, name, outcomes))
                print(rows[-1], flush=True)
    if options.trace is not None:
        end_s = list(recorded(options.trace))[-1].when + 60
        for name, make in POLICIES.items():
            outcome = simulate(recorded(options.trace), make(STARTS_S[0]), end_s, 0.1, STARTS_S[0])
            rows.append(row(options.trace.name, STARTS_S[0], name, [outcome]))
            print(rows[-1], flush=True)
    if options.output is not None:
        head = environment() | {"command": "bench_autoscaling.py"}
        head |= {"objectives": {"first_token_s": SLO_FIRST_S, "token_s": SLO_TOKEN_S}}
        options.output.write_text(json.dumps(head | {"rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
