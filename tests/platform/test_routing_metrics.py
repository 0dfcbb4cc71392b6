"""What `/metrics` says of routing, and which session a request belongs to."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, generate_latest

from footplate.platform.http.parameters import session_key
from footplate.platform.ports import Principal
from footplate.platform.routing_metrics import RoutingMetrics
from footplate.routing.router import Decision
from footplate.routing.types import Ranked, Reason, ReplicaId


class Collector:
    def __init__(self, metrics: RoutingMetrics) -> None:
        self.collect = metrics.families


def test_decisions_hits_and_the_index_are_told() -> None:
    metrics = RoutingMetrics()
    metrics.index_sizes = lambda: {"m": (7, 1)}
    first = Ranked(ReplicaId("0"), Reason.PREFIX, 96)
    both = [first, Ranked(ReplicaId("1"), Reason.FALLBACK, 0)]
    metrics.decided("m", Decision(both, 100, is_matched=True), 1e-4, 4e-5)
    # One that is left alone is asked what it holds, one that was always alone is not.
    metrics.decided("m", Decision([first], 200, is_matched=True), 1e-4, 4e-5)
    metrics.decided("m", Decision([Ranked(ReplicaId("1"), Reason.LOAD, 0)], 50), 1e-4, 4e-5)
    metrics.decided("m", Decision([], 50), 1e-4, 4e-5)
    registry = CollectorRegistry()
    registry.register(Collector(metrics))  # type: ignore[arg-type]
    told = generate_latest(registry).decode().splitlines()
    for line in (
        'footplate_routing_decisions_total{model_name="m",reason="prefix"} 2.0',
        'footplate_routing_decisions_total{model_name="m",reason="load"} 1.0',
        'footplate_routing_prompt_tokens_total{model_name="m"} 300.0',
        'footplate_routing_expected_hit_tokens_total{model_name="m"} 192.0',
        'footplate_routing_index_blocks{model_name="m"} 7.0',
        'footplate_routing_missed_events_total{model_name="m"} 1.0',
        'footplate_routing_decision_seconds_count{model_name="m"} 3.0',
    ):
        assert line in told


def test_a_session_is_of_one_tenant() -> None:
    a, b = (Principal("k", tenant, "member", tenant.encode()) for tenant in ("a", "b"))
    assert session_key(a, None) == b""
    assert session_key(a, "chat 1") == session_key(a, "chat 1") != session_key(a, "chat 2")
    assert session_key(a, "chat 1") != session_key(b, "chat 1")
