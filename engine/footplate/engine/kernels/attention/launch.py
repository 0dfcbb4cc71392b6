"""Sending a step's rows to the attention kernels: single queries to splits of keys, the rest to tiles."""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace

import torch
import triton

from footplate.engine.kernels.attention import kernel
from footplate.engine.kernels.attention.tiles import (
    MAX_SPLITS,
    AttentionTiles,
    Splits,
    Tile,
    attention_tiles,
    decode_splits,
)
from footplate.engine.kernels.ops import AttentionBatch, AttentionSpec, PrefixGroups

BLOCK_SIZES = (8, 16, 32)  # each divides every tile and chunk
HOPPER_HEAD_DIMS = (64, 128)
# The kernels count offsets into a cache in 16 bytes of a 16-bit type, as 32-bit integers.
MAX_CACHE_ELEMENTS = 8 * 2**31
KvPair = tuple[torch.Tensor, torch.Tensor]
# The interpreter multiplies bfloat16 as if its bits were integers, so there every product is made in float32.
IS_INTERPRETED: bool = triton.knobs.runtime.interpret
_INTERPRETED_SMS = 4
FEW_SLOTS = 32
# Parts that the last program of a row and KV head merges itself: so many elements are 64 registers a thread.
MERGED_ELEMENTS = 8192
FIRST_COUNTS = 1024


@dataclass(frozen=True, slots=True)
class AttentionOptions:
    """What may be turned; None leaves it to the table."""

    tiles: AttentionTiles | None = None
    splits: Splits | None = None
    prefix_splits: Splits | None = None
    # A row's bits depend on its context alone: decode rows, too, go through the tiles of queries, which take
    # keys in one order whatever else is in the batch. Slow for long contexts.
    deterministic: bool = False
    use_pdl: bool = False  # start while the kernel before ends; Hopper and later


@dataclass(frozen=True, slots=True)
class DecodePlan:
    """How one launch over decode rows is cut."""

    num_rows: int
    tile: Tile
    splits: Splits
    prefix_tile: Tile
    prefix_splits: Splits | None  # None: no shared prefixes

    @property
    def num_slots(self) -> int:
        """Parts a row and head may leave in the workspace."""
        return self.splits.most + (self.prefix_splits.most if self.prefix_splits else 0)

    def workspace_size(self, spec: AttentionSpec) -> int:
        """float32 elements that `attention` needs: a part's values and its log-sum; 0 without parts."""
        if self.num_slots == 1:
            return 0
        return self.num_rows * spec.num_heads * self.num_slots * (spec.head_dim + 1)


@functools.cache
def _device_shape(device: torch.device) -> tuple[tuple[int, int] | None, int]:
    """(compute capability, multiprocessors); no capability in the interpreter."""
    if IS_INTERPRETED:
        return None, _INTERPRETED_SMS
    return torch.cuda.get_device_capability(device), torch.cuda.get_device_properties(
        device
    ).multi_processor_count


class Workspace:
    """Device memory for the parts of split rows; it grows, and what was handed out stays valid.

    Not for two streams at once. Reserve the most before capturing CUDA graphs: memory that is first made
    within a capture belongs to that graph.
    """

    def __init__(self) -> None:
        # The last one serves; earlier ones are kept because captured graphs write into them.
        self._buffers: list[torch.Tensor] = []
        self._counts: list[torch.Tensor] = []

    def counts(self, size: int, device: torch.device) -> torch.Tensor:
        """At least `size` int32 zeros; who counts in them leaves zeros."""
        if not self._counts or self._counts[-1].numel() < size:
            self._counts.append(torch.zeros(max(size, FIRST_COUNTS), dtype=torch.int32, device=device))
        return self._counts[-1]

    def reserve(self, size: int, device: torch.device) -> torch.Tensor:
        """At least `size` float32 elements, with any contents."""
        if not self._buffers or self._buffers[-1].numel() < size:
            self._buffers.append(torch.empty(size, dtype=torch.float32, device=device))
        return self._buffers[-1]


