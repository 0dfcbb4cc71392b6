"""A new team on a running platform, from the first command to the last: tenant, key, quota, revocation."""

from __future__ import annotations

import json
import time
from typing import Any

import httpx
import pytest

from tests.e2e.serve_process import SMALL, ServeProcess
from tests.e2e.test_operations import footplate

pytestmark = pytest.mark.e2e


def command(served: ServeProcess, *arguments: str) -> Any:
    """A command's JSON, with the admin key of the data folder."""
    done = footplate(*arguments, "--json", FOOTPLATE_URL=served.url, FOOTPLATE_DATA_DIR=str(served.data_dir))
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def chat(served: ServeProcess, key: str) -> httpx.Response:
    body = {"model": SMALL, "messages": [{"role": "user", "content": "Hi"}], "max_completion_tokens": 2}
    headers = {"authorization": f"Bearer {key}"}
    return httpx.post(f"{served.url}/v1/chat/completions", json=body, headers=headers, timeout=60)


def test_a_new_team_works_within_its_quota_until_its_key_is_revoked(served: ServeProcess) -> None:
    tenant = command(served, "tenants", "create", "red")
    made = command(served, "keys", "create", "red", "--name", "ci")
    assert chat(served, made["key"]).status_code == 200
    with served.http("admin") as http:
        assert http.get("/v1/models").status_code == 403
    assert (
        httpx.get(
            f"{served.url}/admin/v1/tenants", headers={"authorization": f"Bearer {made['key']}"}
        ).status_code
        == 403
    )

    command(served, "quotas", "set", "red", "--requests-per-minute", "2")
    assert chat(served, made["key"]).status_code == 200
    used = httpx.get(f"{served.url}/v1/me", headers={"authorization": f"Bearer {made['key']}"}).json()["use"]
    assert used[0]["kind"] == "requests_per_minute" and used[0]["used"] >= 1

    command(served, "tenants", "suspend", "red")
    assert chat(served, made["key"]).status_code == 401
    command(served, "tenants", "resume", "red")
    command(served, "quotas", "set", "red", "--requests-per-minute", "none")
    assert chat(served, made["key"]).status_code == 200
    command(served, "keys", "revoke", made["id"])
    revoked_at = time.monotonic()
    assert chat(served, made["key"]).status_code == 401
    assert time.monotonic() - revoked_at < 2

    actions = [record["action"] for record in command(served, "audit", "--target", made["id"])]
    assert actions == ["key.revoke", "key.create"]
    [record] = command(served, "audit", "--target", tenant["id"], "--oldest-first", "--limit", "1")
    assert (record["action"], record["source"]) == ("tenant.create", "127.0.0.1")
    for file in (served.data_dir / "logs").rglob("*"):
        assert not file.is_file() or made["key"].split("_")[2] not in file.read_text(errors="replace")
