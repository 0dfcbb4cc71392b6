"""On a GPU: the whole engine, graphs and all, says what it says on a CPU, and what a row says is its own."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from footplate.engine import loader
from footplate.engine.config import EngineConfig
from footplate.engine.core import EngineCore
from footplate.engine.kernels.torch_ops import TorchOps
from footplate.engine.types import EngineRequest
from tests.engine.answers import greedy, poison, run

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]

SHAPE = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_act": "silu",
    "hidden_size": 512,
    "intermediate_size": 1280,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "num_hidden_layers": 3,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "vocab_size": 32000,
    "eos_token_id": 1,
    "bos_token_id": 0,
}
OUTPUT = 12
RNG = random.Random(3)
PROMPTS = [[RNG.randrange(5, 31000) for _ in range(n)] for n in (1, 15, 16, 17, 33, 64, 100, 257, 300, 5)]


@pytest.fixture(scope="module")
def config_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("dummy") / "config.json"
    path.write_text(json.dumps(SHAPE))
    return path


@pytest.fixture
def make(config_file: Path) -> Iterator[Any]:
    cores: list[EngineCore] = []

    def build(source: str = "", **options: Any) -> EngineCore:
        defaults = {"dtype": "float32", "kv_cache_gib": 0.5, "max_num_seqs": 24, "prefix_caching": False}
        config = EngineConfig(**defaults | options)
        core = loader.load_engine(source or f"dummy:{config_file}", config, prefix_key=b"k" * 32).core
        poison(core)
        cores.append(core)
        return core

    yield build
    for core in cores:
        core.scheduler.check()
        core.shutdown()


def requests(prompts: list[list[int]] = PROMPTS, **params: Any) -> list[EngineRequest]:
    return [EngineRequest(f"r{i}", p, greedy(OUTPUT, **params)) for i, p in enumerate(prompts)]


def ids(answers: dict[tuple[str, int], Any]) -> dict[Any, list[int]]:
    return {key: answer.token_ids for key, answer in answers.items()}


def test_the_same_weights_say_the_same_on_both_devices(
    make: Any, config_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Dummy weights differ between devices, so they are written down once and read on both."""
    from safetensors.torch import save_file

    from footplate.engine.weights.source import resolve_source
    from footplate.engine.weights.tensor_names import hf_names
    from footplate.engine.weights.tensor_stores import DummyStore
    from footplate.engine.weights.weight_source import open_model

    model, _ = open_model(resolve_source(f"dummy:{config_file}"))
    store = DummyStore(model)
    tensors = {file_name: store.tensor(name) for name, file_name in hf_names(model).items()}
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(config_file.read_text())
    with monkeypatch.context() as patched:
        patched.setattr(loader, "_choose_ops", lambda place: TorchOps())
        on_cpu = make(f"hf:{tmp_path}", device="cpu")
    want = run(on_cpu, *requests(logprobs=3))
    got = run(make(f"hf:{tmp_path}"), *requests(logprobs=3))
    assert ids(got) == ids(want)
    for key, answer in want.items():
        found = [entry.logprob for entry in got[key].logprobs]
        assert found == pytest.approx([entry.logprob for entry in answer.logprobs], abs=1e-3)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"async_scheduling": False},
        {"max_num_batched_tokens": 32},
        {"kv_cache_gib": 36 * 16 * 3072 / 2**30},
    ],
    ids=["ahead", "not ahead", "in chunks", "preempted"],
)
def test_in_float32_no_mate_cut_or_preemption_changes_an_id(make: Any, options: dict[str, Any]) -> None:
    alone = make()
    want = {}
    for request in requests():
        want |= ids(run(alone, request))
    core = make(**options)
    assert ids(run(core, *requests())) == want
    assert ids(run(core, *reversed(requests()))) == want
    if "kv_cache_gib" in options:
        assert core.stats().preemptions > 0


def test_graphs_and_single_launches_say_the_same(make: Any) -> None:
    core = make(dtype="bfloat16")
    with_graphs = run(core, *requests(temperature=0.8, seed=5))
    core.runner._graphs.release()
    assert ids(run(core, *requests(temperature=0.8, seed=5))) == ids(with_graphs)


def test_every_kind_of_draw_runs_beside_every_other(make: Any) -> None:
    core = make()
    kinds: list[dict[str, Any]] = [
        {},
        {"temperature": 1.0, "seed": 1},
        {"temperature": 0.7, "top_k": 20, "seed": 2},
        {"temperature": 0.9, "top_p": 0.8, "min_p": 0.02, "seed": 3},
        {"repetition_penalty": 1.2, "presence_penalty": 0.4},
        {"logprobs": 5, "prompt_logprobs": 1},
    ]
    mixed = [EngineRequest(f"k{i}", PROMPTS[i], greedy(OUTPUT, **kind)) for i, kind in enumerate(kinds)]
    together = ids(run(core, *mixed))
    for request in mixed:
        assert ids(run(core, request))[request.request_id, 0] == together[request.request_id, 0]


def _bits(core: EngineCore, batch: list[EngineRequest]) -> dict[Any, Any]:
    answers = run(core, *batch)
    return {key: (a.token_ids, [entry.logprob for entry in a.logprobs]) for key, a in answers.items()}


def _alone_and_together(make: Any, **options: Any) -> tuple[dict[Any, Any], dict[Any, Any]]:
    core = make(dtype="bfloat16", **options)
    together = _bits(core, requests(logprobs=1))
    alone = {}
    for request in requests(logprobs=1):
        alone |= _bits(core, [request])
    return alone, together


def test_in_deterministic_mode_a_rows_bits_are_its_own(make: Any) -> None:
    alone, together = _alone_and_together(make, deterministic=True)
    assert together == alone
    chunked = make(dtype="bfloat16", deterministic=True, max_num_batched_tokens=48)
    assert _bits(chunked, requests(logprobs=1)) == alone


def test_without_deterministic_mode_bits_do_depend_on_the_batch(make: Any) -> None:
    """If this fails the mode is not needed, or the test above proves nothing."""
    alone, together = _alone_and_together(make)
    assert together != alone


def test_rows_with_a_shared_prefix_say_what_they_say_apart(make: Any) -> None:
    prefix = [RNG.randrange(5, 31000) for _ in range(600)]
    prompts = [prefix + [RNG.randrange(5, 31000) for _ in range(20 + i)] for i in range(6)]
    want = ids(run(make(), *requests(prompts)))
    core = make(prefix_caching=True)
    run(core, *requests([prefix]))
    found = []
    core.runner._graphs.holds = lambda count: False  # prefixes are shared in steps without graphs
    find = core.runner._groups.find
    core.runner._groups.find = lambda *a: found.append(find(*a)) or found[-1]
    assert ids(run(core, *requests(prompts))) == want
    assert any(group is not None for group in found)
