"""On a GPU: safetensors come by pinned buffers and side streams, whole, and without a second copy."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from footplate.engine.kernels.linear.dense import DenseLinear
from footplate.engine.weights import streaming
from footplate.engine.weights.model_config import config_from_json
from footplate.engine.weights.safetensors import read_folder
from footplate.engine.weights.source import ModelSource
from footplate.engine.weights.streaming import Placement, stream
from footplate.engine.weights.tensor_names import hf_names, tensor_shapes
from footplate.engine.weights.weight_source import open_model
from tests.gpu.test_faults import SHAPE

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]
FLOATS = (torch.float32, torch.float16, torch.bfloat16)


def save(folder: Path, tensors: dict[str, torch.Tensor], num_shards: int = 3) -> None:
    from safetensors.torch import save_file

    index = {}
    for shard in range(num_shards):
        part = dict(list(tensors.items())[shard::num_shards])
        save_file(part, folder / f"part-{shard}.safetensors")
        index |= dict.fromkeys(part, f"part-{shard}.safetensors")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))


@pytest.mark.parametrize("target", FLOATS)
def test_every_type_arrives_as_every_type_while_the_device_works(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, target: torch.dtype
) -> None:
    """Small slices make buffers come round often; the default stream still writes to memory it has freed."""
    monkeypatch.setattr(streaming, "SLICE", 1 << 16)
    torch.manual_seed(3)
    tensors = {f"t{i}": torch.randn(100 + 37 * i, 333).to(FLOATS[i % 3]) for i in range(24)}
    save(tmp_path, tensors)
    found = read_folder(tmp_path)
    for _ in range(5):
        busy = [torch.full((4096, 4096), float("nan"), device="cuda") for _ in range(4)]
        for tensor in busy:
            torch.mm(tensor, tensor, out=tensor.clone())
        del busy, tensor
        got = {name: torch.empty(value.shape, dtype=target, device="cuda") for name, value in tensors.items()}
        stream([Placement(found[name], got[name]) for name in tensors])
        for name, value in tensors.items():
            assert torch.equal(got[name].cpu(), value.to(target)), name


def test_a_models_matrices_are_whole_and_take_their_own_size_only(tmp_path: Path) -> None:
    shape = SHAPE | {"num_hidden_layers": 8, "tie_word_embeddings": False}
    (tmp_path / "config.json").write_text(json.dumps(shape))
    config = config_from_json(tmp_path / "config.json")
    tensors = {name: torch.randn(size).bfloat16() for name, size in tensor_shapes(config).items()}
    save(tmp_path, {hf_names(config)[name]: value for name, value in tensors.items()})
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    _, weights = open_model(ModelSource("hf", tmp_path, "hf"))
    stacks = [[f"layers.{i}.{p}" for p in part] for i in range(8) for part in ("qkv", ("gate", "up"), "o")]
    stacks += [[f"layers.{i}.down"] for i in range(8)] + [["head"]]
    made = [weights.linear(names, torch.bfloat16, "cuda") for names in stacks]
    table = weights.tensor("embed", torch.bfloat16, "cuda")
    weights.complete()
    peak = torch.cuda.max_memory_allocated() - before
    for names, linear in zip(stacks, made, strict=True):
        assert isinstance(linear, DenseLinear)
        assert torch.equal(linear.weight.cpu(), torch.cat([tensors[name] for name in names]))
    assert torch.equal(table.cpu(), tensors["embed"])
    held = sum(linear.weight.nbytes for linear in made if isinstance(linear, DenseLinear)) + table.nbytes
    assert peak < 1.05 * held + (1 << 20)
