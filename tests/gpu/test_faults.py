"""On a GPU, with graphs: faults that other engines had, and what only a real device can show."""

from __future__ import annotations

import gc
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from footplate.engine import loader
from footplate.engine.config import EngineConfig
from footplate.engine.core import EngineCore
from footplate.engine.types import EngineRequest
from tests.engine import device_scenarios as scenarios
from tests.engine.answers import greedy, poison, run
from tests.engine.device_scenarios import Rig

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]

SHAPE = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_act": "silu",
    "hidden_size": 512,
    "intermediate_size": 1280,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "num_hidden_layers": 3,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "vocab_size": 32000,
    "eos_token_id": 1,
}
BLOCK_ELEMENTS = 2 * 3 * 2 * 64 * 16  # keys and values, layers, heads, head size, tokens


@pytest.fixture(scope="module")
def config_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("dummy") / "config.json"
    path.write_text(json.dumps(SHAPE))
    return path


@pytest.fixture(params=["float32", "bfloat16"])
def rig(config_file: Path, request: pytest.FixtureRequest) -> Iterator[Rig]:
    """Small steps in 16 bits have kernels of their own on some GPUs."""
    cores: list[EngineCore] = []

    def build(**options: Any) -> EngineCore:
        core = loader.load_engine(f"dummy:{config_file}", EngineConfig(**options), prefix_key=b"k" * 32).core
        poison(core)
        cores.append(core)
        return core

    itemsize = 4 if request.param == "float32" else 2
    yield Rig(build, 32000, BLOCK_ELEMENTS * itemsize, request.param)
    for core in cores:
        while core.has_work:
            core.step()
        core.scheduler.check()
        core.shutdown()
    cores.clear()
    gc.collect()
    torch.cuda.empty_cache()


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
    scenarios.check_random_aborts_leave_nothing_held(rig, 300, seed)


def test_no_placeholder_reaches_the_model(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """FAULTS a28."""
    scenarios.check_no_placeholder_reaches_the_model(rig, monkeypatch)


@pytest.mark.parametrize("ahead", [True, False])
def test_arrivals_in_any_step_say_the_same(rig: Rig, ahead: bool) -> None:
    scenarios.check_arrivals_in_any_step_say_the_same(rig, ahead=ahead)


def test_a_prefix_is_computed_once_in_the_step_that_all_arrive_in(rig: Rig) -> None:
    scenarios.check_a_prefix_is_computed_once_in_the_step_that_all_arrive_in(rig)


# --- graphs ---------------------------------------------------------------------------------------------


def requests(rig: Rig, count: int, **params: Any) -> list[EngineRequest]:
    prompts = [rig.prompt(i, 3 + 11 * i) for i in range(count)]
    return [EngineRequest(f"r{i}", p, greedy(6 + 5 * i, **params)) for i, p in enumerate(prompts)]


def answered(core: EngineCore, *batch: EngineRequest) -> list[list[int]]:
    answers = run(core, *batch)
    return [answers[r.request_id, 0].token_ids for r in batch]


def test_every_graph_size_says_what_single_launches_say(rig: Rig) -> None:
    """Rows end one after the other, so the run goes through all padded sizes from 8 down to 1."""
    core = rig.make(num_blocks=128)
    with_graphs = answered(core, *requests(rig, 8, temperature=0.8, seed=5))
    core.runner._graphs.release()  # type: ignore[attr-defined]
    assert answered(core, *requests(rig, 8, temperature=0.8, seed=5)) == with_graphs


def test_graphs_own_the_memory_they_write_to(rig: Rig) -> None:
    """Between steps everything free on the device is taken and filled with NaN, then given back."""
    core = rig.make(num_blocks=128)
    want = answered(core, *requests(rig, 6))
    for request in requests(rig, 6):
        core.add(request)
    told: dict[str, list[int]] = {}
    while core.has_work:
        for delta in core.step():
            told.setdefault(delta.request_id, []).extend(delta.token_ids)
        torch.cuda.synchronize()
        taken = []
        for size in (1 << 10, 1 << 16, 1 << 22, 1 << 26):
            taken += [torch.full((size // 4,), float("nan"), device="cuda") for _ in range(6)]
        del taken
        torch.cuda.empty_cache()
    assert list(told.values()) == want


def test_two_engines_on_one_device_do_not_write_to_each_other(rig: Rig) -> None:
    one, other = rig.make(num_blocks=64), rig.make(num_blocks=64)
    want = answered(one, *requests(rig, 4))
    for core in (one, other):
        for request in requests(rig, 4):
            core.add(request)
    told: list[dict[str, list[int]]] = [{}, {}]
    while one.has_work or other.has_work:
        for core, found in ((one, told[0]), (other, told[1])):
            for delta in core.step() if core.has_work else ():
                found.setdefault(delta.request_id, []).extend(delta.token_ids)
    assert [list(found.values()) for found in told] == [want, want]


def test_nothing_is_compiled_while_serving(rig: Rig) -> None:
    """Prompts of every length beside decodes of every number, shared prefixes, each kind of draw."""
    import triton

    core = rig.make(num_blocks=400, prefix_caching=True, max_num_batched_tokens=512)
    compiled: list[str] = []
    before = triton.knobs.runtime.jit_post_compile_hook
    triton.knobs.runtime.jit_post_compile_hook = lambda **facts: compiled.append(str(facts.get("key"))[:200])
    try:
        kinds: list[dict[str, Any]] = [
            {},
            {"temperature": 1.0, "seed": 1},
            {"temperature": 0.7, "top_k": 20, "seed": 2},
            {"temperature": 0.9, "top_p": 0.8, "min_p": 0.02, "seed": 3},
            {"repetition_penalty": 1.2},
            {"logprobs": 3, "prompt_logprobs": 1},
            {"n": 3, "temperature": 1.0, "seed": 4},
        ]
        shared = rig.prompt(50, 300)
        batch = [
            EngineRequest(f"a{i}", rig.prompt(i, length), greedy(9, **kinds[i % len(kinds)]))
            for i, length in enumerate((*range(1, 20), 31, 32, 33, 100, 255, 256, 257, 511, 513, 700, 1500))
        ]
        batch += [EngineRequest(f"s{i}", shared + rig.prompt(60 + i, 5 + i), greedy(9)) for i in range(6)]
        run(core, *batch)
        for request in batch[::3]:  # alone, and out of the cache
            run(core, request)
    finally:
        triton.knobs.runtime.jit_post_compile_hook = before
    assert not compiled, f"{len(compiled)} kernels were compiled while serving, such as {compiled[0]}"


@pytest.mark.parametrize("rows", [8, 256])
def test_what_an_engine_takes_stays_in_its_share(config_file: Path, rows: int) -> None:
    """FAULTS a77: weights, pool, graphs and a busy step; what the process took before is counted too."""
    torch.cuda.empty_cache()
    share = 0.5
    options: dict[str, Any] = {"gpu_memory_utilization": share, "max_num_seqs": rows}
    core = loader.load_engine(f"dummy:{config_file}", EngineConfig(**options), prefix_key=b"k" * 32).core
    prompts = [[5 + (i * 31 + n) % 30000 for n in range(200)] for i in range(2 * rows)]
    run(core, *(EngineRequest(f"r{i}", p, greedy(8)) for i, p in enumerate(prompts)))
    free, total = torch.cuda.mem_get_info()
    core.shutdown()
    # the context and libraries' own memory come late; the driver rounds up
    assert total - free <= share * total + (1 << 30)
