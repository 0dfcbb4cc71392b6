"""A batch driven by the openai SDK over gateway processes of which one is killed in the middle."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from tests.billing.builders import USUAL
from tests.billing.conftest import NewBooks
from tests.builders import TENANT_KEY
from tests.deployments.gateways import MODEL, NUM_PROMPT, GatewayProcess, launch, running_gateways
from tests.deployments.test_metering import COMPLETED, Metered, metered_books
from tests.tenancy.limiter.valkey_server import ValkeyServer, running_valkey, wait_until

NUM_LINES, NUM_OUTPUT = 12, 60
OPTIONS = {"step_s": 0.02, "limits": {"lease_s": 1.0}, "batches": {"lease_s": 2.0, "max_running": 4}}


@pytest.fixture(scope="module")
def valkey() -> Iterator[ValkeyServer]:
    with running_valkey() as server:
        yield server


@pytest.fixture
def metered(new_books: NewBooks, tmp_path: Path) -> Iterator[Metered]:
    with metered_books(new_books(), tmp_path / "journal") as found:
        yield found


def sdk(gateway: GatewayProcess) -> openai.OpenAI:
    return openai.OpenAI(api_key=TENANT_KEY, base_url=f"{gateway.url}/v1", max_retries=0, timeout=30)


def lines() -> bytes:
    body: dict[str, Any] = {"model": MODEL, "prompt": [5] * NUM_PROMPT, "max_tokens": NUM_OUTPUT}
    each = {"method": "POST", "url": "/v1/completions", "body": body}
    return b"\n".join(json.dumps({"custom_id": f"id-{n}", **each}).encode() for n in range(NUM_LINES))


def test_a_batch_survives_the_death_of_its_gateway_and_every_line_is_billed_once(
    metered: Metered, valkey: ValkeyServer, tmp_path: Path
) -> None:
    """kill -9 amid lines, then a start: no line twice in the output, none billed but for its one answer."""
    options = {**OPTIONS, **metered.options, "data_dir": str(tmp_path / "data")}
    with running_gateways(1, valkey.url, {}, **options) as gateways:
        with sdk(gateways[0]) as client:
            file = client.files.create(file=("in.jsonl", lines()), purpose="batch")
            batch = client.batches.create(
                input_file_id=file.id, endpoint="/v1/completions", completion_window="24h"
            )
            # Some lines are done and others in the middle of theirs.
            wait_until(lambda: len(metered.rows()) >= 4, timeout_s=30)
        gateways[0].kill()
        gateways[:] = launch(1, valkey.url, {}, **options)
        with sdk(gateways[0]) as client:
            wait_until(lambda: client.batches.retrieve(batch.id).status == "completed", timeout_s=60)
            ended = client.batches.retrieve(batch.id)
            assert ended.request_counts is not None and ended.request_counts.completed == NUM_LINES
            assert ended.output_file_id is not None and ended.error_file_id is None
            output = [
                json.loads(each) for each in client.files.content(ended.output_file_id).text.splitlines()
            ]
        assert [each["custom_id"] for each in output] == [f"id-{n}" for n in range(NUM_LINES)]
        # What the dead one's lines were estimated at has become what their answers used.
        wait_until(lambda: not any(row.is_estimated for row in metered.rows()), timeout_s=30)
        rows = metered.rows()
    assert {row.event_id for row in rows} == {each["id"] for each in output} and len(rows) == NUM_LINES
    half = (NUM_PROMPT * USUAL.input + NUM_OUTPUT * USUAL.output) // 2
    assert [(row.state, row.output, row.amount) for row in rows] == [
        (COMPLETED, NUM_OUTPUT, half)
    ] * NUM_LINES
    assert not (tmp_path / "data" / "files" / "tenant-a" / "batches").exists() or not any(
        (tmp_path / "data" / "files" / "tenant-a" / "batches").iterdir()
    )


def test_two_gateways_share_a_batch_and_a_bad_line_ends_in_the_error_file(
    metered: Metered, valkey: ValkeyServer, tmp_path: Path
) -> None:
    options = {**OPTIONS, "step_s": 0.001, **metered.options, "data_dir": str(tmp_path / "data")}
    bad = json.loads(lines().split(b"\n")[0])
    bad = {**bad, "custom_id": "bad", "body": {**bad["body"], "temperature": 9}}
    with running_gateways(2, valkey.url, {}, **options) as [one, other], sdk(one) as client:
        data = lines() + b"\n" + json.dumps(bad).encode()
        file = client.files.create(file=("in.jsonl", data), purpose="batch")
        batch = client.batches.create(
            input_file_id=file.id,
            endpoint="/v1/completions",
            completion_window="24h",
            metadata={"team": "blue"},
        )
        with sdk(other) as elsewhere:
            wait_until(lambda: elsewhere.batches.retrieve(batch.id).status == "completed", timeout_s=60)
            ended = elsewhere.batches.retrieve(batch.id)
            assert [each.id for each in elsewhere.batches.list()] == [batch.id]
            assert {each.id for each in elsewhere.files.list()} == {
                file.id,
                ended.output_file_id,
                ended.error_file_id,
            }
        assert ended.metadata == {"team": "blue"} and ended.usage is not None
        assert ended.usage.output_tokens == NUM_LINES * NUM_OUTPUT
        assert ended.error_file_id is not None
        [error] = [json.loads(each) for each in client.files.content(ended.error_file_id).text.splitlines()]
        assert (error["custom_id"], error["response"]["status_code"]) == ("bad", 400)
        assert len(metered.rows()) == NUM_LINES
        succeeded = 'footplate_batch_lines_total{outcome="succeeded"}'
        assert one.metric(succeeded) + other.metric(succeeded) == NUM_LINES
        assert client.files.delete(file.id).deleted
        with pytest.raises(openai.NotFoundError):
            client.files.retrieve(file.id)
