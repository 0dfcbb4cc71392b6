"""The commands of administrators, against the admin API over HTTP."""

from __future__ import annotations

import asyncio
import json
import re
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import uvicorn
from typer.testing import CliRunner, Result

from footplate.deployments.cli.main import application, main
from footplate.platform.cli.chat import _stream
from footplate.platform.cli.client import AdminClient, send
from footplate.platform.cli.errors import CommandError
from footplate.tenancy.quotas import FIELDS
from tests.platform.admin.conftest import World
from tests.platform.admin.test_quotas import WHOLE

Run = Callable[..., Result]


@pytest.fixture
def url(world: World) -> Iterator[str]:
    """The app on a port of this machine."""
    server = uvicorn.Server(uvicorn.Config(world.app, port=0, log_config=None, lifespan="off"))
    is_up = threading.Event()
    startup = server.startup

    async def tell(sockets: Any = None) -> None:
        await startup(sockets)
        is_up.set()

    server.startup = tell  # type: ignore[method-assign]
    thread = threading.Thread(target=lambda: asyncio.run(server.serve()))
    thread.start()
    assert is_up.wait(10)
    yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    server.should_exit = True
    thread.join(10)
    assert not thread.is_alive()


@pytest.fixture
def run(url: str, world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    """Runs a command with the admin key that the data folder holds."""
    (tmp_path / "keys").mkdir()
    (tmp_path / "keys" / "admin.key").write_text(world.keys["platform_admin"] + "\n")
    monkeypatch.setenv("FOOTPLATE_URL", url)
    monkeypatch.setenv("FOOTPLATE_DATA_DIR", str(tmp_path))
    monkeypatch.delenv("FOOTPLATE_API_KEY", raising=False)

    def invoke(*arguments: str) -> Result:
        return CliRunner().invoke(application, list(arguments), catch_exceptions=True)

    return invoke


def said(result: Result) -> str:
    assert result.exit_code == 0, (result.output, result.exception)
    return result.stdout


def parsed(result: Result) -> Any:
    return json.loads(said(result))


def test_tenants_from_the_first_to_the_last_command(run: Run, world: World) -> None:
    made = parsed(
        run("tenants", "create", "Red team", "--cost-center", "42", "--label", "env=prod", "--json")
    )
    assert (made["name"], made["cost_center"], made["labels"]) == ("Red team", "42", {"env": "prod"})
    assert [row["name"] for row in parsed(run("tenants", "list", "--json"))][-1] == "Red team"
    assert len(parsed(run("tenants", "list", "--limit", "2", "--json"))) == 2
    table = said(run("tenants", "list"))
    assert made["id"] in table and "env=prod" in table and "share_group" in table
    changed = parsed(
        run("tenants", "update", "Red team", "--name", "Blue team", "--share-group", "g", "--json")
    )
    assert (changed["name"], changed["share_group"], changed["cost_center"]) == ("Blue team", "g", "42")
    assert parsed(run("tenants", "update", made["id"], "--no-share-group", "--json"))["share_group"] is None
    assert parsed(run("tenants", "suspend", "Blue team", "--json"))["state"] == "suspended"
    assert "active" in said(run("tenants", "resume", "Blue team"))
    assert made["id"] in said(run("tenants", "show", "Blue team"))


def test_a_keys_text_alone_is_on_standard_output(run: Run, world: World) -> None:
    result = run("keys", "create", "team", "--name", "ci", "--expires-in", "90d", "--label", "app=chat")
    key = said(result).strip()
    assert key.startswith("fp_") and len(key) == 48
    assert "not shown again" in result.stderr
    assert world.opens(key)
    key_id = key.split("_")[1]
    rotated = run("keys", "rotate", key_id, "--overlap", "1h")
    assert world.opens(said(rotated).strip())
    assert "works until 2026-11-01T13:00:00Z" in rotated.stderr
    assert parsed(run("keys", "revoke", key_id, "--json"))["state"] == "revoked"
    rows = parsed(run("keys", "list", "team", "--json"))
    assert {row["id"]: row["state"] for row in rows}[key_id] == "revoked"
    assert rows[-1]["replaces"] == key_id
    assert "revoked" in said(run("keys", "list", world.team))
    assert parsed(run("keys", "create", "team", "--role", "tenant_admin", "--json"))["role"] == "tenant_admin"


def test_every_field_of_a_quota_is_an_option_and_the_others_stay(run: Run, world: World) -> None:
    options = []
    for name in FIELDS:
        value = WHOLE[name]
        text = ",".join(value) if isinstance(value, list) else value
        text = text if isinstance(text, str) else json.dumps(text)
        options += [f"--{name.replace('_', '-')}", text]
    shown = parsed(run("quotas", "set", "team", *options, "--json"))
    assert {name: shown[name] for name in FIELDS} == WHOLE
    changed = parsed(run("quotas", "set", "team", "--tokens-per-minute", "none", "--weight", "1", "--json"))
    assert {name: changed[name] for name in FIELDS} == {**WHOLE, "tokens_per_minute": None, "weight": 1}
    key_id = world.keys["member"].split("_")[1]
    said(run("quotas", "set", "team", "--key", key_id, "--tokens-per-day", "5"))
    assert parsed(run("quotas", "show", "team", "--key", key_id, "--json"))["tokens_per_day"] == 5
    assert "250.00" in said(run("quotas", "show", "team"))


def test_setting_one_field_keeps_what_the_default_said_of_the_others(run: Run, world: World) -> None:
    shown = parsed(run("quotas", "set", "team", "--tokens-per-minute", "7", "--json"))
    assert (shown["source"], shown["requests_per_minute"], shown["tokens_per_minute"]) == ("own", 600, 7)


def test_audit_shows_the_last_records_first(run: Run, world: World) -> None:
    for center in ("1", "2", "3"):
        said(run("tenants", "update", "team", "--cost-center", center))
    rows = parsed(run("audit", "--limit", "2", "--json"))
    assert [row["after"]["cost_center"] for row in rows] == ["3", "2"]
    assert [row["after"]["cost_center"] for row in parsed(run("audit", "--oldest-first", "--json"))] == [
        "1",
        "2",
        "3",
    ]
    assert parsed(run("audit", "--tenant", "other", "--json")) == []
    assert len(parsed(run("audit", "--target", world.team, "--json"))) == 3
    assert "tenant.update" in said(run("audit"))


def test_long_lists_come_whole(url: str, run: Run, world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("footplate.platform.cli.client.PAGE", 2)
    for number in range(4):
        world.store.create_tenant(f"t{number}")
    with AdminClient() as admin:
        assert len(admin.rows("/tenants")) == 7
        assert [row["name"] for row in admin.rows("/tenants", limit=3)] == ["platform", "team", "other"]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("tenants", "show", "nobody"), "no tenant named 'nobody'"),
        (("tenants", "create", "team"), "Choose another name|choose another name"),
        (("tenants", "suspend", "platform"), "another tenant"),
        (("keys", "revoke", "nothing"), "no such tenant or key"),
        (("quotas", "set", "team", "--weight", "0"), "weight: .*must be from 0.01"),
    ],
)
def test_what_is_refused_is_one_line_and_code_1(
    run: Run, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], arguments: Any, words: str
) -> None:
    monkeypatch.setattr("sys.argv", ["footplate", *arguments])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 1
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert re.search(words, error)


