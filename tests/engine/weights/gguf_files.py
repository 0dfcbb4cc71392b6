"""Small GGUF files for tests, written field by field so that each can be made wrong."""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from footplate.engine.kernels import cases
from footplate.engine.weights.gguf import TENSOR_TYPES

TYPE_CODES = {known.name: code for code, known in TENSOR_TYPES.items()}


@dataclass(frozen=True, slots=True)
class Tensor:
    """A tensor to write: outermost dimension first, as in torch."""

    name: str
    shape: tuple[int, ...]
    type_name: str
    data: bytes


def float_tensor(name: str, values: np.ndarray[Any, Any]) -> Tensor:
    return Tensor(name, values.shape, "F32", values.astype("<f4").tobytes())


def quantised_tensor(name: str, type_name: str, rows: int, columns: int, seed: int = 0) -> Tensor:
    raw = cases.stored_rows(type_name, rows, columns, seed).raw
    return Tensor(name, (rows, columns), type_name, raw.tobytes())


def string(text: str) -> bytes:
    encoded = text.encode()
    return struct.pack("<Q", len(encoded)) + encoded


def value(content: Any) -> bytes:
    """A metadata value with its type code in front."""
    if isinstance(content, bool):
        return struct.pack("<I?", 7, content)
    if isinstance(content, int):
        return struct.pack("<II", 4, content)
    if isinstance(content, float):
        return struct.pack("<If", 6, content)
    if isinstance(content, str):
        return struct.pack("<I", 8) + string(content)
    items: Sequence[Any] = content
    head = struct.pack("<II", 9, 8 if isinstance(items[0], str) else 6) + struct.pack("<Q", len(items))
    return head + b"".join(
        string(item) if isinstance(item, str) else struct.pack("<f", item) for item in items
    )


def gguf_bytes(
    metadata: Mapping[str, Any], tensors: Sequence[Tensor] = (), version: int = 3, alignment: int = 32
) -> bytes:
    """A whole file."""
    head = b"GGUF" + struct.pack("<IQQ", version, len(tensors), len(metadata))
    head += b"".join(string(key) + value(content) for key, content in metadata.items())
    data = b""
    for tensor in tensors:
        data += b"\0" * (-len(data) % alignment)
        head += string(tensor.name) + struct.pack("<I", len(tensor.shape))
        head += b"".join(struct.pack("<Q", size) for size in reversed(tensor.shape))
        head += struct.pack("<IQ", TYPE_CODES[tensor.type_name], len(data))
        data += tensor.data
    return head + b"\0" * (-len(head) % alignment) + data


def write_gguf(path: Path, metadata: Mapping[str, Any], tensors: Sequence[Tensor] = ()) -> Path:
    path.write_bytes(gguf_bytes(metadata, tensors))
    return path


HIDDEN, INNER, HEAD_DIM, VOCABULARY = 64, 96, 16, 40


def llama_metadata(**changes: Any) -> dict[str, Any]:
    """A two-layer llama of 4 heads over 2 KV heads; a change to None leaves the key out."""
    metadata: dict[str, Any] = {
        "general.architecture": "llama",
        "llama.block_count": 2,
        "llama.context_length": 128,
        "llama.embedding_length": HIDDEN,
        "llama.feed_forward_length": INNER,
        "llama.attention.head_count": 4,
        "llama.attention.head_count_kv": 2,
        "llama.attention.layer_norm_rms_epsilon": 1e-5,
        "llama.rope.freq_base": 10000.0,
        "llama.rope.dimension_count": HEAD_DIM,
        "tokenizer.ggml.tokens": ["<s>", "</s>", "é"],
        "tokenizer.ggml.scores": [0.5, -1.0, 2.0],
        "tokenizer.ggml.eos_token_id": 1,
    }
    for key, content in changes.items():
        metadata[key.replace("__", ".")] = content
    return {key: content for key, content in metadata.items() if content is not None}


def llama_tensors(type_name: str = "Q4_1") -> list[Tensor]:
    """Every tensor of that llama, its head tied."""
    tensors = [
        quantised_tensor("token_embd.weight", "Q8_0", VOCABULARY, HIDDEN, 1),
        float_tensor("output_norm.weight", np.full(HIDDEN, 0.5)),
    ]
    matrices = {
        "attn_q": (HIDDEN, HIDDEN),
        "attn_k": (32, HIDDEN),
        "attn_v": (32, HIDDEN),
        "attn_output": (HIDDEN, HIDDEN),
        "ffn_gate": (INNER, HIDDEN),
        "ffn_up": (INNER, HIDDEN),
        "ffn_down": (HIDDEN, INNER),
    }
    for layer in range(2):
        for seed, (name, (rows, columns)) in enumerate(matrices.items()):
            tensors.append(
                quantised_tensor(f"blk.{layer}.{name}.weight", type_name, rows, columns, 10 * layer + seed)
            )
        for name in ("attn_norm", "ffn_norm"):
            tensors.append(float_tensor(f"blk.{layer}.{name}.weight", np.ones(HIDDEN)))
    return tensors
