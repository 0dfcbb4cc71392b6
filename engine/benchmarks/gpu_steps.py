"""The calls that a step of a model consists of, over memory cut from one pool, and torch's counterparts."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from types import SimpleNamespace

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from footplate.engine.kernels.attention.launch import AttentionOptions, attention
from footplate.engine.kernels.ops import AttentionBatch, AttentionSpec
from footplate.engine.kernels.sample.kernel import sample
from footplate.engine.kernels.skinny_linear.kernel import (
    linear_add,
    norm_gate_up,
    norm_linear,
    norm_qkv_rope_cache,
)
from footplate.engine.kernels.skinny_linear.reference import QkvLayer
from footplate.engine.kernels.skinny_linear.tiling import Tiling
from footplate.engine.kernels.streamed_block.block import Block
from footplate.engine.kernels.streamed_block.launch import new_counters, streamed_block

Call = Callable[[], object]
BLOCK_SIZE = 16
EPS = 1e-5
CONTEXT = 640  # tokens a row of a chain has behind it


@dataclass(frozen=True, slots=True)
class Model:
    """The sizes of a decoder."""

    name: str
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int
    layers: int
    vocab: int

    def matrix(self, op: str) -> tuple[int, int]:
        """(N, K) of the weight of an op."""
        return {
            "norm_qkv_rope_cache": ((self.heads + 2 * self.kv_heads) * self.head_dim, self.hidden),
            "linear_add_o": (self.hidden, self.heads * self.head_dim),
            "norm_gate_up": (2 * self.ffn, self.hidden),
            "linear_add_down": (self.hidden, self.ffn),
            "norm_linear_head": (self.vocab, self.hidden),
        }[op]

    @property
    def spec(self) -> AttentionSpec:
        return AttentionSpec(self.heads, self.kv_heads, self.head_dim, self.head_dim**-0.5)


MODELS = {
    "8b": Model("8B", 4096, 32, 8, 128, 14336, 32, 128256),
    "1b": Model("1B", 2048, 32, 8, 64, 8192, 16, 128256),
}
TINY = Model("tiny", 64, 4, 2, 16, 96, 2, 300)
# Sequences, context, whether all of it is new.
ATTENTIONS = {
    "cuda": (
        *((n, 640, False) for n in (1, 8, 32, 128, 256)),
        (1, 32768, False),
        (1, 8192, True),
        (1, 32768, True),
    ),
    "cpu": ((2, 40, False), (1, 33, True)),
}


def batch_of(num_rows: int, context: int, device: torch.device, is_prefill: bool = False) -> AttentionBatch:
    """Sequences of one length each, with one new token or all of them new; blocks lie scattered."""
    width = -(-context // BLOCK_SIZE)
    tables = torch.randperm(num_rows * width, device=device).view(num_rows, width).int()
    new = context if is_prefill else 1
    at = torch.arange(context - new, context, device=device)
    slots = tables[:, at // BLOCK_SIZE].long() * BLOCK_SIZE + at % BLOCK_SIZE
    return AttentionBatch(
        positions=at.int().repeat(num_rows),
        slots=slots.flatten(),
        query_starts=torch.arange(0, num_rows * new + 1, new, device=device).int(),
        context_lens=torch.full((num_rows,), context, dtype=torch.int32, device=device),
        block_tables=tables,
        max_query_len=new,
        max_context_len=context,
        num_decodes=0 if is_prefill else num_rows,
    )


def caches(model: Model, num_tokens: int, like: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Random keys and values for so many tokens."""
    shape = (-(-num_tokens // BLOCK_SIZE), model.kv_heads, BLOCK_SIZE, model.head_dim)
    keys, values = (torch.empty(shape, dtype=like.dtype, device=like.device).normal_() for _ in range(2))
    return keys, values


def product_call(
    model: Model, op: str, weight: torch.Tensor, num_rows: int, tiling: Tiling | None, *, use_pdl: bool
) -> Call:
    """One fused product over a weight, with inputs of its own."""
    device, dtype = weight.device, weight.dtype
    x = torch.empty(num_rows, weight.shape[1], dtype=dtype, device=device).normal_()
    norm = torch.ones(weight.shape[1], device=device)
    if op == "norm_gate_up":
        return lambda: norm_gate_up(x, norm, EPS, weight, "silu", use_pdl=use_pdl, tiling=tiling)
    if op == "norm_linear_head":
        return lambda: norm_linear(x, norm, EPS, weight, use_pdl=use_pdl, tiling=tiling)
    if op == "norm_qkv_rope_cache":
        angles = torch.ones(CONTEXT, model.head_dim, device=device)
        layer = QkvLayer(weight, norm, EPS, model.spec, angles)
        batch = batch_of(num_rows, 1, device)
        kv = caches(model, num_rows * BLOCK_SIZE, x)
        return lambda: norm_qkv_rope_cache(x, layer, batch, kv, use_pdl=use_pdl, tiling=tiling)
    residual = torch.zeros(num_rows, weight.shape[0], dtype=dtype, device=device)
    return lambda: linear_add(x, weight, residual, use_pdl=use_pdl, tiling=tiling)


def _cut(pool: torch.Tensor, model: Model, ops: Sequence[str]) -> Iterator[list[torch.Tensor]]:
    """Weights of one layer after another, until the layers or the pool end."""
    begin = 0
    for _ in range(model.layers):
        layer = []
        for op in ops:
            shape = model.matrix(op)
            layer.append(pool[begin : begin + shape[0] * shape[1]].view(shape))
            begin += shape[0] * shape[1]
        yield layer


def chain_calls(
    model: Model,
    pool: torch.Tensor,
    ops: Sequence[str],
    num_rows: int,
    *,
    use_pdl: bool,
    with_attention: bool,
) -> tuple[list[Call], list[Call], int]:
    """(one step through all layers, its products by cuBLAS, bytes of weights and of keys and values)."""
    device = pool.device
    residual = torch.empty(num_rows, model.hidden, dtype=pool.dtype, device=device).normal_()
    norm = torch.ones(model.hidden, device=device)
    angles = torch.ones(CONTEXT, model.head_dim, device=device)
    batch = batch_of(num_rows, CONTEXT if with_attention else BLOCK_SIZE, device)
    options = AttentionOptions(use_pdl=use_pdl)
    layers = list(_cut(pool, model, ops))
    kvs = [caches(model, num_rows * batch.max_context_len, residual) for _ in layers]
    inner = torch.empty(num_rows, model.ffn, dtype=pool.dtype, device=device).normal_()

    def layer_call(weights: list[torch.Tensor], kv: tuple[torch.Tensor, torch.Tensor]) -> Call:
        qkv, out, gate_up, down = weights
        static = QkvLayer(qkv, norm, EPS, model.spec, angles)

        def call() -> None:
            q = norm_qkv_rope_cache(residual, static, batch, kv, use_pdl=use_pdl)
            attended = attention(q, model.spec, batch, kv, options) if with_attention else q.flatten(1)
            linear_add(attended, out, residual, use_pdl=use_pdl)
            gated = norm_gate_up(residual, norm, EPS, gate_up, "silu", use_pdl=use_pdl)
            linear_add(gated, down, residual, use_pdl=use_pdl)

        return call

    def bare(weights: list[torch.Tensor]) -> Call:
        wide = torch.empty(num_rows, weights[1].shape[1], dtype=pool.dtype, device=device).normal_()
        return lambda: [
            F.linear(x, w) for x, w in zip((residual, wide, residual, inner), weights, strict=True)
        ]

    num_bytes = 2 * sum(w.numel() for layer in layers for w in layer)
    if with_attention:
        num_bytes += 4 * len(layers) * num_rows * CONTEXT * model.kv_heads * model.head_dim
    ours = [layer_call(weights, kv) for weights, kv in zip(layers, kvs, strict=True)]
    return ours, [bare(weights) for weights in layers], num_bytes


def block_calls(
    model: Model, pool: torch.Tensor, ops: Sequence[str], num_rows: int
) -> tuple[list[Call], list[Call], int]:
    """(the streamed block of each layer, its four products by cuBLAS, bytes of a layer's weights)."""
    device = pool.device
    gain = torch.ones(model.hidden, device=device)
    layers = list(_cut(pool, model, ops))
    blocks = [
        Block(out, gain, gate_up, down, gain, layers[(i + 1) % len(layers)][0], EPS, "silu")
        for i, (_, out, gate_up, down) in enumerate(layers)
    ]
    attended = torch.empty(num_rows, layers[0][1].shape[1], dtype=pool.dtype, device=device).normal_()
    residual = torch.zeros(num_rows, model.hidden, dtype=pool.dtype, device=device)
    inner = torch.empty(num_rows, model.ffn, dtype=pool.dtype, device=device).normal_()
    counters = new_counters(len(blocks), device)

    def ours(i: int) -> Call:
        following = counters[(i + 1) % len(blocks)]
        return lambda: streamed_block(attended, blocks[i], residual, counters[i], following, use_pdl=True)

    def bare(block: Block) -> Call:
        assert block.next_qkv is not None
        inputs = (attended, residual, inner, residual)
        weights = (block.out, block.gate_up, block.down, block.next_qkv)
        return lambda: [F.linear(x, w) for x, w in zip(inputs, weights, strict=True)]

    num_bytes = 2 * sum(weight.numel() for weight in layers[0])
    return [ours(i) for i in range(len(blocks))], [bare(block) for block in blocks], num_bytes


def attention_calls(
    model: Model, device: torch.device, num_rows: int, context: int, is_prefill: bool
) -> Iterator[tuple[str, list[Call]]]:
    """Our attention over paged caches, then torch's over contiguous ones, by backend."""
    batch = batch_of(num_rows, context, device, is_prefill)
    new = context if is_prefill else 1
    like = torch.empty(0, dtype=torch.bfloat16 if device.type == "cuda" else torch.float32, device=device)
    kv_bytes = 4 * num_rows * context * model.kv_heads * model.head_dim
    # Decode steps find their keys in memory, not in L2: as many layers as that takes.
    count = 1 if is_prefill or device.type == "cpu" else max(2, min(64, (400 << 20) // kv_bytes))
    q = torch.empty(num_rows * new, model.heads, model.head_dim, dtype=like.dtype, device=device).normal_()
    kvs = [caches(model, num_rows * batch.block_tables.shape[1] * BLOCK_SIZE, like) for _ in range(count)]
    yield "ours", [lambda kv=kv: attention(q, model.spec, batch, kv) for kv in kvs]
    if device.type == "cuda" and not is_prefill:
        early = AttentionOptions(use_pdl=True)
        yield "pdl", [lambda kv=kv: attention(q, model.spec, batch, kv, early) for kv in kvs]
    del kvs
    shape = (num_rows, model.kv_heads, context, model.head_dim)
    dense_q = q.view(num_rows, new, model.heads, model.head_dim).transpose(1, 2)
    pairs = [torch.empty((2, *shape), dtype=like.dtype, device=device).normal_() for _ in range(count)]
    backends = {"torch flash": SDPBackend.FLASH_ATTENTION, "torch cuDNN": SDPBackend.CUDNN_ATTENTION}
    if device.type == "cpu":
        backends = {"torch": SDPBackend.MATH}
    for name, backend in backends.items():

        def dense(pair: torch.Tensor, backend: SDPBackend = backend) -> torch.Tensor:
            with sdpa_kernel(backend):
                return F.scaled_dot_product_attention(
                    dense_q, pair[0], pair[1], is_causal=is_prefill, enable_gqa=True
                )

        yield name, [lambda p=p, dense=dense: dense(p) for p in pairs]


def draw_calls(device: torch.device, vocab_size: int, num_rows: int, kind: str) -> tuple[Call, Call]:
    """Our draw and torch's arg-max, over logits as peaked as a language model's."""
    logits = torch.empty(num_rows, vocab_size, device=device).normal_(std=3.0).bfloat16()
    truncated = kind == "truncated"

    def column(value: float, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.full((num_rows,), value, dtype=dtype, device=device)

    state = SimpleNamespace(
        tokens=torch.zeros(num_rows, 8, dtype=torch.int32, device=device),
        lengths=column(3, torch.int32),
        temperature=column(0.0 if kind == "greedy" else 0.8),
        top_k=column(50 if truncated else 0, torch.int32),
        top_p=column(0.9 if truncated else 1.0),
        min_p=column(0.0),
        seeds=column(7, torch.int64),
    )
    rows = torch.arange(num_rows, dtype=torch.int32, device=device)
    return lambda: sample(logits, rows, state), lambda: logits.argmax(dim=-1)
