"""Requests on their way to one of several replicas, over real sockets, with scripted engine sides."""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from footplate.deployments import inference_client
from footplate.deployments.channel.frames import Status
from footplate.deployments.channel.hub import EngineLink, TokenHub
from footplate.deployments.channel.outlet import GatewayLink, OutletLimits, TokenOutlet
from footplate.deployments.channel.publisher import BlockPublisher
from footplate.deployments.inference_client import ChannelInferenceClient
from footplate.deployments.replica_board import ReplicaBoard
from footplate.deployments.specs import ModelTarget, application_of, replica_label
from footplate.engine.errors import EngineDead, EngineError, EngineOverloaded, InvalidRequest
from footplate.engine.kv.block_log import BlockChanges, BlockLog
from footplate.engine.prefix import PrefixHasher
from footplate.engine.types import (
    EngineRequest,
    EngineStats,
    FinishReason,
    ModelCard,
    SamplingParams,
)
from footplate.platform.ports import Journey
from footplate.routing.router import Router
from footplate.routing.types import ReplicaId
from tests.deployments.test_channel import KEY, asynchronous, token, until

PROMPT = list(range(640))
HASHER = PrefixHasher(b"prefix", 16)


class Replica:
    """An engine side: what it was asked is in `taken`; `refusal` is its answer to everything."""

    def __init__(self, index: int | str) -> None:
        self.taken: list[EngineRequest] = []
        self.aborted: list[str] = []
        self.refusal: EngineError | None = None
        self.running = 0
        self.log = BlockLog()
        self.cached: dict[bytes, None] = {}
        self.outlet = TokenOutlet(
            KEY,
            label=("m", str(index)),
            submit=self._submit,
            abort=lambda request_id, _: self.aborted.append(request_id),
            status=lambda: Status(0.0, EngineStats(running=self.running)),
            blocks=BlockPublisher[GatewayLink](self._changes),
            limits=OutletLimits(status_every_s=0.01, publish_every_s=0.005),
        )

    def cache(self, ids: list[int], scope: bytes) -> None:
        for key in HASHER.chain(ids, scope):
            self.cached[key] = None
            self.log.store(key)
        self.outlet._publish_soon()

    def say(self, request: EngineRequest, *ids: int, finish: FinishReason | None = None) -> None:
        self.outlet.deliver([token(request.request_id, *ids, finish=finish)])

    def _submit(self, request: EngineRequest) -> None:
        if self.refusal is not None:
            raise self.refusal
        self.taken.append(request)

    def _changes(self, whole: bool) -> BlockChanges:
        changes = None if whole else self.log.take()
        if changes is None:
            self.log.turn_on()
            return BlockChanges(tuple(self.cached), is_all=True)
        return changes


class Application:
    """The model's Serve application: its replicas attach when they are asked to."""

    def __init__(self, replicas: list[Replica]) -> None:
        self.replicas = replicas
        self.asleep: list[Replica] = []
        self.num_wakes = 0

    async def wake(self, address: str) -> ModelCard:
        self.num_wakes += 1
        self.replicas += self.asleep
        [card, *_] = await self.attach(address)
        return card

    async def attach(self, address: str) -> list[ModelCard]:
        for replica in self.replicas:
            await replica.outlet.link(address)
        return [ModelCard("m", "", 4096, 4096, 1000, "", "") for _ in self.replicas]


class Fleet:
    """A client and its replicas."""

    def __init__(self, hub: TokenHub, replicas: list[Replica]) -> None:
        self.hub = hub
        self.replicas = replicas
        self.board = ReplicaBoard(b"prefix", new_router=lambda size: Router(size, rng=random.Random(1)))
        self.application = Application(replicas)
        self.client = ChannelInferenceClient(
            hub, ["m"], lambda _: self.application, self.board, accept_s=3.0, refresh_s=0.02
        )

    async def start(self) -> None:
        self.client.start()
        await until(lambda: len(self.board.links("m")) == len(self.replicas))

    def knows(self, replica: Replica, num_keys: int) -> bool:
        name = ReplicaId(str(self.replicas.index(replica)))
        keys = HASHER.chain(PROMPT, b"tenant")
        router = self.board._models["m", 1].router
        return dict(router.index.match(keys)).get(name, 0) == num_keys

    def who_took(self, request_id: str) -> Replica | None:
        return next((r for r in self.replicas if any(t.request_id == request_id for t in r.taken)), None)