def decode_plan(
    q: torch.Tensor, spec: AttentionSpec, batch: AttentionBatch, options: AttentionOptions
) -> DecodePlan:
    """The plan that `attention` follows for the batch's decode rows."""
    num_sms, tiles = _device_shape(q.device)[1], _tiles(q, spec, options)
    splits = options.splits or decode_splits(batch.num_decodes, spec.num_kv_heads, num_sms)
    groups, prefix_splits = _groups(spec, batch), None
    if groups is not None:
        tiles_of_rows = _num_prefix_tiles(groups, tiles.prefix, spec)
        prefix_splits = options.prefix_splits or decode_splits(tiles_of_rows, spec.num_kv_heads, num_sms)
    return DecodePlan(batch.num_decodes, tiles.decode, splits, tiles.prefix, prefix_splits)


def _tiles(q: torch.Tensor, spec: AttentionSpec, options: AttentionOptions) -> AttentionTiles:
    group = spec.num_heads // spec.num_kv_heads
    return _widened(spec.head_dim, group, q.dtype, _device_shape(q.device)[0], options.tiles)


@functools.cache
def _widened(
    head_dim: int,
    group: int,
    dtype: torch.dtype,
    capability: tuple[int, int] | None,
    given: AttentionTiles | None,
) -> AttentionTiles:
    """The table's tiles, or the given ones, with room for all heads of a KV head."""
    chosen, heads = given or attention_tiles(head_dim, dtype, capability), triton.next_power_of_2(group)
    prefill, decode, prefix = (
        replace(tile, rows=max(tile.rows, heads)) for tile in (chosen.prefill, chosen.decode, chosen.prefix)
    )
    return AttentionTiles(prefill, decode, prefix)


def _groups(spec: AttentionSpec, batch: AttentionBatch) -> PrefixGroups | None:
    """The batch's groups where they help: a window moves off a prefix, row by row."""
    return None if spec.window else batch.prefix_groups


def _num_prefix_tiles(groups: PrefixGroups, tile: Tile, spec: AttentionSpec) -> int:
    members = tile.rows // (spec.num_heads // spec.num_kv_heads)
    return len(groups.rows) // members + len(groups.lens)


def attention(
    q: torch.Tensor,
    spec: AttentionSpec,
    batch: AttentionBatch,
    kv: KvPair,
    options: AttentionOptions | None = None,
    workspace: Workspace | None = None,
) -> torch.Tensor:
    """The contract of `Ops.attention`: [T, H, D] -> [T, H * D].

    Takes `decode_plan(...).workspace_size(spec)` elements from the workspace, or from one of its own.
    A decode row with an empty context gives zeros.
    """
    options = options or AttentionOptions()
    if options.deterministic and batch.num_decodes:
        batch = replace(batch, num_decodes=0, prefix_groups=None)
    if not q.is_contiguous() or batch.block_tables.stride(1) != 1:
        raise ValueError("attention needs contiguous queries and rows of block tables")
    if kv[0].stride() != kv[1].stride() or not kv[0][0].is_contiguous():
        raise ValueError("attention needs caches of one layout with contiguous blocks")
    if kv[0].shape[2] not in BLOCK_SIZES:
        raise ValueError(f"attention reads blocks of {BLOCK_SIZES} tokens, not of {kv[0].shape[2]}")
    if kv[0].numel() > MAX_CACHE_ELEMENTS or spec.head_dim % 8:
        raise ValueError(f"attention reads caches of up to {MAX_CACHE_ELEMENTS} elements in rows of whole 8s")
    launch = _Launch(q, torch.empty(q.shape, dtype=q.dtype, device=q.device), spec, batch, kv, options)
    if batch.num_decodes:
        launch.decode(workspace or Workspace())
    if q.shape[0] > batch.num_decodes:
        launch.prefill()
    return launch.output.flatten(1)


