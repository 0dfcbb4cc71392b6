"""`footplate bench serve`: drive a running server, and measure what its clients meet."""

from __future__ import annotations

import asyncio
import json
import os
import shlex
import sys
from pathlib import Path
from typing import Annotated, Any, cast

import httpx
import typer

from footplate.deployments.serve_bench.driver import Bounds
from footplate.deployments.serve_bench.figures import parse_slos
from footplate.deployments.serve_bench.http_stream import Target
from footplate.deployments.serve_bench.prompts import WORKLOADS, Endpoint, Form, Load
from footplate.deployments.serve_bench.report import can_draw, draw, head_line, level_lines
from footplate.deployments.serve_bench.running import Kind, Plan, Run, run
from footplate.engine.bench.record import environment
from footplate.platform.cli.client import open_client, refused, unreachable
from footplate.platform.cli.errors import CommandError

DEFAULT_REQUESTS = 32


_Concurrency = Annotated[
    str | None, typer.Option(help="Closed loop: requests at a time, by commas, such as 1,2,4.")
]
_Rate = Annotated[
    str | None, typer.Option(help="Open loop: requests a second that come by chance, such as 0.5,1,2.")
]
_Requests = Annotated[
    int | None,
    typer.Option(help=f"Requests of each level; {DEFAULT_REQUESTS} without --duration.", min=1),
]
_Duration = Annotated[
    float | None, typer.Option(help="Seconds of each level; what runs then is waited for.", min=0.1)
]
_Model = Annotated[str | None, typer.Option(help="Model to ask; the first one served when left out.")]
_Endpoint = Annotated[
    str | None, typer.Option(help="chat or completions; chat for synthetic prompts, else completions.")
]
_Workload = Annotated[
    str, typer.Option(help="One of " + ", ".join(WORKLOADS) + "; all but the first send token ids.")
]
_InputTokens = Annotated[
    int,
    typer.Option(help="synthetic: prompt tokens as the server counts them, template included.", min=1),
]
_OutputTokens = Annotated[int, typer.Option(help="synthetic: tokens of each answer.", min=1)]
_Scale = Annotated[
    float,
    typer.Option(help="mixed, prefix, sessions: lengths are multiplied by this.", min=0.001, max=100),
]
_Vocabulary = Annotated[int, typer.Option(help="Token ids stay below this.", min=1001)]
_Warmup = Annotated[int, typer.Option(help="Requests before each level that don't count.", min=0)]
_Slo = Annotated[
    str,
    typer.Option(
        help="Limits in ms for goodput, such as ttft:500,itl:50,e2e:5000. itl: of 95 % of a request's "
        "tokens; also tpot (its mean) and gap (its longest wait)."
    ),
]
_Seed = Annotated[
    int, typer.Option(help="The same seed sends the same prompts, which a prefix cache may still hold.")
]
_Extra = Annotated[str, typer.Option(help="More of each request's body, as a JSON object.")]
_Url = Annotated[
    str | None,
    typer.Option(help="A server that is not FOOTPLATE_URL; gets FOOTPLATE_API_KEY, never a key from a file."),
]
_Timeout = Annotated[float, typer.Option(help="Seconds until a request is given up.", min=0.1)]
_JsonFile = Annotated[Path | None, typer.Option("--json", help="Write all figures to this file.")]
_Plot = Annotated[Path | None, typer.Option(help="Draw the levels into this PNG.")]


def serve(  # noqa: PLR0913 - one option for each thing that makes up a load
    concurrency: _Concurrency = None,
    rate: _Rate = None,
    requests: _Requests = None,
    duration: _Duration = None,
    model: _Model = None,
    endpoint: _Endpoint = None,
    workload: _Workload = "synthetic",
    input_tokens: _InputTokens = 128,
    output_tokens: _OutputTokens = 64,
    scale: _Scale = 1.0,
    vocabulary: _Vocabulary = 49_000,
    warmup: _Warmup = 2,
    slo: _Slo = "",
    seed: _Seed = 0,
    extra: _Extra = "{}",
    url: _Url = None,
    timeout: _Timeout = 600.0,
    json_file: _JsonFile = None,
    plot: _Plot = None,
) -> None:
    """Measure a running server: TTFT, inter-token latency, throughput, goodput, errors, by level of load.

    Any server that streams as the OpenAI API does. Figures of a level count for nothing when this process
    itself was late; then the command says so and fails. Ctrl-C ends the level and writes what there is.
    """
    kind, levels = _levels(concurrency, rate)
    chosen = _endpoint(endpoint, workload, kind)
    slos, more = _slos(slo), _json_object(extra)
    _check_files(json_file, plot)
    with _client(url) as http:
        asked = model or _first_model(http)
        target = Target.of(
            str(http.base_url), {n: v for n, v in http.headers.items() if n == "authorization"}
        )
    plan = Plan(
        levels=levels,
        kind=kind,
        input_tokens=input_tokens,
        load=Load(workload, input_tokens, output_tokens, scale, vocabulary, seed),
        form=Form(chosen, asked, extra=more),
        bounds=Bounds(requests or (None if duration else DEFAULT_REQUESTS), duration, timeout),
        num_warm=warmup,
        slos=slos,
    )
    _verdict(_measured(target, plan, json_file, plot))