@pytest.mark.parametrize(
    "arguments",
    [
        ("tenants", "create"),
        ("tenants", "update", "team"),
        ("tenants", "update", "team", "--share-group", "g", "--no-share-group"),
        ("tenants", "create", "x", "--label", "env"),
        ("keys", "create", "team", "--role", "king"),
        ("keys", "create", "team", "--expires-in", "soon"),
        ("keys", "create", "team", "--expires-in", "1d", "--expires-at", "2030-01-01T00:00:00Z"),
        ("keys", "rotate", "k", "--overlap", "5"),
        ("quotas", "set", "team"),
        ("quotas", "set", "team", "--tokens-per-day", "many"),
        ("quotas", "set", "team", "--mode", "off"),
        ("quotas", "set", "team", "--weight", "nan"),
        ("quotas", "set", "team", "--weight", "inf"),
        ("quotas", "set", "team", "--cached-token-weight", "-Infinity"),
        ("quotas", "set", "team", "--per-model", "NaN"),
        ("quotas", "set", "team", "--per-model", '{"m": {"tokens_per_day": 1e999}}'),
        ("quotas", "set", "team", "--per-model", "[" * 100_000),
        ("audit", "--limit", "0"),
    ],
)
def test_wrong_usage_is_code_2(run: Run, arguments: Any) -> None:
    result = run(*arguments)
    assert result.exit_code == 2, result.output


