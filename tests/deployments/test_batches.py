"""Batches over a real PostgreSQL and a real folder: run and billed once at half price, for one tenant."""

from __future__ import annotations

import json
import logging
import threading
from collections.abc import Iterator
from contextlib import AbstractAsyncContextManager
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, Protocol

import pytest

from footplate.billing.adapters.postgres.books import Books
from footplate.billing.adapters.postgres.reconcile_reader import PostgresLedgerCountReader
from footplate.billing.reconcile import BatchCount
from footplate.billing.time_ranges import TimeRange
from footplate.billing.usage import EventState
from footplate.deployments.batches.counts import batch_counts
from footplate.engine.errors import EngineDead, EngineOverloaded
from footplate.engine.types import BATCH_PRIORITY
from footplate.platform.batches.store import ByteStore
from footplate.tenancy.quotas import Quota
from tests.billing.builders import USUAL
from tests.billing.conftest import NewBooks
from tests.builders import TENANT_KEY
from tests.deployments.batch_rig import (
    MODEL,
    NUM_OUTPUT,
    NUM_PROMPT,
    OTHER,
    OTHER_KEY,
    TEXT,
    BatchRig,
    jsonl,
    line,
    running,
    until,
)
from tests.deployments.test_metering import COMPLETED, Metered, metered_books
from tests.fakes import Script

pytestmark = pytest.mark.anyio
FULL = NUM_PROMPT * USUAL.input + NUM_OUTPUT * USUAL.output
CANARY = "canary-30571"


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


class Run(Protocol):
    def __call__(self, **options: Any) -> AbstractAsyncContextManager[BatchRig]: ...


@pytest.fixture
def metered(new_books: NewBooks, tmp_path: Path) -> Iterator[Metered]:
    with metered_books(new_books(), tmp_path / "journal") as found:
        yield found


@pytest.fixture
def run(metered: Metered, tmp_path: Path) -> Run:
    return lambda **options: running(metered, tmp_path / "data", **options)


