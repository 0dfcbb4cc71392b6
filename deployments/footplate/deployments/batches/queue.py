"""The work of batches in PostgreSQL; see `BatchQueue`.

A line is claimed with `for update skip locked`, so that workers never wait for one another, and every change
of a claimed line names the worker and the attempt that it was claimed by.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import psycopg
from sqlalchemy import Connection, text

from footplate.deployments.batches.batch_rows import COLUMNS, as_batch, stamped
from footplate.deployments.batches.database import NOW, Database
from footplate.platform.batches.fairness import WaitingBatch, shares
from footplate.platform.batches.states import froms
from footplate.platform.batches.store import Ended
from footplate.platform.batches.values import (
    BATCH_FILE_S,
    OUTPUT_PURPOSE,
    Batch,
    BatchStatus,
    ClaimedLine,
    LineEnd,
    LineFault,
    LineRow,
    LineSpan,
    LineState,
)

# Of so many batches with waiting lines one claim may take: the oldest ones.
MAX_LOOKED_AT = 200
_LEASE_FREE = f"(b.leased_until is null or b.leased_until < {NOW})"
_MAY_BEGIN = f"(b.not_before is null or b.not_before <= {NOW})"
_LEASED = f"{NOW} + make_interval(secs => :lease_s)"

# By a clock that was set back no lease may end later than one that begins now; twice that is left to gateways
# with other settings.
_TOO_LONG = f"leased_until > {NOW} + make_interval(secs => 2 * :lease_s)"
_SHORTEN_LINES = text(f"""
update batches.lines set leased_until = {_LEASED} where (batch_id, number) in (
    select batch_id, number from batches.lines where state = 'running' and {_TOO_LONG}
    order by batch_id, number for update skip locked)""")
_SHORTEN_BATCHES = text(f"""
update batches.batches set leased_until = {_LEASED} where id in (
    select id from batches.batches where {_TOO_LONG} order by id for update skip locked)""")
_END_LEASES = text(f"""
update batches.lines set state = 'waiting', worker = null, leased_until = null,
    lost_attempts = lost_attempts || attempt
where (batch_id, number) in (
    select batch_id, number from batches.lines where state = 'running' and leased_until < {NOW}
    order by batch_id, number for update skip locked)""")
_EXPIRE = text(f"""
update batches.batches set status = 'finalizing', ending = 'expired', worker = null, leased_until = null,
    not_before = null, {stamped(BatchStatus.FINALIZING)}
where status in ('validating', 'in_progress') and expires_at <= {NOW}""")
_RUN_OUT = text(f"""
update batches.batches b set status = 'finalizing', ending = 'completed', worker = null, leased_until = null,
    not_before = null, {stamped(BatchStatus.FINALIZING)}
where b.status = 'in_progress' and not exists (
    select from batches.lines l where l.batch_id = b.id and l.state in ('waiting', 'running'))""")
_BEGIN = """
update batches.batches b set worker = :worker, leased_until = {leased}
where b.id = (
    select b.id from batches.batches b
    where {which} and {free} and {may_begin}
    order by b.seq limit 1 for update skip locked)
returning {columns}"""
_PARTS = {"leased": _LEASED, "free": _LEASE_FREE, "may_begin": _MAY_BEGIN, "columns": COLUMNS}
_BEGIN_VALIDATION = text(_BEGIN.format(which="b.status = 'validating'", **_PARTS))
_NONE_RUNS = """b.status in ('finalizing', 'cancelling') and not exists (
        select from batches.lines l where l.batch_id = b.id and l.state = 'running')"""
_BEGIN_FINALIZING = text(_BEGIN.format(which=_NONE_RUNS, **_PARTS))
_RENEW_BATCHES = text(f"""
update batches.batches set leased_until = {_LEASED} where id = any(:ids) and worker = :worker returning id""")
_PUT_OFF = text(f"""
update batches.batches set worker = null, leased_until = null,
    not_before = {NOW} + make_interval(secs => :wait_s) where id = :id and worker = :worker""")
_ACCEPT = text(f"""
update batches.batches set status = 'in_progress', model = :model, total = :total, worker = null,
    leased_until = null, not_before = null, is_unswept = true, {stamped(BatchStatus.IN_PROGRESS)}
where id = :id and worker = :worker and status = any(:froms) returning id""")
_REJECT = text(f"""
update batches.batches set status = 'failed', faults = cast(:faults as jsonb), worker = null,
    leased_until = null, {stamped(BatchStatus.FAILED)}
