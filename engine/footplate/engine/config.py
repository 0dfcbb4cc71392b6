"""Engine options, as an operator writes them under `models[].engine`. Resolved once, then frozen."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Literal

from footplate.engine.errors import LoadError

Auto = Literal["auto"]
DTYPES = ("auto", "float32", "bfloat16", "float16")
POLICIES = ("fcfs", "priority", "fair")
# Above what any machine serves; tables of the engine grow with them, and would be said to lack memory.
_MOST = {
    "max_num_seqs": 16_384,
    "max_num_batched_tokens": 1 << 20,
    "block_size": 4096,
}


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """`auto` is resolved against the model and the machine when the model is loaded.

    More fields than the usual budget of twelve: they are one flat public block of the configuration file.
    """

    # compute type; auto: packed weights with float32 activations on CPU, bfloat16 on CUDA
    dtype: str = "auto"
    quantization: str = "none"
    kv_dtype: str = "auto"
    max_model_len: int | Auto = "auto"  # tokens
    max_num_seqs: int = 256  # sequences that run at once
    max_num_batched_tokens: int = 2048  # token budget of one step
    gpu_memory_utilization: float = 0.9
    kv_cache_gib: float | Auto = "auto"
    block_size: int = 16  # tokens
    prefix_caching: bool = True
    policy: str = "fair"
    tensor_parallel: int = 1
    pipeline_parallel: int = 1
    expert_parallel: int = 1
    speculative: dict[str, Any] | None = None
    deterministic: bool = False
    seed: int = 0
    device: str = "auto"  # cpu, cuda or auto
    async_scheduling: bool = True  # one step ahead of the host; off gives the same ids
    max_waiting: int = 4096  # choices queued, of batch work and of all other, before the door says overloaded
    # tokens of batch work in a step beside other work; 0: it waits. auto: 0 on CPU, 32 on CUDA
    batch_class_tokens: int | Auto = "auto"
    # tokens of a step of batch work alone, whose end others wait for. auto: 4 on CPU, 512 on CUDA
    batch_step_tokens: int | Auto = "auto"

    def __post_init__(self) -> None:
        _check_choice("dtype", self.dtype, DTYPES)
        _check_choice("kv_dtype", self.kv_dtype, DTYPES)
        _check_choice("policy", self.policy, POLICIES)
        _check_choice("quantization", self.quantization, ("none",))
        for name, most in _MOST.items():
            if not 1 <= getattr(self, name) <= most:
                raise LoadError(f"engine.{name} is {getattr(self, name)}; it must be from 1 to {most}")
        if self.max_waiting < 1:
            raise LoadError(f"engine.max_waiting is {self.max_waiting}; it must be at least 1")
        if not re.fullmatch(r"auto|cpu|cuda(:\d{1,3})?", self.device):
            raise LoadError(f"engine.device is {self.device!r}; it must be auto, cpu, cuda or cuda:NUMBER")
        for name, least in (("batch_class_tokens", 0), ("batch_step_tokens", 1)):
            value = getattr(self, name)
            if value != "auto" and value < least:
                raise LoadError(f"engine.{name} is {value}; it must be at least {least}, or auto")
        for name in ("tensor_parallel", "pipeline_parallel", "expert_parallel"):
            if getattr(self, name) != 1:
                asked = getattr(self, name)
                raise LoadError(f"engine.{name} is {asked}; this version runs one device a replica, set 1")
        if self.speculative is not None:
            raise LoadError("engine.speculative is set; this version has no speculation, set null")

    @classmethod
    def from_options(cls, options: Mapping[str, Any]) -> EngineConfig:
        """The options as somebody wrote them down.

        Raises:
            LoadError: an option is unknown, or has a value that can't be used.
        """
        known = {f.name for f in fields(cls)}
        if unknown := sorted(set(options) - known):
            raise LoadError(f"engine.{unknown[0]} is no option; known are {', '.join(sorted(known))}")
        try:
            return cls(**options)
        except TypeError as error:
            raise LoadError(f"engine options: a value has a type that can't be used ({error})") from None


def _check_choice(name: str, value: str, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise LoadError(f"engine.{name} is {value!r}; it must be one of {', '.join(choices)}")
