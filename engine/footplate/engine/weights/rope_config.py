"""How a model turns positions into angles: one frozen value from GGUF metadata or a Hugging Face config.

Unknown scaling kinds are errors: a model with the wrong angles answers fluently and wrongly.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from footplate.engine.errors import LoadError
from footplate.engine.weights.config_values import checked_integer, checked_number

KINDS = ("default", "linear", "llama3", "yarn", "factors")


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """Base, scaling kind and its numbers. `kind` is one of KINDS; fields of other kinds keep their defaults.

    `factors` (kind `factors`) divides each frequency by its own number, as GGUF files of Llama 3.1 do.
    `local_theta` is the unscaled base of sliding-window layers; None: they use the same angles.
    """

    theta: float = 10000.0
    kind: str = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position: int = 0  # tokens the model was trained on before scaling
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float = 1.0  # multiplies cosines and sines
    factors: tuple[float, ...] = ()
    local_theta: float | None = None

    def inverse_frequencies(self, head_dim: int, local: bool = False) -> list[float]:
        """Angles per position for each of the head_dim / 2 pairs; `local` asks for sliding-window layers.

        Sources: RoFormer (arXiv:2104.09864), YaRN (arXiv:2309.00071), Llama 3.1's frequency bands.
        """
        if local and self.local_theta is not None:
            return _plain_frequencies(self.local_theta, head_dim)
        plain = _plain_frequencies(self.theta, head_dim)
        if self.kind == "linear":
            return [value / self.factor for value in plain]
        if self.kind == "llama3":
            return [self._llama3(value) for value in plain]
        if self.kind == "yarn":
            return self._yarn(plain, head_dim)
        if self.kind == "factors":
            if len(self.factors) != len(plain):
                raise LoadError(
                    f"rope factors: {len(self.factors)} given, {len(plain)} needed for head size {head_dim}"
                )
            return [value / factor for value, factor in zip(plain, self.factors, strict=True)]
        return plain

    def _llama3(self, frequency: float) -> float:
        wavelength = 2 * math.pi / frequency
        if wavelength < self.original_max_position / self.high_freq_factor:
            return frequency
        if wavelength > self.original_max_position / self.low_freq_factor:
            return frequency / self.factor
        turns = self.original_max_position / wavelength
        share = (turns - self.low_freq_factor) / (self.high_freq_factor - self.low_freq_factor)
        return (1 - share) * frequency / self.factor + share * frequency

    def _yarn(self, plain: list[float], head_dim: int) -> list[float]:
        low = max(math.floor(self._pair_with_turns(self.beta_fast, head_dim)), 0)
        high = min(math.ceil(self._pair_with_turns(self.beta_slow, head_dim)), head_dim - 1)
        width = max(high - low, 0.001)
        scaled = []
        for pair, frequency in enumerate(plain):
            ramp = min(max((pair - low) / width, 0.0), 1.0)
            scaled.append(frequency / self.factor * ramp + frequency * (1 - ramp))
        return scaled

    def _pair_with_turns(self, turns: float, head_dim: int) -> float:
        """The (fractional) pair that makes `turns` full turns over the trained context."""
        trained = self.original_max_position
        return head_dim * math.log(trained / (turns * 2 * math.pi)) / (2 * math.log(self.theta))


def _plain_frequencies(theta: float, head_dim: int) -> list[float]:
    return [theta ** (-2 * pair / head_dim) for pair in range(head_dim // 2)]


def rope_from_scaling(
    scaling: Mapping[str, Any] | None,
    theta: float,
    max_position: int,
    local_theta: float | None = None,
    where: str = "config.json",
) -> RopeConfig:
    """Build from a Hugging Face `rope_scaling` or `rope_parameters` mapping; None means no scaling.
    `where` names the file in errors.

    Raises:
        LoadError: an unknown kind, or a number the kind needs is missing.
    """
    scaling = scaling or {}
    kind = str(scaling.get("rope_type", scaling.get("type", "default")))
    if kind == "default":
        return RopeConfig(theta=theta, local_theta=local_theta)
    if kind not in ("linear", "llama3", "yarn"):
        raise LoadError(
            f"{where}: rope scaling {kind[:40]!r} is not supported; use default, linear, llama3 or yarn"
        )
    factor = _number(scaling, "factor", where)
    if kind == "linear":
        return RopeConfig(theta=theta, kind=kind, factor=factor, local_theta=local_theta)
    if kind == "yarn":
        return _yarn_from_scaling(scaling, theta, max_position, local_theta, where)
    low, high = _number(scaling, "low_freq_factor", where), _number(scaling, "high_freq_factor", where)
    if low >= high:
        raise LoadError(f"{where}: rope scaling needs a low_freq_factor below high_freq_factor")
    return RopeConfig(
        theta=theta,
        kind=kind,
        factor=factor,
        low_freq_factor=low,
        high_freq_factor=high,
        original_max_position=_original(scaling, where),
        local_theta=local_theta,
    )


def yarn_attention_factor(factor: float) -> float:
    """The paper's recommended temperature, applied to cosines and sines (arXiv:2309.00071, section 3.4)."""
    return 0.1 * math.log(factor) + 1.0 if factor > 1 else 1.0


def _yarn_from_scaling(
    scaling: Mapping[str, Any], theta: float, max_position: int, local_theta: float | None, where: str
) -> RopeConfig:
    if scaling.get("mscale") or scaling.get("mscale_all_dim") or scaling.get("truncate") is False:
        raise LoadError(f"{where}: yarn with mscale or truncate=false is not supported")
    factor = _number(scaling, "factor", where)
    given = scaling.get("original_max_position_embeddings") is not None
    attention_factor = scaling.get("attention_factor")
    return RopeConfig(
        theta=theta,
        kind="yarn",
        factor=factor,
        original_max_position=_original(scaling, where) if given else max_position,
        beta_fast=_number(scaling, "beta_fast", where, 32.0),
        beta_slow=_number(scaling, "beta_slow", where, 1.0),
        attention_factor=yarn_attention_factor(factor)
        if attention_factor is None
        else _number(scaling, "attention_factor", where),
        local_theta=local_theta,
    )


def _number(scaling: Mapping[str, Any], key: str, where: str, default: float | None = None) -> float:
    value = scaling.get(key)
    return float(checked_number(default if value is None else value, f"{where}: rope scaling's {key}"))


def _original(scaling: Mapping[str, Any], where: str) -> int:
    key = "original_max_position_embeddings"
    return checked_integer(scaling.get(key), f"{where}: rope scaling's {key}")
