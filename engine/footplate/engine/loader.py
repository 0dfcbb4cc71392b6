"""From a source string and options to an engine core: resolves `auto`, sizes the pool, loads weights."""

from __future__ import annotations

import ctypes
import hashlib
import logging
import math
from dataclasses import dataclass
from pathlib import Path

import torch

from footplate.engine.capacity import kv_bytes_per_token
from footplate.engine.config import EngineConfig
from footplate.engine.core import EngineCore, Runner
from footplate.engine.errors import LoadError
from footplate.engine.kernels.ops import Ops
from footplate.engine.kernels.torch_ops import TorchOps
from footplate.engine.layers.attention import KvPair
from footplate.engine.memory import available_bytes
from footplate.engine.models.decoder import Decoder, Placement
from footplate.engine.runner.batch import PersistentBatch
from footplate.engine.runner.first_step import refuse_damaged
from footplate.engine.runner.model_runner import ModelRunner
from footplate.engine.sampling.sampler import Sampler
from footplate.engine.scheduler import Scheduler
from footplate.engine.weights.model_config import ModelConfig
from footplate.engine.weights.source import ModelSource, resolve_source
from footplate.engine.weights.weight_source import LoadTime, open_model

logger = logging.getLogger(__name__)

GIB = 1 << 30
CPU_KV_SHARE = 0.25  # of available memory, at most CPU_KV_MAX: other models and the system live beside it
CPU_KV_MAX = 2 * GIB
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # options of mallopt(3)
# Prompt work of one step on CPU, in tokens: about half a second on two cores, and matrix products gain
# nothing from more rows.
CPU_STEP_WORK = 256
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(slots=True)
class LoadedModel:
    """Weights in place and every type resolved; engines are made from it."""

    source: ModelSource
    model_config: ModelConfig
    decoder: Decoder
    place: Placement
    kv_dtype: torch.dtype
    dtype: str
    max_len: int
    load_time: LoadTime | None = None  # of the weights; None for random ones
    used_before: int = 0  # bytes of the device that were taken before the weights came


@dataclass(slots=True)
class LoadedEngine:
    """An engine core and the facts that a model card tells."""

    core: EngineCore
    model_config: ModelConfig
    max_model_len: int
    dtype: str
    fingerprint: str
    load_time: LoadTime | None = None  # as in LoadedModel


def load_engine(
    source: str, config: EngineConfig, *, prefix_key: bytes = b"", models_dir: Path | None = None
) -> LoadedEngine:
    """Load a model and everything around it. Takes seconds; reads weights through a memory map.

    Raises:
        LoadError: source, weights or options can't be used; says which and what to do.
    """
    return make_engine(load_model(source, config, models_dir=models_dir), config, prefix_key=prefix_key)


def load_model(source: str, config: EngineConfig, *, models_dir: Path | None = None) -> LoadedModel:
    """Read weights and put them where they are computed with.

    Raises:
        LoadError: source, weights or types can't be used.
    """
    resolved = resolve_source(source, models_dir)
    used_before = _used_bytes(_device(config))
    model_config, weights = open_model(resolved, config.seed, _device(config))
    place, kv_dtype, dtype = _resolve_types(config, resolved, model_config)
    max_len = _max_model_len(config, model_config)
    decoder = Decoder(model_config, weights, _choose_ops(place), place, max_len)
    return LoadedModel(
        resolved,
        model_config,
        decoder,
        place,
        kv_dtype,
        dtype,
        max_len,
        load_time=weights.load_time,
        used_before=used_before,
    )


def make_engine(model: LoadedModel, config: EngineConfig, *, prefix_key: bytes = b"") -> LoadedEngine:
    """A scheduler, a KV pool and a runner around loaded weights.

    Raises:
        LoadError: the KV memory holds too little for the options, or the weights are damaged.
    """
    shape, device = model.model_config, model.place.device
    num_blocks, max_len, runner = (_on_cpu if device.type == "cpu" else _on_device)(model, config)
    refuse_damaged(runner, shape.vocab_size, config.block_size, max_len)
    scheduler = Scheduler(
        config,
        num_blocks=num_blocks,
        max_model_len=max_len,
        vocab_size=shape.vocab_size,
        eos_token_ids=shape.eos_token_ids,
        prefix_key=prefix_key,
        step_work=CPU_STEP_WORK if device.type == "cpu" else math.inf,
    )
    core = EngineCore(scheduler, runner, ahead=config.async_scheduling)
    fingerprint = _fingerprint(model.source, config, shape, model.dtype)
    return LoadedEngine(core, shape, max_len, model.dtype, fingerprint, load_time=model.load_time)


def _on_cpu(model: LoadedModel, config: EngineConfig) -> tuple[int, int, Runner]:
    """(blocks of the KV pool, longest sequence in tokens, the runner that owns the pool)."""
    _keep_freed_memory()
    shape, device = model.model_config, model.place.device
    num_blocks = _num_blocks(config, model, _cpu_memory(config))
    max_len = _fit_model_len(config, model.max_len, num_blocks)
    runner = ModelRunner(
        model.decoder,
        _make_caches(shape, num_blocks, config.block_size, model.kv_dtype, device),
        PersistentBatch(config.max_num_seqs, max_len, config.block_size, device),
        Sampler(shape.vocab_size, shape.eos_token_ids, device),
    )
    return num_blocks, max_len, runner


