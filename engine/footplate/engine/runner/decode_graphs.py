"""Whole decode steps as CUDA graphs, one for each padded batch size; plain calls on other devices."""

from __future__ import annotations

import bisect
import gc
from collections.abc import Collection, Sequence
from typing import Any

import torch

from footplate.engine.models.device_decoder import DeviceDecoder
from footplate.engine.runner.device_state import DeviceState

MAX_GRAPH_ROWS = 512


def graph_sizes(max_rows: int) -> list[int]:
    """Padded batch sizes up to `max_rows`, in steps of about an eighth."""
    limit = min(max_rows, MAX_GRAPH_ROWS)
    sizes = [
        1,
        2,
        3,
        4,
        6,
        8,
        *range(12, 33, 4),
        *range(40, 65, 8),
        *range(80, 129, 16),
        *range(160, 257, 32),
    ]
    sizes += range(320, MAX_GRAPH_ROWS + 1, 64)
    return [s for s in sizes if s < limit] + [limit]


class DecodeGraphs:
    """Runs decode steps of a padded size. Inputs and outputs are tensors that stay where they are.

    A padding row has table row -1: it reads no context and writes nowhere.
    """

    def __init__(self, model: DeviceDecoder, state: DeviceState, sizes: Sequence[int]) -> None:
        self._model = model
        self._state = state
        self._sizes = sorted(sizes)
        device, largest = state.device, self._sizes[-1]
        self._inputs = {s: torch.full((2, s), -1, dtype=torch.int32, device=device) for s in self._sizes}
        self._logits = torch.empty((largest, model.vocab_size), dtype=model.logits_dtype, device=device)
        self._ids = torch.zeros(largest, dtype=torch.int32, device=device)
        self._graphs: dict[int, torch.cuda.CUDAGraph] = {}
        self._pool: Any = None

    def holds(self, num_rows: int) -> bool:
        return num_rows <= self._sizes[-1]

    def size_for(self, num_rows: int) -> int:
        """The smallest padded size that holds so many rows."""
        return self._sizes[bisect.bisect_left(self._sizes, num_rows)]

    def inputs(self, size: int) -> torch.Tensor:
        """[2, size] int32 to fill before `run`: table rows, and the block each got for this step or -1."""
        return self._inputs[size]

    def run(self, size: int) -> tuple[torch.Tensor, torch.Tensor]:
        """(logits [size, V], drawn ids [size] int32), valid until the next run."""
        graph = self._graphs.get(size)
        if graph is not None:
            graph.replay()
        else:
            self._step(size)
        return self._logits[:size], self._ids[:size]

    def _step(self, size: int) -> None:
        rows, new_blocks = self._inputs[size]
        self._model.decode(rows, new_blocks, self._state, self._logits[:size], self._ids[:size])

    @torch.inference_mode()
    def run_once(self, sizes: Collection[int]) -> None:
        """Run steps of those of these sizes that are padded sizes, and of the largest, on padding rows."""
        for size in self._sizes:
            if size in sizes or size == self._sizes[-1]:
                self._inputs[size].fill_(-1)
                self._step(size)

    @torch.inference_mode()
    def capture(self, sizes: Sequence[int] | None = None) -> None:
        """Record graphs, largest first, all in one memory pool: smaller ones live in what the largest took.

        Every kernel is run once before, so that nothing is compiled while recording or serving.
        """
        if self._state.device.type != "cuda":
            return
        for size in sorted(self._sizes if sizes is None else sizes, reverse=True):
            self._inputs[size].fill_(-1)
            stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                self._step(size)
            torch.cuda.current_stream().wait_stream(stream)
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            gc.collect()
            with torch.cuda.graph(graph, pool=self._pool):
                self._step(size)
            self._pool = graph.pool()
            self._graphs[size] = graph

    def release(self) -> None:
        """Forget all graphs and their memory."""
        self._graphs, self._pool = {}, None
