"""Whether a request's prompt and answer are kept: settings, the tenant's consent, how it ended. Pure."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from enum import StrEnum


class CaptureMode(StrEnum):
    """What is kept of tenants that have opted in. SAMPLED keeps what ERRORS does, and a share of the rest."""

    OFF = "off"
    ERRORS = "errors"
    SAMPLED = "sampled"


class Why(StrEnum):
    """What a request was kept for; of several the first."""

    ERROR = "error"
    SLOW_FIRST_TOKEN = "slow_first_token"
    SLOW_TOKENS = "slow_tokens"
    SAMPLE = "sample"


@dataclass(frozen=True, slots=True)
class CapturePolicy:
    """`sample_ratio` from 0 to 1. Limits in seconds, of a first token and of one after it; None: none."""

    mode: CaptureMode = CaptureMode.OFF
    sample_ratio: float = 0.01
    slow_first_token_s: float | None = None
    slow_token_s: float | None = None


@dataclass(frozen=True, slots=True)
class Ending:
    """How a request ended. Seconds; `token_s`: between tokens after the first; None: there were none.

    `has_begun`: an engine had taken it. One that limits or a full queue refuse says nothing about a model.
    """

    request_id: str
    has_failed: bool
    has_begun: bool
    first_token_s: float | None
    token_s: float | None


def may_capture(policy: CapturePolicy, is_opted_in: bool) -> bool:
    """Whether anything of a tenant may ever be kept: the platform and the tenant must both want it."""
    return is_opted_in and policy.mode is not CaptureMode.OFF


def why_capture(policy: CapturePolicy, is_opted_in: bool, ending: Ending) -> Why | None:
    """What a request is kept for; None: nothing of it is."""
    if not may_capture(policy, is_opted_in) or not ending.has_begun:
        return None
    if ending.has_failed:
        return Why.ERROR
    if _is_over(ending.first_token_s, policy.slow_first_token_s):
        return Why.SLOW_FIRST_TOKEN
    if _is_over(ending.token_s, policy.slow_token_s):
        return Why.SLOW_TOKENS
    if policy.mode is CaptureMode.SAMPLED and _share(ending.request_id) < policy.sample_ratio:
        return Why.SAMPLE
    return None


def _is_over(took_s: float | None, limit_s: float | None) -> bool:
    return took_s is not None and limit_s is not None and took_s > limit_s


def _share(request_id: str) -> float:
    """From 0 to below 1, evenly, and the same wherever it is asked."""
    return int.from_bytes(hashlib.sha256(request_id.encode()).digest()[:6]) / (1 << 48)
