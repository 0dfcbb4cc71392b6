"""`footplate drain-node`: for a node of a cluster that is about to be taken away."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Annotated

import typer

from footplate.deployments.errors import StartupError
from footplate.deployments.run_paths import RunPaths
from footplate.platform.settings import data_dir

WATCH_EVERY_S = 5.0
RETRY_S = 2.0


def drain_node(
    seconds: Annotated[
        float, typer.Option(help="How long the node will be there, at most.", min=1.0, max=86_400.0)
    ] = 120.0,
    watch_aws: Annotated[
        bool, typer.Option("--watch-aws", help="Wait for AWS's notice for this spot instance first.")
    ] = False,
    node_id: Annotated[
        str | None, typer.Option(help="Ray's name of the node; else the one with an address of this machine.")
    ] = None,
    data: Annotated[
        Path | None, typer.Option("--data-dir", help="The engines' data folder (or FOOTPLATE_DATA_DIR).")
    ] = None,
) -> None:
    """Move the engines of this machine's Ray node elsewhere, and return once none is left or time is up.

    Others are asked for what is new, replacements start, open streams have the time to end, and end with an
    error event shortly before the node goes. RAY_ADDRESS is asked, or else the cluster of the node that runs
    here.
    """
    # Only who drains needs Ray.
    from footplate.deployments.node_drain import (
        NodeDrain,
        await_notice,
        find_control_store,
        own_age_s,
        spot_notice,
    )

    # Whoever gave the node so long began to count when it called.
    end = time.monotonic() - own_age_s() + seconds
    # Ray reads it once, when it is loaded; by itself it waits half a minute for a head that is away.
    os.environ.setdefault("RAY_py_gcs_connect_timeout_s", "5")
    address = find_control_store()
    if watch_aws:
        left_s = await_notice(spot_notice, lambda: time.sleep(WATCH_EVERY_S))
        end = time.monotonic() + min(seconds, left_s)
    while True:
        try:
            drain = NodeDrain(address, RunPaths.of(data_dir(data)).run_dir, node_id)
            drain.begin(max(end - time.monotonic(), 0.0))
            break
        except StartupError as error:
            # The head may be on its way back; a hook that gave up would have the node end at once.
            if end - time.monotonic() < RETRY_S:
                raise
            typer.echo(f"{error}; trying again", err=True)
            time.sleep(RETRY_S)
    left_s = end - time.monotonic()
    typer.echo(f"node {drain.node_id[:12]} drains; it is there for {left_s:.0f} s")
    num_left = drain.await_empty(left_s)
    typer.echo("it is empty" if not num_left else f"time is up; replicas that are still there: {num_left}")
