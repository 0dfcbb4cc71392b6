"""The whole way over real PostgreSQL: a request, its key's tenant, the thread, the store."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from typing import Any

import httpx
import pytest
from sqlalchemy import Engine, text

from footplate.deployments.capture.rows import PostgresCaptures
from footplate.deployments.capture.service import policy_of
from footplate.engine.errors import EngineDead, EngineOverloaded
from footplate.platform.capture.recorder import CaptureRecorder
from footplate.platform.capture.store import CaptureFilter, CaptureRecord
from footplate.platform.telemetry.settings import ContentCaptureSettings
from footplate.tenancy.admin.store import Page
from tests.builders import TENANT_KEY, model_card, principal
from tests.platform.admin.conftest import ROUTED
from tests.platform.conftest import Rig, chat_body, text_body
from tests.postgres_server import PostgresServer, connected

OTHER_KEY = "fp_other_secret"
SECRETS = (
    "jo.doe@example.com",
    "+49 30 901820",
    "DE89370400440532013000",
    "4111 1111 1111 1111",
    "10.20.30.40",
    "536-90-4399",
    "eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxIn0.c2lnbmF0dXJl",
    f"fp_{'a1B2' * 3}_{'c3D4' * 8}",
    "sk-proj-abcDEF123456",
    "AKIAIOSFODNN7EXAMPLE",
    "hunter2",
)
TALK = "Canary text. " + " and ".join(SECRETS[:-1]) + " password: hunter2 end."


@pytest.fixture
def engine(postgres: PostgresServer) -> Iterator[Engine]:
    with connected(postgres.new_database(is_migrated=True)) as found:
        yield found


class Stored:
    """Calls a real store, when it may."""

    def __init__(self, engine: Engine) -> None:
        self.store = PostgresCaptures(engine)
        self.gate = threading.Event()
        self.gate.set()
        self.has_begun = threading.Event()
        self.failure: Exception | None = None

    def add(self, records: Sequence[CaptureRecord]) -> None:
        self.has_begun.set()
        assert self.gate.wait(20)
        if self.failure is not None:
            raise self.failure
        self.store.add(records)

    def delete_expired(self, limit: int) -> int:
        return self.store.delete_expired(limit)


@dataclass
class Site:
    rig: Rig
    recorder: CaptureRecorder
    stored: Stored

    def ask(self, path: str = "/v1/chat/completions", key: str = TENANT_KEY, **fields: Any) -> httpx.Response:
        body = (chat_body if "chat" in path else text_body)(**fields)
        return asyncio.run(self.rig.post(path, body, key))

    def kept(self) -> list[CaptureRecord]:
        """What is in the store once all that waits is written. Nothing is taken afterwards."""
        self.recorder.close(20)
        heads = self.stored.store.heads(Page(limit=1000), CaptureFilter()).items
        found = [self.stored.store.record(head.id) for head in heads]
        return [record for record in found if record is not None]

    def counts(self) -> dict[str, float]:
        return {family.name: family.samples[0].value for family in self.recorder.families()}


@pytest.fixture
def make_site(make_rig: Any, engine: Engine) -> Any:
    made: list[CaptureRecorder] = []

    def make(mode: str = "sampled", *, max_waiting: int = 128, **options: Any) -> Site:
        fields = {"sample_ratio": 1.0, **options.pop("capture", {})}
        settings = ContentCaptureSettings.model_validate({"mode": mode, **fields})
        stored = Stored(engine)
        recorder = CaptureRecorder(
            policy_of(settings), stored, keep_for=timedelta(days=7), max_waiting=max_waiting, sweep_s=0.01
        )
        recorder.start()
        made.append(recorder)
        rig = make_rig(captures=recorder, **options)
        rig.keys.principals = {
            TENANT_KEY: replace(principal(), captures_content=True),
            OTHER_KEY: principal(tenant_id="tenant-b", key_id="key-b"),
        }
        return Site(rig, recorder, stored)

    yield make
    for recorder in made:
        recorder.close(20)


def user(content: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": content}]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
def test_prompt_and_answer_are_kept_without_what_was_planted(
    make_site: Any, engine: Engine, path: str, stream: bool
) -> None:
    site = make_site()
    site.rig.says("Hello. " + TALK)
    asked = {"messages": user(TALK)} if "chat" in path else {"prompt": TALK}
    answer = site.ask(path, stream=stream, max_tokens=400, **asked)
    assert answer.status_code == 200
    [record] = site.kept()
    assert record.prompts[0].count("Canary text.") == 1 and record.answers[0].startswith(
        "Hello. Canary text."
    )
    assert record.answers[0].endswith("end.")
    assert (record.tenant_id, record.key_id, record.why, record.endpoint) == (
        "tenant-a",
        "key-a",
        "sample",
        path,
    )
    assert record.request_id == answer.headers["x-request-id"]
    with engine.connect() as connection:
        [row] = connection.execute(text("select r::text from capture.records r")).scalars()
    assert [secret for secret in SECRETS if secret in row] == []
    assert record.redacted["email"] == 2 and sum(record.redacted.values()) >= 2 * len(SECRETS)


def test_nothing_is_kept_while_capture_is_off_or_the_tenant_has_not_opted_in(make_site: Any) -> None:
    off = make_site("off")
    off.rig.says("", failure=RuntimeError("x"))
    assert off.ask().status_code == 500
    assert off.kept() == []
    on = make_site()
    assert on.ask(key=OTHER_KEY).status_code == 200
    on.rig.says("", failure=RuntimeError("x"))
    assert on.ask(key=OTHER_KEY).status_code == 500
    assert on.kept() == [] and set(on.counts().values()) == {0}


def test_without_a_recorder_a_consent_changes_nothing(rig: Rig) -> None:
    rig.keys.principals = {TENANT_KEY: replace(principal(), captures_content=True)}
    assert asyncio.run(rig.post("/v1/chat/completions", chat_body())).status_code == 200


def test_errors_are_kept_by_class_and_good_and_refused_requests_are_not(make_site: Any) -> None:
    site = make_site("errors")
    assert site.ask().status_code == 200
    site.rig.says(
        "Hello there, all of you.", failure=RuntimeError("engine says jo@example.com"), fail_after=2
    )
    assert site.ask(stream=True).status_code == 200
    site.rig.says("x", failure=EngineDead("echo of the prompt"))
    assert site.ask().status_code in (500, 503)
    site.rig.says("x", refusal=EngineOverloaded("full", 1))
    assert site.ask().status_code == 503
    assert site.ask(messages=user("x " * 20_000)).status_code == 400
    kept = site.kept()
    assert [(record.why, record.error) for record in kept] == [
        ("error", "RuntimeError"),
        ("error", "EngineDead"),
    ]
    assert [record.answers for record in kept] == [["Hello there"], [""]]
    assert "echo" not in str(kept) and "engine says" not in str(kept)


def test_slow_ones_are_kept(make_site: Any) -> None:
    site = make_site("errors", capture={"slow_first_token_s": 1e-9})
    assert site.ask().status_code == 200
    assert [record.why for record in site.kept()] == ["slow_first_token"]
    site = make_site("errors", capture={"slow_token_s": 1e-9})
    assert site.ask().status_code == 200
    assert sorted(record.why for record in site.kept()) == ["slow_first_token", "slow_tokens"]


def test_of_a_route_what_the_answering_model_said_is_kept(make_site: Any) -> None:
    cards = [model_card(), model_card("large")]
    site = make_site(cards=cards, settings=ROUTED)
    assert site.ask(model="sure", max_tokens=8).status_code == 200
    assert site.ask(model="auto", messages=user("long " * 30), max_tokens=8).status_code == 200
    kept = site.kept()
    assert [record.answers for record in kept] == [["Hello there."], ["Hello there."]]
    assert kept[1].model == "large" and "long long" in kept[1].prompts[0]


def test_of_a_route_what_was_kept_back_until_the_decision_is_kept_too(make_site: Any) -> None:
    site = make_site(cards=[model_card(), model_card("large")], settings=ROUTED)
    text = "Hello there, " + "and there, " * 30
    site.rig.says(text, logprob=-0.0001)
    answer = site.ask(model="sure", max_tokens=200)
    assert answer.json()["model"] == "smollm2-135m"
    [record] = site.kept()
    assert (record.model, record.answers) == ("smollm2-135m", [text])


def test_each_choice_of_each_prompt_is_kept_up_to_a_number(make_site: Any) -> None:
    site = make_site()
    assert site.ask("/v1/completions", prompt=["one", "two"], n=2).status_code == 200
    assert site.ask("/v1/completions", prompt=["x"] * 20).status_code == 200
    small, large = site.kept()
    assert (small.prompts, small.answers, small.is_cut) == (["one", "two"], ["Hello there."] * 4, False)
    assert (len(large.prompts), len(large.answers), large.is_cut) == (16, 16, True)


def test_a_full_queue_drops_and_counts_and_requests_are_answered(make_site: Any) -> None:
    site = make_site(max_waiting=2)
    site.stored.gate.clear()
    assert site.ask().status_code == 200
    assert site.stored.has_begun.wait(20)
    for _ in range(5):
        assert site.ask().status_code == 200
    assert site.counts()["footplate_captures_dropped"] == 3
    site.stored.gate.set()
    assert len(site.kept()) == 3 and site.counts()["footplate_captures_written"] == 3


def test_a_store_that_fails_harms_no_request_and_is_counted(make_site: Any) -> None:
    site = make_site()
    site.stored.failure = OSError("the disk")
    for _ in range(3):
        assert site.ask().status_code == 200
    assert site.kept() == [] and site.counts()["footplate_captures_failed"] == 3


def test_what_postgresql_cannot_hold_is_replaced(make_site: Any) -> None:
    site = make_site()
    assert site.ask("/v1/completions", prompt="a\0b").status_code == 200
    assert [record.prompts for record in site.kept()] == [["a\ufffdb"]]


def kept_until(expires_at: datetime) -> CaptureRecord:
    now = datetime.now(UTC)
    return CaptureRecord("req_1", "t", "k", "m", "/v1/completions", "error", now, expires_at)


def test_what_has_expired_is_deleted_in_small_steps_also_while_capture_is_off(
    make_site: Any, engine: Engine
) -> None:
    now, store = datetime.now(UTC), PostgresCaptures(engine)
    store.add([kept_until(now - timedelta(seconds=1))] * 7 + [kept_until(now + timedelta(hours=1))] * 2)
    assert [store.delete_expired(3) for _ in range(4)] == [3, 3, 1, 0]
    store.add([kept_until(now - timedelta(seconds=1))] * 1_001)
    site = make_site("off")
    for _ in range(2_000):
        if site.counts()["footplate_captures_expired"] == 1_001:
            break
        threading.Event().wait(0.01)
    with engine.connect() as connection:
        assert connection.execute(text("select count(*) from capture.records")).scalar() == 2


def test_records_expire_as_the_settings_say(make_site: Any) -> None:
    site = make_site()
    assert site.ask().status_code == 200
    [record] = site.kept()
    assert record.expires_at - record.captured_at == timedelta(days=7)
