"""Nodes of a cluster that are reclaimed, cut off, or die, under load: what clients see, and what is billed.

Three engines' worth of nodes come and go in one run; the figures go to results/node_faults.json. Needs the
right to make network namespaces.
"""

from __future__ import annotations

import json
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest

from footplate.deployments.leftovers import wait_until
from tests.chaos import ledger_audit
from tests.chaos.fault_results import keep_result
from tests.chaos.ledger_stack import MODEL
from tests.chaos.node_cluster import Cluster, Node, running_cluster
from tests.chaos.test_availability import Ask, Kill, judged
from tests.chaos.test_random_kills import SEED
from tests.e2e.serve_process import ServeProcess

STEP_MS = 25
ARRIVE_EVERY_S = 0.15
NOTICE_S = 36
# A silent replica is given up after 5 s, looked for each quarter of a second; the machine may be busy.
STREAMS_END_S = 7.0
# A new request has its answer by then; a busy machine may take twice as long.
ANSWER_S = 2.0
RECOVER_S = 60.0
FOOTPLATE = str(Path(sys.executable).with_name("footplate"))


@dataclass
class Stream:
    """What a client saw of one stream. Times are monotonic."""

    num_wanted: int
    request_id: str = ""
    num_tokens: int = 0
    end: str = ""
    ended_at: float = 0.0


@dataclass
class Streams:
    """Streams side by side, each of a prompt of its own, so that replicas share them."""

    served: ServeProcess
    all: list[Stream] = field(default_factory=list)
    _threads: list[threading.Thread] = field(default_factory=list)

    def begin(self, number: int, num_tokens: int) -> list[Stream]:
        """Start some more; returns once each of them has tokens."""
        new = [Stream(num_tokens) for _ in range(number)]
        for stream in new:
            self.all.append(stream)
            thread = threading.Thread(target=self._run, args=(stream, len(self.all)), daemon=True)
            self._threads.append(thread)
            thread.start()
        assert wait_until(lambda: all(stream.num_tokens for stream in new), 10)
        return new

    def join(self) -> None:
        """Wait until all have ended."""
        for thread in self._threads:
            thread.join(timeout=RECOVER_S)
            assert not thread.is_alive(), "a stream never ended"

    def _run(self, stream: Stream, number: int) -> None:
        body = {"model": MODEL, "prompt": [number] * 40, "max_tokens": stream.num_wanted}
        asked = {**body, "stream": True, "return_token_ids": True, "ignore_eos": True}
        with suppress(httpx.TransportError), self.served.http(timeout_s=RECOVER_S) as http:
            with http.stream("POST", "/v1/completions", json=asked) as answer:
                stream.request_id = answer.headers["x-request-id"]
                for line in filter(None, answer.iter_lines()):
                    if line == "data: [DONE]":
                        stream.end = stream.end or "whole"
                        break
                    event = json.loads(line.removeprefix("data: "))
                    if "error" in event:
                        stream.end = "error event"
                    else:
                        stream.num_tokens += len(event["choices"][0].get("token_ids") or ())
        stream.end, stream.ended_at = stream.end or "cut", time.monotonic()


class Arrivals:
    """Short requests that come at their times, however long others take; each on a connection of its own.

    Every other one begins with `prefix`, and so belongs where that is cached.
    """

    def __init__(self, served: ServeProcess, prefix: list[int]) -> None:
        self.asks: list[Ask] = []
        self._prefix = prefix
        self._served = served
        self._is_over = threading.Event()
        self._source = threading.Thread(target=self._arrive, daemon=True)
        self._threads: list[threading.Thread] = []

    def __enter__(self) -> Arrivals:
        self._source.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._is_over.set()
        self._source.join()
        for thread in self._threads:
            thread.join(timeout=RECOVER_S)
            assert not thread.is_alive(), "a request never ended"

    def _arrive(self) -> None:
        while not self._is_over.wait(ARRIVE_EVERY_S):
            thread = threading.Thread(target=self._ask, args=(len(self._threads),), daemon=True)
            self._threads.append(thread)
            thread.start()

    def _ask(self, number: int) -> None:
        prompt = [*self._prefix, number] if number % 2 else [2000 + number] * 20
        self.asks.append(ask(self._served, prompt))


