"""Faults that other engines had, on the device runner's own code with plain kernels instead of graphs."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from footplate.engine import device_loader, loader
from footplate.engine.config import EngineConfig
from footplate.engine.core import EngineCore
from footplate.engine.device_loader import SMALL_GRAPH_BYTES, DeviceFactory, DeviceNeeds
from footplate.engine.models.decoder import Decoder
from footplate.engine.runner.decode_graphs import DecodeGraphs, graph_sizes
from footplate.engine.runner.device_runner import DeviceRunner
from tests.engine import device_scenarios as scenarios
from tests.engine.conftest import MakeEngine
from tests.engine.device_scenarios import Rig
from tests.engine.test_triton_engine import SHAPE

BLOCK_BYTES = 2 * 2 * 2 * 16 * 4 * 16  # keys and values, layers, heads, elements, float32, tokens


@pytest.fixture(scope="session")
def config_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("dummy") / "config.json"
    path.write_text(json.dumps(SHAPE))
    return path


@pytest.fixture
def rig(make_engine: MakeEngine, config_file: Path, monkeypatch: pytest.MonkeyPatch) -> Rig:
    def build(**options: Any) -> EngineCore:
        with monkeypatch.context() as patched:
            patched.setattr(loader, "_on_cpu", loader._on_device)
            core = make_engine(f"dummy:{config_file}", **{"async_scheduling": True} | options)
        assert isinstance(core.runner, DeviceRunner)
        return core

    return Rig(build, SHAPE["vocab_size"], BLOCK_BYTES)  # type: ignore[arg-type]


@pytest.mark.parametrize(("count", "gone"), [(1, 0), (5, 0), (7, 0), (8, 0), (8, 3), (3, 2)])
def test_a_decode_step_changes_its_own_rows_only(rig: Rig, count: int, gone: int) -> None:
    """FAULTS a80."""
    scenarios.check_a_decode_step_changes_its_own_rows_only(rig, count, gone)


def test_slots_that_no_row_owns_never_matter(rig: Rig) -> None:
    """FAULTS a63 and a80."""
    scenarios.check_slots_that_no_row_owns_never_matter(rig)


@pytest.mark.parametrize("steps", [0, 1, 2, 3, 4, 5, 8])
@pytest.mark.parametrize("room", ["one row", "blocks of one"])
def test_the_next_owner_of_rows_and_blocks_is_left_alone(rig: Rig, steps: int, room: str) -> None:
    """FAULTS a40."""
    scenarios.check_the_next_owner_is_left_alone(rig, steps, max_num_seqs=1 if room == "one row" else 2)


@pytest.mark.parametrize("seed", [1, 2])
def test_random_aborts_leave_nothing_held(rig: Rig, seed: int) -> None:
    """FAULTS a42."""
    scenarios.check_random_aborts_leave_nothing_held(rig, 60, seed)


def test_no_placeholder_reaches_the_model(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """FAULTS a28."""
    scenarios.check_no_placeholder_reaches_the_model(rig, monkeypatch)


@pytest.mark.parametrize("ahead", [True, False])
def test_arrivals_in_any_step_say_the_same(rig: Rig, ahead: bool) -> None:
    scenarios.check_arrivals_in_any_step_say_the_same(rig, ahead=ahead)


def test_a_prefix_is_computed_once_in_the_step_that_all_arrive_in(rig: Rig) -> None:
    scenarios.check_a_prefix_is_computed_once_in_the_step_that_all_arrive_in(rig)


# --- what graphs take is known before the pool gets the rest ------------------------------------------------


class FakeDevice:
    """A device's memory, in bytes: what is asked of torch.cuda while a pool is sized."""

    def __init__(self, total: int, activations: int, graph: int) -> None:
        self.total, self.used, self.peak = total, 0, 0
        self._activations, self._graph = activations, graph
        self.captured: list[list[int]] = []

    def install(self, monkeypatch: pytest.MonkeyPatch) -> None:
        for name in ("synchronize", "empty_cache", "reset_peak_memory_stats"):
            monkeypatch.setattr(torch.cuda, name, lambda *device: None)
        monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: self.used)
        monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: self.used + self._activations)
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (self.total - self.used, self.total))
        monkeypatch.setattr(DecodeGraphs, "capture", lambda graphs, sizes=None: self._capture(graphs, sizes))
        monkeypatch.setattr(DecodeGraphs, "release", lambda graphs: self._release())

    def _capture(self, graphs: Any, sizes: list[int] | None) -> None:
        sizes = list(graphs._sizes if sizes is None else sizes)
        self.captured.append(sizes)
        self.used += self._graph + SMALL_GRAPH_BYTES * (len(sizes) - 1)

    def _release(self) -> None:
        self.used = 0