def _on_device(model: LoadedModel, config: EngineConfig) -> tuple[int, int, Runner]:
    """As `_on_cpu`; what steps and graphs take is measured before the pool gets the rest."""
    from footplate.engine.device_loader import DeviceFactory

    device = model.place.device
    factory = DeviceFactory(model.decoder, config, device, model.kv_dtype, model.max_len, model.used_before)
    if config.kv_cache_gib == "auto":
        memory = factory.pool_bytes(factory.measure())
    else:
        memory = int(config.kv_cache_gib * GIB)
    num_blocks = _num_blocks(config, model, memory)
    max_len = _fit_model_len(config, model.max_len, num_blocks)
    return num_blocks, max_len, factory.make_ready(num_blocks, max_len)


def _used_bytes(device: torch.device) -> int:
    """Memory of a CUDA device that others have taken; 0 for a CPU."""
    if device.type != "cuda":
        return 0
    from footplate.engine.device_loader import used_bytes

    return used_bytes(device)


def _keep_freed_memory() -> None:
    """Tell glibc not to hand freed memory back: a step's buffers would fault in page by page, every step.

    See `memory.give_back_memory`.
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):
        return  # another C library; only slower
    for option in (M_TRIM_THRESHOLD, M_MMAP_THRESHOLD):
        mallopt(option, GIB)


def _resolve_types(
    config: EngineConfig, source: ModelSource, model: ModelConfig
) -> tuple[Placement, torch.dtype, str]:
    """(where and in what type to compute, type of the KV cache, the type's name for people)."""
    device = _device(config)
    packed = config.dtype == "auto" and device.type == "cpu" and source.kind == "gguf"
    name = config.dtype
    if name == "auto":
        name = "float32" if device.type == "cpu" else "bfloat16"
    if name == "float16" and model.architecture == "gemma3":
        raise LoadError("dtype float16 overflows in Gemma 3; use bfloat16 or float32")
    kv_name = config.kv_dtype
    if kv_name == "auto":
        kv_name = "bfloat16" if packed else name
    if kv_name == "float16" and device.type == "cpu" and name == "float32":
        raise LoadError("kv_dtype float16 has no CPU kernel; use bfloat16 or float32")
    if config.deterministic and not packed and device.type == "cpu":
        raise LoadError(
            "deterministic is set; on CPU only packed weights (a GGUF file, dtype auto) have "
            "results that do not depend on the batch"
        )
    place = Placement(DTYPES[name], device, packed, config.deterministic)
    return place, DTYPES[kv_name], "packed" if packed else name


def _device(config: EngineConfig) -> torch.device:
    if config.device != "auto":
        return torch.device(config.device)
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def _choose_ops(place: Placement) -> Ops:
    """Triton kernels on CUDA, native ones on CPU in float32; the torch references for 16-bit types on CPU."""
    if place.device.type == "cuda":
        from footplate.engine.kernels.attention.launch import AttentionOptions
        from footplate.engine.kernels.triton_ops import TritonOps

        # Programmatic dependent launch: kernels start while the one before them ends.
        use_pdl = torch.cuda.get_device_capability(place.device) >= (9, 0)
        return TritonOps(AttentionOptions(use_pdl=use_pdl, deterministic=place.deterministic))
    if place.device.type == "cpu" and place.dtype is torch.float32:
        from footplate.engine.kernels.cpu_ops import CpuOps

        return CpuOps()
    return TorchOps()


def _max_model_len(config: EngineConfig, model: ModelConfig) -> int:
    if config.max_model_len == "auto":
        return model.max_position
    if not 1 <= config.max_model_len <= model.max_position:
        raise LoadError(
            f"engine.max_model_len is {config.max_model_len}; this model holds at most {model.max_position}"
        )
    return config.max_model_len


def _cpu_memory(config: EngineConfig) -> int:
    """Bytes for KV blocks."""
    if config.kv_cache_gib != "auto":
        return int(config.kv_cache_gib * GIB)
    return min(CPU_KV_MAX, int(available_bytes() * CPU_KV_SHARE))


def _num_blocks(config: EngineConfig, model: LoadedModel, memory: int) -> int:
    """How many blocks `memory` bytes hold, never more than all rows at full length could use."""
    shape = model.model_config
    block_bytes = kv_bytes_per_token(shape, model.kv_dtype.itemsize) * config.block_size
    useful = config.max_num_seqs * -(-model.max_len // config.block_size)
    num_blocks = min(memory // block_bytes, useful)
    if num_blocks < 1:
        raise LoadError(
            f"KV memory of {memory / GIB:.3f} GiB holds no block of {block_bytes} bytes; raise kv_cache_gib"
        )
    return num_blocks


def _fit_model_len(config: EngineConfig, max_len: int, num_blocks: int) -> int:
    """`auto` shrinks to what the pool can hold; a length that was asked for must fit."""
    held = num_blocks * config.block_size
    if config.max_model_len == "auto" or max_len <= held:
        return min(max_len, held)
    raise LoadError(
        f"engine.max_model_len is {max_len}, the KV memory holds {held}; lower it or raise kv_cache_gib"
    )


def _make_caches(
    model: ModelConfig, num_blocks: int, block_size: int, dtype: torch.dtype, device: torch.device
) -> list[KvPair]:
    shape = (num_blocks, model.num_kv_heads, block_size, model.head_dim)
    return [
        (torch.empty(shape, dtype=dtype, device=device), torch.empty(shape, dtype=dtype, device=device))
        for _ in range(model.num_layers)
    ]


def _fingerprint(source: ModelSource, config: EngineConfig, model: ModelConfig, dtype: str) -> str:
    """Changes with code version, weights, options and compute type; the API's system_fingerprint."""
    from importlib.metadata import version

    size = source.path.stat().st_size
    facts = (version("footplate"), torch.__version__, str(size), repr(config), repr(model), dtype)
    return "fp_" + hashlib.blake2b("|".join(facts).encode(), digest_size=6).hexdigest()