where id = :id and worker = :worker and status = any(:froms) returning id""")
_COPY = "copy batches.lines (batch_id, number, byte_offset, num_bytes) from stdin"
_RUNNING = text("""
select b.tenant_id, count(*) from batches.lines l join batches.batches b on b.id = l.batch_id
where l.state = 'running' group by 1""")
_WAITING = text(f"""
select b.id, b.tenant_id, b.seq, c.waiting from batches.batches b
cross join lateral (select count(*) as waiting from (
    select from batches.lines l where l.batch_id = b.id and l.state = 'waiting'
    and (l.not_before is null or l.not_before <= {NOW}) limit :num_free) first_ones) c
where b.status = 'in_progress' and {_MAY_BEGIN} and c.waiting > 0
order by b.seq limit :looked_at""")
# The batch is locked against a cancel for the moment: a line is claimed before it, or not at all.
# Both are looked for once, whatever the planner joins first: a limit that is run again takes more.
_CLAIM = text(f"""
with b as materialized (
    select * from batches.batches where id = :id and status = 'in_progress' for share),
taken as materialized (
    select number from batches.lines
    where batch_id = :id and state = 'waiting' and (not_before is null or not_before <= {NOW})
    order by number limit :count for update skip locked)
update batches.lines l set state = 'running', attempt = l.attempt + 1, worker = :worker,
    leased_until = {_LEASED}, not_before = null
from b, taken
where l.batch_id = :id and l.number = taken.number
returning b.id, b.tenant_id, b.key_id, b.endpoint, b.input_file_id, l.number, l.byte_offset, l.num_bytes,
    l.attempt, l.num_failures, l.lost_attempts""")
_HELD = "l.batch_id = h.batch_id and l.number = h.number and l.attempt = h.attempt and l.worker = :worker"
_RENEW = text(f"""
update batches.lines l set leased_until = {_LEASED}
from unnest(cast(:ids as text[]), cast(:numbers as int[]), cast(:attempts as int[]))
    h(batch_id, number, attempt), batches.batches b
where {_HELD} and l.state = 'running' and b.id = l.batch_id
returning l.batch_id, l.number, b.status""")
_OWN = "batch_id = :id and number = :number and attempt = :attempt and worker = :worker and state = 'running'"
_END = """
update batches.lines set state = :state, result_attempt = :result_attempt, status_code = :status_code,
    worker = null, leased_until = null
where {which} returning number"""
_END_LINE = text(_END.format(which=_OWN))
_GIVE_BACK = text(f"""
update batches.lines set state = 'waiting', worker = null, leased_until = null,
    num_failures = num_failures + :failures, not_before = {NOW} + make_interval(secs => :wait_s),
    lost_attempts = case when :is_lost then lost_attempts || attempt else lost_attempts end
where {_OWN} returning number""")
_PAUSE = text(f"""
update batches.batches set not_before = {NOW} + make_interval(secs => :wait_s)
where id = :id and status = 'in_progress'
and (not_before is null or not_before < {NOW} + make_interval(secs => :wait_s))""")
_ROW = "number, byte_offset, num_bytes, state, result_attempt, lost_attempts"
_LINES = text(
    f"select {_ROW} from batches.lines where batch_id = :id and number > :after order by number limit :limit"
)
_LINES_LEFT = text(
    f"select {_ROW} from batches.lines where batch_id = :id and state = 'waiting' "
    "and lost_attempts <> '{}' order by number"
)
_END_LEFT = text(
    _END.format(
        which="""batch_id = :id and number = :number and state = 'waiting' and exists (
        select from batches.batches b where b.id = :id and b.worker = :worker)"""
    )
)
_FILE = text(f"""
insert into batches.files (id, tenant_id, purpose, filename, num_bytes, state, created_at, expires_at)
values (:id, :tenant, '{OUTPUT_PURPOSE}', :filename, :num_bytes, 'ready', {NOW},
        {NOW} + make_interval(secs => :expires_after_s))
