"""Empties this machine's node of a Ray cluster: its replicas are replaced elsewhere before it goes away.

Asks Ray's control store and nobody else: no driver, no job, and no process of its own on a node that leaves.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from footplate.deployments.errors import StartupError
from footplate.deployments.leaving import notice_file, seconds_left, streams_end_after_s, write_notice
from footplate.deployments.specs import REPLICA_PREFIX

# Of Ray's `DrainNodeReason`: nothing refuses it, and what dies with the node counts as no fault of its own.
PREEMPTION = 2
# To Serve a deadline means: stop a replica so long before as its grace is, replaced or not. With streams of
# ten minutes and a notice of two that is now. We end streams in time ourselves.
NO_DEADLINE = 0
CALL_S = 5.0
LOOK_S = 0.5
METADATA_URL = "http://169.254.169.254"
METADATA_S = 2.0


class NodeDrain:
    """One node on its way out."""

    def __init__(self, gcs_address: str, run_dir: Path, node_id: str | None = None) -> None:
        """`run_dir`: the folder that the node's engines look in; see `leaving`.

        `node_id`: Ray's name of it; None: the one that has an address of this machine.

        Raises:
            StartupError: the control store doesn't answer, or it is not clear which node is meant.
        """
        self._run_dir = run_dir
        self._num_replicas = 1
        alive = self._alive_nodes(gcs_address)
        mine = [name for name, where in alive.items() if (name == node_id if node_id else is_own(where))]
        if len(mine) != 1:
            raise StartupError(
                f"{len(mine)} nodes of the cluster at {gcs_address} are this one",
                "name it: --node-id, as `ray list nodes` shows it",
            )
        [self.node_id] = mine

    def begin(self, seconds: float) -> None:
        """Tell the node's engines that it is there for so many seconds more, and have them replaced.

        Raises:
            StartupError: the engines know, but Ray's control store doesn't answer.
        """
        ends_at = time.monotonic() + streams_end_after_s(seconds)
        write_notice(notice_file(self._run_dir, self.node_id), ends_at)
        try:
            is_taken, why = self._gcs.drain_node(self.node_id, PREEMPTION, "the node goes away", NO_DEADLINE)
        except Exception as error:
            raise StartupError(
                f"Ray's control store did not answer: {type(error).__name__}",
                "the engines of this node end their streams in time; nothing replaces them until it answers",
            ) from error
        if not is_taken:
            raise StartupError(f"Ray does not drain the node: {why}", "see that it is no head")

    def await_empty(self, seconds: float) -> int:
        """Return once the node has no replica left, or is out of time; how many it has then."""
        end = time.monotonic() + seconds
        num_left = self.num_replicas()
        while num_left and (left_s := end - time.monotonic()) > 0:
            time.sleep(min(LOOK_S, left_s))
            num_left = self.num_replicas()
        return num_left

    def num_replicas(self) -> int:
        """How many replicas of Serve run on the node."""

        async def ask() -> Any:
            return await self._gcs.async_get_all_actor_info(actor_state_name="ALIVE", timeout=CALL_S)

        # Who doesn't answer now is asked again.
        with contextlib.suppress(Exception):
            self._num_replicas = sum(
                actor.name.startswith(REPLICA_PREFIX) and actor.address.node_id.hex() == self.node_id
                for actor in asyncio.run(ask()).values()
            )
        return self._num_replicas

    def _alive_nodes(self, gcs_address: str) -> dict[str, str]:
        """Connect; the addresses of nodes that are in the cluster, by name."""
        from ray._raylet import GcsClient  # type: ignore[attr-defined]  # made by Cython
        from ray.core.generated.gcs_pb2 import GcsNodeInfo  # type: ignore[attr-defined]

        try:
            self._gcs: Any = GcsClient(address=gcs_address)
            nodes = self._gcs.get_all_node_info(timeout=CALL_S)
        except Exception as error:
            raise StartupError(
                f"Ray's control store at {gcs_address} did not answer: {type(error).__name__}",
                "set RAY_ADDRESS to the head's address and port",
            ) from error
        return {
            name.hex(): node.node_manager_address
            for name, node in nodes.items()
            if node.state == GcsNodeInfo.GcsNodeState.ALIVE
        }


def own_age_s() -> float:
    """How long ago this process was started: on a busy machine Python needs seconds to get here."""
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    started = int(fields[19]) / os.sysconf("SC_CLK_TCK")
    return max(time.clock_gettime(time.CLOCK_BOOTTIME) - started, 0.0)


def is_own(address: str) -> bool:
    """Whether an address is one of this machine's: only then something can be bound to it."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with contextlib.suppress(OSError), socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.bind((address, 0))
        return True
    return False


def find_control_store() -> str:
    """RAY_ADDRESS, or the address of the cluster of the node that runs on this machine.

    Raises:
        StartupError: there is none.
    """
    from ray._private import services

    try:
        return str(services.canonicalize_bootstrap_address_or_die("auto"))
    except (ConnectionError, OSError, ValueError) as error:
        raise StartupError(
            "no control store of Ray can be found", "set RAY_ADDRESS to the head's address and port"
        ) from error


def spot_notice(url: str = METADATA_URL) -> float | None:
    """How many seconds AWS leaves this spot instance; None: it takes it from nobody.

    Raises:
        StartupError: no instance metadata answers there, or with no notice of that form.
    """
    try:
        asked = urllib.request.Request(
            f"{url}/latest/api/token", method="PUT", headers={"X-aws-ec2-metadata-token-ttl-seconds": "60"}
        )
        with urllib.request.urlopen(asked, timeout=METADATA_S) as answer:
            token = answer.read().decode()
        asked = urllib.request.Request(
            f"{url}/latest/meta-data/spot/instance-action", headers={"X-aws-ec2-metadata-token": token}
        )
        with urllib.request.urlopen(asked, timeout=METADATA_S) as answer:
            return seconds_left(answer.read().decode(), datetime.now(UTC))
    except urllib.error.HTTPError as error:
        if error.code == 404:
            return None
        raise StartupError(f"the instance metadata answered {error.code}", "see its options") from error
    except (OSError, ValueError) as error:
        raise StartupError(
            f"no notice can be read at {url}: {error}", "in a pod the hop limit of IMDSv2 must be 2"
        ) from error


def await_notice(ask: Callable[[], float | None], pause: Callable[[], None]) -> float:
    """Ask again and again until there is a notice; how many seconds it leaves."""
    while (seconds := ask()) is None:
        pause()
    return seconds