@dataclass(slots=True)
class _Launch:
    """One call's tensors, and the launches over them."""

    q: torch.Tensor
    output: torch.Tensor
    spec: AttentionSpec
    batch: AttentionBatch
    kv: KvPair
    options: AttentionOptions

    def _shape(self) -> dict[str, object]:
        """What all passes over keys are compiled for."""
        spec = self.spec
        return {
            "NUM_KV_HEADS": spec.num_kv_heads,
            "GROUP": spec.num_heads // spec.num_kv_heads,
            "HEAD_DIM": spec.head_dim,
            "COLUMNS": max(16, triton.next_power_of_2(spec.head_dim)),
            "BLOCK_SIZE": self.kv[0].shape[2],
            "SOFT_CAP": spec.soft_cap,
            "WIDE": IS_INTERPRETED or self.q.dtype != self.kv[0].dtype,
        }

    def _compiled(self, num_warps: int, num_stages: int) -> dict[str, object]:
        options: dict[str, object] = {"num_warps": num_warps, "num_stages": num_stages}
        if self.options.use_pdl:
            options["launch_pdl"] = True
        return options | {"USE_PDL": self.options.use_pdl}

    def _suits_hopper(self) -> bool:
        capability, same_type = _device_shape(self.q.device)[0], self.q.dtype == self.kv[0].dtype
        is_shaped = self.spec.head_dim in HOPPER_HEAD_DIMS and self.q.dtype.itemsize == 2
        return capability is not None and capability[0] == 9 and same_type and is_shaped

    def prefill(self) -> None:
        """Sequences after the decode rows; given tiles are not for the warp-specialised kernel."""
        batch, spec = self.batch, self.spec
        if self._suits_hopper() and self.options.tiles is None:
            from footplate.engine.kernels.attention.specialised import launch as specialised

            if specialised.suits(spec, self.kv[0]):
                specialised.launch_prefill(self.q, self.output, spec, batch, self.kv)
                return
        tile = _tiles(self.q, spec, self.options).prefill
        num_sequences = len(batch.context_lens) - batch.num_decodes
        queries = tile.rows // (spec.num_heads // spec.num_kv_heads)
        shape = self._shape()
        if tile.is_overlapped and self._suits_hopper():
            from footplate.engine.kernels.attention.hopper.kernel import prefill_kernel as launched

            compiled: dict[str, object] = {"num_warps": tile.num_warps}
            del shape["COLUMNS"], shape["WIDE"]
        else:
            launched = kernel.prefill_kernel
            compiled = self._compiled(tile.num_warps, tile.num_stages)
        # Each sequence may end within a tile; programs past the last tile leave at once.
        num_tiles = (self.q.shape[0] - batch.num_decodes) // queries + num_sequences
        launched[(spec.num_kv_heads, num_tiles)](
            self.q,
            self.output,
            *self.kv,
            batch.query_starts,
            batch.context_lens,
            batch.block_tables,
            batch.num_decodes,
            num_sequences,
            batch.block_tables.stride(0),
            self.kv[0].stride(0),
            spec.scale,
            WINDOW=spec.window,
            ROWS=tile.rows,
            KEYS=tile.keys,
            **shape,
            **compiled,
        )

    def decode(self, workspace: Workspace) -> None:
        """The leading rows with one query each."""
        plan = decode_plan(self.q, self.spec, self.batch, self.options)
        parts = self._parts(plan, workspace)
        if plan.prefix_splits is not None:
            self._read_prefixes(plan, plan.prefix_splits, parts)
        merge_slots = self._merge_slots(plan)
        self._read_rows(plan, parts, merge_slots, workspace)
        if plan.num_slots > 1 and not merge_slots:
            self._merge(plan, parts)

    def _merge_slots(self, plan: DecodePlan) -> int:
        """Parts that the decode kernel has room to merge itself; 0 where a launch of its own must."""
        group = triton.next_power_of_2(self.spec.num_heads // self.spec.num_kv_heads)
        room = MERGED_ELEMENTS // (group * triton.next_power_of_2(self.spec.head_dim))
        fits = plan.prefix_splits is None and 1 < plan.num_slots <= min(room, FEW_SLOTS)
        return min(room, FEW_SLOTS) if fits else 0

    def _parts(self, plan: DecodePlan, workspace: Workspace) -> KvPair:
        """Memory for what splits leave: values and log-sums."""
        size = plan.workspace_size(self.spec)
        num_values = size // (self.spec.head_dim + 1) * self.spec.head_dim
        memory = workspace.reserve(size, self.q.device)
        return memory[:num_values], memory[num_values:size]

    def _read_prefixes(self, plan: DecodePlan, splits: Splits, parts: KvPair) -> None:
        groups, batch, spec, tile = self.batch.prefix_groups, self.batch, self.spec, plan.prefix_tile
        assert groups is not None
        grid = (spec.num_kv_heads, _num_prefix_tiles(groups, tile, spec), splits.most)
        kernel.prefix_kernel[grid](
            self.q,
            *parts,
            *self.kv,
            batch.block_tables,
            groups.rows,
            groups.starts,
            groups.lens,
            len(groups.lens),
            batch.block_tables.stride(0),
            self.kv[0].stride(0),
            spec.scale,
            splits.most,
            plan.num_slots,
            plan.splits.most,
            CHUNK=splits.chunk,
            ROWS=tile.rows,
            KEYS=tile.keys,
            **self._shape(),
            **self._compiled(tile.num_warps, tile.num_stages),
        )

    def _read_rows(self, plan: DecodePlan, parts: KvPair, merge_slots: int, workspace: Workspace) -> None:
        batch, spec, tile = self.batch, self.spec, plan.tile
        # Also where none are needed: so the first call makes them, which is not within a capture.
        counts = workspace.counts(plan.num_rows * spec.num_kv_heads if merge_slots else 0, self.q.device)
        kernel.decode_kernel[(spec.num_kv_heads, plan.num_rows, plan.splits.most)](
            self.q,
            self.output,
            *parts,
            *self.kv,
            batch.context_lens,
            batch.block_tables,
            self._prefix_lens(plan),
            counts,
            batch.block_tables.stride(0),
            self.kv[0].stride(0),
            spec.scale,
            plan.splits.most,
            plan.num_slots,
            MERGE_HEADS=triton.next_power_of_2(spec.num_heads // spec.num_kv_heads),
            MERGE_SLOTS=merge_slots,
            WINDOW=spec.window,
            HAS_PREFIX=plan.prefix_splits is not None,
            CHUNK=plan.splits.chunk,
            ROWS=tile.rows,
            KEYS=tile.keys,
            **self._shape(),
            **self._compiled(tile.num_warps, tile.num_stages),
        )

    def _merge(self, plan: DecodePlan, parts: KvPair) -> None:
        spec = self.spec
        prefix = plan.prefix_splits or Splits(1, 64)
        kernel.merge_kernel[(plan.num_rows, spec.num_heads)](
            self.output,
            *parts,
            self.batch.context_lens,
            self._prefix_lens(plan),
            plan.splits.most,
            prefix.most,
            plan.num_slots,
            NUM_HEADS=spec.num_heads,
            HEAD_DIM=spec.head_dim,
            COLUMNS=triton.next_power_of_2(spec.head_dim),
            BLOCK_SIZE=self.kv[0].shape[2],
            WINDOW=spec.window,
            HAS_PREFIX=plan.prefix_splits is not None,
            CHUNK=plan.splits.chunk,
            PREFIX_CHUNK=prefix.chunk,
            # Two sizes only: each is a kernel of its own.
            PADDED_SLOTS=FEW_SLOTS if plan.num_slots <= FEW_SLOTS else 2 * MAX_SPLITS,
            **self._compiled(num_warps=4, num_stages=1),
        )

    def _prefix_lens(self, plan: DecodePlan) -> torch.Tensor | None:
        groups = self.batch.prefix_groups
        return groups.row_lens if groups is not None and plan.prefix_splits is not None else None
