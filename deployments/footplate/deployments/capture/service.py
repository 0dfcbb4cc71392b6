"""Content capture in one gateway: its pool, its thread, its store."""

from __future__ import annotations

import asyncio
from datetime import timedelta

from footplate.deployments.capture.rows import PostgresCaptures
from footplate.platform.capture.policy import CaptureMode, CapturePolicy
from footplate.platform.capture.recorder import CaptureRecorder
from footplate.platform.telemetry.settings import ContentCaptureSettings
from footplate.tenancy.adapters.postgres.store import connect


class CaptureService:
    """Owns the pool and the thread. Also while capture is off: what was kept before is read, and expires."""

    def __init__(self, database_url: str, settings: ContentCaptureSettings) -> None:
        self._engine = connect(database_url, pool_size=2)
        self.store = PostgresCaptures(self._engine)
        self.recorder = CaptureRecorder(
            policy_of(settings), self.store, keep_for=timedelta(days=settings.retention_days)
        )

    def start(self) -> None:
        """Begin to write and to delete."""
        self.recorder.start()

    async def close(self) -> None:
        """Write what waits, then let go of the database."""
        await asyncio.to_thread(self.recorder.close)
        self._engine.dispose()


def policy_of(settings: ContentCaptureSettings) -> CapturePolicy:
    """What the settings ask for."""
    return CapturePolicy(
        CaptureMode(settings.mode),
        settings.sample_ratio,
        settings.slow_first_token_s,
        settings.slow_token_s,
    )
