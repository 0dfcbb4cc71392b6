"""A team opts in to content capture on a running platform: redacted, read by administrators, written down."""

from __future__ import annotations

import time
from typing import Any

import httpx
import pytest

from tests.e2e.serve_process import SMALL, ServeProcess
from tests.e2e.test_admin import chat, command

pytestmark = pytest.mark.e2e


def test_a_team_that_opts_in_has_its_requests_kept_redacted(served: ServeProcess) -> None:
    tenant = command(served, "tenants", "create", "kept", "--capture-content")
    keys = {name: command(served, "keys", "create", name)["key"] for name in ("kept", served_other(served))}
    said = {"role": "user", "content": "Write to jo.doe@example.com"}
    for key in keys.values():
        body = {"model": SMALL, "messages": [said], "max_completion_tokens": 4}
        headers = {"authorization": f"Bearer {key}"}
        answer = httpx.post(f"{served.url}/v1/chat/completions", json=body, headers=headers, timeout=60)
        assert answer.status_code == 200
    [head] = rows_of(served, 1)
    assert (head["tenant_id"], head["why"], head["model"]) == (tenant["id"], "sample", SMALL)
    shown = command(served, "captures", "show", head["id"])
    assert "Write to [email]" in shown["prompts"][0] and "jo.doe" not in str(shown)
    assert shown["answers"][0]
    actions = [record["action"] for record in command(served, "audit", "--target", head["id"])]
    assert actions == ["capture.read"]

    command(served, "tenants", "update", "kept", "--no-capture-content")
    assert chat(served, keys["kept"]).status_code == 200
    assert rows_of(served, 1) == [head]


def served_other(served: ServeProcess) -> str:
    """A tenant that has not opted in."""
    return str(command(served, "tenants", "create", "not-kept")["name"])


def rows_of(served: ServeProcess, least: int) -> list[dict[str, Any]]:
    """What is kept, once there is so much."""
    end = time.monotonic() + 20
    while True:
        rows: list[dict[str, Any]] = command(served, "captures", "list")
        if len(rows) >= least or time.monotonic() > end:
            return rows
