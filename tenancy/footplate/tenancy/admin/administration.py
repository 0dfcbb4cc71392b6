"""The way to every change: one transaction with its record, the answer to a repeated request, notices."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from footplate.tenancy.admin.audit import AuditRecord, Caller
from footplate.tenancy.admin.store import AdminStore, Reader, RememberedAnswer, Writer
from footplate.tenancy.changes import Change, change_of
from footplate.tenancy.errors import IdempotencyKeyReused

_Answer = TypeVar("_Answer")


@dataclass(frozen=True, slots=True)
class IdempotentRequest:
    """A request that its caller may send twice. `request_hash` covers method, path and body."""

    idempotency_key: str
    request_hash: bytes


@dataclass(frozen=True, slots=True)
class Changed:
    """A change's answer, and what gateways must hear of. Nothing was changed where it `is_repeated`."""

    answer: dict[str, Any]
    notices: tuple[Change, ...] = ()
    is_repeated: bool = False


class Administration:
    """Runs reads and changes on a store. Blocks; any thread may call it."""

    def __init__(self, store: AdminStore) -> None:
        self._store = store

    def read(self, work: Callable[[Reader], _Answer]) -> _Answer:
        """The answer of a read. Raises StoreUnavailable and what `work` raises."""
        with self._store.reading() as reader:
            return work(reader)

    def change(
        self,
        caller: Caller,
        work: Callable[[Writer], dict[str, Any]],
        request: IdempotentRequest | None = None,
    ) -> Changed:
        """Run a change, or answer as the first time when the caller repeats a request.

        A repeated answer is the first one with `key` null: a key's text is shown once and kept nowhere.

        Raises:
            IdempotencyKeyReused: the caller has used this Idempotency-Key for another request.
            StoreUnavailable: nothing was changed, or nobody can say; asking again with an Idempotency-Key is
                safe.
        """
        with self._store.writing() as writer:
            if request is not None:
                earlier = writer.recall(caller.key_id, request.idempotency_key)
                if earlier is not None:
                    return _repeated(earlier, request)
            answer = work(writer)
            if request is not None:
                kept = {**answer, "key": None} if "key" in answer else answer
                writer.remember(
                    caller.key_id, request.idempotency_key, RememberedAnswer(request.request_hash, kept)
                )
            notices = tuple(filter(None, map(change_of, writer.recorded)))
        return Changed(answer, notices)

    def note_refusals(self, records: Sequence[AuditRecord]) -> None:
        """Write down changes that were refused. Raises StoreUnavailable."""
        with self._store.writing() as writer:
            for record in records:
                writer.record(record)


def _repeated(earlier: RememberedAnswer, request: IdempotentRequest) -> Changed:
    if earlier.request_hash != request.request_hash:
        raise IdempotencyKeyReused(
            "this Idempotency-Key was used for another request; send the same request again, or another key"
        )
    return Changed(dict(earlier.answer), is_repeated=True)
