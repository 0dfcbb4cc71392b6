"""What an engine replica tells: how it began each request, its own `/metrics`, its series."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from footplate.deployments.channel import frames
from footplate.deployments.channel.hub import TokenStream
from footplate.deployments.channel.outlet import Delivery
from footplate.deployments.engine_metrics import HISTOGRAMS, EngineMetrics
from footplate.deployments.errors import FrameError
from footplate.deployments.metrics_listener import MetricsListener
from footplate.deployments.replica_telemetry import NUM_PORTS, metrics_ports
from footplate.engine.types import EngineRequest, EngineStats, FinishReason, SamplingParams, SequenceDelta
from footplate.platform.access import may_scrape
from footplate.platform.ports import EngineBegin
from footplate.platform.telemetry.spans import CURRENT
from footplate.platform.telemetry.trace_context import TraceContext
from tests.builders import ADMIN_KEY, SCRAPE_KEY, TENANT_KEY, known_principals
from tests.deployments.test_channel import Clock, Pair, asynchronous, connected, token, until
from tests.fakes import KnownKeys

TRACE = TraceContext(b"t" * 16, b"s" * 8, True)


async def submitted(pair: Pair, request_id: str = "r", trace: bytes = b"") -> tuple[TokenStream, Delivery]:
    """A request that goes all the way over the channel."""
    await pair.outlet.link(pair.hub.address)
    await until(lambda: any(link.is_trusted for link in pair.hub.links))
    [link] = pair.hub.links
    stream = pair.hub.open(request_id)
    pair.hub.submit(stream, link, EngineRequest(request_id, [1, 2, 3], SamplingParams()), trace)
    await stream.accepted
    return stream, pair.outlet._deliveries[request_id]


@asynchronous
async def test_an_engine_says_before_the_first_token_how_it_began(tmp_path: Path) -> None:
    async with connected(tmp_path) as pair:
        before_ns = time.time_ns()
        stream, delivery = await submitted(pair)
        scheduled_at = delivery.came_at + 0.25
        first = SequenceDelta("r", 0, (5,), scheduled_at=scheduled_at)
        delivery.came_at -= 1.0  # a second in the queue and more
        pair.outlet.deliver([first])
        [delta] = await stream.next()
        assert delta.token_ids == (5,)
        begun = stream.begun
        assert begun is not None
        assert before_ns <= begun.arrived_unix_ns <= time.time_ns()
        assert begun.queue_s == pytest.approx(1.25, abs=0.001)
        assert begun.prefill_s == pytest.approx(0, abs=0.001)
        await stream.cancel()
        assert stream.begun is begun


@asynchronous
async def test_a_request_that_ends_before_a_token_says_nothing(tmp_path: Path) -> None:
    async with connected(tmp_path) as pair:
        stream, _ = await submitted(pair)
        pair.outlet.deliver([token("r", finish=FinishReason.ERROR)])
        await stream.next()
        assert stream.begun is None


@asynchronous
async def test_the_engine_knows_whose_trace_a_request_belongs_to(tmp_path: Path) -> None:
    async with connected(tmp_path) as pair:
        seen: list[Any] = []
        pair.outlet._submit = lambda request: seen.append(CURRENT.get())
        await submitted(pair, "traced", TRACE.to_wire())
        await submitted(pair, "bare")
        await submitted(pair, "broken", b"canary")
        traced, bare, broken = seen
        assert (traced.trace_id, traced.request_id) == (TRACE.trace_id, "traced")
        assert not traced.is_recorded, "its spans are the gateway's to write"
        assert bare is None and broken is None
        assert CURRENT.get() is None


@pytest.mark.parametrize("begun", [EngineBegin(1_793_534_400_123_456_789, 0.0, 1.5), EngineBegin(0, 2.0, 0)])
def test_beginnings_are_read_as_they_were_written(begun: EngineBegin) -> None:
    [(kind, payload)] = frames.FrameReader().feed(frames.began_frame(7, begun))
    assert kind == frames.Kind.BEGAN
    assert frames.read_began(payload) == (7, begun)
    long = frames.began_frame(7, EngineBegin(1, 1e9, -1.0))
    assert frames.read_began(frames.FrameReader().feed(long)[0][1])[1] == EngineBegin(1, 4294.967295, 0.0)
    with pytest.raises(FrameError):
        frames.read_began(payload[:-4])


@asynccontextmanager
async def answering(
    pair: Pair, metrics: EngineMetrics, clock: Callable[[], float] = time.monotonic
) -> AsyncIterator[str]:
    """A replica's listener."""
    listener = MetricsListener(metrics.exposition, pair.outlet.may_scrape, clock)
    port = await listener.start("127.0.0.1", 0)
    assert port
    await pair.outlet.link(pair.hub.address)
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        await listener.close()


