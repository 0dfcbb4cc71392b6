"""Weights from safetensors shards to where they are computed with, beside a plain read of the same bytes.

    python engine/benchmarks/bench_load.py [--gib 1] [--shards 4] [--dtype bfloat16] [--device auto]
           [--rounds 3] [--folder DIR] [--out FILE]

Writes a Llama folder of about that size in bfloat16 (kept if --folder is given, and used again if it has the
same size). Then in turn, in each round: one thread reads the files into one buffer; as many threads as the
loader has do, each with its own; they do so into new memory; the `safetensors` library loads each file to the
device and type, if it is installed; our loader loads the model. The files come out of the page cache as far
as it holds them: `--cold` asks the kernel to drop them before each measurement.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import shlex
import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent.parent))
from engine.benchmarks.record import environment, spread

GIB, CHUNK = 1 << 30, 16 << 20
LAYER = {"hidden_size": 2048, "intermediate_size": 8192, "num_attention_heads": 32, "num_key_value_heads": 8}
VOCAB = 32_000
LAYER_BYTES = 2 * (2048 * (2 * 2048 + 2 * 512) + 3 * 2048 * 8192)
TABLE_BYTES = 2 * 2 * VOCAB * 2048


def config_of(size: int) -> dict[str, Any]:
    layers = max(1, round((size - TABLE_BYTES) / LAYER_BYTES))
    return {
        "architectures": ["LlamaForCausalLM"],
        "hidden_act": "silu",
        "head_dim": 64,
        "num_hidden_layers": layers,
        "max_position_embeddings": 2048,
        "rms_norm_eps": 1e-5,
        "vocab_size": VOCAB,
        "dtype": "bfloat16",
    } | LAYER


def write_folder(folder: Path, config: dict[str, Any], num_shards: int) -> None:
    """Random bytes under the names and shapes that the config asks for, in shards of about the same size."""
    from footplate.engine.weights.model_config import config_from_json
    from footplate.engine.weights.tensor_names import hf_names, tensor_shapes

    (folder / "config.json").write_text(json.dumps(config))
    shape = config_from_json(folder / "config.json")
    names, shapes = hf_names(shape), tensor_shapes(shape)
    sizes = {name: 2 * _elements(shapes[name]) for name in names}
    share = sum(sizes.values()) / num_shards
    placed: list[list[str]] = [[] for _ in range(num_shards)]
    reached = 0
    for name, size in sizes.items():
        placed[min(num_shards - 1, int(reached / share))].append(name)
        reached += size
    noise = os.urandom(CHUNK)
    index = {}
    for number, mine in enumerate(placed):
        path = folder / f"model-{number + 1:05d}-of-{num_shards:05d}.safetensors"
        _write_shard(path, {names[n]: (list(shapes[n]), sizes[n]) for n in mine}, noise)
        index |= {names[n]: path.name for n in mine}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))


def _elements(shape: tuple[int, ...]) -> int:
    return shape[0] * (shape[1] if len(shape) > 1 else 1)


def _write_shard(path: Path, tensors: dict[str, tuple[list[int], int]], noise: bytes) -> None:
    header, begin = {}, 0
    for name, (shape, size) in tensors.items():
        header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [begin, begin + size]}
        begin += size
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for _, size in tensors.values():
            for at in range(0, size, CHUNK):
                file.write(noise[: min(CHUNK, size - at)])
        file.flush()
        os.fsync(file.fileno())  # else a cold read could not drop what is not written


def drop(files: list[Path]) -> None:
    for path in files:
        with path.open("rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def read_plainly(files: list[Path], num_threads: int) -> None:
    """Every byte into a buffer of the thread's own; parts of files are handed out in order."""
    parts = [(path, at) for path in files for at in range(0, path.stat().st_size, CHUNK)]

    def read(mine: list[tuple[Path, int]]) -> None:
        buffer = bytearray(CHUNK)
        for path, at in mine:
            with path.open("rb", buffering=0) as file:
                os.preadv(file.fileno(), [buffer], at)

    with ThreadPoolExecutor(num_threads) as threads:
        list(threads.map(read, [parts[i::num_threads] for i in range(num_threads)]))


def read_to_new_memory(files: list[Path], num_threads: int) -> None:
    """Every file into memory that nobody touched before, as the host's weights are: page faults included."""
    import torch

    def read(path: Path) -> torch.Tensor:
        memory = torch.empty(path.stat().st_size, dtype=torch.uint8)
        with path.open("rb", buffering=0) as file:
            for at in range(0, memory.numel(), CHUNK):
                os.preadv(file.fileno(), [memory[at : at + CHUNK].numpy().data], at)
        return memory

    with ThreadPoolExecutor(num_threads) as threads:
        list(threads.map(read, files))


