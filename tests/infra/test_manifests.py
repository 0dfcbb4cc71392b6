"""Manifests beside the chart, the image and the collector: valid, unprivileged, and of names that exist."""

from __future__ import annotations

import asyncio
import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

from footplate.deployments.logs import FIELDS
from footplate.deployments.ray_environment import find_haproxy
from footplate.platform.settings import check_settings
from tests.infra.exposed_metrics import gateway_metrics, series_names
from tests.infra.test_helm_chart import KUBERNETES, is_known

INFRA = Path(__file__).parents[2] / "infra"
POOL = INFRA / "kubernetes" / "pool"
KSERVE = INFRA / "kubernetes" / "kserve" / "inferenceservice.yaml"
COLLECTOR = INFRA / "otel" / "collector.yaml"
MANIFESTS = [*sorted(POOL.glob("*.yaml")), KSERVE, INFRA / "otel" / "deployment.yaml"]
# What OpenTelemetry knows of a request's content, and of people.
CONTENT = (
    "gen_ai.input.messages gen_ai.output.messages gen_ai.system_instructions gen_ai.tool.definitions "
    "gen_ai.tool.call.arguments gen_ai.tool.call.result gen_ai.tool.description gen_ai.tool.name "
    "gen_ai.prompt gen_ai.completion gen_ai.retrieval.query.text gen_ai.retrieval.documents "
    "gen_ai.request.stop_sequences gen_ai.agent.description gen_ai.conversation.id exception.message "
    "exception.stacktrace url.query url.full db.query.text user.id enduser.id session.id client.address "
    "http.request.header.authorization"
).split()


def objects(path: Path) -> Iterator[dict[str, Any]]:
    yield from (one for one in yaml.safe_load_all(path.read_text()) if one and "apiVersion" in one)


def pod_specs() -> dict[str, dict[str, Any]]:
    found = {}
    for path in MANIFESTS:
        for item in objects(path):
            if item["kind"] == "Deployment":
                found[item["metadata"]["name"]] = item["spec"]["template"]["spec"]
            elif item["kind"] == "InferenceService":
                predictor = dict(item["spec"]["predictor"])
                for kserves in ("minReplicas", "maxReplicas", "timeout"):
                    del predictor[kserves]
                found["kserve"] = predictor
    return found


@pytest.mark.parametrize("path", MANIFESTS, ids=lambda path: f"{path.parent.name}/{path.name}")
def test_objects_keep_to_kubernetes_schemas(path: Path) -> None:
    for item in objects(path):
        if is_known(item):
            kubernetes_validate.validate(item, KUBERNETES, strict=True)


@pytest.mark.parametrize("name", sorted(pod_specs()))
def test_pods_are_valid_and_unprivileged(name: str) -> None:
    spec = pod_specs()[name]
    pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": name}, "spec": spec}
    kubernetes_validate.validate(pod, KUBERNETES, strict=True)
    assert spec["securityContext"]["runAsNonRoot"] is True
    for container in [*spec.get("initContainers", ()), *spec["containers"]]:
        context = container["securityContext"]
        assert context["readOnlyRootFilesystem"] is True
        assert context["allowPrivilegeEscalation"] is False
        assert not container["image"].endswith(":latest") and ":" in container["image"]
        assert "memory" in container["resources"]["limits"]
        volumes = {volume["name"] for volume in spec["volumes"]}
        assert {mount["name"] for mount in container["volumeMounts"]} <= volumes


def test_kserve_runs_the_pods_of_the_pool() -> None:
    """Spelled out there, since KServe takes no reference."""
    pool, kserve = pod_specs()["footplate-pool"], pod_specs()["kserve"]
    kserve["containers"][0]["name"] = "footplate"
    for part in ("initContainers", "containers", "volumes", "tolerations", "nodeSelector"):
        assert kserve[part] == pool[part]


def test_the_pools_configuration_is_one_that_footplate_takes() -> None:
    settings, faults = check_settings(POOL / "config.yaml", {})
    assert settings is not None, [str(fault) for fault in faults]
    assert settings.server.host == "0.0.0.0"


def test_the_picker_asks_for_names_that_engines_have(tmp_path: Path) -> None:
    async def collect() -> set[str]:
        return series_names(gateway_metrics(tmp_path).collect())

    exposed = asyncio.run(collect())
    text = (POOL / "picker.yaml").read_text()
    asked = set(re.findall(r"-metric=(\S+)", text)) - {'"'}
    assert len(asked) == 4
    assert asked <= exposed
    [pool] = [item for item in objects(POOL / "pool.yaml") if item["kind"] == "InferencePool"]
    [service] = [item for item in objects(POOL / "picker.yaml") if item["kind"] == "Service"]
    assert pool["spec"]["endpointPickerRef"]["name"] == service["metadata"]["name"]
    assert pool["spec"]["endpointPickerRef"]["port"]["number"] == service["spec"]["ports"][0]["port"]