def ask(served: ServeProcess, prompt: list[int]) -> Ask:
    """One short request."""
    body = {"model": MODEL, "prompt": prompt, "max_tokens": 4, "ignore_eos": True}
    began, status, error = time.monotonic(), 0, ""
    with suppress(httpx.TransportError), served.http(timeout_s=RECOVER_S) as http:
        answer = http.post("/v1/completions", json=body)
        status, error = answer.status_code, "" if answer.status_code == 200 else answer.text
    return Ask(began, time.monotonic(), status, error)


@dataclass
class Rig:
    """The cluster, its load, and what the engines wrote down."""

    cluster: Cluster
    journal: Path
    figures: dict[str, Any] = field(default_factory=dict)
    seen: dict[str, ledger_audit.Seen] = field(default_factory=dict)

    @property
    def served(self) -> ServeProcess:
        return self.cluster.served

    def lines(self, pid: int, event: str) -> list[dict[str, Any]]:
        """What an engine's process wrote down of such an event."""
        lines = map(json.loads, self.journal.read_text().splitlines())
        return [line for line in lines if line["pid"] == pid and line["event"] == event]

    def taken(self, pid: int) -> list[str]:
        """The requests that an engine took."""
        return [line["request_id"] for line in self.lines(pid, "add")]

    def engine_of(self, node: Node) -> int:
        """The process of the engine on a node."""
        [pid] = set(self.served.engine_pids()) & set(node.pids())
        return pid

    def audit(self, streams: Streams) -> str:
        """Hold the ledger against all engines and clients of this run, these streams among them."""
        for each in streams.all:
            self.seen[each.request_id] = ledger_audit.Seen(each.num_tokens, each.end == "whole")
        return ledger_audit.audit(self.served, ledger_audit.Load(self.served, 0, SEED, seen=self.seen))

    def prefix_on(self, pid: int) -> list[int]:
        """The beginning of a prompt that an engine has cached."""
        for number in range(200):
            prefix, before = [1000 * len(self.figures) + number] * 160, self.taken(pid)
            assert ask(self.served, prefix).status == 200
            if self.taken(pid) != before:
                return prefix
        raise AssertionError("nobody asks it")

    def begin_on(self, pid: int, streams: Streams, number: int, num_tokens: int) -> list[Stream]:
        """Start streams until so many are with an engine; the others are somewhere else."""
        begun: list[Stream] = []
        while sum(any(each.request_id in name for name in self.taken(pid)) for each in begun) < number:
            assert len(begun) < 40, "nobody asks it"
            begun += streams.begin(1, num_tokens)
        return begun

    def replace(self) -> float:
        """Another node joins; how long until the gateway has one more engine than before."""
        began, before = time.monotonic(), self.cluster.engines()
        self.cluster.add_node()
        is_known = wait_until(lambda: self.cluster.engines() - before, RECOVER_S, every_s=0.2)
        assert is_known, self.cluster.said()
        return time.monotonic() - began

    def keep(self, fault: str, kill: Kill, streams: list[Stream], at: float, **more: Any) -> None:
        """Hold the figures of a fault against their bounds, and keep them."""
        ends = sorted(each.end for each in streams)
        last = max((each.ended_at - at for each in streams if each.end == "error event"), default=0.0)
        figures = asdict(kill) | {"streams": {end: ends.count(end) for end in ends}}
        self.figures[fault] = figures | {"streams_failed_after_s": round(last, 2)} | more
        assert kill.num_new_failed == 0, kill
        assert kill.longest_s <= 2 * ANSWER_S, kill
        assert kill.answered_s <= 2 * ANSWER_S, kill


@pytest.fixture(scope="module")
def rig() -> Iterator[Rig]:
    with ledger_audit.open_folder() as folder:
        journal = folder / "scripted.journal"
        journal.touch()
        script = f"scripted:step_ms={STEP_MS},journal={journal}"
        config = f"limits: {{lease_s: {ledger_audit.LEASE_S}}}\n"
        with running_cluster(folder / "data", config, script) as cluster:
            rig = Rig(cluster, journal)
            yield rig
            if len(rig.figures) == 3:
                keep_result("node_faults", step_ms=STEP_MS, **rig.figures)