on conflict (id) do nothing""")


class PostgresBatchQueue:
    """Short transactions; safe from any thread and any process. Leases last `lease_s`."""

    def __init__(self, database: Database, lease_s: float = 30.0) -> None:
        self._database = database
        self._lease_s = lease_s

    def advance(self) -> None:
        """As `BatchQueue.advance`."""
        with self._database.transaction() as connection:
            for statement in (_SHORTEN_LINES, _SHORTEN_BATCHES):
                connection.execute(statement, {"lease_s": self._lease_s})
            for statement in (_END_LEASES, _EXPIRE, _RUN_OUT):
                connection.execute(statement)

    def begin_validation(self, worker: str) -> Batch | None:
        """As `BatchQueue.begin_validation`."""
        return self._begin(_BEGIN_VALIDATION, worker)

    def begin_finalizing(self, worker: str) -> Batch | None:
        """As `BatchQueue.begin_finalizing`."""
        return self._begin(_BEGIN_FINALIZING, worker)

    def renew_batches(self, worker: str, batch_ids: Collection[str]) -> set[str]:
        """As `BatchQueue.renew_batches`."""
        values = self._values(worker=worker, ids=list(batch_ids))
        with self._database.transaction() as connection:
            return {row[0] for row in connection.execute(_RENEW_BATCHES, values)}

    def put_off(self, batch_id: str, worker: str, wait_s: float) -> None:
        """As `BatchQueue.put_off`."""
        self._execute(_PUT_OFF, id=batch_id, worker=worker, wait_s=wait_s)

    def accept(self, batch_id: str, worker: str, model: str, spans: Sequence[LineSpan]) -> bool:
        """As `BatchQueue.accept`; lines and status in one transaction."""
        values = self._values(
            id=batch_id, worker=worker, model=model, total=len(spans), froms=froms(BatchStatus.IN_PROGRESS)
        )
        with self._database.transaction() as connection:
            if connection.execute(_ACCEPT, values).one_or_none() is None:
                return False
            with _driver(connection).cursor() as cursor, cursor.copy(_COPY) as copy:
                for span in spans:
                    copy.write_row((batch_id, span.number, span.offset, span.num_bytes))
        return True

    def reject(self, batch_id: str, worker: str, faults: Sequence[LineFault]) -> bool:
        """As `BatchQueue.reject`."""
        shown = json.dumps([fault.fields() for fault in faults])
        return self._execute(
            _REJECT, id=batch_id, worker=worker, faults=shown, froms=froms(BatchStatus.FAILED)
        )

    def claim(self, worker: str, num_free: int) -> list[ClaimedLine]:
        """As `BatchQueue.claim`."""
        claimed: list[ClaimedLine] = []
        with self._database.transaction() as connection:
            looking = dict(num_free=num_free, looked_at=MAX_LOOKED_AT)
            waiting = [WaitingBatch(*row) for row in connection.execute(_WAITING, looking)]
            if not waiting:
                return []
            running: dict[str, int] = {row[0]: row[1] for row in connection.execute(_RUNNING)}
            for batch_id, count in shares(running, waiting, num_free):
                values = self._values(worker=worker, id=batch_id, count=count)
                for row in connection.execute(_CLAIM, values):
                    claimed.append(_claimed(*row))
        return claimed

    def renew(self, worker: str, held: Collection[ClaimedLine]) -> dict[tuple[str, int], BatchStatus]:
        """As `BatchQueue.renew`."""
        # In one order everywhere, so that no two workers wait for each other.
        lines = sorted(held, key=lambda line: line.key)
        values = self._values(
            worker=worker,
            ids=[line.batch_id for line in lines],
            numbers=[line.span.number for line in lines],
            attempts=[line.attempt for line in lines],
        )
        with self._database.transaction() as connection:
            rows = connection.execute(_RENEW, values).all()
        return {(batch_id, number): BatchStatus(status) for batch_id, number, status in rows}

    def end_line(self, worker: str, line: ClaimedLine, end: LineEnd) -> bool:
        """As `BatchQueue.end_line`."""
        return self._execute(_END_LINE, **_own(worker, line), **_end(end))

    def give_back(
        self, worker: str, line: ClaimedLine, wait_s: float, *, is_failure: bool, is_lost: bool = False
    ) -> bool:
        """As `BatchQueue.give_back`."""
        values = dict(**_own(worker, line), wait_s=wait_s, failures=int(is_failure), is_lost=is_lost)
        with self._database.transaction() as connection:
            is_ours = connection.execute(_GIVE_BACK, values).one_or_none() is not None
            if is_ours and wait_s and not is_failure:
                connection.execute(_PAUSE, dict(id=line.batch_id, wait_s=wait_s))
        return is_ours

    def lines(self, batch_id: str, after: int, limit: int) -> list[LineRow]:
        """As `BatchQueue.lines`."""
        with self._database.transaction() as connection:
            rows = connection.execute(_LINES, {"id": batch_id, "after": after, "limit": limit})
            return [_line_row(*row) for row in rows]

    def lines_left(self, batch_id: str) -> list[LineRow]:
        """As `BatchQueue.lines_left`."""
        with self._database.transaction() as connection:
            return [_line_row(*row) for row in connection.execute(_LINES_LEFT, {"id": batch_id})]

    def end_left(self, batch_id: str, worker: str, number: int, end: LineEnd) -> bool:
        """As `BatchQueue.end_left`."""
        return self._execute(_END_LEFT, id=batch_id, worker=worker, number=number, **_end(end))

    def finish(self, batch: Batch, worker: str, ended: Ended) -> bool:
        """As `BatchQueue.finish`."""
        files = {"output": ended.output, "errors": ended.errors}
        values = dict(
            id=batch.id,
            worker=worker,
            status=ended.status.value,
            froms=froms(ended.status),
            total=ended.counts.total,
            completed=ended.counts.completed,
            failed=ended.counts.failed,
            input=ended.tokens.input,
            cached=ended.tokens.cached,
            output=ended.tokens.output,
            output_file=None if ended.output is None else ended.output[0],
            error_file=None if ended.errors is None else ended.errors[0],
        )
        finish = text(f"""
            update batches.batches set status = :status, total = :total, completed = :completed,
                failed = :failed, input_tokens = :input, cached_tokens = :cached, output_tokens = :output,
                output_file_id = :output_file, error_file_id = :error_file, worker = null,
                leased_until = null, {stamped(ended.status)}
            where id = :id and worker = :worker and status = any(:froms) returning id""")
        with self._database.transaction() as connection:
            if connection.execute(finish, values).one_or_none() is None:
                return False
            for name, file in files.items():
                if file is not None:
                    connection.execute(_FILE, self._file_values(batch, name, *file))
            connection.execute(text("delete from batches.lines where batch_id = :id"), {"id": batch.id})
        return True

    def unswept(self, limit: int) -> list[tuple[str, str]]:
        """As `BatchQueue.unswept`."""
        query = text("""
            select tenant_id, id from batches.batches
            where is_unswept and status in ('completed', 'expired', 'cancelled') order by seq limit :limit""")
        with self._database.transaction() as connection:
            return [(row[0], row[1]) for row in connection.execute(query, {"limit": limit})]

    def swept(self, batch_id: str) -> None:
        """As `BatchQueue.swept`."""
        self._execute(
            text("update batches.batches set is_unswept = false where id = :id returning id"), id=batch_id
        )

    def depth(self) -> Mapping[str, int]:
        """As `BatchQueue.depth`."""
        query = text("""
            select l.state, count(*) from batches.lines l join batches.batches b on b.id = l.batch_id
            where l.state in ('waiting', 'running') and b.status = 'in_progress' group by 1""")
        with self._database.transaction() as connection:
            return {row[0]: row[1] for row in connection.execute(query)}

    def _begin(self, statement: Any, worker: str) -> Batch | None:
        with self._database.transaction() as connection:
            row = connection.execute(statement, self._values(worker=worker)).one_or_none()
        return None if row is None else as_batch(row)

    def _execute(self, statement: Any, **values: object) -> bool:
        """Whether a statement that returns what it has changed has changed anything."""
        with self._database.transaction() as connection:
            answer = connection.execute(statement, self._values(**values))
            return answer.returns_rows and answer.first() is not None

    def _values(self, **values: object) -> dict[str, object]:
        return {"lease_s": self._lease_s, **values}

    def _file_values(self, batch: Batch, name: str, file_id: str, num_bytes: int) -> dict[str, object]:
        return dict(
            id=file_id,
            tenant=batch.tenant_id,
            filename=f"{batch.id}_{name}.jsonl",
            num_bytes=num_bytes,
            expires_after_s=batch.output_expires_after_s or BATCH_FILE_S,
        )


def _claimed(*row: Any) -> ClaimedLine:
    *names, number, offset, num_bytes, attempt, num_failures, lost = row
    batch_id, tenant_id, key_id, endpoint, input_file_id = names
    span = LineSpan(number, offset, num_bytes)
    return ClaimedLine(
        batch_id, tenant_id, key_id, endpoint, input_file_id, span, attempt, num_failures, tuple(lost)
    )


def _own(worker: str, line: ClaimedLine) -> dict[str, object]:
    return {"id": line.batch_id, "number": line.span.number, "attempt": line.attempt, "worker": worker}


def _end(end: LineEnd) -> dict[str, object]:
    return {"state": end.state.value, "result_attempt": end.attempt, "status_code": end.status}


def _line_row(
    number: int, offset: int, num_bytes: int, state: str, result_attempt: int | None, lost: list[int]
) -> LineRow:
    return LineRow(LineSpan(number, offset, num_bytes), LineState(state), result_attempt, tuple(lost))


def _driver(connection: Connection) -> psycopg.Connection[Any]:
    driver: psycopg.Connection[Any] | None = connection.connection.driver_connection
    assert driver is not None
    return driver