@asynccontextmanager
async def fleet_of(tmp_path: Path, count: int) -> AsyncIterator[Fleet]:
    hub = TokenHub(KEY)
    await hub.start(f"unix:{tmp_path}/hub.sock")
    fleet = Fleet(hub, [Replica(index) for index in range(count)])
    await fleet.start()
    try:
        yield fleet
    finally:
        await fleet.client.close()
        for replica in fleet.replicas:
            await replica.outlet.close()
        await hub.close()


def asked(request_id: str, ids: list[int] = PROMPT, scope: bytes = b"tenant") -> EngineRequest:
    return EngineRequest(request_id, ids, SamplingParams(max_tokens=8), scope)


@asynchronous
async def test_a_request_goes_where_its_tenants_prefix_is(tmp_path: Path) -> None:
    async with fleet_of(tmp_path, 4) as fleet:
        holder = fleet.replicas[2]
        holder.cache(PROMPT[:480], b"tenant")
        await until(lambda: fleet.knows(holder, 30))
        for number in range(3):
            await fleet.client.submit("m", asked(f"own{number}"))
            assert fleet.who_took(f"own{number}") is holder
        # Another tenant's blocks say nothing: its requests spread as if nothing were cached.
        for number in range(12):
            prompt = [number, *PROMPT]
            await fleet.client.submit("m", asked(f"other{number}", prompt, b"neighbour"))
        assert len({fleet.who_took(f"other{number}") for number in range(12)}) > 1


@asynchronous
async def test_a_neighbours_prefix_draws_no_request_in_either_direction(tmp_path: Path) -> None:
    async with fleet_of(tmp_path, 2) as fleet:
        first, second = fleet.replicas
        first.cache(PROMPT, b"a")
        second.cache(PROMPT, b"b")
        await until(lambda: len(fleet.board._models["m", 1].router.index) == 80)
        for number in range(4):
            await fleet.client.submit("m", asked(f"a{number}", scope=b"a"))
            await fleet.client.submit("m", asked(f"b{number}", scope=b"b"))
            assert fleet.who_took(f"a{number}") is first
            assert fleet.who_took(f"b{number}") is second


@asynchronous
async def test_a_refusing_replica_is_followed_by_the_next_and_all_refusals_are_one(tmp_path: Path) -> None:
    async with fleet_of(tmp_path, 3) as fleet:
        holder, *others = fleet.replicas
        holder.cache(PROMPT, b"tenant")
        await until(lambda: fleet.knows(holder, 40))
        holder.refusal = EngineOverloaded("full")
        generation = await fleet.client.submit("m", asked("r"))
        assert fleet.who_took("r") in others
        assert generation.engine in ("1", "2")
        for other in others:
            other.refusal = EngineOverloaded("full too", 7.0)
        with pytest.raises(EngineOverloaded):
            await fleet.client.submit("m", asked("s"))
        # What is wrong with the request is wrong everywhere.
        holder.refusal = InvalidRequest("too hot", "temperature")
        with pytest.raises(InvalidRequest, match="too hot") as caught:
            await fleet.client.submit("m", asked("t"))
        assert caught.value.param == "temperature"


@asynchronous
async def test_a_model_without_replicas_is_woken_once_by_whoever_asks(tmp_path: Path) -> None:
    async with fleet_of(tmp_path, 1) as fleet:
        [only] = fleet.replicas
        fleet.replicas.clear()
        await only.outlet.close()
        await until(lambda: not fleet.board.links("m"))
        assert "m" in fleet.client.models(), "what it is stays known"
        fleet.application.asleep.append(Replica("0"))
        given = await asyncio.gather(*(fleet.client.submit("m", asked(f"r{n}")) for n in range(8)))
        assert {generation.engine for generation in given} == {"0"}
        assert fleet.application.num_wakes == 1


@asynchronous
async def test_a_silent_replica_refuses_nobody_while_another_is_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(inference_client, "ANSWER_S", 0.2)
    async with fleet_of(tmp_path, 2) as fleet:
        silent, dead = fleet.replicas
        silent.cache(PROMPT, b"tenant")
        await until(lambda: fleet.knows(silent, 40))
        silent.outlet.take = lambda *_: None  # type: ignore[method-assign]
        dead.refusal = EngineDead("it ends")
        journey = Journey("m")
        asking = asyncio.create_task(fleet.client.submit("m", asked("r"), journey))
        await until(lambda: [each.outcome for each in journey.placements] == ["refused"] * 2)
        fleet.replicas[:] = [Replica(2)]
        assert (await asking).engine == "2"
        for replica in (silent, dead):
            await replica.outlet.close()


