"""What is known of files, in PostgreSQL; see `FileRows`."""

from __future__ import annotations

from typing import Any

from sqlalchemy import Connection, text

from footplate.deployments.batches.database import NOW, Database, utc
from footplate.platform.batches.store import ListPage, NewFile
from footplate.platform.batches.values import FileLimits, StoredFile, new_file_id
from footplate.platform.errors import LimitRefused, NotThere, WrongState

# Of a tenant's files: one at a time counts what it has.
_LOCK_SPACE = 0x66706266
# Longer than any body may take to come. What a gateway that died had counts against its tenant so long.
RECEIVING_S = 3_600
_OPEN = "('validating', 'in_progress', 'finalizing', 'cancelling')"
_COLUMNS = "id, tenant_id, purpose, filename, num_bytes, created_at, expires_at"
_IN_USE = f"""exists (select from batches.batches b
    where b.input_file_id = f.id and b.status in {_OPEN})"""
# One that is over its time is nobody's any more, whether or not it has been swept. A batch reads on.
_SEEN = f"f.state = 'ready' and (f.expires_at is null or f.expires_at > {NOW} or {_IN_USE})"
_LOCK = text("select pg_advisory_xact_lock(:space, hashtext(:tenant))")
_HAVE = text(
    "select count(*), coalesce(sum(num_bytes), 0) from batches.files where tenant_id = :tenant and state <> "
    "'deleted' and id <> :but"
)
_NOTE = text("update batches.files set num_bytes = :num_bytes where id = :id and state = 'receiving'")
_BEGIN = text(f"""
insert into batches.files (id, tenant_id, purpose, filename, state, created_at)
values (:id, :tenant, :purpose, :filename, 'receiving', {NOW})""")
_FINISH = text(f"""
update batches.files set state = 'ready', num_bytes = :num_bytes, purpose = :purpose, filename = :filename,
    created_at = {NOW}, expires_at = {NOW} + make_interval(secs => :expires_after_s)
where id = :id and state = 'receiving' returning {_COLUMNS}""")
_FIND = text(f"select {_COLUMNS} from batches.files f where f.id = :id and f.tenant_id = :tenant and {_SEEN}")
LOCK_FILE = text(
    f"select {_COLUMNS}, {_IN_USE} from batches.files f "
    f"where f.id = :id and f.tenant_id = :tenant and {_SEEN} for update"
)
_DELETED = "update batches.files set state = 'deleted' where id = :id"
_DOOM = text(f"""
with over as materialized (
    select f.id from batches.files f
    where (f.state = 'ready' and f.expires_at <= {NOW} and not {_IN_USE})
       or (f.state = 'receiving' and f.created_at < {NOW} - make_interval(secs => :receiving_s))
    limit :limit for update skip locked)
update batches.files set state = 'deleted' where id in (select id from over)""")
_DOOMED = text("select tenant_id, id from batches.files where state = 'deleted' order by seq limit :limit")


