"""How many refused changes of one key are written down, so that no key fills the audit table. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from datetime import datetime, timedelta

from footplate.tenancy.admin.audit import AuditRecord

MAX_WRITTEN = 10
WINDOW = timedelta(minutes=1)
LEFT_OUT = "too_many_refusals"


@dataclass(slots=True)
class _Window:
    begin: datetime
    num_records: int
    last: AuditRecord


class RefusalBudget:
    """Each key has `MAX_WRITTEN` records in a `WINDOW`, and one that counts the rest. Not thread-safe."""

    def __init__(self) -> None:
        # In the order in which they begin.
        self._windows: dict[str, _Window] = {}

    def admit(self, record: AuditRecord, now: datetime) -> list[AuditRecord]:
        """What is to be written now that a change was refused: its record unless that is one too many.

        Windows that are over come first, each with one record of the code `too_many_refusals`, whose
        `after` holds `num_left_out`. Nobody waits for the end of a window, so the count of a key that falls
        silent is written with the next refusal of any key.
        """
        written = list(self._ended(now))
        key_id = record.caller.key_id
        window = self._windows.setdefault(key_id, _Window(now, 0, record))
        window.num_records += 1
        window.last = record
        if window.num_records <= MAX_WRITTEN:
            written.append(record)
        return written

    def _ended(self, now: datetime) -> Iterator[AuditRecord]:
        while self._windows:
            key_id, window = next(iter(self._windows.items()))
            # A clock that was set back ends a window too, for nobody knows how old that is.
            if timedelta(0) <= now - window.begin < WINDOW:
                return
            del self._windows[key_id]
            if window.num_records > MAX_WRITTEN:
                after = {"num_left_out": window.num_records - MAX_WRITTEN}
                yield replace(window.last, code=LEFT_OUT, target=None, after=after)
