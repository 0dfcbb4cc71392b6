"""A read that never answers is told of by name, and stops no other one."""

from __future__ import annotations

import asyncio
import threading

import pytest

from footplate.platform.file_checks import MAX_LEFT, FileChecks
from footplate.tenancy.errors import Conflict, InvalidValue


def waits(mount: threading.Event) -> None:
    mount.wait()


def test_reads_that_hang_are_named_and_keep_nobody_waiting() -> None:
    mount = threading.Event()

    async def check() -> list[str]:
        checks = FileChecks(wait_s=0.05)
        read: list[str] = []
        for _ in range(MAX_LEFT):
            with pytest.raises(InvalidValue, match="reading gguf:/mnt/a took more than"):
                await checks.run(lambda: waits(mount), "gguf:/mnt/a")
            if checks.num_left < MAX_LEFT:
                await checks.run(lambda: read.append("other"), "gguf:/b")
        return read

    try:
        assert asyncio.run(check()).count("other") == MAX_LEFT - 1
    finally:
        mount.set()


def test_too_many_that_hang_are_refused_until_the_mount_answers() -> None:
    mount = threading.Event()

    async def check() -> None:
        checks = FileChecks(wait_s=0.05)
        for _ in range(MAX_LEFT):
            with pytest.raises(InvalidValue):
                await checks.run(lambda: waits(mount), "gguf:/mnt/a")
        with pytest.raises(Conflict, match=f"{MAX_LEFT} checks"):
            await checks.run(lambda: None, "gguf:/b")
        mount.set()
        async with asyncio.timeout(5):
            while checks.num_left:
                await asyncio.sleep(0)
        await checks.run(lambda: None, "gguf:/b")

    asyncio.run(check())


def test_what_a_check_raises_is_told() -> None:
    def refuse() -> None:
        raise InvalidValue("no", "source")

    with pytest.raises(InvalidValue, match="no"):
        asyncio.run(FileChecks(wait_s=5).run(refuse, "gguf:/b"))
