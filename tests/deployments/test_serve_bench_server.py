"""`footplate bench serve` against a small real server of server-sent events with a pace of its own."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import uvicorn
from typer.testing import CliRunner

from footplate.deployments.cli.main import application
from footplate.deployments.ports import find_free_port
from footplate.deployments.serve_bench.driver import Bounds, Driver
from footplate.deployments.serve_bench.figures import token_times
from footplate.deployments.serve_bench.http_stream import StreamClient, Target
from footplate.deployments.serve_bench.prompts import Form, Load
from footplate.platform.cli.errors import CommandError

FIRST_S, GAP_S = 0.08, 0.03
TEMPLATE_TOKENS = 10


@dataclass
class PacedServer:
    """Its models are named for how they behave; `spans_s` are its own times from first to last token."""

    url: str
    asked: list[dict[str, Any]] = field(default_factory=list)
    headers: list[dict[str, str]] = field(default_factory=list)
    spans_s: list[float] = field(default_factory=list)

    async def __call__(self, scope: dict[str, Any], receive: Callable[..., Any], send: Send) -> None:
        if scope["type"] != "http":
            return
        self.headers.append({name.decode(): value.decode() for name, value in scope["headers"]})
        text, more = b"", True
        while more:
            message = await receive()
            text, more = text + message.get("body", b""), message.get("more_body", False)
        if scope["path"] == "/v1/models":
            return await _json(send, 200, {"data": [{"id": "paced"}]})
        body = json.loads(text)
        self.asked.append(body)
        # The first request of a command asks for one token, and finds nothing wrong.
        model = body["model"] if body["max_tokens"] > 1 else "paced"
        if body["model"] == "no-ignore-eos" and "ignore_eos" in body:
            return await _json(send, 400, {"error": {"message": "no such parameter"}})
        if model == "busy":
            return await _json(send, 429, {"error": {"message": "secret", "code": "rate_limit_exceeded"}})
        if model == "interrupts" and len(self.asked) == 6:
            os.kill(os.getpid(), signal.SIGINT)
        await self._stream(body, model, send)

    async def _stream(self, body: dict[str, Any], model: str, send: Send) -> None:
        head = [(b"content-type", b"text/event-stream; charset=utf-8")]
        await send({"type": "http.response.start", "status": 200, "headers": head})
        await _event(send, {"choices": [{"delta": {"role": "assistant", "content": ""}}]})
        count = body["max_tokens"]
        each = 2 if model == "pairs" else 1
        await asyncio.sleep(FIRST_S)
        begun = time.perf_counter()
        for sent in range(0, count, each):
            if sent:
                await asyncio.sleep(GAP_S)
            await _event(send, {"choices": [{"delta": {"content": "x" * each}}]})
            if sent == 2 and model == "breaks":
                await _event(send, {"error": {"message": "secret", "code": "server_error"}})
                break
            if sent == 2 and model == "cut":
                return await send({"type": "http.response.body", "body": b""})
            if sent == 2 and model == "dropped":
                raise ConnectionError
        if body["max_tokens"] > 1:
            self.spans_s.append(time.perf_counter() - begun)
        words = len(body["messages"][0]["content"].split())
        told = {"boasts": 10**18, "counts-back": -1, "guesses": 2.5, "agrees": True}.get(model, count)
        usage = {"prompt_tokens": words + TEMPLATE_TOKENS, "completion_tokens": told}
        await _event(send, {"choices": [], "usage": usage})
        await send({"type": "http.response.body", "body": b"data: [DONE]\n\n"})


Send = Callable[[dict[str, Any]], Awaitable[None]]


async def _event(send: Send, event: dict[str, Any]) -> None:
    text = b"data: " + json.dumps(event).encode() + b"\n\n"
    await send({"type": "http.response.body", "body": text, "more_body": True})


async def _json(send: Send, status: int, body: dict[str, Any]) -> None:
    head = [(b"content-type", b"application/json")]
    await send({"type": "http.response.start", "status": status, "headers": head})
    await send({"type": "http.response.body", "body": json.dumps(body).encode()})


@pytest.fixture
def server() -> Iterator[PacedServer]:
    port = find_free_port()
    paced = PacedServer(f"http://127.0.0.1:{port}")
    config = uvicorn.Config(paced, port=port, log_level="critical", lifespan="off", timeout_keep_alive=60)
    running = uvicorn.Server(config)
    thread = threading.Thread(target=lambda: asyncio.run(running.serve()), daemon=True)
    thread.start()
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("FOOTPLATE_API_KEY", raising=False)
        while not running.started:
            thread.join(0.01)
            assert thread.is_alive()
        yield paced
    running.should_exit = True
    thread.join(10)
    assert not thread.is_alive()


def measured(server: PacedServer, out: Path, *options: str) -> tuple[dict[str, Any], BaseException | None]:
    """What a run wrote, and how the command failed, if it did."""
    command = ["bench", "serve", "--url", server.url, "--json", str(out / "out.json"), *options]
    done = CliRunner().invoke(application, command)
    assert (out / "out.json").exists(), done.exception
    return json.loads((out / "out.json").read_text()), done.exception


def test_a_known_pace_is_what_is_measured(server: PacedServer, tmp_path: Path) -> None:
    plot = tmp_path / "out.png"
    found, _ = measured(
        server, tmp_path, "--concurrency", "1,3", "--requests", "4", "--output-tokens", "6",
        "--input-tokens", "32", "--slo", "ttft:60000,e2e:60000", "--plot", str(plot),
    )  # fmt: skip
    assert {"commit", "hardware", "versions", "command", "load_1min", "load"} <= found.keys()
    assert found["load"]["model"] == "paced" and found["load"]["ignore_eos"]
    assert [level["concurrency"] for level in found["levels"]] == [1, 3]
    warm = found["load"]["warm_up_requests"]
    assert len(server.asked) == 1 + 2 * (warm + 4)
    spans_ms = sorted(1e3 * span / 5 for span in server.spans_s)
    for level in found["levels"]:
        assert (level["requests"], level["completed"], level["errors"]) == (4, 4, {})
        assert level["input_tokens"] == {"mean": 32.0, "min": 32, "max": 32}
        assert level["output_tokens"] == {"mean": 6.0, "min": 6, "max": 6}
        # A little may be lost at either end of a span; nothing that the server did not do is added but lag.
        slack_ms = 2 + level["client"]["lag_ms"]["max"]
        assert spans_ms[0] - slack_ms <= level["tpot_ms"]["min"]
        assert level["tpot_ms"]["max"] <= spans_ms[-1] + slack_ms
        assert level["ttft_ms"]["min"] >= 1e3 * FIRST_S
        assert level["itl_ms"]["count"] == 20 and level["itl_estimated_requests"] == 0
        assert level["e2e_ms"]["min"] >= 1e3 * (FIRST_S + 4.5 * GAP_S)
        if not level["client"]["is_late"]:
            assert level["goodput"]["share"] == 1
    assert plot.read_bytes().startswith(b"\x89PNG")


def test_several_tokens_in_an_event_are_counted_by_the_usage(server: PacedServer, tmp_path: Path) -> None:
    options = ("--model", "pairs", "--concurrency", "1", "--requests", "2", "--output-tokens", "8")
    [level] = measured(server, tmp_path, *options)[0]["levels"]
    assert level["itl_estimated_requests"] == 2
    # 8 tokens in 4 events: the first is taken for one, the three others for seven
    assert level["gap_ms"]["mean"] / level["itl_ms"]["mean"] == pytest.approx(7 / 3, abs=0.01)
    assert (level["gap_ms"]["count"], level["output_tokens"]["mean"]) == (6, 8)


@pytest.mark.parametrize(
    ("model", "error"),
    [
        ("busy", "http_429"),
        ("breaks", "stream_error:server_error"),
        ("cut", "cut"),
        ("dropped", "cut"),
        *((model, "bad_usage") for model in ("boasts", "counts-back", "guesses", "agrees")),
    ],
)
def test_what_fails_is_counted_by_kind(server: PacedServer, tmp_path: Path, model: str, error: str) -> None:
    options = ("--model", model, "--concurrency", "2", "--requests", "3", "--slo", "ttft:60000")
    found, failure = measured(server, tmp_path, *options, "--output-tokens", "6")
    [level] = found["levels"]
    assert (level["errors"], level["completed"], level["output_tokens_s"]) == ({error: 3}, 0, 0)
    assert level["goodput"] is None or level["goodput"]["share"] == 0
    assert isinstance(failure, CommandError)
    assert "secret" not in json.dumps(found)


def test_a_server_without_ignore_eos_is_asked_without(server: PacedServer, tmp_path: Path) -> None:
    found, _ = measured(server, tmp_path, "--model", "no-ignore-eos", "--concurrency", "1", "--requests", "2")
    assert found["load"]["ignore_eos"] is False and found["levels"][0]["completed"] == 2


def test_ctrl_c_writes_what_there_is(server: PacedServer, tmp_path: Path) -> None:
    options = ("--model", "interrupts", "--concurrency", "1", "--duration", "600", "--output-tokens", "3")
    found, failure = measured(server, tmp_path, *options)
    [level] = found["levels"]
    # one request asked first, two warmed up, two ended, and the sixth was given up
    assert (level["completed"], level["unfinished"], level["errors"]) == (2, 1, {})
    assert found["is_interrupted"] and isinstance(failure, CommandError) and "interrupted" in str(failure)


def test_in_open_loop_a_request_waits_on_its_own_clock(server: PacedServer) -> None:
    """With one request at a time and far more due than can be served, each next one has waited longer."""

    async def level() -> list[float]:
        bounds = Bounds(6, None, 60.0, max_in_flight=1)
        driver = Driver(StreamClient(Target.of(server.url, {})), Form("chat", "paced"), bounds)
        found = await driver.open(1000.0, Load("synthetic", 8, 2, 1.0, 49_000, 0).chains(0, 6), seed=0)
        return sorted(token_times(sample).ttft for sample in found.samples)

    ttfts = asyncio.run(level())
    each_ms = 1e3 * (FIRST_S + GAP_S)
    for turn, ttft in enumerate(ttfts):
        assert ttft >= turn * each_ms + 1e3 * FIRST_S - 100
    assert ttfts[-1] >= 5 * each_ms


def test_a_rate_is_held_whatever_the_server_does(server: PacedServer, tmp_path: Path) -> None:
    options = ("--rate", "40", "--requests", "12", "--output-tokens", "4", "--seed", "7")
    [level] = measured(server, tmp_path, *options)[0]["levels"]
    assert (level["rate"], level["completed"]) == (40.0, 12)
    # one after the other they would take 12 times as long as the fastest of them
    assert level["wall_s"] < 12e-3 * level["e2e_ms"]["min"]


def test_a_key_from_a_file_is_never_sent_to_another_server(
    server: PacedServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys = tmp_path / "keys"
    keys.mkdir()
    (keys / "tenant.key").write_text("fp_abc_def")
    monkeypatch.setenv("FOOTPLATE_DATA_DIR", str(tmp_path))
    measured(server, tmp_path, "--concurrency", "1", "--requests", "1")
    assert not any("authorization" in headers for headers in server.headers)
    monkeypatch.setenv("FOOTPLATE_API_KEY", "sk-of-a-peer")
    server.headers.clear()
    measured(server, tmp_path, "--concurrency", "1", "--requests", "1")
    assert all(headers["authorization"] == "Bearer sk-of-a-peer" for headers in server.headers)


@pytest.mark.parametrize(
    "options",
    [
        [],
        ["--concurrency", "1", "--rate", "1"],
        ["--concurrency", "0"],
        ["--concurrency", "1.5"],
        ["--rate", "nan"],
        ["--rate", "1", "--workload", "sessions"],
        ["--rate", "1", "--workload", "mixed", "--endpoint", "chat"],
        ["--rate", "1", "--slo", "ttft"],
        ["--rate", "1", "--extra", "[]"],
    ],
)
def test_wrong_usage_is_refused(options: list[str]) -> None:
    assert CliRunner().invoke(application, ["bench", "serve", *options]).exit_code == 2


def test_what_can_not_be_asked_ends_in_one_line(server: PacedServer) -> None:
    runner = CliRunner()
    nobody = f"http://127.0.0.1:{find_free_port()}"
    for options, text in (
        (["--url", nobody, "--model", "m"], "can't be connected to"),
        (["--url", "ftp://x", "--model", "m"], "not a URL"),
        (["--url", server.url, "--input-tokens", "5"], "template alone takes 10"),
        (["--url", server.url, "--json", "/nowhere/out.json"], "there is no folder"),
    ):
        with pytest.raises(CommandError, match=text):
            runner.invoke(
                application, ["bench", "serve", "--concurrency", "1", *options], catch_exceptions=False
            )