def metrics_of(model: str = "m") -> EngineMetrics:
    return EngineMetrics(model, "0", lambda: EngineStats(running=2, waiting=3, kv_blocks_total=10))


@asynchronous
async def test_metrics_are_for_scrape_and_admin_keys_of_any_gateway(tmp_path: Path) -> None:
    async with connected(tmp_path) as pair, answering(pair, metrics_of()) as url, httpx.AsyncClient() as http:
        keys = KnownKeys(known_principals())
        pair.hub.key_judge = lambda key: may_scrape(keys, key)

        async def status(key: str | None, path: str = "/metrics", method: str = "GET") -> int:
            headers = {} if key is None else {"authorization": f"Bearer {key}"}
            return (await http.request(method, url + path, headers=headers)).status_code

        assert [await status(key) for key in (SCRAPE_KEY, ADMIN_KEY)] == [200, 200]
        assert [await status(key) for key in (TENANT_KEY, "fp_x_y", None, "x")] == [401] * 4
        assert await status(SCRAPE_KEY, "/") == 404
        assert await status(SCRAPE_KEY, method="POST") == 405
        assert await status(SCRAPE_KEY, method="HEAD") == 200


@asynchronous
async def test_a_revoked_key_is_refused_within_its_second(tmp_path: Path) -> None:
    clock = Clock()
    async with (
        connected(tmp_path) as pair,
        answering(pair, metrics_of(), clock) as url,
        httpx.AsyncClient() as http,
    ):
        keys = KnownKeys(known_principals())
        pair.hub.key_judge = lambda key: may_scrape(keys, key)
        headers = {"authorization": f"Bearer {SCRAPE_KEY}"}
        assert (await http.get(url + "/metrics", headers=headers)).status_code == 200
        del keys.principals[SCRAPE_KEY]
        clock.now += 1.1
        assert (await http.get(url + "/metrics", headers=headers)).status_code == 401


@asynchronous
async def test_without_a_gateways_word_nobody_reads_metrics(tmp_path: Path) -> None:
    async with connected(tmp_path) as pair, answering(pair, metrics_of()) as url, httpx.AsyncClient() as http:
        headers = {"authorization": f"Bearer {SCRAPE_KEY}"}
        assert (await http.get(url + "/metrics", headers=headers)).status_code == 401

        async def fail(key: str) -> bool:
            raise OSError(key)

        pair.hub.key_judge = fail
        headers = {"authorization": f"Bearer {ADMIN_KEY}"}
        assert (await http.get(url + "/metrics", headers=headers)).status_code == 401