class PostgresFileRows:
    """Short transactions; safe from any thread and any process."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def begin(self, new: NewFile, limits: FileLimits) -> str:
        """As `FileRows.begin`."""
        file_id = new_file_id()
        with self._database.transaction() as connection:
            num_files, num_bytes = self._have(connection, new.tenant_id)
            if num_files >= limits.max_files:
                raise LimitRefused(
                    f"This tenant keeps {num_files} files, and may keep {limits.max_files}. Delete some.",
                    "insufficient_quota",
                )
            if num_bytes >= limits.max_stored_bytes:
                raise _too_much(num_bytes, limits)
            connection.execute(
                _BEGIN,
                dict(id=file_id, tenant=new.tenant_id, purpose=new.purpose, filename=new.filename),
            )
        return file_id

    def note_size(self, file_id: str, new: NewFile, num_bytes: int, limits: FileLimits) -> None:
        """As `FileRows.note_size`."""
        with self._database.transaction() as connection:
            self._refuse_too_much(connection, file_id, new, num_bytes, limits)
            connection.execute(_NOTE, dict(id=file_id, num_bytes=num_bytes))

    def finish(self, file_id: str, new: NewFile, num_bytes: int, limits: FileLimits) -> StoredFile:
        """As `FileRows.finish`."""
        with self._database.transaction() as connection:
            self._refuse_too_much(connection, file_id, new, num_bytes, limits)
            row = connection.execute(
                _FINISH,
                dict(
                    id=file_id,
                    num_bytes=num_bytes,
                    purpose=new.purpose,
                    filename=new.filename,
                    expires_after_s=new.expires_after_s,
                ),
            ).one_or_none()
        if row is None:
            raise WrongState(
                "This upload took so long that it was given up; send it again.", "upload_expired"
            )
        return as_file(row)

    def find(self, tenant_id: str, file_id: str) -> StoredFile | None:
        """As `FileRows.find`."""
        with self._database.transaction() as connection:
            row = connection.execute(_FIND, dict(id=file_id, tenant=tenant_id)).one_or_none()
        return None if row is None else as_file(row)

    def page_of(self, tenant_id: str, page: ListPage, purpose: str | None) -> tuple[list[StoredFile], bool]:
        """As `FileRows.page_of`."""
        sign, order = (">", "asc") if page.is_ascending else ("<", "desc")
        where = f"f.tenant_id = :tenant and {_SEEN}"
        where += " and f.purpose = :purpose" if purpose is not None else ""
        values = dict(tenant=tenant_id, purpose=purpose, limit=page.limit + 1)
        with self._database.transaction() as connection:
            if page.after is not None:
                values["seq"] = place_of(connection, "files", tenant_id, page.after)
                where += f" and f.seq {sign} :seq"
            query = (
                f"select {_COLUMNS} from batches.files f where {where} order by f.seq {order} limit :limit"
            )
            rows = [as_file(row) for row in connection.execute(text(query), values)]
        return rows[: page.limit], len(rows) > page.limit

    def begin_delete(self, tenant_id: str, file_id: str) -> StoredFile | None:
        """As `FileRows.begin_delete`."""
        with self._database.transaction() as connection:
            # A batch that is made at the same time waits for this lock, or has it: see `BatchRows.create`.
            row = connection.execute(LOCK_FILE, dict(id=file_id, tenant=tenant_id)).one_or_none()
            if row is None:
                return None
            if row[-1]:
                raise WrongState(
                    "A batch that is not over reads this file. Wait for its end, or cancel it first.",
                    "file_in_use",
                )
            connection.execute(text(_DELETED), {"id": file_id})
        return as_file(row)

    def doomed(self, limit: int) -> list[tuple[str, str]]:
        """As `FileRows.doomed`."""
        values = dict(limit=limit, receiving_s=RECEIVING_S)
        with self._database.transaction() as connection:
            connection.execute(_DOOM, values)
            return [(row[0], row[1]) for row in connection.execute(_DOOMED, {"limit": limit})]

    def forget(self, file_id: str) -> None:
        """As `FileRows.forget`."""
        with self._database.transaction() as connection:
            connection.execute(
                text("delete from batches.files where id = :id and state <> 'ready'"), {"id": file_id}
            )

    def _refuse_too_much(
        self, connection: Connection, file_id: str, new: NewFile, num_bytes: int, limits: FileLimits
    ) -> None:
        _, others = self._have(connection, new.tenant_id, but=file_id)
        if others + num_bytes > limits.max_stored_bytes:
            raise _too_much(others + num_bytes, limits)

    def _have(self, connection: Connection, tenant_id: str, but: str = "") -> tuple[int, int]:
        connection.execute(_LOCK, {"space": _LOCK_SPACE, "tenant": tenant_id})
        num_files, num_bytes = connection.execute(_HAVE, {"tenant": tenant_id, "but": but}).one()
        return int(num_files), int(num_bytes)


def as_file(row: Any) -> StoredFile:
    """A row of `_COLUMNS`."""
    file_id, tenant_id, purpose, filename, num_bytes, created_at, expires_at = row[:7]
    created = utc(created_at)
    assert created is not None
    return StoredFile(file_id, tenant_id, purpose, filename, int(num_bytes), created, utc(expires_at))


def place_of(connection: Connection, table: str, tenant_id: str, name: str) -> int:
    """Where a list goes on behind an entry. Raises NotThere."""
    query = text(f"select seq from batches.{table} where id = :id and tenant_id = :tenant")
    found = connection.execute(query, {"id": name, "tenant": tenant_id}).scalar()
    if found is None:
        raise NotThere("There is nothing of this id to go on behind.", "after")
    return int(found)


def _too_much(num_bytes: int, limits: FileLimits) -> LimitRefused:
    return LimitRefused(
        f"This tenant's files would hold {num_bytes} bytes, and may hold {limits.max_stored_bytes}. "
        "Delete some.",
        "insufficient_quota",
    )
