"""Files and batches of one gateway: their stores, the desk for its endpoints, and its worker."""

from __future__ import annotations

import os
import secrets
import socket
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from footplate.billing.adapters.postgres.books import connect
from footplate.deployments.batches.batch_rows import PostgresBatchRows
from footplate.deployments.batches.byte_store import open_byte_store
from footplate.deployments.batches.database import Database
from footplate.deployments.batches.file_rows import PostgresFileRows
from footplate.deployments.batches.queue import PostgresBatchQueue
from footplate.platform.app import BatchParts
from footplate.platform.batches.desk import BatchDesk
from footplate.platform.batches.line_run import LineWork
from footplate.platform.batches.metrics import BatchMetrics
from footplate.platform.batches.store import ByteStore
from footplate.platform.batches.threads import StoreThreads
from footplate.platform.batches.values import FileLimits
from footplate.platform.batches.worker import BatchWorker, Pace
from footplate.platform.http.straight_path import StraightEndpoint
from footplate.platform.metering import EventSink
from footplate.platform.ports import InferenceClient, KeyFinder
from footplate.platform.settings import BatchSettings
from footplate.platform.telemetry.spans import Tracer
from footplate.routing.cascade import Cascade

NUM_THREADS = 4
POOL_SIZE = 6  # with two more for a moment: one for each thread here and at the desk


@dataclass(frozen=True, slots=True)
class LineParts:
    """What the worker runs lines with: the app's own endpoints, and what stands behind them."""

    endpoints: Mapping[str, StraightEndpoint]
    client: InferenceClient
    keys: KeyFinder
    sink: EventSink | None
    # Routes that lines may name.
    cascades: Mapping[str, Cascade] = field(default_factory=dict)
    tracer: Tracer = field(default_factory=Tracer)


class BatchService:
    """Owns a pool and threads; belongs to one event loop. `start` comes after the app is made."""

    def __init__(
        self,
        database_url: str,
        files_url: str,
        data_dir: Path,
        settings: BatchSettings,
        *,
        data: ByteStore | None = None,
        pace: Pace | None = None,
    ) -> None:
        self._engine = connect(database_url, pool_size=POOL_SIZE)
        database = Database(self._engine)
        self._files = PostgresFileRows(database)
        self._queue = PostgresBatchQueue(database, settings.lease_s)
        self._data = data or open_byte_store(files_url, data_dir)
        self._threads = StoreThreads("batches", NUM_THREADS)
        self._pace = pace or Pace(max_running=settings.max_running)
        limits = FileLimits(settings.max_files, int(settings.max_stored_gib * 2**30))
        desk = BatchDesk(self._files, PostgresBatchRows(database), self._data, limits, settings.max_open)
        self.parts = BatchParts(desk, BatchMetrics())
        self._worker: BatchWorker | None = None
        # Never used again: what an earlier process of this machine held is not this one's.
        self._name = f"{socket.gethostname()}-{os.getpid()}-{secrets.token_hex(6)}"

    @property
    def num_running(self) -> int:
        """How many lines this gateway's worker holds."""
        return 0 if self._worker is None else self._worker.num_running

    def start(self, lines: LineParts) -> None:
        """Begin to work on batches."""
        work = LineWork(
            lines.endpoints,
            self._queue,
            self._data,
            lines.keys,
            lines.sink,
            self._threads,
            self._name,
            lines.cascades,
            lines.tracer,
        )
        self._worker = BatchWorker(work, lines.client, self._files, self.parts.metrics, self._pace)
        self.parts.desk.wake.append(self._worker.wake)
        self._worker.start()

    async def close(self) -> None:
        """Give back what is not done. Comes before the limits' and the events' own."""
        if self._worker is not None:
            await self._worker.close()
        await self.parts.desk.close()
        await self._threads.close()
        self._engine.dispose()
