"""Engines and their clients on a simulated clock: what a routing policy does to a fleet of any size.

A simulated engine batches continuously: each step takes some prompt tokens and one token of every running
sequence, and lasts as long as a step of an 8B model on one H200 does by the benchmarks of `engine/`. Its
cache holds whole blocks, forgets the least recently used, and tells of both, 50 ms late.
"""

from __future__ import annotations

import heapq
import itertools
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from footplate.engine.bench.workloads import Job
from footplate.engine.prefix import PrefixHasher
from footplate.routing.types import BlockEvents, BlockKey, ReplicaId, ReplicaLoad

BLOCK = 16
HASHER = PrefixHasher(b"benchmark", BLOCK)
# Llama-3.1-8B on one H200: 217 ms for 8,192 tokens, 4.4 ms a step of 8 and 12.5 ms one of 256.
STEP_S, PREFILL_TOKEN_S, DECODE_TOKEN_S = 0.0042, 26.5e-6, 32e-6
MAX_STEP_TOKENS, MAX_RUNNING = 8_192, 256
EVENT_S = 0.05


@dataclass(slots=True)
class Request:
    """One job on its way."""

    job: Job
    keys: Sequence[BlockKey]
    session: str
    came_s: float = 0.0
    num_cached: int = 0
    num_left: int = 0
    num_out: int = 0
    first_token_s: float = 0.0
    is_done: Callable[[], None] = lambda: None


