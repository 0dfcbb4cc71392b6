"""Gumbel noise as a pure function of (seed, position, token id).

Adding it to log-probabilities and taking the arg-max draws from the distribution (the Gumbel-max trick).
Since the noise of a token does not depend on the batch, on other tokens or on a generator's state, the same
seed draws the same tokens alone, in any batch, and after preemption.
"""

from __future__ import annotations

import torch

_MASK32 = 0xFFFFFFFF
_MASK64 = 0xFFFFFFFFFFFFFFFF


def draw_key(seed: int, position: int) -> tuple[int, int]:
    """Two signed 32-bit keys for one draw: 64 bits of (seed, position), mixed as SplitMix64 does."""
    z = (seed * 0x9E3779B97F4A7C15 + (position + 1) * 0xD1B54A32D192ED03) & _MASK64
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK64
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK64
    z ^= z >> 31
    return _signed(z & _MASK32), _signed(z >> 32)


def _signed(value: int) -> int:
    return value - (1 << 32) if value & 0x80000000 else value


def gumbel(token_ids: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    """Noise for token_ids, int32 [R, M] or [M], under keys, int32 [R, 2]. Gives float32 [R, M]."""
    x = token_ids * _signed(0x9E3779B1) ^ keys[:, :1]
    x = _mix(x)
    x = _mix(x.add_(keys[:, 1:]))
    # 23 bits and a half: exact in float32, never 0 or 1
    uniform = (((x >> 9) & 0x7FFFFF).float() + 0.5) * 2.0**-23
    return -torch.log(-torch.log(uniform))


def _mix(x: torch.Tensor) -> torch.Tensor:
    """MurmurHash3's 32-bit finaliser, in place on int32 with wrapping products."""
    x ^= (x >> 16) & 0xFFFF
    x *= _signed(0x85EBCA6B)
    x ^= (x >> 13) & 0x7FFFF
    x *= _signed(0xC2B2AE35)
    x ^= (x >> 16) & 0xFFFF
    return x
