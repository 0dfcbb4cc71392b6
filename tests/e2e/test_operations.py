"""What operators and their scrapers see, and the command line beside a running platform."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
from pathlib import Path
from typing import Any

import httpx
import pytest
from ray.dashboard.modules.metrics import dashboards

from footplate.deployments.leftovers import wait_until
from footplate.deployments.run_paths import RunPaths
from tests.e2e.serve_process import BASE, FOOTPLATE, SMALL, ServeProcess, clean_environment

ROOT = Path(__file__).parents[2]

pytestmark = pytest.mark.e2e
GAUGES = {"vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:kv_cache_usage_perc"}
COUNTERS = {
    "vllm:prompt_tokens_total",
    "vllm:generation_tokens_total",
    "vllm:prefix_cache_queries_total",
    "vllm:prefix_cache_hits_total",
    "vllm:num_preemptions_total",
}
COUNTED = (
    "vllm:generation_tokens_total",
    "vllm:prompt_tokens_total",
    "vllm:prefix_cache_hits_total",
    "vllm:e2e_request_latency_seconds_count",
)
HISTOGRAMS = {
    "vllm:time_to_first_token_seconds",
    "vllm:inter_token_latency_seconds",
    "vllm:e2e_request_latency_seconds",
}


def footplate(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [str(FOOTPLATE), *arguments],
        env=clean_environment(**environment),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=60,
    )


def test_health_and_readiness_need_no_key(served: ServeProcess) -> None:
    with served.http(None) as http:
        assert http.get("/healthz").status_code == 200
        ready = http.get("/readyz")
    assert ready.status_code == 200
    states = ready.json()["dependencies"]
    assert {"engines", "database"} <= set(states)
    assert all(state["ready"] for state in states.values())


def test_rays_daemons_do_not_go_before_engines_and_gateways(served: ServeProcess) -> None:
    daemons = served.pids("/raylet ")
    assert daemons
    for pid in [*daemons, *served.engine_pids(), *served.gateway_pids(), *served.pids("bin/haproxy ")]:
        assert os.getpriority(os.PRIO_PROCESS, pid) == os.getpriority(os.PRIO_PROCESS, 0), pid


def test_every_answer_has_one_request_id_of_ours(served: ServeProcess) -> None:
    with served.http() as http:
        for path in ("/healthz", "/v1/models", "/v1/nothing", "/nothing", "/-/healthz"):
            for headers in ({}, {"x-request-id": "mine"}):
                response = http.get(path, headers=headers)
                ids = response.headers.get_list("x-request-id")
                assert len(ids) == 1 and ids[0].startswith("req_"), (path, ids)
                assert response.headers["openai-processing-ms"].isdigit()


def test_rays_own_dashboard_finds_the_engines(served: ServeProcess) -> None:
    """Every `ray_vllm_…` series that Ray's Serve LLM dashboard draws, in what this node's agent exports."""
    panels = (Path(dashboards.__file__).parent / "serve_llm_dashboard_panels.py").read_text()
    drawn = set(re.findall("ray_vllm_[a-z0-9_]+", panels))
    # What is not here: caches of other machines and other memories.
    drawn -= {name for name in drawn if re.match("ray_vllm_(external|kv_offload|nixl)", name)}
    assert len(drawn) > 15
    with served.http() as http:
        for _ in range(2):
            body = {"model": SMALL, "prompt": "one two three four " * 10, "max_tokens": 2}
            assert http.post("/v1/completions", json=body).status_code == 200
    [port_file] = (RunPaths.of(served.data_dir).ray_dir / "session_latest").glob("metrics_export_port_*")
    url = f"http://127.0.0.1:{port_file.read_text().strip()}/metrics"

    def missing() -> set[str]:
        found = set(re.findall("^ray_vllm_[a-z0-9_]+", httpx.get(url).text, re.MULTILINE))
        # A histogram is named without the endings of its series.
        found |= {name.removesuffix("_bucket") for name in found}
        return drawn - found

    # Workers hand theirs to the agent every ten seconds.
    wait_until(lambda: not missing(), 30, every_s=0.5)
    assert not missing()


def test_metrics_need_the_right_key(served: ServeProcess) -> None:
    for key, status in ((None, 401), ("tenant", 403), ("scrape", 200), ("admin", 200)):
        with served.http(key) as http:
            assert http.get("/metrics").status_code == status, key
    with served.http("scrape") as http:
        assert http.get("/v1/models").status_code == 403
        body = {"model": SMALL, "prompt": "x"}
        assert http.post("/v1/completions", json=body).status_code == 403


def test_metrics_count_what_is_served(served: ServeProcess) -> None:
    body: dict[str, Any] = {"model": SMALL, "prompt": [7] * 40, "max_tokens": 5, "ignore_eos": True}

    def counts() -> dict[str, float]:
        reasons = {"ended": served.metric("vllm:request_success_total", finished_reason="length")}
        return {**reasons, **{name: served.metric(name) for name in COUNTED}}

    with served.http() as http:
        # One before, so that every series exists.
        assert http.post("/v1/completions", json=body).status_code == 200
        served.await_settled()
        before = counts()
        usage = http.post("/v1/completions", json=body).json()["usage"]
    cached = usage["prompt_tokens_details"]["cached_tokens"]
    assert (usage["prompt_tokens"], usage["completion_tokens"], cached > 0) == (40, 5, True)
    gains = {"ended": 1, **dict(zip(COUNTED, (5, 40, cached, 1), strict=True))}
    after = {name: before[name] + gain for name, gain in gains.items()}
    assert wait_until(lambda: counts() == after, 5), (before, after, counts())


def test_all_metric_names_are_there_for_both_models(served: ServeProcess) -> None:
    with served.http() as http:
        for model in (SMALL, BASE):
            assert http.post(
                "/v1/completions", json={"model": model, "prompt": "a", "max_tokens": 2}
            ).is_success
    lines = served.metrics().splitlines()
    for model in (SMALL, BASE):
        shown = {line.partition("{")[0] for line in lines if f'model_name="{model}"' in line}
        assert GAUGES | COUNTERS | {f"{name}_bucket" for name in HISTOGRAMS} <= shown


def test_chat_answers_one_question_from_the_command_line(served: ServeProcess) -> None:
    arguments = ["chat", "What is the capital of France?", "--max-tokens", "16", "--temperature", "0"]
    environment = {"FOOTPLATE_URL": served.url, "FOOTPLATE_API_KEY": served.key()}
    done = footplate(*arguments, "--model", SMALL, **environment)
    assert (done.returncode, done.stderr) == (0, "")
    assert "Paris" in done.stdout
    refused = footplate(*arguments, **{**environment, "FOOTPLATE_API_KEY": "fp_nobody_wrong"})
    assert refused.returncode == 1
    assert len(refused.stderr.splitlines()) == 1
    assert "key" in refused.stderr


def test_the_doctor_finds_everything_the_platform_needs(tmp_path: Path) -> None:
    config = tmp_path / "footplate.yaml"
    config.write_text("server: {port: 0}\n")
    done = footplate("doctor", "--json", "--config", str(config), "--data-dir", str(tmp_path / "data"))
    findings = {finding["name"]: finding for finding in json.loads(done.stdout)}
    assert done.returncode == 0, findings
    assert {"python", "torch", "ray", "haproxy", "configuration", "postgresql", "valkey"} <= set(findings)
    config.write_text("server: {port: 0}\nmodels: [{name: a, source: 'gguf:/nowhere.gguf'}]\n")
    done = footplate("doctor", "--json", "--config", str(config), "--data-dir", str(tmp_path / "data"))
    assert done.returncode == 1
    missing = [finding for finding in json.loads(done.stdout) if finding["state"] == "missing"]
    assert [(finding["name"], bool(finding["mend"])) for finding in missing] == [("model a", True)]


def test_the_doctor_looks_at_the_port_that_serve_would_be_given(tmp_path: Path) -> None:
    config = tmp_path / "footplate.yaml"
    with socket.create_server(("127.0.0.1", 0)) as taken:
        number = taken.getsockname()[1]
        for in_file, option, state in ((0, number, "missing"), (number, 0, "ok")):
            config.write_text(f"server: {{port: {in_file}}}\n")
            options = ["--config", str(config), "--data-dir", str(tmp_path / "data"), "--port", str(option)]
            findings = json.loads(footplate("doctor", "--json", *options).stdout)
            [found] = [finding for finding in findings if finding["name"] == "port"]
            assert found["state"] == state, found
            assert f"{option} on 127.0.0.1" in found["found"]


def test_the_doctor_names_a_route_that_answers_no_chats(tmp_path: Path) -> None:
    config = tmp_path / "footplate.yaml"
    shipped = (ROOT / "deployments/configs/routes.yaml").read_text()
    template = ROOT / "deployments/configs/questions.jinja"
    options = ["--json", "--config", str(config), "--data-dir", str(tmp_path / "data")]
    for text, state in (
        (shipped.replace("questions.jinja", str(template)), "ok"),
        (shipped.replace("    chat_template: questions.jinja\n", ""), "note"),
    ):
        config.write_text(text + "server: {port: 0}\n")
        findings = {finding["name"]: finding for finding in json.loads(footplate("doctor", *options).stdout)}
        assert findings["route auto"]["state"] == state, findings["route auto"]


def test_the_doctor_and_a_second_start_name_the_platform_that_runs(
    served: ServeProcess, tmp_path: Path
) -> None:
    config = tmp_path / "footplate.yaml"
    config.write_text(f"server: {{port: {served.url.rpartition(':')[2]}}}\n")
    options = ["--config", str(config), "--data-dir", str(served.data_dir)]
    done = footplate("doctor", "--json", *options)
    findings = {finding["name"]: finding for finding in json.loads(done.stdout)}
    assert done.returncode == 0, findings
    who = f"process {served.child.pid} at {served.url}"
    assert who in findings["platform"]["found"]
    assert findings["port"]["state"] == "ok"
    assert "running database" not in findings
    second = footplate("serve", *options)
    assert second.returncode == 1
    assert who in second.stderr
    # The refused start has left the note of the one that runs as it was.
    assert who in footplate("doctor", *options).stdout


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("server:\n  port: 8000\n  host: [\n", None),
        ("server:\n  port: eight\n", 2),
        ("server:\n  port: 8000\nmodells: []\n", 3),
        ("models:\n  - name: a\n    source: package:a\n    engine: {block_size: -1}\n", 4),
    ],
)
def test_a_broken_configuration_is_named_by_file_and_line(
    tmp_path: Path, text: str, line: int | None
) -> None:
    config = tmp_path / "broken.yaml"
    config.write_text(text)
    done = footplate("config", "check", str(config))
    assert done.returncode == 1
    assert f"{config}:{line or ''}" in done.stderr, done.stderr
    served = footplate("serve", "--config", str(config), "--data-dir", str(tmp_path / "data"))
    assert served.returncode == 1
    assert f"{config}:{line or ''}" in served.stderr
    assert "Traceback" not in served.stderr


def test_a_stream_that_a_stuck_replica_ends_leaves_one_line_in_the_logs(served: ServeProcess) -> None:
    canary = "canary-5d0e91"
    body = {"model": SMALL, "prompt": canary, "max_tokens": 1900, "ignore_eos": True, "stream": True}
    pids = served.engine_pids()
    with served.http() as http, http.stream("POST", "/v1/completions", json=body) as answer:
        lines = answer.iter_lines()
        assert next(lines).startswith("data: ")
        # Shorter than it takes Serve to replace a replica, longer than the gateway waits for a silent one.
        for pid in pids:
            os.kill(pid, signal.SIGSTOP)
        try:
            events = [line for line in lines if line]
        finally:
            for pid in pids:
                os.kill(pid, signal.SIGCONT)
    assert events[-1] == "data: [DONE]"
    assert json.loads(events[-2].removeprefix("data: "))["error"]["type"] == "server_error"
    request_id = answer.headers["x-request-id"]

    def logged() -> list[str]:
        logs = RunPaths.of(served.data_dir).ray_dir.glob("session_*_*/logs/**/*")
        texts = [path.read_text(errors="replace") for path in logs if path.is_file()]
        assert not any(canary in text or served.key() in text for text in texts)
        return [line for text in texts for line in text.splitlines() if request_id in line]

    assert wait_until(lambda: bool(logged()), 5)
    [line] = [json.loads(line) for line in logged()]
    assert (line["process"], line["model"], line["status"], line["error"]) == (
        "gateway",
        SMALL,
        500,
        "EngineDead",
    )
