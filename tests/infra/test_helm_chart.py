"""The chart: rendered, held against Kubernetes' own schemas, and against what the code asks for."""

from __future__ import annotations

import hashlib
import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import typer
import yaml

from footplate.deployments.cli import main as command_line
from footplate.deployments.gateway import NODE_CHANNEL
from footplate.deployments.pod_setup import POD_PORTS
from footplate.deployments.ray_environment import ray_environment
from footplate.deployments.run_paths import RunPaths
from footplate.platform.settings import check_settings
from tests.infra.go_template import Chart

CHART = Path(__file__).parents[2] / "infra" / "helm" / "footplate"
KUBERNETES = "1.33"
EVERYTHING: dict[str, Any] = {
    "httpRoute": {"enabled": True},
    "podMonitor": {"enabled": True},
    "gateways": {"stateClaim": "journals"},
    "serviceAccount": {"annotations": {"example.com/role": "x"}},
    "image": {"pullSecrets": [{"name": "registry"}]},
    "networkPolicy": {"clients": [{"namespaceSelector": {"matchLabels": {"team": "web"}}}]},
    "admin": {"storageClassName": "gp3"},
}


@pytest.fixture(scope="module")
def chart() -> Chart:
    return Chart(CHART)


def one(objects: list[dict[str, Any]], kind: str, name: str = "footplate") -> dict[str, Any]:
    [found] = [o for o in objects if o["kind"] == kind and o["metadata"]["name"] == name]
    return found