def _measured(target: Target, plan: Plan, json_file: Path | None, plot: Path | None) -> Run:
    """Measure, show each level as it ends, and write the files."""
    result: dict[str, Any] = environment() | {"command": shlex.join(["footplate", *sys.argv[1:]])}
    print(f"{result['hardware']}; footplate {result['versions'].get('footplate')} at {result['commit']}")
    print(f"load of this machine before: {result['load_1min']}")
    print(head_line(), flush=True)
    done = asyncio.run(run(target, plan, lambda figures: print("\n".join(level_lines(figures)), flush=True)))
    result |= _record(plan, done) | {"load_1min_after": round(os.getloadavg()[0], 2)}
    if json_file is not None:
        json_file.write_text(json.dumps(result, indent=1) + "\n")
    if plot is not None and done.levels:
        draw(plot, done.levels)
    return done


def _check_files(json_file: Path | None, plot: Path | None) -> None:
    for name, file in (("--json", json_file), ("--plot", plot)):
        if file is not None and not file.absolute().parent.is_dir():
            raise CommandError(f"{name} {file}: there is no folder {file.absolute().parent}")
    if plot is not None and not can_draw():
        raise CommandError("--plot needs matplotlib: pip install 'footplate[eval]'")


def _levels(concurrency: str | None, rate: str | None) -> tuple[Kind, list[float]]:
    if (concurrency is None) == (rate is None):
        raise typer.BadParameter("give --concurrency or --rate, one of them")
    kind: Kind = "rate" if concurrency is None else "concurrency"
    try:
        if concurrency is None:
            levels = [float(part) for part in (rate or "").split(",")]
        else:
            levels = [float(int(part)) for part in concurrency.split(",")]
    except ValueError:
        levels = []
    if not levels or not all(0 < level <= 100_000 for level in levels):
        raise typer.BadParameter(f"--{kind} must be numbers above 0 with commas between them, such as 1,2,4")
    return kind, levels


def _endpoint(endpoint: str | None, workload: str, kind: str) -> Endpoint:
    if workload not in WORKLOADS:
        raise typer.BadParameter(f"--workload {workload!r}; known are {', '.join(WORKLOADS)}")
    chosen = endpoint or ("chat" if workload == "synthetic" else "completions")
    if chosen not in ("chat", "completions"):
        raise typer.BadParameter(f"--endpoint {chosen!r}; it can be chat or completions")
    if workload != "synthetic" and chosen == "chat":
        raise typer.BadParameter(f"--workload {workload} sends token ids, which only completions take")
    if workload == "sessions" and kind == "rate":
        raise typer.BadParameter(
            "--workload sessions needs --concurrency: a turn waits for the one before it"
        )
    return cast(Endpoint, chosen)


def _slos(text: str) -> dict[str, float]:
    try:
        return parse_slos(text)
    except ValueError as error:
        raise typer.BadParameter(f"--slo {error}") from None


def _json_object(text: str) -> dict[str, Any]:
    try:
        found = json.loads(text)
    except ValueError:
        found = None
    if not isinstance(found, dict):
        raise typer.BadParameter('--extra must be a JSON object, such as {"return_token_ids": true}')
    return found


def _client(url: str | None) -> httpx.Client:
    """To the platform, with a tenant's key; or to any server, with FOOTPLATE_API_KEY if there is one."""
    if url is None:
        return open_client("tenant.key")
    try:
        Target.of(url, {})
        key = (os.environ.get("FOOTPLATE_API_KEY") or "").strip()
        # A peer's root is often given with the version; our paths have it.
        base = url.rstrip("/").removesuffix("/v1")
        return httpx.Client(
            base_url=base, headers={"authorization": f"Bearer {key}"} if key else {}, timeout=30
        )
    except (ValueError, httpx.InvalidURL):
        raise CommandError(f"--url {url!r} is not a URL; write http://HOST:PORT") from None


def _first_model(client: httpx.Client) -> str:
    try:
        response = client.get("/v1/models")
    except httpx.HTTPError as error:
        raise unreachable(error) from None
    if response.is_error:
        raise refused(response)
    try:
        return str(response.json()["data"][0]["id"])
    except (ValueError, KeyError, IndexError, TypeError):
        raise CommandError("the server names no model; give --model") from None


def _record(plan: Plan, done: Run) -> dict[str, Any]:
    return {
        "load": {
            "workload": done.load.workload,
            "endpoint": done.form.endpoint,
            "model": done.form.model,
            "loop": "closed" if plan.kind == "concurrency" else "open",
            "input_tokens": plan.input_tokens if done.load.workload == "synthetic" else None,
            "output_tokens": plan.load.output_len if done.load.workload == "synthetic" else None,
            "ignore_eos": done.form.ignores_eos,
            "scale": done.load.scale,
            "seed": done.load.seed,
            "warm_up_requests": plan.num_warm,
            "extra": dict(done.form.extra),
        },
        "is_interrupted": done.is_interrupted,
        "levels": done.levels,
    }


def _verdict(done: Run) -> None:
    """What keeps the figures from being good ends the command with code 1."""
    if done.is_interrupted:
        raise CommandError("interrupted; what was measured until then is shown and written")
    if any(level["client"]["is_late"] or "bad_usage" in level["errors"] for level in done.levels):
        raise CommandError(
            "the client was late, so these figures are not the server's: "
            "give it a core of its own, or ask for less"
        )
    if any(level["completed"] == 0 for level in done.levels):
        raise CommandError("a level has no request that went well; 'failed' says why")
