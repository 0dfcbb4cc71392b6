"""The registry of models in PostgreSQL; see `ModelRegistry`."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from pydantic import ValidationError
from sqlalchemy import Connection, Engine, RowMapping, text

from footplate.billing.adapters.postgres.books import UNAVAILABLE
from footplate.platform.model_registry import (
    Decide,
    ModelState,
    RegistryChange,
    SeenModel,
    WantedModel,
    shown_settings,
)
from footplate.platform.settings import ModelSettings
from footplate.tenancy.errors import StoreUnavailable

# Any number, as long as each kind of work has its own.
_WRITE_LOCK_ID = 0x66706D77
_WANTED = text("select * from models.wanted order by name")
_SEEN = text("select * from models.seen")
_PUT = text(
    "insert into models.wanted (name, settings, generation, is_removed, changed_by) "
    "values (:name, cast(:settings as jsonb), :generation, :is_removed, :changed_by) "
    "on conflict (name) do update set settings = excluded.settings, generation = excluded.generation, "
    "is_removed = excluded.is_removed, changed_by = excluded.changed_by, changed_at = now()"
)
_NOTE = text(
    "insert into models.seen (name, state, generation, serving, num_replicas, reason, retry_at) "
    "values (:name, :state, :generation, :serving, :num_replicas, :reason, :retry_at) "
    "on conflict (name) do update set state = excluded.state, generation = excluded.generation, "
    "serving = excluded.serving, num_replicas = excluded.num_replicas, reason = excluded.reason, "
    "retry_at = excluded.retry_at, "
    "since = case when (models.seen.state, models.seen.generation) = (excluded.state, excluded.generation) "
    "then models.seen.since else now() end"
)


class PostgresModelRegistry:
    """Short transactions on a pool; safe from any thread."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def rows(self) -> Sequence[WantedModel]:
        """As `ModelRegistry.rows`."""
        with self._transaction() as connection:
            return _rows(connection)

    def seen(self) -> Mapping[str, SeenModel]:
        """As `ModelRegistry.seen`."""
        with self._transaction() as connection:
            found = connection.execute(_SEEN).mappings().all()
        return {row["name"]: SeenModel(**{**row, "state": ModelState(row["state"])}) for row in found}

    def change(self, decide: Decide, beside: Callable[[object, RegistryChange], None]) -> None:
        """As `ModelRegistry.change`."""
        with self._transaction() as connection:
            # Two who add one name at once must not both find it free.
            connection.execute(text("select pg_advisory_xact_lock(:id)"), {"id": _WRITE_LOCK_ID})
            change = decide({row.name: row for row in _rows(connection)})
            if change.after != change.before:
                connection.execute(_PUT, _values(change.after))
            beside(connection, change)

    def begin_run(self, file: Iterable[str]) -> None:
        """Forget what an earlier run has seen, and its reloads of the file's models.

        A model that an administrator had added and that the file has now is the file's from here on.
        """
        with self._transaction() as connection:
            connection.execute(text("delete from models.seen"))
            connection.execute(
                text("delete from models.wanted where settings is null or name = any(:names)"),
                {"names": list(file)},
            )

    def note(self, seen: Iterable[SeenModel], gone: Iterable[str] = ()) -> None:
        """Write down what is seen now; rows of what is `gone` are dropped, unless it is wanted again."""
        with self._transaction() as connection:
            for model in seen:
                connection.execute(_NOTE, _seen_values(model))
            for name in gone:
                connection.execute(
                    text("delete from models.wanted where name = :name and is_removed"), {"name": name}
                )
                connection.execute(text("delete from models.seen where name = :name"), {"name": name})

    @contextmanager
    def _transaction(self) -> Iterator[Connection]:
        try:
            with self._engine.begin() as connection:
                yield connection
        except UNAVAILABLE as error:
            raise StoreUnavailable("PostgreSQL gave no answer") from error


def _rows(connection: Connection) -> list[WantedModel]:
    return [_wanted(row) for row in connection.execute(_WANTED).mappings()]


def _wanted(row: RowMapping) -> WantedModel:
    settings = row["settings"]
    try:
        parsed = None if settings is None else ModelSettings.model_validate(settings)
    except ValidationError:
        # Another version has written it: it is shown as such, and may be removed or put anew.
        return WantedModel(**{**row, "settings": None, "is_unreadable": True})
    return WantedModel(**{**row, "settings": parsed})


def _values(row: WantedModel) -> dict[str, Any]:
    shown = shown_settings(row)
    settings = None if shown is None else json.dumps(shown)
    return {
        "name": row.name,
        "settings": settings,
        "generation": row.generation,
        "is_removed": row.is_removed,
        "changed_by": row.changed_by,
    }


def _seen_values(model: SeenModel) -> dict[str, Any]:
    return {
        "name": model.name,
        "state": model.state.value,
        "generation": model.generation,
        "serving": model.serving,
        "num_replicas": model.num_replicas,
        "reason": model.reason,
        "retry_at": model.retry_at,
    }
