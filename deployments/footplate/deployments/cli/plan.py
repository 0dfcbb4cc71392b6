"""`footplate plan`: what a model takes on a GPU, and how many are needed. Needs neither weights nor a GPU."""

from __future__ import annotations

import dataclasses
import json
import math
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from footplate.engine.capacity import (
    DEVICES,
    GB,
    GIB,
    KV_BYTES,
    OVERHEAD_BYTES,
    WEIGHT_BYTES,
    Capacity,
    Demand,
    Device,
    capacity,
    fewest_gpus,
    parameters_read,
)
from footplate.engine.errors import LoadError
from footplate.engine.weights.model_config import ModelConfig, read_config
from footplate.engine.weights.source import resolve_source
from footplate.platform.cli.errors import CommandError


def plan(  # noqa: PLR0913 - each is an option of the command
    source: Annotated[
        str, typer.Argument(help="Model: hf:/folder, gguf:/path, package:NAME, dummy:/config.json.")
    ],
    gpu: Annotated[str, typer.Option(help="One of " + ", ".join(DEVICES) + ".")] = "H100-80GB",
    gpus: Annotated[int, typer.Option(help="Devices that share it; 0: as few as it takes.", min=0)] = 0,
    dtype: Annotated[str, typer.Option(help="Weights: " + ", ".join(WEIGHT_BYTES) + ".")] = "bfloat16",
    kv_dtype: Annotated[str, typer.Option(help="Keys and values: " + ", ".join(KV_BYTES) + ".")] = "bfloat16",
    utilization: Annotated[float, typer.Option(help="Share of the memory.", min=0.1, max=1.0)] = 0.9,
    context: Annotated[int, typer.Option(help="Tokens of a sequence, prompt and answer.", min=1)] = 4096,
    prompt: Annotated[int, typer.Option(help="Tokens of a prompt.", min=1)] = 1024,
    output: Annotated[int, typer.Option(help="Tokens of an answer.", min=1)] = 256,
    price: Annotated[float | None, typer.Option(help="Of one device for an hour.", min=0.0)] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Weights, KV cache, concurrency, ceilings of speed, devices needed and cost, from the model's shape."""
    options = (("--gpu", gpu, DEVICES), ("--dtype", dtype, WEIGHT_BYTES), ("--kv-dtype", kv_dtype, KV_BYTES))
    for name, value, known in options:
        if value not in known:
            raise CommandError(f"{name} {value} is not known; use one of {', '.join(known)}")
    if price is not None and not math.isfinite(price):
        raise CommandError("--price is beyond all numbers; give what one device costs for an hour")
    try:
        shape = read_config(resolve_source(source))
    except LoadError as error:
        raise CommandError(str(error)) from error
    device = DEVICES[gpu]
    demand = Demand(dtype, kv_dtype, utilization, context, prompt, output, price)
    asked = capacity(shape, device, demand, gpus or 1)
    needed = fewest_gpus(shape, device, demand)
    shown = asked if gpus or needed is None else needed
    if as_json:
        result = {
            "source": source,
            "gpu": gpu,
            "plan": dataclasses.asdict(shown) | {"fits": shown.fits},
            "one_gpu": dataclasses.asdict(capacity(shape, device, demand, 1)),
            "gpus_needed": None if needed is None else needed.num_gpus,
        }
        typer.echo(json.dumps(result))
        return
    _show(source, shape, device, demand, shown, needed)


def _show(
    source: str, shape: ModelConfig, device: Device, demand: Demand, shown: Capacity, needed: Capacity | None
) -> None:
    one = capacity(shape, device, demand, 1)
    table = Table(title=f"{source} on {shown.num_gpus} x {device.name}", title_justify="left")
    for name in ("what", "figure", "how"):
        table.add_column(name, overflow="fold")
    for row in _rows(shape, device, demand, shown):
        table.add_row(*row)
    console = Console()
    console.print(table)
    given = device.memory_bytes * demand.gpu_memory_utilization / GB
    if not one.fits and needed is not None:
        console.print(
            f"One {device.name} gives {given:.0f} GB; weights take "
            f"{one.weight_bytes / GB:.0f} and leave {one.kv_budget_bytes_per_gpu / GB:.1f} for keys and "
            f"values: it takes {needed.num_gpus} of them. A smaller --dtype takes fewer."
        )
    elif needed is None:
        console.print("No group of such devices holds it; use larger ones or a smaller --dtype.")


def _rows(shape: ModelConfig, device: Device, demand: Demand, shown: Capacity) -> list[tuple[str, str, str]]:
    count, weight = shown.num_gpus, WEIGHT_BYTES[demand.weight_type]
    kv_size = KV_BYTES[demand.kv_type]
    rows = [
        ("parameters", f"{shown.parameters / 1e9:.2f} billion", "matrices and embeddings"),
        ("weights", f"{shown.weight_bytes / GB:.1f} GB", f"parameters x {weight:g} bytes"),
        (
            "keys and values of a token",
            f"{shown.kv_bytes_per_token / 1024:.0f} KiB",
            f"2 x {shape.num_layers} layers x {shape.num_kv_heads} heads x {shape.head_dim} x {kv_size} B",
        ),
        (
            "left for them on a device",
            f"{shown.kv_budget_bytes_per_gpu / GIB:.1f} GiB",
            f"{device.memory_bytes / GB:.0f} GB x {demand.gpu_memory_utilization:g} - weights / {count} - "
            f"{OVERHEAD_BYTES / GB:.0f} GB for steps and graphs",
        ),
        ("tokens held at once", f"{shown.kv_tokens:,}", "in paged blocks"),
        (
            f"sequences of {demand.context_tokens} at once",
            f"{shown.concurrent_contexts:.1f}",
            "shorter ones more; shared prefixes count once",
        ),
        (
            "one sequence's decoding, at best",
            f"{shown.decode_tokens_per_s_alone:.0f} tokens/s",
            f"{device.read_bytes_per_s * count / 1e12:.2f} TB/s over "
            f"{parameters_read(shape) * weight / GB:.2g} GB of weights and its keys and values",
        ),
        (
            "decoding when full, at best",
            f"{shown.decode_tokens_per_s_full:,.0f} tokens/s",
            "the same, weights read once for all",
        ),
        (
            f"a prompt of {demand.prompt_tokens}, at best",
            f"{shown.prefill_s * 1000:.0f} ms",
            f"2 operations a weight and token, and attention, at {device.flops * count / 1e12:.0f} TFLOP/s",
        ),
    ]
    if shown.cost_per_million_output_tokens is not None:
        rows.append(
            (
                "a million output tokens",
                f"{shown.cost_per_million_output_tokens:.2f}",
                f"{demand.price_per_hour:g} an hour and device, half of it filled, prompts included",
            )
        )
    return rows
