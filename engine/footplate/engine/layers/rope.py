"""The table of rotary angles a model's attention layers look up."""

from __future__ import annotations

import torch

from footplate.engine.weights.model_config import ModelConfig


def cos_sin_table(
    config: ModelConfig, num_positions: int, device: torch.device, *, local: bool
) -> torch.Tensor:
    """[num_positions, head_dim] float32: half cosines, then half sines. `local` asks for sliding layers.

    Angles are taken in float64: at late positions float32 products lose whole turns.
    """
    frequencies = torch.tensor(config.rope.inverse_frequencies(config.head_dim, local), dtype=torch.float64)
    angles = torch.arange(num_positions, dtype=torch.float64)[:, None] * frequencies
    scale = 1.0 if local and config.rope.local_theta is not None else config.rope.attention_factor
    table = torch.cat((angles.cos(), angles.sin()), dim=1) * scale
    return table.to(device=device, dtype=torch.float32)
