"""What it means that a kernel agrees with its reference."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from footplate.engine.kernels.cases import Case


@dataclass(frozen=True, slots=True)
class KernelPair:
    """One op on one backend. Both functions take a case's arguments, may change tensors in them, and return
    one.

    Results and changed arguments must agree within atol + rtol * |expected|; `reason` says why that much.
    """

    name: str  # op folder / backend
    reference: Callable[..., torch.Tensor]
    kernel: Callable[..., torch.Tensor]
    cases: Sequence[Case]
    atol: float
    rtol: float
    reason: str

    @property
    def op(self) -> str:
        """The op's folder."""
        return self.name.split("/")[0]
