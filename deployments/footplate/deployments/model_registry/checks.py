"""What is wrong with a model before anything of it starts: its files, its text, and whether it fits."""

from __future__ import annotations

import os
import subprocess
from dataclasses import dataclass
from pathlib import Path

from footplate.deployments.model_registry.folders import ModelFolders
from footplate.deployments.model_registry.start_faults import safe_text
from footplate.deployments.specs import ModelSpec
from footplate.engine.capacity import GIB, LeastMemory, least_memory
from footplate.engine.config import EngineConfig
from footplate.engine.errors import LoadError
from footplate.engine.memory import available_bytes
from footplate.engine.text.pipeline import TextPipeline
from footplate.engine.weights.inspection import SourceFacts, inspect_source
from footplate.engine.weights.source import resolve_source
from footplate.platform.settings import ModelSettings
from footplate.tenancy.errors import Conflict, InvalidValue

ITEM_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
_NVIDIA_SMI_S = 5.0
_DEVICE_FILES = ("/dev/nvidiactl", "/dev/dxg", "/dev/kfd")  # of drivers that come without the command


@dataclass(frozen=True, slots=True)
class Machine:
    """Memory in bytes that a replica could have: of the largest GPU (0: there is none), and what the system
    has left. `num_gpus` None: nobody can say."""

    gpu_bytes: int
    free_bytes: int
    num_gpus: int | None = None


def read_machine() -> Machine:
    """This machine, as it is now."""
    sizes = _gpu_sizes()
    count = None if sizes is None else len(sizes)
    return Machine(max(sizes or [0]), available_bytes(), count)


@dataclass(frozen=True, slots=True)
class ModelChecker:
    """Checks models on the machine that is to run them. Blocks for as long as headers and tokenizer take.

    `folders`: where the files of models that are added may lie; None: anywhere. `is_whole_cluster`: no other
    machine runs replicas, so that what this one lacks is not there.
    """

    models_dir: Path
    folders: ModelFolders | None = None
    is_whole_cluster: bool = False

    def check(self, model: ModelSettings) -> None:
        """Refuse what can't start.

        Raises:
            InvalidValue: the source or the template can't be used; names the field.
            Conflict: the machine has not the memory for it; says how much it takes and how much there is.
        """
        machine = read_machine()
        if self.is_whole_cluster and (told := device_fault(model.engine.device, machine.num_gpus)):
            raise InvalidValue(told, "engine.device")
        if self.folders is not None:
            self.folders.check(model)
        try:
            facts = inspect_source(resolve_source(model.source, self.models_dir))
            TextPipeline.load(model.source, None, self.models_dir)
        except LoadError as error:
            raise InvalidValue(f"the model can't be loaded: {_told(error, model)}", "source") from None
        if model.chat_template is not None:
            try:
                TextPipeline.load(model.source, model.chat_template, self.models_dir)
            except LoadError as error:
                raise InvalidValue(f"it can't be used: {_told(error, model)}", "chat_template") from None
        fault = size_fault(model.engine.to_config(), facts, machine)
        if fault is not None:
            raise Conflict(fault)

    def has_memory(self, model: ModelSpec) -> bool:
        """Whether all its replicas may fit into the memory that is free now; true where nobody can say."""
        try:
            facts = inspect_source(resolve_source(model.source, self.models_dir))
        except LoadError:
            return True
        least = needs(model.engine, facts, is_gpu=False)
        return least.total_bytes * model.first_replicas <= available_bytes()


def device_fault(device: str, num_gpus: int | None) -> str | None:
    """A sentence about a device that a machine has not; None for one that it may have. Pure."""
    kind, _, number = device.partition(":")
    if kind != "cuda" or num_gpus is None or int(number or 0) < num_gpus:
        return None
    return f"engine.device is {device}, and this machine has {num_gpus} GPUs; take another, or auto"


def size_fault(engine: EngineConfig, facts: SourceFacts, machine: Machine) -> str | None:
    """A sentence about a model that is too large for a machine; None for one that may fit. Pure."""
    wanted = engine.max_model_len
    longest = facts.config.max_position
    if wanted != "auto" and wanted > longest:
        return f"engine.max_model_len is {wanted}; this model holds at most {longest}"
    is_gpu = machine.gpu_bytes > 0 and engine.device != "cpu"
    least = needs(engine, facts, is_gpu=is_gpu)
    share = engine.gpu_memory_utilization if is_gpu else 1.0
    given = machine.gpu_bytes * share if is_gpu else machine.free_bytes
    if least.total_bytes <= given:
        return None
    where = f"{share:g} of a GPU of {machine.gpu_bytes / GIB:.1f} GiB" if is_gpu else "free memory"
    return (
        f"the model takes at least {least.total_bytes / GIB:.1f} GiB ({least.weight_bytes / GIB:.1f} of "
        f"weights, {least.kv_bytes / GIB:.1f} of keys and values) and {where} is {given / GIB:.1f} GiB; "
        "take a smaller model, a smaller engine.max_model_len, or another machine"
    )


def needs(engine: EngineConfig, facts: SourceFacts, *, is_gpu: bool) -> LeastMemory:
    """What one replica takes at least."""
    shape = facts.config
    tokens = engine.block_size if engine.max_model_len == "auto" else engine.max_model_len
    default = "bfloat16" if is_gpu else "float32"
    dtype = default if engine.dtype == "auto" else engine.dtype
    kv_type = dtype if engine.kv_dtype == "auto" else engine.kv_dtype
    found = least_memory(shape, ITEM_BYTES[dtype], kv_type, tokens, is_gpu=is_gpu)
    weights = found.weight_bytes
    if engine.dtype == "auto" and not is_gpu and facts.stored_bytes:
        # A CPU keeps quantised weights as they are stored.
        weights = min(weights, facts.stored_bytes)
    kv = found.kv_bytes
    if engine.kv_cache_gib != "auto":
        kv = max(kv, int(engine.kv_cache_gib * GIB))
    return LeastMemory(weights, kv, found.other_bytes)


def _told(error: LoadError, model: ModelSettings) -> str:
    return safe_text(str(error), model.source, model.chat_template)


def _gpu_sizes() -> list[int] | None:
    """Of each GPU, asked without a CUDA context, which would itself take some; None where nobody can say."""
    command = ["nvidia-smi", "--query-gpu=memory.total", "--format=csv,noheader,nounits"]
    try:
        answer = subprocess.run(command, capture_output=True, text=True, timeout=_NVIDIA_SMI_S, check=True)
        return [int(line) << 20 for line in answer.stdout.split()]
    except FileNotFoundError:
        return None if any(map(os.path.exists, _DEVICE_FILES)) else []
    except (OSError, ValueError, subprocess.SubprocessError):
        return None
