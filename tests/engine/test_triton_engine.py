"""The Triton backend as a whole engine, in Triton's interpreter: the path of a GPU without its graphs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from footplate.engine import device_loader, loader
from footplate.engine.config import EngineConfig
from footplate.engine.core import EngineCore
from footplate.engine.layers.layer_stack import LayerStack
from footplate.engine.models.decoder import Decoder
from footplate.engine.runner.step_kernels import StepKernels
from footplate.engine.types import EngineRequest
from tests.engine.answers import greedy, poison, run

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="tests/gpu runs this on the GPU itself")

SHAPE = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_act": "silu",
    "hidden_size": 48,
    "intermediate_size": 96,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "num_hidden_layers": 2,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": True,
    "vocab_size": 600,
    "eos_token_id": 1,
    "bos_token_id": 0,
}
PROMPTS = [[(7 * i + n) % 590 + 5 for i in range(n)] for n in (3, 18, 33)]
FUSED_TOKENS = 16  # fewer than in production, so that prompts take the general path


def requests() -> list[EngineRequest]:
    kinds: list[dict[str, Any]] = [
        {},
        {"temperature": 0.9, "seed": 4},
        {"temperature": 0.8, "top_p": 0.7, "seed": 1},
    ]
    pairs = zip(PROMPTS, kinds, strict=True)
    return [EngineRequest(f"r{i}", prompt, greedy(5, **kind)) for i, (prompt, kind) in enumerate(pairs)]


def answers(config_file: Path, config: EngineConfig) -> dict[tuple[str, int], list[int]]:
    core: EngineCore = loader.load_engine(f"dummy:{config_file}", config, prefix_key=b"k" * 32).core
    poison(core)
    found = run(core, *requests())
    core.shutdown()
    return {key: answer.token_ids for key, answer in found.items()}


def test_triton_kernels_say_what_the_native_ones_say(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from footplate.engine.kernels.decode_step.kernel import decode_inputs
    from footplate.engine.kernels.sample.kernel import sample
    from footplate.engine.kernels.triton_ops import TritonOps
    from footplate.engine.models.fused_decoder import fuse

    config_file = tmp_path / "config.json"
    config_file.write_text(json.dumps(SHAPE))
    config = EngineConfig(dtype="float32", device="cpu", kv_cache_gib=0.001, max_num_seqs=4)
    want = answers(config_file, config)

    ops = TritonOps()

    def bind(decoder: Decoder, caches: Any) -> LayerStack:
        def general(residual: torch.Tensor, batch: Any, last: Any) -> torch.Tensor:
            return decoder._run_layers(residual, batch, last, caches)

        fused = fuse(ops, decoder.layers, caches, general, FUSED_TOKENS)
        assert fused is not None
        return fused

    monkeypatch.setattr(loader, "_choose_ops", lambda place: ops)
    monkeypatch.setattr(loader, "_on_cpu", loader._on_device)
    monkeypatch.setattr(device_loader, "torch_step", lambda: StepKernels(decode_inputs, sample))
    monkeypatch.setattr(device_loader, "WARM_UP_LENGTHS", ())
    monkeypatch.setattr(Decoder, "bind", bind)
    assert answers(config_file, config) == want
