"""The policy as Ray Serve calls it: in its controller, ten times a second, for each model's deployment."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from typing import Any

from footplate.deployments.autoscaling.policy import ReplicaReport, ReplicaScaler, ScalingTarget
from footplate.deployments.sparse_lines import SparseLines

logger = logging.getLogger(__name__)

# The use of a replica that has only batch work to do.
ANY_USE = 1e-3
# Names of what replicas record.
WAITING, RUNNING, USE, FINISHED = "waiting", "running", "use", "finished"
POLICY = f"{__name__}:ServeReplicaPolicy"


class ServeReplicaPolicy:
    """Serve's context in, its pair of a number and a state out. Nothing that happens here may raise: Serve
    would stop scaling."""

    def __init__(self, **target: Any) -> None:
        self._scaler = ReplicaScaler(ScalingTarget(**target))
        self._lines = SparseLines()

    def __call__(self, context: Any) -> tuple[int, dict[str, Any]]:
        """See `AutoscalingContext`."""
        try:
            asked = context.total_num_requests or 0.0
            reports = reports_of(context.aggregated_metrics or {})
            before = context.target_num_replicas
            running = len(context.running_replicas or ())
            wanted = self._scaler.decide(reports, running, before, asked, time.monotonic())
        except Exception as error:
            if self._lines.is_due(type(error)):
                logger.warning("no decision on replicas: %s", type(error).__name__)
            return context.target_num_replicas, {}
        if wanted != before:
            logger.warning(
                "%s: %d replicas in place of %d (%s)", context.app_name, wanted, before, self._scaler.reason
            )
        return wanted, {}


def reports_of(metrics: Mapping[str, Mapping[Any, float]]) -> dict[str, ReplicaReport]:
    """What replicas have recorded, by replica; one that has not told all is left out."""
    names = (WAITING, RUNNING, USE, FINISHED)
    found: dict[str, dict[str, float]] = {}
    for name in names:
        for replica, value in (metrics.get(name) or {}).items():
            found.setdefault(str(replica), {})[name] = float(value)
    return {
        replica: ReplicaReport(*(values[name] for name in names))
        for replica, values in found.items()
        if len(values) == len(names)
    }


def recorded(
    *,
    waiting: int,
    batch_waiting: int,
    running: int,
    batch_running: int,
    max_running: int,
    kv_usage: float,
    finished: int,
) -> dict[str, float]:
    """What a replica records of its engine. Batch work asks for no other replica, since nobody waits for it;
    but its own is not idle."""
    online = running - batch_running
    share = online / running if running else 0.0
    use = max(kv_usage * share, online / max_running, ANY_USE if running or waiting else 0.0)
    return {
        WAITING: float(waiting - batch_waiting),
        RUNNING: float(online),
        USE: min(1.0, use),
        FINISHED: float(finished),
    }
