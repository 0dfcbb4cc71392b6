"""The engine's metrics in Ray's own, under the names that its LLM dashboard asks for: `ray_vllm_…`.

Ray puts `ray_` in front, and allows no colon any more. It is a second copy of numbers that are
recorded once: counters go on by what they have gained, and requests' values follow a second or so later.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from typing import Any

from footplate.deployments.engine_metrics import HISTOGRAMS, EngineMetrics
from footplate.engine.types import EngineStats

logger = logging.getLogger(__name__)
_EVERY_S = 2.0
_MAX_PENDING = 65_536
_LABELS = ("model_name", "engine")


def _gauges(stats: EngineStats) -> dict[str, float]:
    return {
        "num_requests_running": stats.running,
        "num_requests_waiting": stats.waiting,
        # The dashboard still asks for it; nothing is swapped here.
        "num_requests_swapped": 0,
        "kv_cache_usage_perc": stats.kv_usage,
    }


def _counters(stats: EngineStats) -> dict[str, float]:
    return {
        "prefix_cache_queries": stats.prefix_queries,
        "prefix_cache_hits": stats.prefix_hits,
        "num_preemptions": stats.preemptions,
        "prompt_tokens": stats.prompt_tokens,
        "generation_tokens": stats.generation_tokens,
    }


class RayMetrics:
    """Mirrors one replica's metrics. Belongs to its event loop; Ray must be there."""

    def __init__(self, metrics: EngineMetrics, replica_id: str = "") -> None:
        # Only here: whoever imports this module may run without Ray.
        from ray.util.metrics import Counter, Gauge, Histogram

        self._metrics = metrics
        tags = {**dict(zip(_LABELS, metrics.labels, strict=True)), "ReplicaId": replica_id}
        stats = metrics.stats()

        def made(kind: Any, name: str, *arguments: Any, extra: tuple[str, ...] = ()) -> Any:
            found = kind(f"vllm_{name}", *arguments, tag_keys=(*_LABELS, "ReplicaId", *extra))
            found.set_default_tags(tags)
            return found

        self._gauges = {name: made(Gauge, name, name) for name in _gauges(stats)}
        self._counters = {name: made(Counter, name, name) for name in _counters(stats)}
        self._finished = made(Counter, "request_success", "Requests ended", extra=("finished_reason",))
        self._histograms = {
            name: made(Histogram, name, text, list(bounds)) for name, text, bounds in HISTOGRAMS
        }
        self._told: dict[str, float] = {}
        self._pending: deque[tuple[str, float]] = deque(maxlen=_MAX_PENDING)
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Begin to hand over."""
        self._metrics.observed = lambda name, value: self._pending.append((name, value))
        self._task = asyncio.create_task(self._forever(), name="ray-metrics")

    def close(self) -> None:
        """Stop."""
        self._metrics.observed = None
        if self._task is not None:
            self._task.cancel()

    def hand_over(self) -> None:
        """Give Ray what has come since the last time."""
        stats = self._metrics.stats()
        for name, value in _gauges(stats).items():
            self._gauges[name].set(value)
        for name, value in _counters(stats).items():
            self._count(name, self._counters[name], value, None)
        for reason, value in stats.finished.items():
            self._count(f"finished {reason}", self._finished, value, {"finished_reason": str(reason)})
        while self._pending:
            name, value = self._pending.popleft()
            self._histograms[name].observe(value)

    def _count(self, name: str, counter: Any, value: float, tags: dict[str, str] | None) -> None:
        gained = value - self._told.get(name, 0.0)
        if gained > 0:
            counter.inc(gained, tags)
            self._told[name] = value

    async def _forever(self) -> None:
        while True:
            await asyncio.sleep(_EVERY_S)
            try:
                self.hand_over()
            except Exception as error:
                # Metrics of Ray's are a copy: without them the engine serves as before.
                logger.error("Ray does not take metrics", exc_info=error)
                return


def ray_metrics(metrics: EngineMetrics) -> RayMetrics | None:
    """The mirror of a replica's metrics; None outside of a Ray worker."""
    import ray
    from ray import serve

    if not ray.is_initialized():
        return None
    try:
        # The dashboard tells replicas apart by Serve's name of each.
        replica_id = str(serve.get_replica_context().replica_id.unique_id)
    except serve.exceptions.RayServeException:
        replica_id = ""
    return RayMetrics(metrics, replica_id)
