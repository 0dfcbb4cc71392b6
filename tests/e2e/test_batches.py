"""The openai SDK runs a batch end to end on a real model, and the bill shows its discount."""

from __future__ import annotations

import json
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from typing import Any

import openai
import pytest

from footplate.deployments.leftovers import wait_until
from tests.e2e.serve_process import SMALL, ServeProcess
from tests.e2e.test_admin import command

pytestmark = pytest.mark.e2e
# Of the packaged prices, for one token.
INPUT, CACHED, OUTPUT = (Decimal(text) / 10**6 for text in ("0.02", "0.002", "0.08"))


def line(number: int, **changes: Any) -> bytes:
    messages = [{"role": "user", "content": f"Name {number} rivers."}]
    body = {"model": SMALL, "messages": messages, "max_tokens": 8, "temperature": 0, **changes}
    fields = {"custom_id": f"id-{number}", "method": "POST", "url": "/v1/chat/completions", "body": body}
    return json.dumps(fields).encode()


def test_a_batch_runs_end_to_end_and_the_statement_shows_half_the_price(served: ServeProcess) -> None:
    tenant = command(served, "tenants", "create", "nightly")
    key = command(served, "keys", "create", "nightly", "--name", "batches")["key"]
    data = b"\n".join([*(line(number) for number in range(2, 8)), line(8, temperature=9)])
    with openai.OpenAI(api_key=key, base_url=f"{served.url}/v1", max_retries=0, timeout=60) as client:
        file = client.files.create(file=("questions.jsonl", data), purpose="batch")
        batch = client.batches.create(
            input_file_id=file.id, endpoint="/v1/chat/completions", completion_window="24h"
        )
        # Somebody asks meanwhile, as always.
        alone = client.chat.completions.create(**json.loads(line(2))["body"])
        assert wait_until(lambda: client.batches.retrieve(batch.id).status == "completed", 60, every_s=0.2)
        ended = client.batches.retrieve(batch.id)
        assert ended.output_file_id is not None and ended.error_file_id is not None
        output, errors = (
            [json.loads(each) for each in client.files.content(file_id).text.splitlines()]
            for file_id in (ended.output_file_id, ended.error_file_id)
        )
    by_id = {each["custom_id"]: each["response"]["body"] for each in output}
    assert sorted(by_id) == [f"id-{number}" for number in range(2, 8)]
    # A line's answer is the one that the same request gets.
    assert by_id["id-2"]["choices"][0]["message"]["content"] == alone.choices[0].message.content
    assert [(each["custom_id"], each["response"]["status_code"]) for each in errors] == [("id-8", 400)]
    usages = [body["usage"] for body in by_id.values()]
    assert ended.usage is not None and alone.usage is not None
    assert ended.usage.input_tokens == sum(usage["prompt_tokens"] for usage in usages)
    assert ended.usage.output_tokens == sum(usage["completion_tokens"] for usage in usages)

    def cost(usage: Any) -> Decimal:
        cached = usage["prompt_tokens_details"]["cached_tokens"]
        fresh = usage["prompt_tokens"] - cached
        return INPUT * fresh + CACHED * cached + OUTPUT * usage["completion_tokens"]

    full = sum(map(cost, usages), Decimal(0))
    expected = full / 2 + cost(alone.usage.model_dump())
    now = datetime.now(UTC)
    begin, end = (f"{now + timedelta(days=days):%Y-%m-%d}" for days in (-1, 2))
    with served.http("admin") as admin:

        def used() -> Any:
            asked = {"from": begin, "to": end, "group_by": "tenant", "tenant_id": tenant["id"]}
            answer = admin.get("/admin/v1/usage", params=asked)
            assert answer.status_code == 200, answer.text
            return answer.json()["totals"]

        assert wait_until(lambda: used()["requests"] == 7, 20, every_s=0.2), used()
        assert Decimal(used()["cost"]) == expected
        month = f"{now:%Y-%m}"
        page = admin.get(f"/admin/v1/periods/{month}/statements/{tenant['id']}")
        assert page.status_code == 200, page.text
        assert "batch usage" in page.text and "batch discount" in page.text
        # Nothing of it is left unexplained: lines, events, engines.
        found = admin.get("/admin/v1/reconciliation", params={"from": begin, "to": end}).json()
        assert "batch_differs" not in found["counts"], found