def test_a_tenant_whose_name_begins_as_an_id_is_found_by_it(run: Run, world: World) -> None:
    for name in ("tnt_foo12907", "tnt_0123456789abcdef0"):
        made = parsed(run("tenants", "create", name, "--json"))
        assert parsed(run("tenants", "show", name, "--json")) == made
        assert parsed(run("tenants", "show", made["id"], "--json")) == made


def test_a_text_that_is_not_utf8_is_refused_in_one_line(run: Run) -> None:
    for arguments in (("tenants", "create", "\udcff"), ("tenants", "show", "\udcff")):
        assert isinstance(run(*arguments).exception, CommandError)


@pytest.mark.parametrize("arguments", [("tenants", "list"), ("tenants", "list", "--json")])
def test_output_that_can_not_be_written_is_one_line_and_code_1(run: Run, arguments: Any) -> None:
    with open("/dev/full", "w") as full:
        command = [sys.executable, "-m", "footplate.deployments.cli.main", *arguments]
        ended = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, timeout=60)
    assert (ended.returncode, ended.stderr) == (
        1,
        "footplate: the output can't be written: No space left on device\n",
    )


def test_without_a_key_or_a_platform_a_command_says_what_to_do(
    run: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("FOOTPLATE_URL", "http://127.0.0.1:9")
    assert "set FOOTPLATE_URL" in str(run("tenants", "list").exception)
    (tmp_path / "keys" / "admin.key").unlink()
    assert "set FOOTPLATE_API_KEY" in str(run("tenants", "list").exception)
    monkeypatch.setenv("FOOTPLATE_API_KEY", f"fp_{'a' * 12}_{'b' * 32}")
    assert "no platform answers" in str(run("tenants", "list").exception)


@pytest.mark.parametrize("end", ["\n", "\r\n", "\r", " ", "\t\n"])
def test_a_key_with_a_line_end_behind_it_works(
    run: Run, world: World, monkeypatch: pytest.MonkeyPatch, end: str
) -> None:
    monkeypatch.setenv("FOOTPLATE_API_KEY", world.keys["platform_admin"] + end)
    assert "team" in said(run("tenants", "list"))


@pytest.mark.parametrize("command", [("tenants", "list"), ("chat", "hello")])
@pytest.mark.parametrize("spoilt", ["{}\nx", "{}é", "{} {}", "x{}", "fp_{}", "é", "fp_nobody_wrong"])
def test_what_is_no_key_is_said_to_be_none_and_not_repeated(
    run: Run, world: World, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, command: Any, spoilt: str
) -> None:
    key = world.keys["platform_admin"]
    text = spoilt.replace("{}", key)
    monkeypatch.setenv("FOOTPLATE_API_KEY", text)
    in_environment = run(*command)
    monkeypatch.delenv("FOOTPLATE_API_KEY")
    for name in ("admin.key", "tenant.key"):
        (tmp_path / "keys" / name).write_text(text, encoding="utf-8")
    for result in (in_environment, run(*command)):
        assert isinstance(result.exception, CommandError), result.exception
        assert "is not a key" in str(result.exception)
        assert key.split("_")[2] not in f"{result.exception}{result.output}"


def test_no_text_of_the_http_library_is_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(request: httpx.Request) -> httpx.Response:
        raise httpx.LocalProtocolError(f"Illegal header value {request.headers['authorization']!r}")

    client = httpx.Client(
        transport=httpx.MockTransport(fail),
        base_url="http://test",
        headers={"authorization": "Bearer canary"},
    )
    for ask in (lambda: send(client, "GET", "/"), lambda: list(_stream(client, {}))):
        with pytest.raises(CommandError, match="no platform answers") as caught:
            ask()
        assert "canary" not in str(caught.value)
