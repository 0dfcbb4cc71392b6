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
_Done = TypeVar("_Done")
# Makes a change of another store, and calls what it is given before that is committed: with the connection of
# its transaction, and with what was done.
Enclosing = Callable[[Callable[[object, _Done], None]], object]


class _MadeMeanwhile(Exception):
    """The same request has gone through while this one waited for its turn."""


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
            return _earlier(writer, caller, request) or _made(writer, caller, request, work(writer))

    def change_enclosed(
        self,
        caller: Caller,
        enclosing: Enclosing[_Done],
        work: Callable[[Writer, _Done], dict[str, Any]],
        request: IdempotentRequest | None = None,
    ) -> Changed:
        """As `change`, in the transaction of another store on the same database.

        What is done there, its record and the remembered answer stand or fall together, whatever dies when.
        """
        changed = self._recalled(caller, request)
        if changed is not None:
            return changed
        made: list[Changed] = []

        def beside(transaction: object, done: _Done) -> None:
            with self._store.writing(within=transaction) as writer:
                if _earlier(writer, caller, request) is not None:
                    raise _MadeMeanwhile
                made.append(_made(writer, caller, request, work(writer, done)))

        try:
            enclosing(beside)
        except Exception:
            # Refused, perhaps, because the same request went through a moment ago.
            changed = self._recalled(caller, request)
            if changed is None:
                raise
            return changed
        return made[0]

    def _recalled(self, caller: Caller, request: IdempotentRequest | None) -> Changed | None:
        if request is None:
            return None
        with self._store.writing() as writer:
            return _earlier(writer, caller, request)

    def note_refusals(self, records: Sequence[AuditRecord]) -> None:
        """Write down changes that were refused. Raises StoreUnavailable."""
        with self._store.writing() as writer:
            for record in records:
                writer.record(record)


def _earlier(writer: Writer, caller: Caller, request: IdempotentRequest | None) -> Changed | None:
    """The answer to the same request before. Raises IdempotencyKeyReused."""
    earlier = None if request is None else writer.recall(caller.key_id, request.idempotency_key)
    return None if request is None or earlier is None else _repeated(earlier, request)


def _made(
    writer: Writer, caller: Caller, request: IdempotentRequest | None, answer: dict[str, Any]
) -> Changed:
    if request is not None:
        kept = {**answer, "key": None} if "key" in answer else answer
        writer.remember(caller.key_id, request.idempotency_key, RememberedAnswer(request.request_hash, kept))
    return Changed(answer, tuple(filter(None, map(change_of, writer.recorded))))


def _repeated(earlier: RememberedAnswer, request: IdempotentRequest) -> Changed:
    if earlier.request_hash != request.request_hash:
        raise IdempotencyKeyReused(
            "this Idempotency-Key was used for another request; send the same request again, or another key"
        )
    return Changed(dict(earlier.answer), is_repeated=True)
