"""What a model takes and gives on a device: memory, concurrency, and ceilings of speed. Pure arithmetic.

Weights are read once a step, so bandwidth over bytes bounds one sequence's decoding, and operations bound
the reading of prompts (the roofline of Williams, Waterman and Patterson 2009, with one term each). Real steps
stay below both; `footplate bench engine` says by how much.
"""

from __future__ import annotations

from dataclasses import dataclass

from footplate.engine.weights.model_config import ModelConfig

GB, GIB = 10**9, 1 << 30
# Bytes of a weight; 4-bit formats with their scales (a group of 32 to 128 shares one).
WEIGHT_BYTES = {"float32": 4.0, "bfloat16": 2.0, "float16": 2.0, "fp8": 1.0, "int8": 1.0625, "int4": 0.5625}
KV_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "fp8": 1}
# What the library, graphs and a step's activations take of a GPU beside weights and KV pool.
OVERHEAD_BYTES = 2 * GB
MAX_GPUS = 64


@dataclass(frozen=True, slots=True)
class Device:
    """A device by its data sheet: bytes, bytes a second, dense bf16 operations a second."""

    name: str
    memory_bytes: float
    read_bytes_per_s: float
    flops: float


DEVICES = {
    device.name: device
    for device in (
        Device("L4", 24 * GB, 0.30e12, 121e12),
        Device("A10G", 24 * GB, 0.60e12, 70e12),
        Device("L40S", 48 * GB, 0.864e12, 362e12),
        Device("A100-40GB", 40 * GB, 1.555e12, 312e12),
        Device("A100-80GB", 80 * GB, 2.039e12, 312e12),
        Device("H100-80GB", 80 * GB, 3.35e12, 989e12),
        Device("H200", 141 * GB, 4.8e12, 989e12),
        Device("B200", 180 * GB, 8.0e12, 2250e12),
    )
}


@dataclass(frozen=True, slots=True)
class Demand:
    """How a model is to run: types, share of memory, and what its requests are like, in tokens."""

    weight_type: str = "bfloat16"
    kv_type: str = "bfloat16"
    gpu_memory_utilization: float = 0.9
    context_tokens: int = 4096
    prompt_tokens: int = 1024
    output_tokens: int = 256
    # Price of one device for an hour, and the share of it that work fills.
    price_per_hour: float | None = None
    busy_share: float = 0.5


@dataclass(frozen=True, slots=True)
class Capacity:
    """What comes of it on some devices. Bytes are of one device where its name says so."""

    num_gpus: int
    parameters: int
    weight_bytes: int
    kv_bytes_per_token: int
    weight_bytes_per_gpu: int
    kv_budget_bytes_per_gpu: int
    kv_tokens: int
    concurrent_contexts: float
    decode_tokens_per_s_alone: float
    decode_tokens_per_s_full: float
    prefill_s: float
    cost_per_million_output_tokens: float | None

    @property
    def fits(self) -> bool:
        """Whether at least one sequence of the demanded context can run."""
        return self.concurrent_contexts >= 1


def kv_bytes_per_token(shape: ModelConfig, itemsize: int) -> int:
    """Keys and values of one token in all layers."""
    return 2 * shape.num_layers * shape.num_kv_heads * shape.head_dim * itemsize


def count_parameters(shape: ModelConfig) -> int:
    """Weights of all matrices and embeddings; norms, some thousandths of a percent, are left out."""
    queries, keys = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
    attention = shape.hidden_size * (2 * queries + 2 * keys)
    feed_forward = 3 * shape.hidden_size * shape.intermediate_size
    tables = 1 if shape.tied_embeddings else 2
    return shape.num_layers * (attention + feed_forward) + tables * shape.vocab_size * shape.hidden_size


def parameters_read(shape: ModelConfig) -> int:
    """Weights that a decode step reads: all but the input embeddings, of which it takes a row."""
    untied = 0 if shape.tied_embeddings else shape.vocab_size * shape.hidden_size
    return count_parameters(shape) - untied


def prefill_flops(shape: ModelConfig, num_tokens: int) -> float:
    """Operations to read a prompt: two for each weight and token, and attention over half the square."""
    head = shape.vocab_size * shape.hidden_size
    matrices = 2.0 * (parameters_read(shape) - head) * num_tokens
    pairs = num_tokens * num_tokens / 2
    return matrices + 4.0 * shape.num_layers * shape.num_heads * shape.head_dim * pairs


def capacity(shape: ModelConfig, device: Device, demand: Demand, num_gpus: int = 1) -> Capacity:
    """What `num_gpus` devices give that share the model as a tensor-parallel group."""
    weight_bytes = int(count_parameters(shape) * WEIGHT_BYTES[demand.weight_type])
    read_bytes = parameters_read(shape) * WEIGHT_BYTES[demand.weight_type]
    kv_token = kv_bytes_per_token(shape, KV_BYTES[demand.kv_type])
    of_one = device.memory_bytes * demand.gpu_memory_utilization
    budget = max(int(of_one - weight_bytes / num_gpus - OVERHEAD_BYTES), 0)
    # Heads that are fewer than devices are held more than once.
    kv_shards = min(num_gpus, shape.num_kv_heads)
    kv_tokens = int(budget // (kv_token / kv_shards))
    at_once = kv_tokens / demand.context_tokens
    bandwidth = device.read_bytes_per_s * num_gpus
    alone = bandwidth / (read_bytes + kv_token * demand.context_tokens)
    running = max(int(at_once), 0)
    full = running * bandwidth / (read_bytes + running * kv_token * demand.context_tokens) if running else 0.0
    prefill_s = prefill_flops(shape, demand.prompt_tokens) / (device.flops * num_gpus)
    cost = None
    if demand.price_per_hour is not None and full:
        # A second of the devices makes answers and reads the prompts that they need.
        tokens_per_s = 1 / (1 / full + prefill_s / demand.output_tokens)
        cost = demand.price_per_hour * num_gpus / 3600 / (tokens_per_s * demand.busy_share) * 1e6
    return Capacity(
        num_gpus,
        count_parameters(shape),
        weight_bytes,
        kv_token,
        int(weight_bytes / num_gpus),
        budget,
        kv_tokens,
        at_once,
        alone,
        full,
        prefill_s,
        cost,
    )


@dataclass(frozen=True, slots=True)
class LeastMemory:
    """Bytes without which a model can't start on one device."""

    weight_bytes: int
    kv_bytes: int
    other_bytes: int

    @property
    def total_bytes(self) -> int:
        """All of it."""
        return self.weight_bytes + self.kv_bytes + self.other_bytes


def least_memory(
    shape: ModelConfig, weight_bytes: float, kv_type: str, tokens: int, *, is_gpu: bool
) -> LeastMemory:
    """What one replica takes at least. `weight_bytes` of one weight; quantised ones have no whole number."""
    kv_bytes = kv_bytes_per_token(shape, KV_BYTES[kv_type]) * tokens
    return LeastMemory(int(count_parameters(shape) * weight_bytes), kv_bytes, OVERHEAD_BYTES if is_gpu else 0)


def fewest_gpus(shape: ModelConfig, device: Device, demand: Demand) -> Capacity | None:
    """The smallest tensor-parallel group (1, 2, 4, …) on which one context fits; None below 64 devices."""
    num_gpus = 1
    while num_gpus <= min(MAX_GPUS, shape.num_heads):
        found = capacity(shape, device, demand, num_gpus)
        if found.fits:
            return found
        num_gpus *= 2
    return None