@asynchronous
async def test_series_have_the_names_that_pickers_and_dashboards_read(tmp_path: Path) -> None:
    async with connected(tmp_path) as pair, answering(pair, metrics_of()) as url, httpx.AsyncClient() as http:
        pair.hub.key_judge = lambda key: may_scrape(KnownKeys(known_principals()), key)
        metrics = metrics_of()
        pair.outlet.on_end = metrics.ended
        stream, delivery = await submitted(pair)
        pair.outlet.deliver([SequenceDelta("r", 0, (5,), scheduled_at=delivery.came_at)])
        pair.outlet.deliver([token("r", 6), token("r", 7, finish=FinishReason.STOP)])
        await until(lambda: stream.is_finished)
        answer = await http.get(url + "/metrics", headers={"authorization": f"Bearer {SCRAPE_KEY}"})
    families = {family.name: family for family in text_string_to_metric_families(answer.text)}
    assert {"vllm:num_requests_waiting", "vllm:num_requests_running", "vllm:kv_cache_usage_perc"} <= set(
        families
    )
    assert families["vllm:num_requests_waiting"].samples[0].labels == {"model_name": "m", "engine": "0"}
    assert families["vllm:num_requests_waiting"].samples[0].value == 3
    assert {f"vllm:{name}" for name, *_ in HISTOGRAMS} <= set(families)
    recorded = {family.name: family for family in metrics.collect()}
    for name, *_ in HISTOGRAMS:
        [count] = [s.value for s in recorded[f"vllm:{name}"].samples if s.name.endswith("_bucket")][-1:]
        assert count == 1, name
    [tokens] = [
        s.value for s in recorded["vllm:request_generation_tokens"].samples if s.name.endswith("_sum")
    ]
    assert tokens == 3


@asynchronous
async def test_a_port_that_is_taken_is_had_once_it_is_free(tmp_path: Path) -> None:
    async with connected(tmp_path) as pair:
        before, after = (
            MetricsListener(metrics_of().exposition, pair.outlet.may_scrape, retry_s=0.01) for _ in range(2)
        )
        port = await before.start("127.0.0.1", 0)
        assert await after.start("127.0.0.1", port) == 0
        await before.close()
        assert before.port == 0
        await until(lambda: after.port == port)
        async with httpx.AsyncClient() as http:
            assert (await http.get(f"http://127.0.0.1:{port}/metrics")).status_code == 401
        await after.close()


@asynchronous
async def test_whose_port_is_taken_answers_at_another_until_it_has_its_own(tmp_path: Path) -> None:
    async with connected(tmp_path) as pair, httpx.AsyncClient() as http:
        made = [
            MetricsListener(metrics_of().exposition, pair.outlet.may_scrape, retry_s=0.01) for _ in range(4)
        ]
        old, other, new, late = made
        ports = [await old.start("127.0.0.1", 0), await other.start("127.0.0.1", 0)]
        free = await late.start("127.0.0.1", 0)
        await late.close()
        assert await new.start("127.0.0.1", ports[0], (ports[1], free)) == free
        assert (await http.get(f"http://127.0.0.1:{free}/metrics")).status_code == 401
        await old.close()
        await until(lambda: new.port == ports[0])
        assert (await http.get(f"http://127.0.0.1:{new.port}/metrics")).status_code == 401
        await asyncio.gather(*(each.close() for each in made))


def test_replicas_have_ports_of_their_own_and_share_the_rest() -> None:
    assert metrics_ports(0, 3) == [0]
    assert metrics_ports(9471, 0) == list(range(9471, 9471 + NUM_PORTS))
    assert metrics_ports(9471, 2)[:2] == [9473, 9474] and set(metrics_ports(9471, 2)) == set(
        range(9471, 9471 + NUM_PORTS)
    )
    assert metrics_ports(9471, 40)[:1] == [9511]
    assert max(metrics_ports(65_530, 9)) == 65_535


@asynchronous
async def test_many_who_ask_at_once_each_get_their_answer(tmp_path: Path) -> None:
    async with connected(tmp_path) as pair:
        await pair.outlet.link(pair.hub.address)
        keys = KnownKeys(known_principals())
        pair.hub.key_judge = lambda key: may_scrape(keys, key)
        asked = [SCRAPE_KEY, TENANT_KEY] * 20
        answers = await asyncio.gather(*map(pair.outlet.may_scrape, asked))
        assert answers == [True, False] * 20
        pair.hub.key_judge = None
        assert await pair.outlet.may_scrape(SCRAPE_KEY) is False