@asynchronous
async def test_a_gateway_that_finds_no_replica_wakes_the_model_to_learn_what_it_is(tmp_path: Path) -> None:
    async with fleet_of(tmp_path, 0) as fleet:
        fleet.application.asleep.append(Replica("0"))
        await until(lambda: "m" in fleet.client.models())
        await fleet.client.submit("m", asked("r"))


@asynchronous
async def test_a_replica_that_leaves_is_asked_where_nobody_else_takes_a_request(tmp_path: Path) -> None:
    async with fleet_of(tmp_path, 2) as fleet:
        leaving, staying = fleet.replicas
        leaving.cache(PROMPT, b"tenant")
        await until(lambda: fleet.knows(leaving, 40))
        leaving.outlet.leave()
        await until(lambda: fleet.board._models["m", 1].leaving)
        for number in range(3):
            await fleet.client.submit("m", asked(f"r{number}"))
            assert fleet.who_took(f"r{number}") is staying
        staying.refusal = EngineOverloaded("full")
        await fleet.client.submit("m", asked("last"))
        assert fleet.who_took("last") is leaving


@asynchronous
async def test_a_replica_whose_heart_beats_stay_out_is_not_asked_until_they_come_again(
    tmp_path: Path,
) -> None:
    async with fleet_of(tmp_path, 2) as fleet:
        quiet, other = fleet.replicas
        quiet.cache(PROMPT, b"tenant")
        await until(lambda: fleet.knows(quiet, 40))
        send, quiet.outlet._send_status = quiet.outlet._send_status, lambda: None  # type: ignore[method-assign]
        (link,) = [each for each in fleet.hub.links if each.label[1] == "0"]
        link.heard_at -= 2.0
        fleet.hub.check()
        assert len(fleet.board.links("m")) == 1
        await fleet.client.submit("m", asked("r"))
        assert fleet.who_took("r") is other
        quiet.outlet._send_status = send  # type: ignore[method-assign]
        await until(lambda: len(fleet.board.links("m")) == 2 and fleet.knows(quiet, 40))


@asynchronous
async def test_the_last_of_many_is_asked_when_all_others_refuse(tmp_path: Path) -> None:
    async with fleet_of(tmp_path, 7) as fleet:
        for replica in fleet.replicas:
            replica.refusal = EngineOverloaded("full")
        fleet.replicas[4].refusal = None
        # Those that hold the prompt stay the first by rank however often they refuse.
        for holder in fleet.replicas[:4]:
            holder.cache(PROMPT, b"tenant")
        await until(lambda: all(fleet.knows(holder, 40) for holder in fleet.replicas[:4]))
        for number in range(3):
            await fleet.client.submit("m", asked(f"r{number}"))
            assert fleet.who_took(f"r{number}") is fleet.replicas[4]


@asynchronous
async def test_a_request_without_a_token_survives_its_replica_and_one_with_a_token_does_not(
    tmp_path: Path,
) -> None:
    async with fleet_of(tmp_path, 2) as fleet:
        generation = await fleet.client.submit("m", asked("r"))
        first = fleet.who_took("r")
        assert first is not None
        [second] = [replica for replica in fleet.replicas if replica is not first]
        first.refusal = EngineDead("gone")
        reading = asyncio.create_task(generation.next())
        await asyncio.sleep(0)
        await first.outlet.close()
        await until(lambda: second.taken)
        second.say(second.taken[0], 5)
        assert [delta.token_ids for delta in await reading] == [(5,)]
        assert generation.engine == str(fleet.replicas.index(second))
        assert fleet.client.num_moved == 1
        # Once is enough, and what the client has read can't be taken back.
        await second.outlet.close()
        with pytest.raises(EngineDead):
            await generation.next()


@asynchronous
async def test_when_all_are_dead_the_replacement_is_waited_for(tmp_path: Path) -> None:
    async with fleet_of(tmp_path, 1) as fleet:
        [old] = fleet.replicas
        old.cache(PROMPT, b"tenant")
        await until(lambda: fleet.knows(old, 40))
        fleet.replicas.clear()
        await old.outlet.close()
        await until(lambda: not fleet.board.links("m"))
        asking = asyncio.create_task(fleet.client.submit("m", asked("r")))
        await asyncio.sleep(0)
        replacement = Replica(0)
        fleet.replicas.append(replacement)
        await asking
        assert replacement.taken
        # It has its predecessor's name, and nothing of its cache.
        assert fleet.knows(replacement, 0)


