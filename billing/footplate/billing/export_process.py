"""A process of its own for each export, with memory of its own, so that no request waits for one.

python -m footplate.billing.export_process   # reads what to do from its standard input
"""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

import msgspec

from footplate.billing.exports.request import ExportId

# So many at a time from one gateway; others wait in line.
MAX_PROCESSES = 2
NICENESS = 10


@dataclass(frozen=True, slots=True)
class ExportWork:
    """What a process needs to know. The URL may hold a password: it goes through a pipe."""

    export_id: str
    database_url: str
    currency: str
    timezone: str
    folder: str


class ExportProcesses:
    """Starts a process for each export. Safe from any thread."""

    def __init__(self, database_url: str, currency: str, timezone: str, folder: Path) -> None:
        self._work = ExportWork("", database_url, currency, timezone, str(folder))
        self._threads = ThreadPoolExecutor(MAX_PROCESSES, thread_name_prefix="exports")
        self._lock = threading.Lock()
        self._running: set[subprocess.Popen[bytes]] = set()
        self._is_closed = False

    def __call__(self, export_id: ExportId) -> None:
        """Let an export be written, now or when others are done."""
        self._threads.submit(self._run, export_id)

    def close(self) -> None:
        """End those that run; whoever asks for one of them is told that it was interrupted."""
        with self._lock:
            self._is_closed = True
            for process in self._running:
                process.terminate()
        self._threads.shutdown(wait=True, cancel_futures=True)

    def _run(self, export_id: ExportId) -> None:
        work = ExportWork(**{**asdict(self._work), "export_id": export_id})
        with self._lock:
            if self._is_closed:
                return
            process = subprocess.Popen(
                [sys.executable, "-m", "footplate.billing.export_process"],
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
            )
            self._running.add(process)
        try:
            with suppress(BrokenPipeError):
                process.communicate(msgspec.json.encode(work))
        finally:
            process.wait()
            with self._lock:
                self._running.discard(process)


def main() -> None:
    """Write one export."""
    # The drivers are loaded in this process alone.
    from footplate.billing.adapters.postgres.books import Books, connect
    from footplate.billing.adapters.postgres.export_store import PostgresExportStore

    os.nice(NICENESS)
    work = msgspec.json.decode(sys.stdin.buffer.read(), type=ExportWork)
    engine = connect(work.database_url, pool_size=2)
    try:
        books = Books(engine, work.currency, work.timezone)
        PostgresExportStore(books, Path(work.folder)).run(ExportId(work.export_id))
    finally:
        engine.dispose()


if __name__ == "__main__":
    main()
