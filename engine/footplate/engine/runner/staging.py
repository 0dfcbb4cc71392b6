"""Small arrays between host and device, through pinned memory that is used in turn."""

from __future__ import annotations

import time

import numpy as np
import torch

SLOTS = 8
FIRST_BYTES = 1 << 16
ALIGNED_WORDS = 4


class Staging:
    """Pinned buffers on a CUDA device; plain memory elsewhere. Used from one thread.

    A buffer that goes up is written again only when its last copy has run. One that comes down is the
    reader's until SLOTS more were fetched; no more than two steps are ever unread.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._is_cuda = device.type == "cuda"
        self._up = [torch.empty(0, dtype=torch.int32)] * SLOTS
        self._down = [torch.empty(0, dtype=torch.int32)] * SLOTS
        self._risen = [self._event() for _ in range(SLOTS)]
        self._fallen = [self._event() for _ in range(SLOTS)]
        self._next_up = self._next_down = 0
        self.waited_s = 0.0  # until the device had read what a buffer held before

    def _event(self) -> torch.cuda.Event | None:
        return torch.cuda.Event() if self._is_cuda else None  # type: ignore[no-untyped-call]

    def send(self, values: np.ndarray, to: torch.Tensor) -> None:
        """Copy int32 values into a device tensor of the same size."""
        staged, event = self._stage(values.reshape(-1))
        to.copy_(staged.view(to.shape), non_blocking=True)
        if event is not None:
            event.record()

    def put(self, values: np.ndarray) -> torch.Tensor:
        """A new device tensor of int32 values."""
        staged, event = self._stage(values.reshape(-1))
        if event is None:
            return staged.clone().view(values.shape)
        moved = staged.to(self.device, non_blocking=True)
        event.record()
        return moved.view(values.shape)

    def put_all(self, *arrays: np.ndarray) -> list[torch.Tensor]:
        """Several int32 arrays as device tensors, in one copy.

        Each begins at a multiple of 16 bytes: Triton compiles a kernel anew for pointers that don't.
        """
        begins = np.cumsum([0] + [-(-a.size // ALIGNED_WORDS) * ALIGNED_WORDS for a in arrays])
        packed = np.zeros(begins[-1], dtype=np.int32)
        for begin, array in zip(begins, arrays, strict=False):
            packed[begin : begin + array.size] = array.reshape(-1)
        flat = self.put(packed)
        return [
            flat[begin : begin + array.size].view(array.shape)
            for begin, array in zip(begins.tolist(), arrays, strict=False)
        ]

    def fetch(self, ids: torch.Tensor) -> tuple[torch.Tensor, torch.cuda.Event | None]:
        """Start copying int32 ids to the host: (host memory, what to wait for)."""
        if not self._is_cuda:
            return ids.clone(), None
        slot, self._next_down = self._next_down, (self._next_down + 1) % SLOTS
        self._down[slot] = self._fit(self._down[slot], ids.numel())
        host, event = self._down[slot][: ids.numel()], self._fallen[slot]
        assert event is not None
        host.copy_(ids, non_blocking=True)
        event.record()
        return host, event

    def _stage(self, values: np.ndarray) -> tuple[torch.Tensor, torch.cuda.Event | None]:
        slot, self._next_up = self._next_up, (self._next_up + 1) % SLOTS
        event = self._risen[slot]
        if event is not None:
            start = time.perf_counter()
            event.synchronize()
            self.waited_s += time.perf_counter() - start
        self._up[slot] = self._fit(self._up[slot], values.size)
        staged = self._up[slot][: values.size]
        staged.numpy()[:] = values
        return staged, event

    def _fit(self, buffer: torch.Tensor, size: int) -> torch.Tensor:
        if buffer.numel() >= size:
            return buffer
        return torch.empty(max(FIRST_BYTES // 4, 2 * size), dtype=torch.int32, pin_memory=self._is_cuda)