def pod_templates(objects: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Every pod that the release makes, by what it is."""
    cluster = one(objects, "RayService")["spec"]["rayClusterConfig"]
    templates = {group["groupName"]: group["template"] for group in cluster["workerGroupSpecs"]}
    templates["head"] = cluster["headGroupSpec"]["template"]
    templates["admin"] = one(objects, "Deployment", "footplate-admin")["spec"]["template"]
    return templates


def serve_config(objects: list[dict[str, Any]]) -> dict[str, Any]:
    config: dict[str, Any] = yaml.safe_load(one(objects, "RayService")["spec"]["serveConfigV2"])
    return config


def is_known(item: dict[str, Any]) -> bool:
    """Whether Kubernetes itself has this kind; others come with their operators."""
    return item["apiVersion"] in ("v1", "apps/v1", "policy/v1", "networking.k8s.io/v1")


@pytest.mark.parametrize("values", [{}, EVERYTHING], ids=["defaults", "everything"])
def test_objects_keep_to_kubernetes_schemas(chart: Chart, values: dict[str, Any]) -> None:
    objects = chart.render(**values)
    pods = [
        {
            "apiVersion": "v1",
            "kind": "Pod",
            "metadata": {"name": name, **template["metadata"]},
            "spec": template["spec"],
        }
        for name, template in pod_templates(objects).items()
    ]
    for item in [*filter(is_known, objects), *pods]:
        kubernetes_validate.validate(item, KUBERNETES, strict=True)
    assert {o["kind"] for o in objects if not is_known(o)} <= {"RayService", "HTTPRoute", "PodMonitor"}


def test_a_field_that_kubernetes_does_not_know_is_found(chart: Chart) -> None:
    pod = pod_templates(chart.render())["engines"]
    pod["spec"]["containers"][0]["readinessprobe"] = {}
    broken = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "x"}, "spec": pod["spec"]}
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(broken, KUBERNETES, strict=True)


@pytest.mark.parametrize("pod", ["head", "gateways", "engines", "admin"])
def test_pods_are_unprivileged(chart: Chart, pod: str) -> None:
    spec = pod_templates(chart.render())[pod]["spec"]
    assert spec["securityContext"]["runAsNonRoot"] is True
    assert spec["automountServiceAccountToken"] is False
    for container in [*spec["initContainers"], *spec["containers"]]:
        context = container["securityContext"]
        assert context["allowPrivilegeEscalation"] is False
        assert context["readOnlyRootFilesystem"] is True
        assert context["capabilities"] == {"drop": ["ALL"]}
        assert "memory" in container["resources"]["limits"]
        mounted = {mount["name"] for mount in container["volumeMounts"]}
        assert mounted <= {volume["name"] for volume in spec["volumes"]}


@pytest.mark.parametrize("pod", ["head", "gateways", "engines"])
def test_ray_runs_in_pods_as_it_does_on_one_machine(chart: Chart, pod: str) -> None:
    [container] = pod_templates(chart.render())[pod]["spec"]["containers"]
    told = {entry["name"]: entry.get("value") for entry in container["env"]}
    paths = RunPaths(Path("/var/lib/footplate"), Path("/run/footplate"), "")
    wanted = ray_environment(paths, POD_PORTS, haproxy=None)
    # The wrapper's own part, without writing it where a pod would.
    wanted |= {name: "" for name in told if name.startswith("RAY_SERVE_HAPROXY")}
    ours = {"FOOTPLATE_INSTANCE", "RAY_AUTH_MODE", "RAY_AUTH_TOKEN"}  # the operator gives the token
    assert {name for name in wanted if name not in told} == ours
    differing = {
        name: (value, told[name])
        for name, value in wanted.items()
        if value and name not in ours and told[name] != value
    }
    # On a cluster balancers must see that a replica leaves.
    assert differing.keys() == {"RAY_SERVE_DIRECT_INGRESS_MIN_DRAINING_PERIOD_S"}
    assert told["RAY_SERVE_HAPROXY_BINARY_PATH"] == f"{paths.haproxy_dir}/haproxy"


def test_haproxys_switches_are_those_of_one_machine(chart: Chart, tmp_path: Path) -> None:
    [container] = pod_templates(chart.render())["gateways"]["spec"]["containers"]
    told = {entry["name"]: entry.get("value") for entry in container["env"] if "HAPROXY" in entry["name"]}
    paths = RunPaths(tmp_path, tmp_path, "")
    paths.haproxy_dir.mkdir()
    here = ray_environment(paths, POD_PORTS, Path("/usr/sbin/haproxy"))
    wanted = {
        name: value.replace(str(tmp_path), "/run/footplate")
        for name, value in here.items()
        if "HAPROXY" in name
    }
    assert told.keys() == wanted.keys()
    del told["RAY_SERVE_HAPROXY_NBTHREAD"], wanted["RAY_SERVE_HAPROXY_NBTHREAD"]  # by the machine's cores
    assert told == wanted


def test_the_configuration_is_one_that_footplate_takes(chart: Chart, tmp_path: Path) -> None:
    data = one(chart.render(), "ConfigMap", "footplate-config")["data"]
    for name, text in data.items():
        (tmp_path / name).write_text(text)
    environment = {
        "FOOTPLATE_STORAGE__DATABASE_URL": "postgresql+psycopg://u:p@db/footplate",
        "FOOTPLATE_STORAGE__REDIS_URL": "rediss://:p@valkey:6379/0",
    }
    settings, faults = check_settings(tmp_path / "config.yaml", environment)
    assert settings is not None, [str(fault) for fault in faults]
    assert settings.storage.files_url.startswith("s3://")


def test_applications_are_built_by_functions_that_exist(chart: Chart) -> None:
    objects = chart.render()
    config, data = serve_config(objects), one(objects, "ConfigMap", "footplate-config")["data"]
    from footplate.deployments import rayservice

    for application in config["applications"]:
        module, _, name = application["import_path"].partition(":")
        assert module == rayservice.__name__
        assert callable(getattr(rayservice, name))
    by_name = {application["name"]: application for application in config["applications"]}
    models = [model["name"] for model in chart.values["config"]["models"]]
    assert sorted(by_name) == sorted(["gateway", *models])
    assert by_name["gateway"]["args"]["digests"] == {
        name: hashlib.sha256(text.encode()).hexdigest() for name, text in data.items()
    }
    assert all(by_name[name]["route_prefix"] is None for name in models)


def test_only_pods_that_have_room_are_booked(chart: Chart) -> None:
    objects = chart.render(engines={"enginesPerPod": 2})
    groups = one(objects, "RayService")["spec"]["rayClusterConfig"]["workerGroupSpecs"]
    offered = {g["groupName"]: json.loads(json.loads(g["rayStartParams"]["resources"])) for g in groups}
    assert offered == {"gateways": {"footplate_gateway": 1}, "engines": {"footplate_engine": 2}}
    booked = {a["name"]: a["args"]["resources"] for a in serve_config(objects)["applications"]}
    assert booked == {"gateway": {"footplate_gateway": 1}, "llama-3.1-8b": {"footplate_engine": 1}}


def test_ports_are_closed_but_for_clients(chart: Chart) -> None:
    policy = one(chart.render(), "NetworkPolicy")["spec"]
    assert policy["podSelector"]["matchLabels"] == {
        "app.kubernetes.io/name": "footplate",
        "app.kubernetes.io/instance": "footplate",
    }
    open_to_all = [rule["ports"] for rule in policy["ingress"] if not rule.get("from")]
    assert open_to_all == [[{"port": 8000, "protocol": "TCP"}]]
    inside = [rule for rule in policy["ingress"] if "ports" not in rule]
    assert inside == [{"from": [{"podSelector": policy["podSelector"]}]}]
    # The channel takes any port of a pod's, so that rule is what lets it through.
    assert NODE_CHANNEL.endswith(":0")
    monitored = {p["port"] for rule in policy["ingress"] for p in rule.get("ports", ())} - {8000, 8265}
    assert monitored == {POD_PORTS.first_replica}


def test_streams_may_end_before_a_pod_is_killed(chart: Chart) -> None:
    objects = chart.render()
    for name in ("gateways", "engines"):
        spec = pod_templates(objects)[name]["spec"]
        [container] = spec["containers"]
        waits = int(container["lifecycle"]["preStop"]["exec"]["command"][-1])
        assert spec["terminationGracePeriodSeconds"] > waits
        assert waits == 600
    assert one(objects, "PodDisruptionBudget", "footplate-gateways")["spec"]["maxUnavailable"] == 1


def test_an_engine_pod_that_is_told_to_go_drains_its_node_first(chart: Chart) -> None:
    objects = chart.render(engines={"noticeSeconds": 110})
    [container] = pod_templates(objects)["engines"]["spec"]["containers"]
    program, command, *options = container["lifecycle"]["preStop"]["exec"]["command"]
    assert (program, command, options) == ("footplate", "drain-node", ["--seconds", "110"])
    told = typer.main.get_command(command_line.application).commands[command]  # type: ignore[attr-defined]
    told.parse_args(told.make_context(command, list(options), resilient_parsing=True), list(options))
    # The hook writes where the engines look: both go by the data folder.
    assert {"name": "FOOTPLATE_DATA_DIR", "value": "/var/lib/footplate"} in container["env"]


def test_no_secret_is_written_into_an_object(chart: Chart) -> None:
    text = json.dumps(chart.render(**EVERYTHING))
    assert '"kind": "Secret"' not in text
    cluster = one(chart.render(), "RayService")["spec"]["rayClusterConfig"]
    password = cluster["gcsFaultToleranceOptions"]["redisPassword"]
    assert password == {"valueFrom": {"secretKeyRef": {"name": "footplate", "key": "gcs-password"}}}
    assert "externalStorageNamespace" not in cluster["gcsFaultToleranceOptions"]


def test_metrics_do_not_leave_by_the_route(chart: Chart) -> None:
    route = one(chart.render(httpRoute={"enabled": True}), "HTTPRoute")["spec"]
    paths = {match["path"]["value"] for rule in route["rules"] for match in rule["matches"]}
    assert paths == {"/v1", "/admin/v1", "/console", "/healthz", "/readyz", "/health"}


@pytest.mark.skipif(shutil.which("helm") is None, reason="helm is not on the path")
@pytest.mark.parametrize("values", [{}, EVERYTHING], ids=["defaults", "everything"])
def test_helm_renders_the_same(chart: Chart, values: dict[str, Any], tmp_path: Path) -> None:
    file = tmp_path / "values.yaml"
    file.write_text(yaml.safe_dump(values))
    command = ["helm", "template", "footplate", str(CHART), "--namespace", "footplate", "--values", str(file)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    helms = [o for o in yaml.safe_load_all(done.stdout) if o]
    ours = chart.render(**values)
    # Texts of YAML within YAML may be laid out otherwise; their digests then differ too.
    skipped = {"ConfigMap", "RayService"}

    def key(o: dict[str, Any]) -> tuple[str, str]:
        return (o["kind"], o["metadata"]["name"])

    assert sorted(map(key, helms)) == sorted(map(key, ours))
    by_key = {key(o): o for o in helms}
    assert [o for o in ours if o["kind"] not in skipped and by_key[key(o)] != o] == []
