"""Files over a real PostgreSQL, on a disk and on an object store: kept whole, for their tenant and time."""

from __future__ import annotations

import asyncio
import errno
import os
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import fsspec
import pytest
from sqlalchemy import text

from footplate.deployments.batches.byte_store import DiskStore, ObjectStore, open_byte_store
from footplate.deployments.batches.database import Database
from footplate.deployments.batches.setup import prepare_batches
from footplate.deployments.errors import StartupError
from footplate.platform.batches.store import ByteStore
from footplate.platform.errors import BatchStoreFull, FileStoreAway
from footplate.platform.settings import BatchSettings
from tests.billing.conftest import NewBooks
from tests.deployments.batch_rig import jsonl, line, until
from tests.deployments.test_batches import Run, metered, run
from tests.deployments.test_metering import Metered
from tests.postgres_server import connected

__all__ = ["metered", "run"]
pytestmark = pytest.mark.anyio


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(params=["disk", "objects"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[ByteStore]:
    if request.param == "disk":
        yield DiskStore(tmp_path / "files")
    else:
        system = fsspec.filesystem("memory", global_store=False, skip_instance_cache=True)
        yield ObjectStore(system, "/bucket/prefix")


def test_an_object_is_there_whole_or_not_at_all(store: ByteStore) -> None:
    for pieces in (store.pieces("t/a"), store.read("t/a")):
        assert pieces is None
    writer = store.writer("t/a")
    writer.write(b"0123")
    assert store.read("t/a") is None
    writer.write(b"456789")
    writer.commit()
    writer.abort()
    assert store.read("t/a") == b"0123456789"
    assert (store.read("t/a", 2, 3), store.read("t/a", 8), store.read("t/a", 0, 2)) == (b"234", b"89", b"01")
    given_up = store.writer("t/b")
    given_up.write(b"x")
    given_up.abort()
    assert store.read("t/b") is None
    large = bytes(range(256)) * 10_000
    store.put("t/folder/large", large)
    store.put("t/folder/large", large[1:])
    pieces = store.pieces("t/folder/large")
    assert pieces is not None and b"".join(pieces) == large[1:]
    assert store.read_many(["t/a", "t/no", "t/folder/large"]) == [b"0123456789", None, large[1:]]
    store.put("t/folder2/kept", b"1")
    for _ in range(2):
        store.delete_folder("t/folder")
        store.delete("t/a")
    assert store.read_many(["t/a", "t/folder/large", "t/folder2/kept"]) == [None, None, b"1"]


def test_a_store_that_takes_nothing_says_so_and_nothing_else(tmp_path: Path) -> None:
    (tmp_path / "files").write_text("")
    with pytest.raises(FileStoreAway) as away:
        DiskStore(tmp_path / "files").put("tenant/secret-name", b"x")
    assert "secret" not in str(away.value)


def test_a_platform_does_not_start_on_a_store_that_it_cannot_use(new_books: NewBooks, tmp_path: Path) -> None:
    url = new_books()
    prepare_batches(url, "embedded", tmp_path)
    prepare_batches(url, str(tmp_path / "elsewhere"), tmp_path)
    assert isinstance(open_byte_store("embedded", tmp_path), DiskStore)
    for wrong in ("s3://key:secret@bucket/x", "nobody://secret"):
        with pytest.raises(StartupError, match=r"storage\.files_url") as refused:
            prepare_batches(url, wrong, tmp_path)
        assert "secret" not in f"{refused.value}"


async def test_a_file_comes_back_as_it_went_in_and_goes_when_it_is_told(run: Run) -> None:
    async with run() as rig:
        data = jsonl(*(line(f"id-{number}") for number in range(5_000)))
        answer = await rig.post_file(data)
        file = answer.json()
        assert (file["bytes"], file["purpose"], file["filename"]) == (len(data), "batch", "in.jsonl")
        assert file["expires_at"] - file["created_at"] == 30 * 24 * 3600
        assert (await rig.get(f"/files/{file['id']}")).json() == file
        content = await rig.get(f"/files/{file['id']}/content")
        assert content.content == data
        assert rig.paths == [f"tenant-a/files/{file['id']}"]
        async with rig.http() as http:
            gone = await http.delete(f"/files/{file['id']}")
            assert gone.json() == {"id": file["id"], "object": "file", "deleted": True}
            assert (await http.delete(f"/files/{file['id']}")).status_code == 404
        assert rig.paths == [] and rig.sql("select 1 from batches.files") == []


async def test_parts_of_the_form_come_in_any_order_and_each_is_honoured_or_refused(run: Run) -> None:
    async with run() as rig:
        kept = {"expires_after[anchor]": "created_at", "expires_after[seconds]": "3600"}
        file = (await rig.post_file(b"{}", **kept)).json()
        assert file["expires_at"] - file["created_at"] == 3600
        async with rig.http() as http:
            parts: Any = [
                ("file", ("../../etc/pass wd", b"{}")),
                ("purpose", (None, b"batch")),
            ]
            late = await http.post("/files", files=parts)
            assert (late.status_code, late.json()["filename"]) == (200, "pass wd")
        before = rig.paths
        for fields, param in (
            ({"purpose": "assistants"}, "purpose"),
            ({"purpose": "x" * 2_000}, "form"),
            ({"unknown": "1"}, "form"),
            ({**kept, "expires_after[seconds]": "5"}, "expires_after.seconds"),
            ({**kept, "expires_after[seconds]": "many"}, "expires_after.seconds"),
            ({**kept, "expires_after[anchor]": "now"}, "expires_after.anchor"),
        ):
            answer = await rig.post_file(b"{}", **fields)
            assert (answer.status_code, answer.json()["error"]["param"]) == (400, param), fields
        async with rig.http() as http:
            for kind, body in (
                ("application/json", b"{}"),
                ("multipart/form-data; boundary=b", b"--b\r\nContent-Disposition: form-data; name=purpose"),
                ("multipart/form-data; boundary=b", b"--b--"),
            ):
                assert (
                    await http.post("/files", content=body, headers={"content-type": kind})
                ).status_code == 400
        # Whatever was refused has left nothing.
        assert rig.paths == before and len(rig.sql("select 1 from batches.files")) == 2


async def test_lists_are_complete_whatever_is_added_meanwhile(run: Run) -> None:
    async with run() as rig:
        ids = [await rig.upload(b"{}") for _ in range(5)]
        await rig.upload(b"{}", "fp_other_secret")
        page = (await rig.get("/files?limit=2")).json()
        found, new = [each["id"] for each in page["data"]], await rig.upload(b"{}")
        while page["has_more"]:
            page = (await rig.get(f"/files?limit=2&after={page['last_id']}")).json()
            found += [each["id"] for each in page["data"]]
        assert found == ids[::-1]
        oldest = (await rig.get("/files?order=asc&purpose=batch")).json()
        assert [each["id"] for each in oldest["data"]] == [*ids, new]
        assert (oldest["first_id"], oldest["last_id"], oldest["has_more"]) == (ids[0], new, False)
        assert (await rig.get("/files?purpose=batch_output")).json()["data"] == []
        wrong = ("limit=0", "limit=x", "limit=10001", "order=up", "purpose=x", "unknown=1", "after=%00")
        for query in (*wrong, "limit=1&limit=2"):
            assert (await rig.get(f"/files?{query}")).status_code == 400
        assert (await rig.get("/files?after=file-nobody")).status_code == 404


async def test_a_file_that_a_batch_reads_stays_until_the_batch_is_over(run: Run) -> None:
    async with run() as rig:
        rig.engine.script.hold_after = 1
        batch = await rig.begin(line("a"))
        await until(lambda: rig.engine.generations)
        path = f"/files/{batch['input_file_id']}"
        async with rig.http() as http:
            refused = await http.delete(path)
            assert (refused.status_code, refused.json()["error"]["code"]) == (409, "file_in_use")
            # Nor does its time take it away.
            rig.sql("update batches.files set expires_at = now() - interval '1 day'")
            assert (await http.get(path)).status_code == 200
            await http.post(f"/batches/{batch['id']}/cancel")
            await rig.until(batch["id"], "cancelled")
            assert (await http.get(path)).status_code == 404
        await until(lambda: batch["input_file_id"] not in str(rig.paths))


async def test_what_is_over_its_time_or_was_never_finished_is_swept(run: Run) -> None:
    async with run() as rig:
        kept, over = await rig.upload(b"{}"), await rig.upload(b"{}")
        rig.sql("update batches.files set expires_at = now() where id = :id", id=over)
        assert (await rig.get(f"/files/{over}")).status_code == 404
        rig.sql(
            "insert into batches.files (id, tenant_id, purpose, filename, state, created_at) values "
            "('file-torn', 'tenant-a', '', 'x', 'receiving', now() - interval '2 days')"
        )
        await until(lambda: rig.sql("select id from batches.files") == [(kept,)])
        assert rig.paths == [f"tenant-a/files/{kept}"]


async def test_the_bytes_of_an_upload_whose_gateway_died_are_swept_too(run: Run) -> None:
    async with run() as rig:
        kept = await rig.upload(b"{}")
        store = DiskStore(rig.data_dir / "files")
        for name in ("file-torn", "file-torn2"):
            store.writer(f"tenant-a/files/{name}").write(b"secret")
        rig.sql(
            "insert into batches.files (id, tenant_id, purpose, filename, state, created_at) values "
            "('file-torn', 'tenant-a', '', 'x', 'receiving', now() - interval '2 hours')"
        )
        await until(lambda: rig.sql("select id from batches.files") == [(kept,)])
        names = {path.name for path in (rig.data_dir / "files" / "tenant-a" / "files").iterdir()}
        # The other one is on its way.
        assert len(names) == 2 and kept in names and "file-torn2" in str(names)


async def test_a_tenant_keeps_so_many_files_and_bytes_and_no_more(run: Run) -> None:
    settings = BatchSettings(max_files=2, max_stored_gib=100 / 2**30, max_open=1)
    async with run(settings=settings) as rig:
        await rig.upload(b"x" * 60)
        refused = await rig.post_file(b"x" * 60)
        assert (refused.status_code, refused.json()["error"]["code"]) == (429, "insufficient_quota")
        assert refused.headers["x-should-retry"] == "false"
        await rig.upload(b"x")
        assert (await rig.post_file(b"x")).status_code == 429
        assert (await rig.post_file(b"x", "fp_other_secret")).status_code == 200
        assert len(rig.paths) == 3


async def test_an_upload_over_the_limit_is_cut_and_leaves_nothing(run: Run) -> None:
    async with run() as rig:

        async def endless() -> AsyncIterator[bytes]:
            yield b'--b\r\nContent-Disposition: form-data; name="file"; filename="a"\r\n\r\n'
            while True:
                yield b"x" * (1 << 23)

        async with rig.http() as http:
            headers = {"content-type": "multipart/form-data; boundary=b"}
            answer = await http.post("/files", content=endless(), headers=headers)
            assert (answer.status_code, answer.json()["error"]["code"]) == (413, "request_too_large")
            small = await http.post("/batches", content=b"x" * (9 << 20))
            assert small.status_code == 413
        assert rig.paths == [] and rig.sql("select 1 from batches.files") == []


async def test_while_a_store_is_away_the_api_says_so_and_workers_go_on_afterwards(
    run: Run, metered: Metered
) -> None:
    async with run() as rig:
        rig.engine.script.hold_after = 1
        batch = await rig.begin(*(line(f"id-{n}") for n in range(3)))
        await until(lambda: len(rig.engine.generations) == 3)
        files = rig.data_dir / "files"
        files.rename(rig.data_dir / "away")
        files.write_text("")
        rig.engine.script.goes_on.set()
        answer = await rig.post_file(b"{}")
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "server_is_overloaded")
        assert answer.headers["retry-after"] == "1"
        await until(lambda: rig.sql("select 1 from batches.lines where lost_attempts <> '{}'"))
        files.unlink()
        (rig.data_dir / "away").rename(files)
        ended = await rig.until(batch["id"], "completed")
        assert ended["request_counts"]["completed"] == 3
        await until(lambda: not any(row.is_estimated for row in metered.rows()))
        assert len(metered.rows()) == 3


async def test_an_upload_to_a_full_disk_says_so_and_leaves_nothing(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    async with run() as rig:
        with monkeypatch.context() as disk:
            disk.setattr(os, "fsync", full)
            answer = await rig.post_file(b"{}")
        assert (answer.status_code, answer.json()["error"]["code"]) == (507, "insufficient_storage")
        assert "delete some" in answer.json()["error"]["message"]
        assert answer.headers["x-should-retry"] == "false"
        assert rig.paths == [] and rig.sql("select 1 from batches.files") == []
        assert (await rig.post_file(b"{}")).status_code == 200


def test_a_database_without_room_is_told_from_one_that_is_away(new_books: NewBooks) -> None:
    fault = "do $$ begin raise exception 'could not extend file' using errcode = '53100'; end $$"
    with connected(new_books()) as engine, pytest.raises(BatchStoreFull):
        with Database(engine).transaction() as connection:
            connection.execute(text(fault))


async def test_without_a_database_files_and_batches_are_a_503_that_says_when_to_come_again(run: Run) -> None:
    async with run(batches_host="/nowhere") as rig:
        for answer in (
            await rig.post_file(b"{}"),
            await rig.create("file-1"),
            await rig.get("/files"),
            await rig.get("/batches/batch_1"),
        ):
            assert (answer.status_code, answer.json()["error"]["code"]) == (503, "server_is_overloaded")
            assert answer.headers["retry-after"] == "1"


async def test_what_is_on_its_way_counts_like_what_is_kept(run: Run) -> None:
    """Many uploads that never end fill a disk as well as many that do."""
    async with run(settings=BatchSettings(max_stored_gib=4 / 1024)) as rig:
        is_sent, may_end = asyncio.Event(), asyncio.Event()
        head = b'--b\r\ncontent-disposition: form-data; name="file"; filename="x"\r\n\r\n'
        purpose = b'\r\n--b\r\ncontent-disposition: form-data; name="purpose"\r\n\r\nbatch\r\n--b--'

        async def slowly() -> AsyncIterator[bytes]:
            yield head
            for _ in range(3):
                yield b"x" * (1 << 20)
            is_sent.set()
            await may_end.wait()
            yield purpose

        async with rig.http() as http:
            kind = {"content-type": "multipart/form-data; boundary=b"}
            slow = asyncio.create_task(http.post("/files", content=slowly(), headers=kind))
            await is_sent.wait()
            await until(lambda: rig.sql("select 1 from batches.files where num_bytes >= 2 << 20"))
            refused = await rig.post_file(b"x" * (5 << 19))
            assert (refused.status_code, refused.json()["error"]["code"]) == (429, "insufficient_quota")
            assert (await rig.post_file(b"x")).status_code == 200
            may_end.set()
            assert (await slow).json()["bytes"] == 3 << 20
        assert len(rig.paths) == 2
