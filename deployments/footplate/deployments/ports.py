"""Which TCP ports a run needs, and whether they are free, before anything starts."""

from __future__ import annotations

import socket
from dataclasses import dataclass

from footplate.deployments.errors import StartupError

# Serve gives each ingress replica a port of its own behind HAProxy; one block of these per installation.
FIRST_REPLICA_PORT = 20_000
NUM_BLOCKS = 100
BLOCK_SIZE = 100


@dataclass(frozen=True, slots=True)
class RunPorts:
    """The ports of one run. All but the first are internal and bound to loopback."""

    http: int
    haproxy_metrics: int
    haproxy_stats: int
    fallback_proxy: int
    first_replica: int
    last_replica: int

    @staticmethod
    def choose(http: int, mark: str) -> RunPorts:
        """Free ports for the internal listeners, and the installation's block of replica ports."""
        first = FIRST_REPLICA_PORT + int(mark, 16) % NUM_BLOCKS * BLOCK_SIZE
        # The last port of the block is Serve's exclusive bound.
        return RunPorts(
            http, find_free_port(), find_free_port(), find_free_port(), first, first + BLOCK_SIZE - 1
        )


def find_free_port(host: str = "127.0.0.1") -> int:
    """A TCP port that was free a moment ago."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.bind((host, 0))
        return int(probe.getsockname()[1])


def is_port_free(host: str, port: int) -> bool:
    """Whether a server could listen there now.

    Raises:
        StartupError: the host is no address of this machine.
    """
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(address)
            probe.listen(1)
    except PermissionError as error:
        raise StartupError(
            f"port {port} needs more rights than this user has", "choose --port 1024 or above"
        ) from error
    except socket.gaierror as error:
        raise StartupError(f"the host {host!r} has no address", "set --host 127.0.0.1") from error
    except OSError as error:
        if error.errno == 99:  # EADDRNOTAVAIL
            raise StartupError(f"{host} is no address of this machine", "set --host 127.0.0.1") from error
        return False
    return True


def require_free_port(host: str, port: int) -> None:
    """Refuse to start where something listens already.

    Raises:
        StartupError: the port is taken; says how to go on.
    """
    if not is_port_free(host, port):
        raise StartupError(
            f"port {port} on {host} is taken",
            f"stop what listens there (ss -ltnp 'sport = :{port}'), or set --port",
        )
