"""A decoder on one device's caches, with what a step does around it: block copies, inputs, head, draws."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch

from footplate.engine.kernels.decode_step.reference import RowTables as DecodeTables
from footplate.engine.kernels.ops import AttentionBatch
from footplate.engine.kernels.sample.reference import DrawState
from footplate.engine.layers.attention import KvPair
from footplate.engine.models.decoder import Decoder


class RowTables(DecodeTables, DrawState, Protocol):
    """All that step kernels read and write of the persistent batch; see runner/device_state."""


class StepKernels(Protocol):
    """What a step does beside the model. R rows of a step are given by their table rows; -1 is padding."""

    def copy_blocks(self, caches: Sequence[KvPair], copies: Sequence[tuple[int, int]]) -> None:
        """Copy whole blocks (from, to) in every layer."""
        ...

    def decode_inputs(
        self, rows: torch.Tensor, new_blocks: torch.Tensor, state: Any
    ) -> tuple[torch.Tensor, AttentionBatch]:
        """Take in blocks that rows got (-1: none); (last known token [R] of each row, where it stands)."""
        ...

    def draw(self, logits: torch.Tensor, rows: torch.Tensor, state: Any) -> torch.Tensor:
        """Draw ids [R] int32 from logits [R, V] by each row's parameters; append them to the token table."""
        ...


class DeviceDecoder:
    """The model as a queue of kernels."""

    def __init__(self, decoder: Decoder, caches: list[KvPair], step: StepKernels) -> None:
        self.caches = caches
        self._decoder = decoder
        self._layers = decoder.bind(caches)
        self._step = step
        self.vocab_size = decoder.config.vocab_size
        self.logits_dtype = decoder.dtype

    def copy_blocks(self, copies: Sequence[tuple[int, int]]) -> None:
        if copies:
            self._step.copy_blocks(self.caches, copies)

    def hidden(self, token_ids: torch.Tensor, batch: AttentionBatch, *, last_only: bool) -> torch.Tensor:
        """token_ids [T] -> [T, hidden], or last tokens' [S, hidden]; any mixture of decodes and prompts."""
        return self._decoder.hidden(token_ids, batch, self._layers, last_only=last_only)

    def logits(self, hidden: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        """[R, hidden] -> [R, V] in the compute type."""
        return self._decoder.scores(hidden, out)

    def draw(self, logits: torch.Tensor, rows: torch.Tensor, state: RowTables) -> torch.Tensor:
        return self._step.draw(logits, rows, state)

    def decode(
        self,
        rows: torch.Tensor,
        new_blocks: torch.Tensor,
        state: RowTables,
        logits: torch.Tensor,
        ids: torch.Tensor,
    ) -> None:
        """One decode step of rows [R] into logits [R, V] and ids [R]; no host value depends on the state."""
        token_ids, batch = self._step.decode_inputs(rows, new_blocks, state)
        hidden = self._decoder.hidden(token_ids, batch, self._layers)
        self._decoder.scores(hidden, logits)
        ids.copy_(self._step.draw(logits, rows, state))