@dataclass
class Replica:
    """One engine. `kv_tokens`: what its pool holds, of living and of cached sequences."""

    name: ReplicaId
    kv_tokens: int
    waiting: deque[Request] = field(default_factory=deque)
    running: list[Request] = field(default_factory=list)
    num_hit_tokens: int = 0
    num_prompt_tokens: int = 0
    num_taken: int = 0
    busy_s: float = 0.0
    max_requests: int = 0

    def __post_init__(self) -> None:
        self._cached: OrderedDict[BlockKey, None] = OrderedDict()
        self._stored: list[BlockKey] = []
        self._evicted: list[BlockKey] = []
        self._sequence = itertools.count()
        self._has_told = False

    @property
    def load(self) -> ReplicaLoad:
        in_work = [request for request in self.running if request.num_left]
        num_new = sum(request.num_left for request in in_work)
        num_new += sum(len(request.job.prompt_token_ids) for request in self.waiting)
        return ReplicaLoad(len(self.running), len(self.waiting), num_new)

    def take(self, request: Request) -> None:
        self.num_taken += 1
        self.waiting.append(request)
        self.max_requests = max(self.max_requests, len(self.waiting) + len(self.running))

    def events(self) -> BlockEvents | None:
        """What changed since the last call."""
        if self._has_told and not (self._stored or self._evicted):
            return None
        gone = [key for key in self._evicted if key not in self._cached]
        stored = [key for key in self._stored if key in self._cached]
        events = BlockEvents(next(self._sequence), stored, gone, is_reset=not self._has_told)
        self._stored, self._evicted, self._has_told = [], [], True
        return events

    def step(self) -> tuple[float, list[Request], list[Request]]:
        """Seconds that a step takes, who has a first token after it, and who has ended."""
        decoding = [request for request in self.running if not request.num_left]
        room = MAX_STEP_TOKENS - len(decoding)
        in_step = [request for request in self.running if request.num_left]
        num_prefill, began = 0, []
        while room:
            if not in_step:
                if not self.waiting or len(self.running) >= MAX_RUNNING:
                    break
                in_step.append(self._begin(self.waiting.popleft()))
                self.running.append(in_step[0])
            request = in_step.pop(0)
            taken = min(request.num_left, room)
            request.num_left -= taken
            room -= taken
            num_prefill += taken
            if not request.num_left:
                began.append(request)
        # What a step computes can be found from the next one on.
        for request in began:
            self._store(request.keys)
        ended = []
        for request in (*decoding, *began):
            request.num_out += 1
            if request.num_out >= request.job.output_len:
                ended.append(request)
        if ended:
            gone = set(map(id, ended))
            self.running = [request for request in self.running if id(request) not in gone]
        took_s = STEP_S + num_prefill * PREFILL_TOKEN_S + len(decoding) * DECODE_TOKEN_S
        self.busy_s += took_s
        return took_s, began, ended

    def _begin(self, request: Request) -> Request:
        num_prompt = len(request.job.prompt_token_ids)
        num_held = 0
        for key in request.keys:
            if key not in self._cached:
                break
            self._cached.move_to_end(key)
            num_held += 1
        request.num_cached = min(num_held * BLOCK, num_prompt - 1)
        request.num_left = num_prompt - request.num_cached
        self.num_hit_tokens += request.num_cached
        self.num_prompt_tokens += num_prompt
        return request

    def _store(self, keys: Iterable[BlockKey]) -> None:
        # Ends are forgotten first.
        for key in reversed(list(keys)):
            if key not in self._cached:
                self._stored.append(key)
            self._cached[key] = None
            self._cached.move_to_end(key)
        live = sum(len(r.job.prompt_token_ids) + r.num_out for r in self.running) // BLOCK
        while len(self._cached) > max(self.kv_tokens // BLOCK - live, 0):
            key, _ = self._cached.popitem(last=False)
            self._evicted.append(key)


class Policy:
    """What is compared. `tell` comes every 50 ms for each replica, `choose` for each request."""

    def tell(self, replica: ReplicaId, load: ReplicaLoad, events: BlockEvents | None, now: float) -> None: ...

    def choose(self, request: Request, now: float) -> ReplicaId:
        raise NotImplementedError


@dataclass
class Outcome:
    """What came of one load under one policy."""

    seconds: float
    hit_tokens: int
    prompt_tokens: int
    first_token_s: list[float]
    requests_by_replica: list[int]
    busy_by_replica: list[float]

    @property
    def hit_rate(self) -> float:
        return self.hit_tokens / self.prompt_tokens

    @property
    def imbalance(self) -> float:
        """The busiest replica's work against the mean."""
        return max(self.busy_by_replica) * len(self.busy_by_replica) / sum(self.busy_by_replica)


class Fleet:
    """Replicas under one policy, on one clock."""

    def __init__(self, policy: Policy, num_replicas: int, kv_tokens: int) -> None:
        self._policy = policy
        self.replicas = {
            ReplicaId(str(n)): Replica(ReplicaId(str(n)), kv_tokens) for n in range(num_replicas)
        }
        self._agenda: list[tuple[float, int, Callable[[], None]]] = []
        self._order = itertools.count()
        self._stepping: set[ReplicaId] = set()
        self.now = 0.0
        self._last_s = 0.0
        self._num_open = 0
        self._waits: list[float] = []

    def at(self, when: float, action: Callable[[], None]) -> None:
        heapq.heappush(self._agenda, (when, next(self._order), action))

    def send(self, request: Request) -> None:
        self._num_open += 1
        request.came_s = self.now
        replica = self.replicas[self._policy.choose(request, self.now)]
        replica.take(request)
        if replica.name not in self._stepping:
            self._step(replica)

    def run(self) -> Outcome:
        """Until nothing is left to do."""
        self._tell()
        while self._agenda:
            self.now, _, action = heapq.heappop(self._agenda)
            action()
        replicas = self.replicas.values()
        return Outcome(
            self._last_s,
            sum(replica.num_hit_tokens for replica in replicas),
            sum(replica.num_prompt_tokens for replica in replicas),
            sorted(self._waits),
            [replica.num_taken for replica in replicas],
            [replica.busy_s for replica in replicas],
        )

    def _tell(self) -> None:
        for replica in self.replicas.values():
            self._policy.tell(replica.name, replica.load, replica.events(), self.now)
        if self._agenda or self._num_open:
            self.at(self.now + EVENT_S, self._tell)

    def _step(self, replica: Replica) -> None:
        if not (replica.waiting or replica.running):
            self._stepping.discard(replica.name)
            return
        self._stepping.add(replica.name)
        took_s, began, ended = replica.step()

        def end() -> None:
            self._last_s = self.now
            self._waits += [self.now - request.came_s for request in began]
            for request in ended:
                self._num_open -= 1
                request.is_done()
            self._step(replica)

        self.at(self.now + took_s, end)


def request_of(job: Job, session: str = "") -> Request:
    return Request(job, HASHER.chain(job.prompt_token_ids, job.tenant.encode()), session)


def closed_loop(fleet: Fleet, jobs: Sequence[Job], concurrency: int) -> Outcome:
    """So many at a time; the next begins when one ends."""
    waiting = iter([request_of(job) for job in jobs])

    def send_next() -> None:
        request = next(waiting, None)
        if request is not None:
            request.is_done = send_next
            fleet.send(request)

    for number in range(concurrency):
        # Clients that begin in the same instant are no load that anybody has.
        fleet.at(number * 0.001, send_next)
    return fleet.run()


def sessions(fleet: Fleet, turns_of: Sequence[Sequence[Job]], pause_s: float = 1.0) -> Outcome:
    """Each session sends its next turn some time after the answer to the last."""
    for number, jobs in enumerate(turns_of):
        turns = iter([request_of(job, f"{job.tenant}/{number}") for job in jobs])

        def send_next(turns: Iterable[Request] = turns) -> None:
            request = next(iter(turns), None)
            if request is not None:
                request.is_done = lambda: fleet.at(fleet.now + pause_s, send_of(turns))
                fleet.send(request)

        def send_of(turns: Iterable[Request]) -> Callable[[], None]:
            return lambda: send_next(turns)

        fleet.at(number * 0.02, send_of(turns))
    return fleet.run()


def infinite_hit_rate(jobs: Iterable[Job]) -> float:
    """The share of prompt tokens that one replica with all memory of the world would find, one by one."""
    known: set[BlockKey] = set()
    num_hit = num_prompt = 0
    for job in jobs:
        keys = HASHER.chain(job.prompt_token_ids, job.tenant.encode())
        held = next((n for n, key in enumerate(keys) if key not in known), len(keys))
        num_hit += min(held * BLOCK, len(job.prompt_token_ids) - 1)
        num_prompt += len(job.prompt_token_ids)
        known.update(keys)
    return num_hit / num_prompt
