"""A row's bits depend on its own sequence alone: not on its batch, the cut of its prompt, or threads."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import pytest
import torch

from footplate.engine.kernels import cases
from footplate.engine.kernels.cpu_decoder import CpuDecoder, LayerWeights
from footplate.engine.kernels.cpu_ops import CpuOps
from footplate.engine.kernels.linear.packed import PackedLinear, PackedMatrix
from footplate.engine.kernels.ops import AttentionBatch, AttentionSpec
from footplate.engine.kernels.registry import cpu_ops
from footplate.engine.layers.layer_stack import last_tokens


@pytest.fixture
def ops() -> Iterator[CpuOps]:
    shared = cpu_ops()
    yield shared
    shared.set_threads(2)


@pytest.mark.parametrize("type_name", cases.QUANTISED_TYPES)
def test_packed_rows_are_the_same_bits_in_every_batch(ops: CpuOps, type_name: str) -> None:
    linear = PackedLinear(PackedMatrix(ops.library, [cases.stored_rows(type_name, 45, 512)]))
    x = torch.randn(21, 512)
    ops.set_threads(1)
    alone = torch.cat([linear(x[row : row + 1]).clone() for row in range(21)])
    for threads in (1, 2, 5):
        ops.set_threads(threads)
        for size in (2, 3, 4, 5, 8, 21):
            batches = [linear(x[at : at + size].contiguous()).clone() for at in range(0, 21, size)]
            assert torch.equal(torch.cat(batches), alone)


@pytest.mark.parametrize("shape", ["mixed", "window", "heads-8", "odd-blocks", "chunk-edges", "soft-cap"])
def test_attention_rows_are_the_same_bits_in_every_batch(ops: CpuOps, shape: str) -> None:
    described = cases.ATTENTION_SHAPES[shape]
    batch, spec = cases.attention_batch(described), cases.attention_spec(described)
    kv = cases.filled_cache(described, batch)
    q = torch.randn(batch.positions.shape[0], described.heads[0], described.head_dim)
    ops.set_threads(1)
    together = ops.attention(q, spec, batch, kv)
    ops.set_threads(3)
    assert torch.equal(ops.attention(q, spec, batch, kv), together)
    for row in range(q.shape[0]):
        alone = ops.attention(q[row : row + 1].contiguous(), spec, _one_row(batch, row), kv)
        assert torch.equal(alone[0], together[row])


def _one_row(batch: AttentionBatch, row: int) -> AttentionBatch:
    """The row as a decode step of its sequence, whose context ends with it."""
    sequence = int((batch.query_starts <= row).sum()) - 1
    position = int(batch.positions[row])
    return AttentionBatch(
        positions=batch.positions[row : row + 1],
        slots=batch.slots[row : row + 1],
        query_starts=torch.tensor([0, 1], dtype=torch.int32),
        context_lens=torch.tensor([position + 1], dtype=torch.int32),
        block_tables=batch.block_tables[sequence : sequence + 1].contiguous(),
        max_query_len=1,
        max_context_len=position + 1,
    )


HIDDEN, INNER, HEADS, HEAD_DIM = 64, 96, (4, 2), 32


def _layers(ops: CpuOps, post_norms: bool, num_layers: int = 2) -> list[LayerWeights]:
    def packed(seed: int, rows: Sequence[int], columns: int) -> PackedLinear:
        segments = [cases.stored_rows("Q4_1", count, columns, seed + at) for at, count in enumerate(rows)]
        return PackedLinear(PackedMatrix(ops.library, segments))

    angles = torch.randn(256, HEAD_DIM // 2)
    cos_sin = torch.cat([angles.cos(), angles.sin()], dim=-1)
    spec = AttentionSpec(*HEADS, HEAD_DIM, HEAD_DIM**-0.5)
    q_size, kv_size = HEADS[0] * HEAD_DIM, HEADS[1] * HEAD_DIM
    layers = []
    for index in range(num_layers):
        layer = LayerWeights(
            qkv=packed(index, (q_size, kv_size, kv_size), HIDDEN),
            o=packed(index + 10, (HIDDEN,), q_size),
            gate_up=packed(index + 20, (INNER, INNER), HIDDEN),
            down=packed(index + 30, (HIDDEN,), INNER),
            attn_norm=torch.rand(HIDDEN),
            mlp_norm=torch.rand(HIDDEN),
            spec=replace(spec),
            cos_sin=cos_sin,
        )
        if post_norms:
            extra = {name: torch.rand(HIDDEN) for name in ("post_attn_norm", "post_mlp_norm")}
            extra |= {name: torch.rand(HEAD_DIM) for name in ("q_norm", "k_norm")}
            layer = replace(layer, **extra)
        layers.append(layer)
    return layers


def _one_by_one(
    ops: CpuOps,
    layers: Sequence[LayerWeights],
    kv: Sequence[tuple[torch.Tensor, torch.Tensor]],
    x: torch.Tensor,
    batch: AttentionBatch,
) -> torch.Tensor:
    for layer, cache in zip(layers, kv, strict=True):
        norms = None
        if layer.q_norm is not None and layer.k_norm is not None:
            norms = (layer.q_norm, layer.k_norm, 1e-6)
        qkv = layer.qkv(ops.rms_norm(x, layer.attn_norm, 1e-6))
        q = ops.rope_and_cache(qkv, layer.spec, batch, layer.cos_sin, cache, norms)
        mixed = layer.o(ops.attention(q, layer.spec, batch, cache))
        x = x + (
            ops.rms_norm(mixed, layer.post_attn_norm, 1e-6) if layer.post_attn_norm is not None else mixed
        )
        gate_up = layer.gate_up(ops.rms_norm(x, layer.mlp_norm, 1e-6))
        mixed = layer.down(ops.gated_activation(gate_up, "silu"))
        x = x + (ops.rms_norm(mixed, layer.post_mlp_norm, 1e-6) if layer.post_mlp_norm is not None else mixed)
    return x


def _pool(layers: Sequence[LayerWeights], num_blocks: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    size = (num_blocks, HEADS[1], cases.BLOCK_SIZE, HEAD_DIM)
    return [(torch.full(size, float("nan")), torch.full(size, float("nan"))) for _ in layers]


@pytest.mark.parametrize("post_norms", [False, True], ids=["plain", "post-norms"])
def test_decoder_in_one_call_is_the_ops_one_by_one(ops: CpuOps, post_norms: bool) -> None:
    layers = _layers(ops, post_norms)
    batch = cases.attention_batch(cases.AttentionShape(((20, 20), (1, 1), (70, 70)), heads=HEADS))
    x = torch.randn(batch.positions.shape[0], HIDDEN)
    ours, theirs = _pool(layers, 9), _pool(layers, 9)
    wanted = _one_by_one(ops, layers, theirs, x.clone(), batch)
    found = CpuDecoder(ops, layers, ours, 1e-6, "silu")(x.clone(), batch)
    torch.testing.assert_close(found, wanted, atol=1e-5, rtol=1e-4)
    for mine, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine, other, atol=1e-5, rtol=1e-4, equal_nan=True)


def test_a_prompt_cut_into_steps_gives_the_same_bits(ops: CpuOps) -> None:
    layers = _layers(ops, post_norms=True)
    length = 150
    x = torch.randn(length, HIDDEN)
    whole = CpuDecoder(ops, layers, _pool(layers, 10), 1e-6, "gelu_tanh")(x.clone(), _prompt(0, length))
    for places in ((1,), (37, 128, 129), (149,), tuple(range(100, 150))):
        decoder = CpuDecoder(ops, layers, _pool(layers, 10), 1e-6, "gelu_tanh")
        parts = [decoder(x[a:b].clone(), _prompt(a, b)) for a, b in cases.cuts(length, places)]
        assert torch.equal(torch.cat(parts), whole)


@pytest.mark.parametrize("post_norms", [False, True], ids=["plain", "post-norms"])
def test_last_tokens_alone_have_the_bits_of_whole_prompts(ops: CpuOps, post_norms: bool) -> None:
    layers = _layers(ops, post_norms)
    batch = cases.attention_batch(cases.AttentionShape(((20, 20), (1, 1), (70, 70), (9, 40)), heads=HEADS))
    x = torch.randn(batch.positions.shape[0], HIDDEN)
    whole_kv, last_kv = _pool(layers, 13), _pool(layers, 13)
    for pool in (whole_kv, last_kv):
        for pair in pool:
            for cache in pair:  # what an earlier step left of the last sequence
                cache.copy_(torch.arange(cache.numel()).view(cache.shape).sin())
    whole = CpuDecoder(ops, layers, whole_kv, 1e-6, "silu")(x.clone(), batch)
    picked = last_tokens(batch)
    last = CpuDecoder(ops, layers, last_kv, 1e-6, "silu")(x.clone(), batch, picked.batch)
    assert picked.rows.tolist() == [19, 20, 90, 99]
    assert torch.equal(last, whole[picked.rows])
    for kept, made in zip(whole_kv, last_kv, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(kept, made, strict=True))


def _prompt(begin: int, end: int) -> AttentionBatch:
    return AttentionBatch(
        positions=torch.arange(begin, end, dtype=torch.int32),
        slots=torch.arange(begin, end),
        query_starts=torch.tensor([0, end - begin], dtype=torch.int32),
        context_lens=torch.tensor([end], dtype=torch.int32),
        block_tables=torch.arange(10, dtype=torch.int32)[None],
        max_query_len=end - begin,
        max_context_len=end,
    )