@asynchronous
async def test_who_has_somebody_else_to_ask_waits_for_no_replacement(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with fleet_of(tmp_path, 1) as fleet:
        [replica] = fleet.replicas
        generation = await fleet.client.submit("m", asked("r"), Journey("m", may_wait=False))
        reading = asyncio.create_task(generation.next())
        fleet.replicas.clear()
        await replica.outlet.close()
        with pytest.raises(EngineOverloaded):
            await reading
        with pytest.raises(EngineOverloaded):
            await fleet.client.submit("m", asked("s"), Journey("m", may_wait=False))
    # Nor does it wait for the last one that says nothing.
    monkeypatch.setattr(inference_client, "ANSWER_S", 0.02)
    async with fleet_of(tmp_path, 1) as fleet:
        [replica] = fleet.replicas
        replica.outlet.take = lambda *_: None  # type: ignore[method-assign]
        with pytest.raises(EngineOverloaded, match="answers now"):
            await fleet.client.submit("m", asked("r"), Journey("m", may_wait=False))


@asynchronous
async def test_a_draining_replica_ends_what_it_has_and_gets_nothing_new(tmp_path: Path) -> None:
    async with fleet_of(tmp_path, 2) as fleet:
        generation = await fleet.client.submit("m", asked("r"))
        old = fleet.who_took("r")
        assert old is not None
        draining = asyncio.create_task(old.outlet.drain())
        await until(lambda: len(fleet.board.links("m")) == 1)
        for number in range(5):
            await fleet.client.submit("m", asked(f"new{number}"))
            assert fleet.who_took(f"new{number}") is not old
        assert not draining.done()
        old.say(old.taken[0], 1, finish=FinishReason.STOP)
        assert [delta.token_ids for delta in await generation.next()] == [(1,)]
        await draining


@asynchronous
async def test_a_replica_that_gives_no_answer_is_passed_over_until_it_is_heard_of(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(inference_client, "ANSWER_S", 0.02)
    async with fleet_of(tmp_path, 2) as fleet:
        silent, other = fleet.replicas
        silent.cache(PROMPT, b"tenant")
        await until(lambda: fleet.knows(silent, 40))
        take = silent.outlet.take
        silent.outlet.take = lambda *_: None  # type: ignore[method-assign]
        await fleet.client.submit("m", asked("r"))
        assert fleet.who_took("r") is other
        silent.outlet.take = take  # type: ignore[method-assign]
        # It has told all of its blocks anew.
        await until(lambda: fleet.knows(silent, 40))
        await fleet.client.submit("m", asked("s"))
        assert fleet.who_took("s") is silent


@asynchronous
async def test_a_lost_event_is_made_good_by_the_whole(tmp_path: Path) -> None:
    async with fleet_of(tmp_path, 2) as fleet:
        holder = fleet.replicas[0]
        holder.cache(PROMPT[:160], b"tenant")
        await until(lambda: fleet.knows(holder, 10))
        # An event that this gateway never gets.
        [link] = holder.outlet._links.values()
        assert holder.outlet._blocks is not None
        holder.outlet._blocks._next[link] += 1
        holder.cache(PROMPT[:320], b"tenant")
        await until(lambda: fleet.knows(holder, 20))
        assert fleet.board.index_sizes()["m"] == (20, 1)


@asynchronous
async def test_who_leaves_before_the_answer_leaves_nothing_running(tmp_path: Path) -> None:
    async with fleet_of(tmp_path, 1) as fleet:
        [replica] = fleet.replicas
        take = replica.outlet.take
        held: list[object] = []
        replica.outlet.take = lambda *submission: held.append(submission)  # type: ignore[method-assign,func-returns-value]
        asking = asyncio.create_task(fleet.client.submit("m", asked("r")))
        await until(lambda: held)
        asking.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asking
        take(*held[0])  # type: ignore[misc]
        await until(lambda: replica.aborted == ["r"])


@asynchronous
async def test_an_unknown_model_has_no_engine(tmp_path: Path) -> None:
    async with fleet_of(tmp_path, 1) as fleet:
        with pytest.raises(EngineDead, match="no model named"):
            await fleet.client.submit("nobody", asked("r"))


@asynchronous
async def test_a_model_that_can_not_be_attached_is_told_of_once_per_kind_of_failure(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "footplate.deployments.inference_client")
    failures: list[Exception] = []

    def find(application: str) -> Application:
        failures.append(KeyError("canary") if len(failures) < 3 else OSError("canary"))
        raise failures[-1]

    async with fleet_of(tmp_path, 0) as fleet:
        board = ReplicaBoard(b"prefix", new_router=lambda size: Router(size, rng=random.Random(1)))
        client = ChannelInferenceClient(fleet.hub, ["late"], find, board, accept_s=3.0, refresh_s=0.02)
        client.start()
        await until(lambda: len(failures) >= 6)
        await client.close()
    lines = [record.getMessage() for record in caplog.records if "late" in record.getMessage()]
    assert lines == [f"replicas of late can't be attached yet: {kind}" for kind in ("KeyError", "OSError")]


class Versions:
    """A model's generations, each an application of its own that comes and goes."""

    def __init__(self, hub: TokenHub) -> None:
        self.applications: dict[str, list[Replica]] = {}
        self.board = ReplicaBoard(b"prefix", new_router=lambda size: Router(size, rng=random.Random(1)))
        self.client = ChannelInferenceClient(hub, ["m"], self.find, self.board, accept_s=3.0, refresh_s=0.02)

    def find(self, application: str) -> Application:
        return Application(self.applications[application])

    async def deploy(self, generation: int) -> Replica:
        replica = Replica(replica_label(generation, "0"))
        self.applications.setdefault(application_of("m", generation), []).append(replica)
        self.client.serve([ModelTarget("m", ("nick",), (generation,))])
        await until(lambda: any(link.label[1] == replica_label(generation, "0") for link in self.links()))
        return replica

    def links(self) -> list[EngineLink]:
        return list(self.board.links("m"))


@asynchronous
async def test_a_new_generation_takes_what_is_new_and_the_old_one_ends_what_it_has(tmp_path: Path) -> None:
    hub = TokenHub(KEY)
    await hub.start(f"unix:{tmp_path}/hub.sock")
    versions = Versions(hub)
    client = versions.client
    client.start()
    assert [names.name for names in client.starting()] == ["m"]
    old = await versions.deploy(1)
    assert client.starting() == []
    before = await client.submit("m", asked("before"))
    old.say(old.taken[0], 1)
    assert [delta.token_ids for delta in await before.next()] == [(1,)]
    # While the new one has not answered, the old one serves.
    versions.applications[application_of("m", 2)] = []
    client.serve([ModelTarget("m", (), (2,))])
    await client.submit("m", asked("meanwhile"))
    assert [request.request_id for request in old.taken] == ["before", "meanwhile"]
    new = await versions.deploy(2)
    for number in range(4):
        await client.submit("m", asked(f"after{number}"))
    assert len(new.taken) == 4
    assert len(old.taken) == 2
    # Nothing is asked of the old one any more, and its stream is whole.
    del versions.applications[application_of("m", 1)][:]
    await until(lambda: list(client._generations["m"]) == [2])
    old.say(old.taken[0], 2, finish=FinishReason.STOP)
    assert [delta.token_ids for delta in await before.next()] == [(2,)]
    assert await before.next() == ()
    await client.close()
    for replica in (old, new):
        await replica.outlet.close()
    await hub.close()


@asynchronous
async def test_a_removed_model_is_gone_at_once_and_its_streams_go_on(tmp_path: Path) -> None:
    hub = TokenHub(KEY)
    await hub.start(f"unix:{tmp_path}/hub.sock")
    versions = Versions(hub)
    client = versions.client
    client.start()
    replica = await versions.deploy(1)
    open_stream = await client.submit("m", asked("open"))
    client.serve([])
    assert client.models() == {}
    assert client.starting() == []
    with pytest.raises(EngineDead):
        await client.submit("m", asked("late"))
    replica.say(replica.taken[0], 1, finish=FinishReason.STOP)
    assert [delta.token_ids for delta in await open_stream.next()] == [(1,)]
    # The same name again, which nobody serves yet.
    versions.applications.clear()
    client.serve([ModelTarget("m", ("nick",), (2,))])
    assert [(names.name, names.aliases) for names in client.starting()] == [("m", ("nick",))]
    await client.close()
    await replica.outlet.close()
    await hub.close()
