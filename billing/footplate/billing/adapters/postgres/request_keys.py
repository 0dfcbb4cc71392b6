"""Idempotency keys of requests in PostgreSQL; see `RequestKeys`."""

from __future__ import annotations

from sqlalchemy import delete, select, tuple_
from sqlalchemy.dialects.postgresql import insert

from footplate.billing.adapters.postgres.books import Books, writing
from footplate.billing.adapters.postgres.event_store import PostgresEventStore
from footplate.billing.adapters.postgres.tables import request_keys
from footplate.billing.request_keys import KEPT, FirstRequest, digest
from footplate.billing.usage import EventId, TenantId

# Each claim takes some that are over with it: the table stays as large as a day.
MAX_FORGOTTEN = 20


class PostgresRequestKeys:
    """The primary key decides who is first; safe from any thread and any process."""

    def __init__(self, books: Books, events: PostgresEventStore) -> None:
        self._books = books
        self._events = events

    def claim(self, tenant_id: TenantId, key: str, event_id: EventId) -> FirstRequest | None:
        """As `RequestKeys.claim`."""
        kept = request_keys.c
        now = self._books.clock()
        values = {
            "tenant_id": tenant_id,
            "key_digest": digest(key),
            "event_id": event_id,
            "claimed_at": now,
        }
        own = insert(request_keys).values(values)
        own = own.on_conflict_do_update(
            index_elements=[kept.tenant_id, kept.key_digest],
            set_={"event_id": own.excluded.event_id, "claimed_at": own.excluded.claimed_at},
            where=kept.claimed_at <= now - KEPT,
        )
        over = (
            select(kept.tenant_id, kept.key_digest)
            .where(kept.claimed_at <= now - KEPT)
            .limit(MAX_FORGOTTEN)
            .with_for_update(skip_locked=True)
        )
        with writing(self._books.engine) as connection:
            if connection.execute(own.returning(kept.event_id)).scalar() is not None:
                connection.execute(
                    delete(request_keys).where(tuple_(kept.tenant_id, kept.key_digest).in_(over))
                )
                return None
            query = select(kept.event_id).where(
                kept.tenant_id == tenant_id, kept.key_digest == values["key_digest"]
            )
            first = connection.execute(query).scalar()
        if first is None:
            # Released between the two: whoever asks again finds it free.
            return FirstRequest(event_id)
        stored = self._events.find(EventId(first))
        if stored is None:
            return FirstRequest(EventId(first))
        return FirstRequest(EventId(first), stored.event.state, stored.event.tokens)

    def release(self, tenant_id: TenantId, key: str, event_id: EventId) -> None:
        """As `RequestKeys.release`."""
        kept = request_keys.c
        own = (kept.tenant_id == tenant_id, kept.key_digest == digest(key), kept.event_id == event_id)
        with writing(self._books.engine) as connection:
            connection.execute(delete(request_keys).where(*own))