def test_a_reclaimed_node_is_left_before_it_goes(rig: Rig) -> None:
    node = rig.cluster.nodes[-1]
    pid = rig.engine_of(node)
    streams = Streams(rig.served)
    with Arrivals(rig.served, rig.prefix_on(pid)) as load:
        short = rig.begin_on(pid, streams, 2, num_tokens=300)
        long = rig.begin_on(pid, streams, 2, num_tokens=1900)
        at = time.monotonic()
        command = [FOOTPLATE, "drain-node", "--seconds", str(NOTICE_S)]
        drain = rig.cluster.spawn(command, "drain", node)
        said = rig.cluster.data_dir / "drain"
        assert wait_until(lambda: "drains" in said.read_text(), 20), said.read_text()
        told_at = time.monotonic()
        replaced_s = rig.replace()
        code = drain.wait(timeout=NOTICE_S + 10)
        emptied_at = time.monotonic()
        streams.join()
        asks = list(load.asks)
    assert (code, said.read_text().splitlines()[-1]) == (0, "it is empty")
    node.take_away()
    kill = judged("reclaim", at, replaced_s, asks)
    taken = [line["at"] - told_at for line in rig.lines(pid, "add") if line["at"] > told_at]
    ended = [each for each in long if each.end == "error event"]
    rig.keep(
        "reclaim",
        kill,
        streams.all,
        at,
        notice_s=NOTICE_S,
        told_after_s=round(told_at - at, 2),
        took_new_for_s=round(max(taken, default=0.0), 2),
        empty_after_s=round(emptied_at - at, 2),
        audit=rig.audit(streams),
    )
    assert {each.end for each in short} == {"whole"}
    assert not [ask for ask in asks if ask.status != 200]
    assert emptied_at - at < NOTICE_S + 1.0
    # Early enough for a node that is gone at the end of its notice.
    assert all(each.ended_at - at < NOTICE_S - 2.0 for each in ended)
    assert max(taken, default=0.0) < 1.0
    # What could not end by itself was told so, and not before the time that there was.
    assert ended
    assert all(each.num_tokens and each.ended_at - at > NOTICE_S / 2 for each in ended)
    assert {each.end for each in long} <= {"whole", "error event"}


@pytest.mark.parametrize("fault", ["cut off", "killed"])
def test_a_lost_node_costs_no_more_than_what_ran_on_it(rig: Rig, fault: str) -> None:
    node = rig.cluster.nodes[-1]
    pid = rig.engine_of(node)
    streams = Streams(rig.served)
    with Arrivals(rig.served, rig.prefix_on(pid)) as load:
        begun = rig.begin_on(pid, streams, 3, num_tokens=600)
        at = time.monotonic()
        if fault == "cut off":
            node.cut()
        else:
            node.kill()
        assert wait_until(lambda: len(rig.cluster.engines()) == 1, STREAMS_END_S, every_s=0.1)
        forgotten_s = time.monotonic() - at
        # With no room elsewhere the replacement waits for a node.
        replaced_s = rig.replace()
        streams.join()
        asks = list(load.asks)
    aborted = [line["at"] - at for line in rig.lines(pid, "abort")]
    fenced_s = fence(node) if fault == "cut off" else 0.0
    node.take_away()
    rig.keep(
        fault,
        judged(fault, at, replaced_s, asks),
        begun,
        at,
        forgotten_after_s=round(forgotten_s, 2),
        engine_gave_up_after_s=round(max(aborted, default=0.0), 2),
        fenced_after_s=round(fenced_s, 2),
        audit=rig.audit(streams),
    )
    failed = [each for each in begun if each.end == "error event"]
    assert failed
    assert {each.end for each in begun} == {"whole", "error event"}
    assert all(each.ended_at - at < STREAMS_END_S for each in failed)
    if fault == "cut off":
        # It computes for nobody: its side of the cut notices too.
        assert aborted
        assert max(aborted) < 2 * STREAMS_END_S


def fence(node: Node) -> float:
    """Mend the cable of a node that was given up: it ends itself, or two would be in one place."""
    began = time.monotonic()
    node.mend()
    assert wait_until(lambda: not node.pids(), RECOVER_S, every_s=0.1), node.pids()
    return time.monotonic() - began