async def test_a_batch_runs_and_each_line_is_one_event_at_half_price(run: Run) -> None:
    """FAULTS b2 15, 16 and 18: what is polled often, or never fetched, is billed once, as the items say."""
    async with run() as rig:
        rig.engine.script = Script([500] * 50, ends_with_stop=False, cached_tokens=3)
        bad = line("bad", temperature=99)
        lines = [*(line(f"id-{number}") for number in range(9)), bad]
        batch = await rig.begin(*lines, metadata={"team": "blue"})
        assert (batch["status"], batch["metadata"]) == ("validating", {"team": "blue"})
        assert batch["expires_at"] - batch["created_at"] == 24 * 3600
        ended = await rig.until(batch["id"], "completed")
        for _ in range(20):
            assert await rig.batch(batch["id"]) == ended
        assert ended["request_counts"] == {"total": 10, "completed": 9, "failed": 1}
        assert ended["model"] == MODEL and ended["errors"] is None
        assert (
            ended["created_at"] <= ended["in_progress_at"] <= ended["finalizing_at"] <= ended["completed_at"]
        )
        assert (ended["failed_at"], ended["cancelled_at"], ended["expired_at"]) == (None, None, None)
        usage = ended["usage"]
        assert (usage["input_tokens"], usage["output_tokens"]) == (9 * NUM_PROMPT, 9 * NUM_OUTPUT)
        assert usage["input_tokens_details"] == {"cached_tokens": 27}
        rows = rig.metered.rows()
        cached = NUM_PROMPT * USUAL.input - 3 * (USUAL.input - USUAL.cached_input)
        assert [(row.state, row.is_estimated) for row in rows] == [(COMPLETED, False)] * 9
        assert [row.amount for row in rows] == [(cached + NUM_OUTPUT * USUAL.output) // 2] * 9
        # Behind all that somebody waits for.
        assert {request.priority for request in rig.engine.requests} == {BATCH_PRIORITY}
        output = await rig.lines_of(ended["output_file_id"])
        assert [each["custom_id"] for each in output] == [f"id-{number}" for number in range(9)]
        assert {each["id"] for each in output} == {row.event_id for row in rows}
        for each in output:
            response = each["response"]
            assert (each["error"], response["status_code"]) == (None, 200)
            assert response["request_id"].startswith(each["id"])
            assert response["body"]["usage"]["completion_tokens"] == NUM_OUTPUT
        [error] = await rig.lines_of(ended["error_file_id"])
        assert (error["custom_id"], error["error"], error["response"]["status_code"]) == ("bad", None, 400)
        assert error["response"]["body"]["error"]["param"] == "temperature"
        day = TimeRange(datetime.now(UTC) - timedelta(hours=1), datetime.now(UTC) + timedelta(hours=1))
        events = PostgresLedgerCountReader(Books(rig.metered.engine)).batches(day)
        assert batch_counts(rig.metered.engine, events, day) == [BatchCount(batch["id"], 9, 9)]
        names = {ended["input_file_id"], ended["output_file_id"], ended["error_file_id"]}
        assert rig.paths == sorted(f"tenant-a/files/{name}" for name in names)
        assert rig.sql("select count(*) from batches.lines") == [(0,)]
        shown = (await rig.get(f"/files/{ended['output_file_id']}")).json()
        assert (shown["purpose"], shown["filename"]) == ("batch_output", f"{batch['id']}_output.jsonl")
        assert shown["bytes"] == len((await rig.get(f"/files/{shown['id']}/content")).content)
        text = (await rig.get("/../metrics", "fp_scrape_secret")).text
        assert 'footplate_batch_lines_total{outcome="succeeded"} 9.0' in text
        assert 'footplate_batches_total{status="completed"} 1.0' in text


async def test_a_batch_cancelled_at_5_of_10_costs_5_and_what_ran_then(run: Run) -> None:
    """FAULTS b2 17."""
    async with run() as rig:
        # The sixth and those after it never end by themselves.
        rig.engine.script.hold_after = 6
        batch = await rig.begin(
            *(line(f"id-{n}") for n in range(5)), *(line(f"id-{n}", max_tokens=40) for n in range(5, 10))
        )

        async def has_five() -> bool:
            return bool((await rig.batch(batch["id"]))["request_counts"]["completed"] == 5)

        await until(has_five)
        await until(lambda: sum(each.num_steps == 6 for each in rig.engine.generations) == 4)
        assert (await rig.post(f"/batches/{batch['id']}/cancel")).json()["status"] == "cancelling"
        ended = await rig.until(batch["id"], "cancelled")
        assert (await rig.post(f"/batches/{batch['id']}/cancel")).json() == ended
        assert ended["request_counts"] == {"total": 10, "completed": 5, "failed": 0}
        assert ended["cancelling_at"] <= ended["cancelled_at"]
        assert len(await rig.lines_of(ended["output_file_id"])) == 5
        errors = await rig.lines_of(ended["error_file_id"])
        assert {each["custom_id"] for each in errors} == {f"id-{n}" for n in range(5, 10)}
        assert {(each["response"], each["error"]["code"]) for each in errors} == {(None, "batch_cancelled")}
        rows = rig.metered.rows()
        done = [row for row in rows if row.state == COMPLETED]
        assert [(row.amount, row.is_estimated) for row in done] == [(FULL // 2, False)] * 5
        # What ran when it was cancelled is billed as far as it came, and never runs again.
        stopped = [row for row in rows if row.state == EventState.CLIENT_CANCELLED.value]
        assert len(stopped) == 4 and not any(row.is_estimated for row in stopped)
        assert {row.output for row in stopped} == {6}
        assert rig.settlement.num_open == 0


async def test_a_batch_whose_day_is_over_ends_with_what_is_done(run: Run) -> None:
    async with run() as rig:
        rig.engine.script.hold_after = 6
        batch = await rig.begin(line("done"), line("held", max_tokens=40))
        await until(lambda: len(rig.metered.rows()) == 1)
        await until(lambda: any(each.num_steps == 6 for each in rig.engine.generations))
        rig.sql("update batches.batches set expires_at = now()")
        ended = await rig.until(batch["id"], "expired")
        assert ended["expired_at"] is not None
        assert [each["custom_id"] for each in await rig.lines_of(ended["output_file_id"])] == ["done"]
        [error] = await rig.lines_of(ended["error_file_id"])
        assert (error["custom_id"], error["error"]["code"]) == ("held", "batch_expired")
        assert len(rig.metered.rows()) == 2


async def test_a_bad_file_fails_before_anything_runs_and_says_why(run: Run) -> None:
    async with run() as rig:
        file_id = await rig.upload(
            jsonl(line("a"), {**line("a"), "method": "GET"}, line("c", model="nobody"))
        )
        batch = (await rig.create(file_id)).json()
        ended = await rig.until(batch["id"], "failed")
        errors = ended["errors"]["data"]
        assert [(each["code"], each["line"], each["param"]) for each in errors] == [
            ("duplicate_custom_id", 2, "custom_id"),
            ("mismatched_model", 3, "body.model"),
        ]
        assert ended["failed_at"] is not None and ended["output_file_id"] is None and ended["usage"] is None
        unknown = await rig.begin(line("a", model="nobody"))
        ended = await rig.until(unknown["id"], "failed")
        assert [each["code"] for each in ended["errors"]["data"]] == ["model_not_found"]
        assert rig.engine.requests == [] and rig.metered.rows() == []
        async with rig.http() as http:
            keyed = await http.post("/batches", json={}, headers={"idempotency-key": "k"})
            assert (keyed.status_code, keyed.json()["error"]["code"]) == (400, "unsupported_parameter")
        rig.keys.principals[OTHER_KEY] = replace(
            rig.keys.principals[OTHER_KEY], tenant_quota=Quota(requests_per_minute=0)
        )
        assert (await rig.create(file_id, OTHER_KEY)).json()["error"]["code"] == "insufficient_quota"
        refusals = (
            ({"endpoint": "/v1/embeddings"}, "endpoint"),
            ({"completion_window": "1h"}, "completion_window"),
            ({"file_id": "file-nobody"}, "input_file_id"),
            ({"metadata": {"k": "v" * 513}}, "metadata"),
            ({"metadata": {str(n): "v" for n in range(17)}}, "metadata"),
            (
                {"output_expires_after": {"anchor": "created_at", "seconds": 1}},
                "output_expires_after.seconds",
            ),
            ({"unknown": 1}, "unknown"),
        )
        for fields, param in refusals:
            answer = await rig.create(**{"file_id": file_id, **fields})
            assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)


async def test_tenants_see_their_own_files_and_batches_only(run: Run) -> None:
    async with run() as rig:
        mine = await rig.begin(line("a"))
        await rig.until(mine["id"], "completed")
        mine = await rig.batch(mine["id"])
        files = [mine["input_file_id"], mine["output_file_id"]]
        async with rig.http(OTHER_KEY) as http:
            assert (await http.get("/files")).json()["data"] == []
            assert (await http.get("/batches")).json()["data"] == []
            for file_id in files:
                answers = [
                    await http.get(f"/files/{file_id}"),
                    await http.get(f"/files/{file_id}/content"),
                    await http.delete(f"/files/{file_id}"),
                ]
                missing = [
                    await http.get("/files/file-nobody"),
                    await http.get("/files/file-nobody/content"),
                    await http.delete("/files/file-nobody"),
                ]
                assert [each.content for each in answers] == [each.content for each in missing]
                assert {each.status_code for each in (*answers, *missing)} == {404}
            for method, path in (("GET", ""), ("POST", "/cancel")):
                answer = await http.request(method, f"/batches/{mine['id']}{path}")
                assert answer.status_code == 404
                assert answer.content == (await http.request(method, f"/batches/x{path}")).content
            assert (await rig.create(files[0], OTHER_KEY)).status_code == 400
            assert (await http.get(f"/batches?after={mine['id']}")).status_code == 404
        assert (await rig.get(f"/files/{files[0]}")).status_code == 200


async def test_a_line_runs_only_with_what_its_key_may_use_when_it_runs(run: Run) -> None:
    """FAULTS b8 78: at the door, and when the allow-list has changed meanwhile; 82 for a revoked key."""
    async with run() as rig:
        allowed = rig.keys.principals[TENANT_KEY]
        only_other = replace(allowed, tenant_quota=Quota(allowed_models=frozenset({OTHER})))
        rig.keys.principals[TENANT_KEY] = only_other
        ended = await rig.until((await rig.begin(line("a")))["id"], "failed")
        assert ended["errors"]["data"][0]["code"] == "model_not_found"
        rig.keys.principals[TENANT_KEY] = allowed
        rig.engine.script.hold_after = 0
        held = await rig.begin(*(line(f"id-{n}") for n in range(6)))
        await until(lambda: len(rig.engine.generations) == 4)
        rig.keys.principals[TENANT_KEY] = only_other
        release(rig)
        ended = await rig.until(held["id"], "completed")
        assert ended["request_counts"] == {"total": 6, "completed": 4, "failed": 2}
        errors = await rig.lines_of(ended["error_file_id"])
        assert {each["response"]["body"]["error"]["code"] for each in errors} == {"model_not_found"}
        rig.keys.principals[TENANT_KEY] = allowed
        batch = await rig.begin(line("a"), endpoint=TEXT)
        del rig.keys.principals[TENANT_KEY]
        await until(
            lambda: (
                rig.sql("select status from batches.batches order by seq desc limit 1") == [("completed",)]
            )
        )
        rig.keys.principals[TENANT_KEY] = allowed
        ended = await rig.batch(batch["id"])
        if ended["request_counts"]["failed"]:
            [error] = await rig.lines_of(ended["error_file_id"])
            assert error["response"]["body"]["error"]["code"] == "invalid_api_key"


def release(rig: BatchRig) -> None:
    """Let what was held go on, and hold nothing more."""
    held, rig.engine.script = rig.engine.script, replace(rig.engine.script, hold_after=None)
    held.goes_on.set()


async def test_what_passes_is_waited_for_and_what_fails_is_tried_again(run: Run) -> None:
    async with run() as rig:
        rig.engine.script.refusal = EngineOverloaded("full", 1)
        batch = await rig.begin(line("a"), line("b"))
        await until(lambda: rig.sql("select 1 from batches.batches where not_before is not null"))
        assert (await rig.batch(batch["id"]))["request_counts"]["failed"] == 0
        rig.engine.script.refusal = None
        ended = await rig.until(batch["id"], "completed")
        assert ended["request_counts"]["completed"] == 2
        # An engine that dies over a line: what it had made is billed as an estimate until an answer mends it.
        rig.engine.script = Script([500] * 50, ends_with_stop=False, failure=EngineDead("gone"), fail_after=2)
        batch = await rig.begin(line("c"))
        await until(lambda: len(rig.metered.rows()) == 3)
        assert (rig.metered.rows()[2].is_estimated, rig.metered.rows()[2].output) == (True, 2)
        rig.engine.script = Script([500] * 50, ends_with_stop=False)
        ended = await rig.until(batch["id"], "completed")
        assert ended["request_counts"]["completed"] == 1
        assert [(row.state, row.amount) for row in rig.metered.rows()] == [(COMPLETED, FULL // 2)] * 3


async def test_what_never_works_ends_in_the_error_file_and_costs_nothing(run: Run) -> None:
    async with run() as rig:
        rig.engine.script = Script(failure=EngineDead(CANARY))
        batch = await rig.begin(line("a"))

        async def is_over() -> bool:
            rig.sql("update batches.lines set not_before = null")
            return bool((await rig.batch(batch["id"]))["status"] == "completed")

        await until(is_over)
        ended = await rig.batch(batch["id"])
        [error] = await rig.lines_of(ended["error_file_id"])
        assert error["response"]["status_code"] == 500 and CANARY not in json.dumps(error)
        assert len(rig.engine.generations) == 3
        assert [(row.output, row.amount) for row in rig.metered.rows()] == [(0, None)]


async def test_a_line_that_takes_its_workers_with_it_is_given_up(run: Run) -> None:
    async with run() as rig:
        rig.engine.script.refusal = EngineOverloaded("full", 1)
        batch = await rig.begin(line("killer"), line("b"))
        await until(lambda: rig.sql("select 1 from batches.batches where not_before is not null"))
        rig.sql("update batches.lines set lost_attempts = array_fill(99, array[10]) where number = 1")
        rig.engine.script.refusal = None
        ended = await rig.until(batch["id"], "completed")
        assert ended["request_counts"] == {"total": 2, "completed": 1, "failed": 1}
        [error] = await rig.lines_of(ended["error_file_id"])
        assert (error["custom_id"], error["response"]["status_code"]) == ("killer", 500)
        assert len(rig.engine.generations) == 1


def stand_still(rig: BatchRig) -> None:
    """Nothing more is heard of a worker, though what it has begun goes on."""
    assert rig.service._worker is not None
    for task in rig.service._worker._tasks:
        task.cancel()


class Crashing:
    """A store of bytes that never answers again once an answer of a line is kept: as if the worker died."""

    def __init__(self, store: ByteStore) -> None:
        self._store = store
        self.is_kept = threading.Event()
        self.is_over = threading.Event()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    def put(self, key: str, data: bytes) -> None:
        self._store.put(key, data)
        self.is_kept.set()
        self.is_over.wait(30)
        raise OSError


async def test_an_answer_that_a_lost_worker_had_kept_is_billed_and_not_run_again(
    run: Run, metered: Metered
) -> None:
    """Between the answer and its event: the next worker finds it by the lease that ended."""
    stores: list[Crashing] = []

    def crash(store: ByteStore) -> ByteStore:
        stores.append(Crashing(store))
        return stores[0]  # type: ignore[return-value]

    async with run(wrap=crash) as dying:
        batch = await dying.begin(line("a"))
        await until(lambda: stores[0].is_kept.is_set())
        assert len(dying.engine.generations) == 1 and metered.rows() == []
        stand_still(dying)
        metered_rows = metered.rows
        async with run() as other:
            other.sql("update batches.lines set leased_until = now() - interval '1 s'")
            ended = await other.until(batch["id"], "completed")
            assert ended["request_counts"]["completed"] == 1
            assert other.engine.generations == []
            assert [(row.state, row.is_estimated, row.amount) for row in metered_rows()] == [
                (COMPLETED, False, FULL // 2)
            ]
            text = (await other.get("/../metrics", "fp_scrape_secret")).text
            assert 'footplate_batch_lines_total{outcome="found"} 1.0' in text
        stores[0].is_over.set()
    # The one that was thought dead ends too: nothing of it counts.
    assert [(row.state, row.amount) for row in metered_rows()] == [(COMPLETED, FULL // 2)]


async def test_leases_that_a_clock_set_back_would_keep_for_hours_end_in_time(run: Run) -> None:
    async with run() as dying:
        dying.engine.script.hold_after = 1
        await dying.begin(line("a"))
        await until(lambda: bool(dying.engine.generations))
        stand_still(dying)
        async with run() as other:
            # As a server sees them whose clock has stepped back by an hour.
            in_an_hour = "set leased_until = now() + interval '1 hour'"
            other.sql(f"update batches.lines {in_an_hour}")
            other.sql(f"update batches.batches {in_an_hour}, worker = 'dying'")
            for table in ("lines", "batches"):
                late = f"select 1 from batches.{table} where leased_until > now() + interval '50 min'"
                await until(lambda late=late: other.sql(late) == [])
        release(dying)


async def test_a_worker_that_lost_its_line_keeps_and_bills_nothing_of_it(run: Run, metered: Metered) -> None:
    """Though it is the first to have an answer: what is delivered and billed is the holder's."""
    async with run() as slow:
        slow.engine.script.hold_after = 2
        batch = await slow.begin(line("a"))
        await until(lambda: any(each.num_steps == 2 for each in slow.engine.generations))
        stand_still(slow)
        async with run() as holder:
            holder.engine.script = Script([500] * 3, hold_after=1)
            holder.sql("update batches.lines set leased_until = now() - interval '1 s'")
            await until(lambda: holder.engine.generations)
            release(slow)
            await until(lambda: slow.service.num_running == 0 and metered.rows())
            assert [(row.output, row.is_estimated) for row in metered.rows()] == [(NUM_OUTPUT, True)]
            holder.engine.script.goes_on.set()
            ended = await holder.until(batch["id"], "completed")
            [output] = await holder.lines_of(ended["output_file_id"])
            assert output["response"]["body"]["usage"]["completion_tokens"] == 3
    assert [(row.state, row.is_estimated, row.output) for row in metered.rows()] == [(COMPLETED, False, 3)]


async def test_work_that_is_given_back_at_a_stop_goes_on_at_the_next_start(
    run: Run, metered: Metered
) -> None:
    async with run() as rig:
        rig.engine.script.hold_after = 2
        batch = await rig.begin(*(line(f"id-{n}") for n in range(6)))
        await until(lambda: sum(each.num_steps == 2 for each in rig.engine.generations) == 4)
    stopped = metered.rows()
    assert [(row.is_estimated, row.output) for row in stopped] == [(True, 2)] * 4
    async with run() as rig:
        ended = await rig.until(batch["id"], "completed")
        assert ended["request_counts"]["completed"] == 6
    assert [(row.state, row.is_estimated, row.amount) for row in metered.rows()] == [
        (COMPLETED, False, FULL // 2)
    ] * 6


async def test_tenants_take_turns(run: Run) -> None:
    async with run() as rig:
        rig.engine.script.hold_after = 0
        large = await rig.begin(*(line(f"id-{n}") for n in range(20)))
        await until(lambda: len(rig.engine.generations) == 4)
        small = await rig.begin(line("b"), key=OTHER_KEY)
        await rig.until(small["id"], "in_progress", OTHER_KEY)
        release(rig)
        await rig.until(small["id"], "completed", OTHER_KEY)
        order = [request.tenant for request in rig.engine.requests]
        assert order.index("tenant-b") <= 8
        await rig.until(large["id"], "completed")


async def test_nothing_of_a_line_is_in_logs_metrics_or_the_database(
    run: Run, caplog: pytest.LogCaptureFixture
) -> None:
    """FAULTS b8 75, for batches: good lines, refused ones, failing ones, bad files."""
    caplog.set_level(logging.DEBUG)
    async with run() as rig:
        good = line(CANARY, prompt=f"{CANARY} text", stop=[CANARY], user=CANARY, metadata={CANARY: CANARY})
        refused = line(f"{CANARY}-2", prompt=CANARY, **{CANARY: CANARY})
        await rig.until((await rig.begin(good, refused))["id"], "completed")
        failing = await rig.begin({**line(CANARY), CANARY: 1}, {**line("b"), "url": CANARY})
        ended = await rig.until(failing["id"], "failed")
        assert CANARY not in json.dumps(ended)
        rig.engine.script = Script(failure=EngineDead(CANARY))
        batch = await rig.begin(line(CANARY, prompt=CANARY))
        await until(lambda: len(rig.engine.generations) >= 2)
        await rig.post(f"/batches/{batch['id']}/cancel")
        await rig.until(batch["id"], "cancelled")
        for table in ("batches.files", "batches.batches", "batches.lines", "billing.events"):
            assert CANARY not in str(rig.sql(f"select t::text from {table} t"))
        assert CANARY not in (await rig.get("/../metrics", "fp_scrape_secret")).text
    assert CANARY not in caplog.text
