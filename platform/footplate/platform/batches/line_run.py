"""One attempt at one line: run like any request, kept before it is marked, billed by what is kept.

The order is what makes a line run and cost once, whatever dies in between:

1. its answer is kept in the file store, together with the usage event that it will be billed by;
2. that event is made durable;
3. the line is marked as ended.

A worker that dies before 1 leaves nothing: the line runs again, and what the dead attempt was billed by its
last heart-beat is an estimate that the next answer's exact count replaces. One that dies after 1 leaves an
answer: whoever gets the line finds it, does 2 and 3, and runs nothing.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass, field

import msgspec

from footplate.billing.usage import BatchId, EventId
from footplate.platform.batches.lines import ReadLine, read_line
from footplate.platform.batches.results import KeptResult, answered_line, tokens_of
from footplate.platform.batches.retries import Later, is_hopeless, judge
from footplate.platform.batches.store import BatchQueue, ByteStore
from footplate.platform.batches.threads import StoreThreads
from footplate.platform.batches.values import ClaimedLine, LineEnd
from footplate.platform.errors import AuthenticationFailed
from footplate.platform.http.errors import api_error
from footplate.platform.http.in_process import InProcessAnswer, InProcessCaller, ask_in_process
from footplate.platform.http.straight_path import StraightEndpoint
from footplate.platform.metering import EventSink, LineAttempt
from footplate.platform.ports import KeyFinder, Principal
from footplate.platform.telemetry.spans import Tracer
from footplate.routing.cascade import Cascade
from footplate.tenancy.access import Action, roles_with

_ROLES = frozenset(role.value for role in roles_with(Action.USE_MODELS))


class LeaseLost(Exception):
    """Another worker has the line by now: what this one has made of it counts for nothing."""


@dataclass(slots=True, eq=False)
class HeldLine:
    """A line that this worker runs now."""

    line: ClaimedLine
    attempt: LineAttempt = field(init=False)
    leave: asyncio.Event = field(default_factory=asyncio.Event)
    # Whether its answer may be in the file store, and how it ends when it is.
    may_be_kept: bool = False
    end: LineEnd | None = None

    def __post_init__(self) -> None:
        self.attempt = LineAttempt(EventId(self.line.event_id), BatchId(self.line.batch_id))

    def stop(self, *, is_final: bool) -> None:
        """End it early. `is_final`: it is not begun again, and what it has used is what it costs."""
        self.attempt.is_final = self.attempt.is_final or is_final
        self.leave.set()


@dataclass(frozen=True, slots=True)
class LineWork:
    """What running lines needs."""

    endpoints: Mapping[str, StraightEndpoint]
    queue: BatchQueue
    data: ByteStore
    keys: KeyFinder
    sink: EventSink | None
    threads: StoreThreads
    worker: str
    cascades: Mapping[str, Cascade] = field(default_factory=dict)
    tracer: Tracer = field(default_factory=Tracer)


async def find_kept(work: LineWork, line: ClaimedLine) -> LineEnd | None:
    """The end of a line by an answer that a lost worker has kept: billed if it was not, and not run again."""
    return await settle_kept(
        work.data, work.threads, work.sink, {n: line.result_key(n) for n in line.lost_attempts}
    )


async def settle_kept(
    data: ByteStore, threads: StoreThreads, sink: EventSink | None, keys: Mapping[int, str]
) -> LineEnd | None:
    """The first answer among those of some attempts, once its event is durable."""
    for attempt, key in sorted(keys.items()):
        found = await threads.ask(lambda key=key: data.read(key))  # type: ignore[misc]
        kept = None if found is None else KeptResult.from_bytes(found)
        if kept is None:
            continue
        event = kept.usage_event()
        if event is not None and sink is not None:
            # It may be there already: the same event again changes nothing, and mends an estimate.
            await asyncio.shield(sink.take(event))
        return kept.end(attempt)
    return None


async def run_line(work: LineWork, held: HeldLine) -> LineEnd | Later | None:
    """One attempt. None: it was stopped before it had an answer.

    Raises:
        LeaseLost: another worker has it.
        BatchStoreAway, FileStoreAway, StoreUnavailable: it could not be read, looked up or kept.
    """
    line = held.line
    data = await work.threads.ask(
        lambda: work.data.read(line.input_key, line.span.offset, line.span.num_bytes)
    )
    read = _read(data)
    principal = await work.keys.find(line.key_id)
    if read is None or is_hopeless(line.num_failures, len(line.lost_attempts)):
        return await _refuse(work, held, read, RuntimeError())
    if principal is None or not _may_run(principal, line):
        message = "The key that made this batch is revoked, expired, or its tenant suspended."
        return await _refuse(work, held, read, AuthenticationFailed(message))
    caller = InProcessCaller(principal, held.attempt, tracer=work.tracer)

    async def keep(body: bytes) -> None:
        event = None if caller.run is None else caller.run.completed_event()
        tokens = tokens_of(body)
        text = answered_line(line.event_id, read.custom_id, line.request_id, 200, body)
        kept = KeptResult(
            200,
            text,
            b"" if event is None else event.to_bytes(),
            tokens.input,
            tokens.cached,
            tokens.output,
        )
        await _keep(work, held, kept)

    asked = (line.endpoint, line.request_id, read.body)
    answer = await ask_in_process(work.endpoints[line.endpoint], asked, caller, held.leave, keep)
    if caller.run is not None:
        # The mark comes last: a line that is marked is looked at by nobody any more.
        await caller.run.until_recorded()
    if held.end is not None or answer is None:
        return held.end
    later = judge(answer.status, answer.headers, line.num_failures)
    return later or await _keep_refusal(work, held, read, answer)


def _may_run(principal: Principal, line: ClaimedLine) -> bool:
    return principal.tenant_id == line.tenant_id and principal.role in _ROLES


def _read(data: bytes | None) -> ReadLine | None:
    try:
        return None if data is None else read_line(data)
    except msgspec.DecodeError:
        return None


async def _refuse(work: LineWork, held: HeldLine, read: ReadLine | None, reason: Exception) -> LineEnd:
    """For what gets to no endpoint: its file has changed, its key is no more, or it has no hope."""
    found = api_error(reason)
    answer = InProcessAnswer(found.status, found.encode())
    return await _keep_refusal(work, held, read or ReadLine("", b""), answer)


async def _keep_refusal(work: LineWork, held: HeldLine, read: ReadLine, answer: InProcessAnswer) -> LineEnd:
    line = held.line
    text = answered_line(line.event_id, read.custom_id, line.request_id, answer.status, answer.body)
    return await _keep(work, held, KeptResult(answer.status, text))


async def _keep(work: LineWork, held: HeldLine, kept: KeptResult) -> LineEnd:
    """Keep an answer, if the line is still ours: then it stays so for a lease, and nobody else begins."""
    line = held.line

    def renew_and_put() -> bool:
        if line.key not in work.queue.renew(work.worker, [line]):
            return False
        work.data.put(line.result_key(line.attempt), kept.to_bytes())
        return True

    held.may_be_kept = True
    keeping = asyncio.ensure_future(work.threads.ask(renew_and_put))
    try:
        is_ours = await asyncio.shield(keeping)
    except asyncio.CancelledError:
        # Stopped at the last moment: what is kept meanwhile is the line's answer all the same.
        await asyncio.wait([keeping])
        if not keeping.exception() and keeping.result():
            _note_kept(held, kept)
        raise
    if not is_ours:
        raise LeaseLost
    return _note_kept(held, kept)


def _note_kept(held: HeldLine, kept: KeptResult) -> LineEnd:
    held.attempt.is_final = True
    held.end = kept.end(held.line.attempt)
    return held.end
