"""Kept prompts and answers in PostgreSQL; see `CaptureWriter` and `CaptureShelf`."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from sqlalchemy import Engine, RowMapping, text

from footplate.platform.capture.store import CaptureFilter, CaptureRecord
from footplate.tenancy.adapters.postgres.store import reading
from footplate.tenancy.admin.store import Listed, Page
from footplate.tenancy.errors import InvalidValue

_ADD = text(
    "insert into capture.records (request_id, tenant_id, key_id, model, endpoint, why, error, first_token_s, "
    "prompts, answers, redacted, is_cut, captured_at, expires_at) "
    "values (:request_id, :tenant_id, :key_id, :model, :endpoint, :why, :error, :first_token_s, "
    "cast(:prompts as jsonb), cast(:answers as jsonb), cast(:redacted as jsonb), :is_cut, :captured_at, "
    ":expires_at)"
)
# Of several gateways each takes other rows.
_DELETE = text(
    "delete from capture.records where id in (select id from capture.records where expires_at <= now() "
    "order by expires_at limit :limit for update skip locked)"
)
_ERASE = text("delete from capture.records where tenant_id = :tenant_id")
_HEAD = (
    "id, request_id, tenant_id, key_id, model, endpoint, why, error, first_token_s, redacted, is_cut, "
    "captured_at, expires_at"
)
_SHOW = text(f"select {_HEAD}, prompts, answers from capture.records where id = :id and expires_at > now()")


class PostgresCaptures:
    """Short transactions on a pool; safe from any thread."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def add(self, records: Sequence[CaptureRecord]) -> None:
        """As `CaptureWriter.add`."""
        with self._engine.begin() as connection:
            connection.execute(_ADD, [_values(record) for record in records])

    def delete_expired(self, limit: int) -> int:
        """As `CaptureWriter.delete_expired`."""
        with self._engine.begin() as connection:
            return connection.execute(_DELETE, {"limit": limit}).rowcount

    def heads(self, page: Page, wanted: CaptureFilter) -> Listed[CaptureRecord]:
        """As `CaptureShelf.heads`."""
        values: dict[str, Any] = {"limit": page.limit + 1}
        terms = ["expires_at > now()"]
        if page.after is not None:
            if not (page.after.isascii() and page.after.isdigit() and len(page.after) <= 18):
                raise InvalidValue("after must be the next of a page before", "after")
            values["after"] = int(page.after)
            terms.append("id < :after" if page.is_newest_first else "id > :after")
        for term, name, value in (
            ("tenant_id = :tenant_id", "tenant_id", wanted.tenant_id),
            ("captured_at >= :begin", "begin", wanted.begin),
            ("captured_at < :end", "end", wanted.end),
        ):
            if value is not None:
                values[name] = value
                terms.append(term)
        order = "desc" if page.is_newest_first else "asc"
        where = f"where {' and '.join(terms)} order by id {order} limit :limit"
        query = f"select {_HEAD} from capture.records {where}"
        with reading(self._engine) as connection:
            rows = connection.execute(text(query), values).mappings().all()
        return Listed([_record(row) for row in rows[: page.limit]], len(rows) > page.limit)

    def record(self, record_id: int) -> CaptureRecord | None:
        """As `CaptureShelf.record`."""
        with reading(self._engine) as connection:
            row = connection.execute(_SHOW, {"id": record_id}).mappings().one_or_none()
        return None if row is None else _record(row)

    def erase(self, tenant_id: str) -> int:
        """As `CaptureShelf.erase`."""
        with self._engine.begin() as connection:
            return connection.execute(_ERASE, {"tenant_id": tenant_id}).rowcount


def _values(record: CaptureRecord) -> dict[str, Any]:
    return {
        "request_id": record.request_id,
        "tenant_id": record.tenant_id,
        "key_id": record.key_id,
        "model": record.model,
        "endpoint": record.endpoint,
        "why": record.why,
        "error": record.error,
        "first_token_s": record.first_token_s,
        # Half a surrogate pair is no text to PostgreSQL.
        "prompts": _json(record.prompts),
        "answers": _json(record.answers),
        "redacted": json.dumps(dict(record.redacted)),
        "is_cut": record.is_cut,
        "captured_at": record.captured_at,
        "expires_at": record.expires_at,
    }


def _json(texts: Sequence[str]) -> str:
    return json.dumps([each.encode("utf-8", "replace").decode() for each in texts])


def _record(row: RowMapping) -> CaptureRecord:
    return CaptureRecord(**row)
