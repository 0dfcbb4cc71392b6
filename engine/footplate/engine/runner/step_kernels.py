"""The kernels of a step that stand around the model: on a CUDA device, and in plain PyTorch for any other."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from footplate.engine.kernels.ops import AttentionBatch
from footplate.engine.layers.attention import KvPair
from footplate.engine.runner.device_state import DeviceState


def _blank_batch(num_rows: int, width: int, device: torch.device) -> AttentionBatch:
    """Memory for where the tokens of a decode step stand."""
    return AttentionBatch(
        positions=torch.empty(num_rows, dtype=torch.int32, device=device),
        slots=torch.empty(num_rows, dtype=torch.int64, device=device),
        query_starts=torch.arange(num_rows + 1, dtype=torch.int32, device=device),
        context_lens=torch.empty(num_rows, dtype=torch.int32, device=device),
        block_tables=torch.zeros((num_rows, width), dtype=torch.int32, device=device),
        max_query_len=1,
        max_context_len=0,  # not known on the host; kernels of decode steps read context_lens
        num_decodes=num_rows,
    )


class StepKernels:
    """Implements the protocol of the same name on the functions of one backend.

    The batch of each number of rows is memory of its own that stays where it is, so graphs may write to it.
    """

    def __init__(
        self, decode_inputs: Callable[..., torch.Tensor], sample: Callable[..., torch.Tensor]
    ) -> None:
        self._decode_inputs = decode_inputs
        self._sample = sample
        self._batches: dict[int, tuple[torch.Tensor, AttentionBatch]] = {}

    def copy_blocks(self, caches: Sequence[KvPair], copies: Sequence[tuple[int, int]]) -> None:
        for source, target in copies:
            for pair in caches:
                for cache in pair:
                    cache[target] = cache[source]

    def decode_inputs(
        self, rows: torch.Tensor, new_blocks: torch.Tensor, state: DeviceState
    ) -> tuple[torch.Tensor, AttentionBatch]:
        size = rows.shape[0]
        if size not in self._batches:
            batch = _blank_batch(size, state.blocks.shape[1], state.device)
            self._batches[size] = (torch.empty(size, dtype=torch.int32, device=state.device), batch)
        token_ids, batch = self._batches[size]
        self._decode_inputs(rows, new_blocks, state, state.block_size, token_ids, batch)
        if state.device.type != "cuda":
            batch.max_context_len = int(batch.context_lens.max())
        return token_ids, batch

    def draw(self, logits: torch.Tensor, rows: torch.Tensor, state: DeviceState) -> torch.Tensor:
        return self._sample(logits, rows, state, appends=True)


class TritonStep(StepKernels):
    """On a CUDA device."""

    def __init__(self, caches: Sequence[KvPair]) -> None:
        from footplate.engine.kernels.block_copy.kernel import block_copy, cache_addresses
        from footplate.engine.kernels.decode_step.kernel import decode_inputs
        from footplate.engine.kernels.sample.kernel import sample

        super().__init__(decode_inputs, sample)
        self._block_copy = block_copy
        self._flat = [cache for pair in caches for cache in pair]
        self._addresses = cache_addresses(self._flat)

    def copy_blocks(self, caches: Sequence[KvPair], copies: Sequence[tuple[int, int]]) -> None:
        device = self._flat[0].device
        index = torch.tensor(copies, dtype=torch.int32).pin_memory().to(device, non_blocking=True)
        self._block_copy(self._flat, index, self._addresses)


def torch_step() -> StepKernels:
    """In plain PyTorch, row by row: for tests of the runner without a GPU."""
    from footplate.engine.kernels.decode_step.reference import decode_inputs
    from footplate.engine.kernels.sample.reference import sample

    return StepKernels(decode_inputs, sample)