@pytest.mark.parametrize("graph_mib", [0, 64, 200])
def test_graphs_are_measured_before_the_pool_gets_what_is_left(
    make_engine: MakeEngine, config_file: Path, monkeypatch: pytest.MonkeyPatch, graph_mib: int
) -> None:
    """FAULTS a77."""
    mib = 1 << 20
    device = FakeDevice(1024 * mib, activations=32 * mib, graph=graph_mib * mib)
    device.install(monkeypatch)
    monkeypatch.setattr(loader, "_on_cpu", loader._on_device)
    pools: list[int] = []
    made = DeviceFactory.make

    def counted(factory: DeviceFactory, num_blocks: int, max_len: int) -> Any:
        pools.append(num_blocks)
        # the pool is not really made: only its size is of interest
        return made(factory, min(num_blocks, 64), min(max_len, 512))

    monkeypatch.setattr(DeviceFactory, "make", counted)
    options: dict[str, Any] = {"kv_cache_gib": "auto", "max_num_seqs": 4000, "gpu_memory_utilization": 0.75}
    make_engine(f"dummy:{config_file}", **options)
    sizes = graph_sizes(2048)
    assert device.captured[0] == sizes[-1:] and len(device.captured) == 2  # the largest alone, then all
    graphs = (graph_mib * mib) + SMALL_GRAPH_BYTES * (len(sizes) - 1)
    room = 768 * mib - 32 * mib - graphs
    assert pools[-1] == room // BLOCK_BYTES
    assert pools[-1] * BLOCK_BYTES + device.used + 32 * mib <= 768 * mib


def test_a_device_that_graphs_fill_has_no_pool(
    make_engine: MakeEngine, config_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    FakeDevice(256 << 20, activations=8 << 20, graph=230 << 20).install(monkeypatch)
    monkeypatch.setattr(loader, "_on_cpu", loader._on_device)
    monkeypatch.setattr(device_loader, "SMALL_GRAPH_BYTES", 0)
    with pytest.raises(loader.LoadError, match="holds no block"):
        make_engine(f"dummy:{config_file}", kv_cache_gib="auto")


@pytest.mark.parametrize(
    ("others", "own", "want"),
    [(1, 200, 1000 * 0.45 - 200), (450, 200, 1000 * 0.45 - 200), (700, 200, 1000 - 900 - 20), (800, 200, 0)],
    ids=["alone", "beside another engine", "what is free is less", "nothing is free"],
)
def test_an_engines_share_counts_its_own_memory_only(
    monkeypatch: pytest.MonkeyPatch, others: int, own: int, want: float
) -> None:
    FakeDevice(1000 << 20, 0, 0).install(monkeypatch)
    free = (1000 - others - own) << 20
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (free, 1000 << 20))
    monkeypatch.setattr(device_loader, "FREE_MARGIN", 20 << 20)
    shape = SimpleNamespace(num_layers=1, num_kv_heads=1, head_dim=64)
    factory = DeviceFactory(
        cast(Decoder, SimpleNamespace(config=shape)),
        EngineConfig(gpu_memory_utilization=0.45),
        torch.device("cpu"),
        torch.float32,
        64,
        used_before=others << 20,
    )
    needs = DeviceNeeds(activations=0, graphs=0)
    assert factory.pool_bytes(needs) == pytest.approx(want * (1 << 20), abs=1)