def read_by_the_library(files: list[Path], device: str, dtype: Any) -> None:
    """Each file to the device, then to the type that is computed in."""
    import torch
    from safetensors.torch import load_file

    loaded = [load_file(path, device=device) for path in files]
    # On the host the library maps files: nothing is read before it is touched.
    is_mapped = device == "cpu"
    loaded = [{name: t.to(dtype, copy=is_mapped) for name, t in part.items()} for part in loaded]
    if device == "cuda":
        torch.cuda.synchronize()
    del loaded


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--gib", type=float, default=1.0)
    parser.add_argument("--shards", type=int, default=4)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--folder", type=Path, help="where the shards lie, or are to lie")
    parser.add_argument("--cold", action="store_true", help="drop files from the page cache before each read")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    if options.rounds < 1 or options.shards < 1 or options.gib <= 0:
        parser.error("--rounds, --shards and --gib must be positive")
    folder = options.folder or Path(tempfile.mkdtemp(prefix="footplate-load-"))
    try:
        folder.mkdir(parents=True, exist_ok=True)
        result = _measure(folder, options)
    finally:
        if options.folder is None:
            shutil.rmtree(folder)
    if options.out:
        options.out.write_text(json.dumps(result, indent=1) + "\n")
        print(options.out)


def _measure(folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    import torch

    if options.device.startswith("cuda") and not torch.cuda.is_available():
        sys.exit("--device cuda: torch finds no CUDA device here; leave --device out")
    device = options.device if options.device != "auto" else "cuda" if torch.cuda.is_available() else "cpu"
    files = _prepare(folder, int(options.gib * GIB), options.shards)
    num_bytes = sum(path.stat().st_size for path in files)
    reported: list[float] = []
    ways = _ways(folder, files, device, options.dtype, reported)
    rates = _in_turn(ways, files, options, num_bytes)
    rates["load_model, as it reports"] = reported
    rows = [{"way": name, "unit": "GB/s", **spread(found)} for name, found in rates.items()]
    for row in rows:
        print(f"{row['way']:28} {row['median']:8.2f} GB/s  ({row['min']}..{row['max']})")
    medians = {row["way"]: row["median"] for row in rows}
    others = [name for name in ways if name != "load_model"]
    ratios = {f"load_model / {name}": round(medians["load_model"] / medians[name], 3) for name in others}
    for name, ratio in ratios.items():
        print(f"{name:44} {ratio:.2f}")
    facts = {
        "command": "bench_load.py " + shlex.join(sys.argv[1:]),
        "bytes": num_bytes,
        "files": len(files),
        "device": device,
        "is_cold": options.cold,
    }
    return environment() | facts | {"rows": rows, "ratios": ratios}


def _ways(
    folder: Path, files: list[Path], device: str, dtype: str, reported: list[float]
) -> dict[str, Callable[[], None]]:
    """What is measured, by name. Our loader's own figures go to `reported`."""
    import torch

    from footplate.engine.config import EngineConfig
    from footplate.engine.loader import DTYPES, load_model
    from footplate.engine.weights.streaming import num_readers

    config, threads = EngineConfig(dtype=dtype, device=device), num_readers()

    def load() -> None:
        model = load_model(f"hf:{folder}", config)
        if device == "cuda":
            torch.cuda.synchronize()
        assert model.load_time is not None
        reported.append(model.load_time.gb_s)

    ways: dict[str, Callable[[], None]] = {
        "plain read, 1 thread": lambda: read_plainly(files, 1),
        f"plain read, {threads} threads": lambda: read_plainly(files, threads),
        "read to new host memory": lambda: read_to_new_memory(files, threads),
        "safetensors library": lambda: read_by_the_library(files, device, DTYPES[dtype]),
        "load_model": load,
    }
    if importlib.util.find_spec("safetensors") is None:
        print("safetensors library: left out, it is not installed")
        del ways["safetensors library"]
    if device == "cuda":
        torch.zeros(1, device=device)  # the context is no part of any of them
    return ways


def _in_turn(
    ways: dict[str, Callable[[], None]], files: list[Path], options: argparse.Namespace, num_bytes: int
) -> dict[str, list[float]]:
    """GB/s of each way in each round. A round before the first fills the page cache and is not counted."""
    import torch

    rates: dict[str, list[float]] = {name: [] for name in ways}
    read_plainly(files, 4)
    for _ in range(options.rounds):
        for name, way in ways.items():
            if options.cold:
                drop(files)
            start = time.perf_counter()
            way()
            rates[name].append(num_bytes / (time.perf_counter() - start) / 1e9)
            if torch.cuda.is_available():
                torch.cuda.empty_cache()
    return rates


def _prepare(folder: Path, size: int, num_shards: int) -> list[Path]:
    config = config_of(size)
    described = folder / "config.json"
    is_there = described.is_file() and json.loads(described.read_text()) == config
    if not is_there or len(list(folder.glob("*.safetensors"))) != num_shards:
        if any(folder.iterdir()):
            sys.exit(f"{folder} holds something else; give an empty folder or the same --gib and --shards")
        free = shutil.disk_usage(folder).free
        if free < 1.1 * size:
            sys.exit(f"{folder} has {free / GIB:.1f} GiB free, {1.1 * size / GIB:.1f} are needed")
        write_folder(folder, config, num_shards)
    return sorted(folder.glob("*.safetensors"))


if __name__ == "__main__":
    main()