def test_haproxy_takes_the_sidecars_configuration() -> None:
    haproxy = find_haproxy()
    if haproxy is None:
        pytest.skip("there is no HAProxy")
    command = [str(haproxy), "-c", "-f", str(POOL / "metrics.cfg")]
    environment = {**os.environ, "SCRAPE_KEY": "fp_a_b"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_nothing_of_content_may_pass_the_collector() -> None:
    config = yaml.safe_load(COLLECTOR.read_text())
    redaction = config["processors"]["redaction"]
    assert redaction["allow_all_keys"] is False
    allowed = redaction["allowed_keys"]
    assert len(set(allowed)) == len(allowed)
    assert not set(allowed) & set(CONTENT)
    # Lines of our own logs pass whole; the list there is the first wall.
    assert set(allowed) >= FIELDS
    patterns = [re.compile(pattern) for pattern in redaction["blocked_values"]]
    for secret in ("fp_yJr7HaJZfPND_s3cr3t", f"fpmk:1:{'ab' * 32}", "Bearer abc.def"):
        assert any(pattern.search(secret) for pattern in patterns)


def test_each_pipeline_of_the_collector_is_walled() -> None:
    config = yaml.safe_load(COLLECTOR.read_text())
    for name, pipeline in config["service"]["pipelines"].items():
        order = pipeline["processors"]
        assert order[0] == "memory_limiter" and order[-2:] == ["redaction", "batch"]
        assert ("transform/texts" in order) is (name != "metrics")
        assert pipeline["exporters"] == ["otlphttp"]
    assert config["exporters"]["otlphttp"]["endpoint"].startswith("${env:")


@pytest.mark.parametrize(
    ("name", "ours"),
    [
        ("chat llama-3.1-8b", True),
        ("POST /v1/chat/completions", True),
        ("GET", True),
        ("tell me a secret", False),
    ],
)
def test_names_of_spans_are_ours_or_other(name: str, ours: bool) -> None:
    text = COLLECTOR.read_text()
    [pattern] = re.findall(r'IsMatch\(span\.name, "([^"]+)"\)', text)
    assert bool(re.match(pattern, name)) is ours


@pytest.mark.skipif(shutil.which("otelcol-contrib") is None, reason="otelcol-contrib is not on the path")
def test_the_collector_takes_its_configuration() -> None:
    environment = {**os.environ, "OTLP_ENDPOINT": "http://127.0.0.1:1", "OTLP_AUTHORIZATION": "x"}
    command = ["otelcol-contrib", "validate", f"--config={COLLECTOR}"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_the_image_is_pinned_and_not_run_by_root() -> None:
    lines = (INFRA / "docker" / "Dockerfile").read_text().splitlines()
    [base] = {
        line.removeprefix("ARG PYTHON_IMAGE=") for line in lines if line.startswith("ARG PYTHON_IMAGE=")
    }
    assert re.fullmatch(r"python:3\.\d+\.\d+-slim-\w+", base)
    assert {line.split()[1] for line in lines if line.startswith("FROM ")} == {"${PYTHON_IMAGE}"}
    assert "USER 10001:10001" in lines
    copied = {
        line.split()[1]
        for line in lines
        if line.startswith("COPY ") and "/footplate " in line and "--" not in line
    }
    root = INFRA.parent
    assert copied == {
        f"{folder.parent.name}/footplate" for folder in root.glob("*/footplate") if folder.is_dir()
    }


def test_compose_gives_footplate_servers_of_its_own() -> None:
    services = yaml.safe_load((INFRA / "docker" / "compose.yaml").read_text())["services"]
    assert all(":" in service["image"] and "latest" not in service["image"] for service in services.values())
    environment = {
        name: re.sub(r"\$\{\w+:-(\w+)\}", r"\1", value)
        for name, value in services["footplate"]["environment"].items()
    }
    settings, faults = check_settings(None, environment)
    assert settings is not None, [str(fault) for fault in faults]
    assert "embedded" not in (settings.storage.database_url, settings.storage.redis_url)
    assert services["footplate"]["ports"] == ["127.0.0.1:8000:8000"]


def test_no_manifest_holds_a_secret() -> None:
    for path in INFRA.rglob("*"):
        if path.is_file():
            assert not re.search(
                r"fpmk:\d+:[0-9a-f]{64}|fp_[A-Za-z0-9]{8,}_[A-Za-z0-9]{16,}", path.read_text()
            ), path
