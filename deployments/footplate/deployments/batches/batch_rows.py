"""Batches as their owners see them, in PostgreSQL; see `BatchRows`."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from typing import Any

from sqlalchemy import Row, text

from footplate.deployments.batches.database import NOW, Database, utc
from footplate.deployments.batches.file_rows import LOCK_FILE, place_of
from footplate.engine.errors import InvalidRequest
from footplate.platform.batches.states import check_cancellable, froms
from footplate.platform.batches.store import ListPage
from footplate.platform.batches.values import (
    BATCH_PURPOSE,
    WINDOW_S,
    Batch,
    BatchStatus,
    LineCounts,
    LineFault,
    LineTokens,
    NewBatch,
    new_batch_id,
)
from footplate.platform.errors import LimitRefused

_LOCK_SPACE = 0x66706262
OPEN = "('validating', 'in_progress', 'finalizing', 'cancelling')"
COLUMNS = (
    "b.id, b.tenant_id, b.key_id, b.endpoint, b.input_file_id, b.metadata, b.output_expires_after_s, "
    "b.status, b.created_at, b.expires_at, b.stamps, b.ending, b.model, b.faults, b.total, "
    "b.completed, b.failed, b.input_tokens, b.cached_tokens, b.output_tokens, b.output_file_id, "
    "b.error_file_id"
)
# While a batch runs its lines are counted; a row that every line changed would be in everybody's way.
_COUNTS = """
select count(*), count(*) filter (where state = 'succeeded'), count(*) filter (where state = 'failed')
from batches.lines where batch_id = :id"""
_NUM_OPEN = text(f"select count(*) from batches.batches where tenant_id = :tenant and status in {OPEN}")
_CREATE = text(f"""
insert into batches.batches as b
    (id, tenant_id, key_id, endpoint, input_file_id, metadata, output_expires_after_s, status, created_at,
     expires_at)
values (:id, :tenant, :key, :endpoint, :file, cast(:metadata as jsonb), :output_s, 'validating', {NOW},
        {NOW} + make_interval(secs => :window_s))
returning {COLUMNS}""")
_FIND = text(f"select {COLUMNS} from batches.batches b where b.id = :id and b.tenant_id = :tenant")
_LOCK_BATCH = text(f"{_FIND.text} for update")


def stamped(status: BatchStatus) -> str:
    """An assignment that notes when a batch came to a status."""
    return f"stamps = stamps || jsonb_build_object('{status.value}', extract(epoch from {NOW}))"


_CANCEL = text(f"""
update batches.batches set status = 'cancelling', worker = null, leased_until = null, not_before = null,
    {stamped(BatchStatus.CANCELLING)}
where id = :id and status = any(:froms)""")


class PostgresBatchRows:
    """Short transactions; safe from any thread and any process."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def create(self, new: NewBatch, max_open: int) -> Batch:
        """As `BatchRows.create`."""
        values = dict(
            id=new_batch_id(),
            tenant=new.tenant_id,
            key=new.key_id,
            endpoint=new.endpoint,
            file=new.input_file_id,
            metadata=json.dumps(dict(new.metadata)),
            output_s=new.output_expires_after_s,
            window_s=WINDOW_S,
        )
        with self._database.transaction() as connection:
            connection.execute(
                text("select pg_advisory_xact_lock(:space, hashtext(:tenant))"),
                {"space": _LOCK_SPACE, "tenant": new.tenant_id},
            )
            # Held to the end: a file that is being deleted is either gone by now, or kept for this.
            file = connection.execute(
                LOCK_FILE, dict(id=new.input_file_id, tenant=new.tenant_id)
            ).one_or_none()
            if file is None:
                message = "There is no such file, or it is not yours; upload it with POST /v1/files first."
                raise InvalidRequest(message, "input_file_id")
            if file.purpose != BATCH_PURPOSE:
                raise InvalidRequest(
                    "This file was not uploaded for batches: purpose=batch.", "input_file_id"
                )
            num_open = connection.execute(_NUM_OPEN, {"tenant": new.tenant_id}).scalar_one()
            if num_open >= max_open:
                raise LimitRefused(
                    f"This tenant has {num_open} batches that are not over, and may have {max_open}. "
                    "Wait for one, or cancel it.",
                    "rate_limit_exceeded",
                    60,
                    about="requests",
                )
            return as_batch(connection.execute(_CREATE, values).one())

    def find(self, tenant_id: str, batch_id: str) -> Batch | None:
        """As `BatchRows.find`."""
        with self._database.transaction() as connection:
            row = connection.execute(_FIND, {"id": batch_id, "tenant": tenant_id}).one_or_none()
            return None if row is None else as_batch(row, self._counts(connection, row))

    def page_of(self, tenant_id: str, page: ListPage) -> tuple[list[Batch], bool]:
        """As `BatchRows.page_of`."""
        where = "b.tenant_id = :tenant"
        values: dict[str, Any] = {"tenant": tenant_id, "limit": page.limit + 1}
        with self._database.transaction() as connection:
            if page.after is not None:
                values["seq"] = place_of(connection, "batches", tenant_id, page.after)
                where += " and b.seq < :seq"
            query = f"select {COLUMNS} from batches.batches b where {where} order by b.seq desc limit :limit"
            rows = connection.execute(text(query), values).all()
            found = [as_batch(row, self._counts(connection, row)) for row in rows[: page.limit]]
        return found, len(rows) > page.limit

    def cancel(self, tenant_id: str, batch_id: str) -> Batch | None:
        """As `BatchRows.cancel`."""
        with self._database.transaction() as connection:
            row = connection.execute(_LOCK_BATCH, {"id": batch_id, "tenant": tenant_id}).one_or_none()
            if row is None:
                return None
            if check_cancellable(BatchStatus(row.status)):
                values = dict(id=batch_id, froms=froms(BatchStatus.CANCELLING))
                connection.execute(_CANCEL, values)
                row = connection.execute(_FIND, {"id": batch_id, "tenant": tenant_id}).one()
            return as_batch(row, self._counts(connection, row))

    @staticmethod
    def _counts(connection: Any, row: Row[Any]) -> LineCounts | None:
        if BatchStatus(row.status) not in (
            BatchStatus.IN_PROGRESS,
            BatchStatus.FINALIZING,
            BatchStatus.CANCELLING,
        ):
            return None
        return LineCounts(*connection.execute(text(_COUNTS), {"id": row.id}).one())


def as_batch(row: Row[Any], counts: LineCounts | None = None) -> Batch:
    """A row of `COLUMNS`; `counts` where its lines have been counted."""
    created, expires = utc(row.created_at), utc(row.expires_at)
    assert created is not None and expires is not None
    return Batch(
        row.id,
        row.tenant_id,
        row.key_id,
        row.endpoint,
        row.input_file_id,
        row.metadata,
        row.output_expires_after_s,
        BatchStatus(row.status),
        created,
        expires,
        {BatchStatus(name): datetime.fromtimestamp(float(at), UTC) for name, at in row.stamps.items()},
        None if row.ending is None else BatchStatus(row.ending),
        row.model,
        tuple(LineFault(**fault) for fault in row.faults),
        counts or LineCounts(row.total, row.completed, row.failed),
        LineTokens(row.input_tokens, row.cached_tokens, row.output_tokens),
        row.output_file_id,
        row.error_file_id,
    )
