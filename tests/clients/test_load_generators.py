"""aiperf, guidellm and `footplate bench serve` measure one server in turn, and find the same.

They take turns in rounds, each time another one first; what is compared is the geometric mean over the
rounds of a tool's share of ours. A small machine's speed changes by a tenth and more from one run to the
next, whoever measures, and the time between tokens most of all. The gateway's own histogram says how fast the
server was meanwhile: so a tool's median time between tokens is taken as a share of the server's mean in the
same run, and these are compared. Times to the first token are compared as reported: there the server's mean
is of other requests, too, since prompts of a warm-up come again and are then in the prefix cache. All shares
are written down, with standard errors.

What each one calls its figures, read in the source of the versions that are installed:

- TTFT: all three end it with the first chunk that has text, not with the role chunk. aiperf begins it just
  before it asks its pool for a connection; guidellm as the request's head is written; ours, in closed loop,
  before a connection is taken.
- "Inter token latency" of aiperf and guidellm is a mean for each request: (last text - first text) over
  (output tokens - 1), tokens as the server counts them. That is our TPOT, which is compared here; our ITL is
  the distribution of the gaps themselves. aiperf's "inter chunk latency" is each gap between chunks.

They are held to one another with one request at a time. With two their figures differ by more, perhaps by how
they pace: ours sends both at once, and prompts that come together are read together.
"""

from __future__ import annotations

import json
import math
import os
import statistics
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from footplate.engine.bench.record import environment as facts
from footplate.engine.bench.record import spread
from footplate.engine.text.pipeline import TextPipeline
from tests.clients.conftest import HERE
from tests.e2e.serve_process import FOOTPLATE, SMALL, ServeProcess, clean_environment

pytestmark = pytest.mark.clients
ROUNDS = int(os.environ.get("CLIENTS_ROUNDS", "12"))
LEVELS = tuple(int(part) for part in os.environ.get("CLIENTS_CONCURRENCY", "1").split(","))
REQUESTS, WARM = 20, 4
CONTENT_TOKENS, OUTPUT_TOKENS = 96, 32
TOLERANCE = 0.10
# What our client may lag, of the TTFT it reports, in 19 of 20 moments. Its own warning is stricter, for the
# sake of 99th percentiles; medians are compared here.
MAX_LAG = 0.02
RUN_S = 600
RESULTS = HERE / "results"
OURS = "footplate bench serve"


@dataclass(frozen=True)
class Measured:
    """A run's medians in ms, as the tool itself computed them, and what it was asked to do."""

    tool: str
    concurrency: int
    ttft_ms: float
    itl_ms: float
    requests: int
    input_tokens: float
    output_tokens: float
    load_1min: float
    command: str
    more: dict[str, Any]
    # What the gateway measured meanwhile: means over the run's requests, those that warm up among them.
    served_ttft_ms: float = math.nan
    served_itl_ms: float = math.nan


@dataclass(frozen=True)
class Setting:
    """One server, and what all tools need to know of it."""

    served: ServeProcess
    tokenizer: Path
    input_tokens: int
    folder: Path

    def run(self, command: list[str], is_refused_ok: bool = False, **variables: str) -> tuple[str, float]:
        """Run a tool to its end; its command without the key, and the load that it found."""
        load = round(os.getloadavg()[0], 2)
        done = subprocess.run(
            command,
            env=clean_environment(**variables),
            cwd=self.folder,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=RUN_S,
        )
        assert done.returncode == 0 or is_refused_ok, (done.stdout + done.stderr)[-3000:]
        shown = " ".join([Path(command[0]).name, *command[1:]])
        for text, name in (
            (self.served.key(), "KEY"),
            (str(self.tokenizer), "TOKENIZER"),
            (self.served.url, "URL"),
            (str(self.folder), "FOLDER"),
        ):
            shown = shown.replace(text, name)
        return shown, load


def by_aiperf(program: Path, at: Setting, concurrency: int, seed: int) -> Measured:
    out = at.folder / f"aiperf-{concurrency}-{seed}"
    command, load = at.run([
        *(str(program), "profile", "--model", SMALL, "--url", at.served.url, "--api-key", at.served.key()),
        *("--endpoint-type", "chat", "--streaming", "--use-server-token-count"),
        *("--tokenizer", str(at.tokenizer), "--random-seed", str(seed)),
        *("--concurrency", str(concurrency), "--request-count", str(REQUESTS)),
        *("--warmup-request-count", str(WARM)),
        *("--isl", str(CONTENT_TOKENS), "--isl-stddev", "0"),
        *("--osl", str(OUTPUT_TOKENS), "--osl-stddev", "0"),
        *("--extra-inputs", "ignore_eos:true", "--extra-inputs", "temperature:0"),
        *("--ui", "none", "--no-gpu-telemetry", "--artifact-dir", str(out)),
    ])  # fmt: skip
    found = json.loads((out / "profile_export_aiperf.json").read_text())
    return Measured(
        tool="aiperf 0.13.0",
        concurrency=concurrency,
        ttft_ms=found["time_to_first_token"]["p50"],
        itl_ms=found["inter_token_latency"]["p50"],
        requests=found["time_to_first_token"]["count"],
        input_tokens=found["usage_prompt_tokens"]["avg"],
        output_tokens=found["output_sequence_length"]["avg"],
        load_1min=load,
        command=command,
        more={"inter_chunk_latency_p50_ms": found["inter_chunk_latency"]["p50"]},
    )


def by_guidellm(program: Path, at: Setting, concurrency: int, seed: int) -> Measured:
    out = at.folder / f"guidellm-{concurrency}-{seed}.json"
    backend = {
        "kind": "openai_http",
        "target": at.served.url,
        "model": SMALL,
        "api_key": at.served.key(),
        "extras": {"body": {"temperature": 0}},
    }
    data = f"kind=synthetic_text,prompt_tokens={CONTENT_TOKENS},output_tokens={OUTPUT_TOKENS}"
    command, load = at.run([
        *(str(program), "run", "--backend", json.dumps(backend)),
        *("--profile", f"kind=concurrent,streams={concurrency},warmup={WARM}"),
        *("--constraint", f"kind=max_requests,count={WARM + REQUESTS}"),
        *("--tokenizer", f"kind=hf_auto,model={at.tokenizer}", "--data", data),
        *("--seed", f"kind=static,value={seed}"),
        *("--output", f"kind=json,path={out}", "--disable-console"),
    ], HF_HUB_OFFLINE="1")  # fmt: skip
    [benchmark] = json.loads(out.read_text())["benchmarks"]
    metrics = benchmark["metrics"]
    assert not benchmark["requests"]["errored"]
    return Measured(
        tool="guidellm 0.8.1",
        concurrency=concurrency,
        ttft_ms=metrics["time_to_first_token_ms"]["successful"]["median"],
        itl_ms=metrics["inter_token_latency_ms"]["successful"]["median"],
        requests=metrics["time_to_first_token_ms"]["successful"]["count"],
        input_tokens=metrics["prompt_token_count"]["successful"]["mean"],
        output_tokens=metrics["output_token_count"]["successful"]["mean"],
        load_1min=load,
        command=command,
        more={},
    )


def by_footplate(at: Setting, concurrency: int, seed: int) -> Measured:
    out = at.folder / f"footplate-{concurrency}-{seed}.json"
    command, load = at.run(
        [
            *(str(FOOTPLATE), "bench", "serve", "--url", at.served.url, "--model", SMALL),
            *("--concurrency", str(concurrency), "--requests", str(REQUESTS), "--warmup", str(WARM)),
            *("--input-tokens", str(at.input_tokens), "--output-tokens", str(OUTPUT_TOKENS)),
            *("--seed", str(seed), "--json", str(out)),
        ],
        # It refuses to call figures good that were taken late; they are written all the same.
        is_refused_ok=True,
        FOOTPLATE_API_KEY=at.served.key(),
    )
    [level] = json.loads(out.read_text())["levels"]
    assert not level["errors"]
    return Measured(
        tool=OURS,
        concurrency=concurrency,
        ttft_ms=level["ttft_ms"]["p50"],
        itl_ms=level["tpot_ms"]["p50"],
        requests=level["completed"],
        input_tokens=level["input_tokens"]["mean"],
        output_tokens=level["output_tokens"]["mean"],
        load_1min=load,
        command=command,
        more={"gap_p50_ms": level["gap_ms"]["p50"], "client": level["client"]},
    )


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServeProcess]:
    """A platform on half of the cores. The other half is the tools': aiperf's ten processes would slow the
    very server that they time."""
    cores = sorted(os.sched_getaffinity(0))
    half = max(1, len(cores) // 2)
    os.sched_setaffinity(0, cores[:half])
    process = ServeProcess.launch(tmp_path_factory.mktemp("clients") / "data")
    os.sched_setaffinity(0, cores[half:] or cores)
    try:
        yield process
    finally:
        os.sched_setaffinity(0, cores)
        process.stop()


@pytest.fixture(scope="module")
def setting(
    served: ServeProcess,
    tokenizer_dir: Path,
    pipeline: TextPipeline,
    tmp_path_factory: pytest.TempPathFactory,
) -> Setting:
    text = "Name three rivers."
    body = {"model": SMALL, "messages": [{"role": "user", "content": text}], "max_tokens": 1}
    with served.http() as http:
        asked = http.post("/v1/chat/completions", json=body).json()["usage"]["prompt_tokens"]
    # The others count a prompt before the template is put around it, ours counts what the server does.
    template_tokens = asked - len(pipeline.encode(text))
    folder = tmp_path_factory.mktemp("generators")
    return Setting(served, tokenizer_dir, CONTENT_TOKENS + template_tokens, folder)


def test_all_tools_find_the_same_latencies(aiperf: Path, guidellm: Path, setting: Setting) -> None:
    assert ROUNDS > 1, "one round has no standard error"
    tools = [
        partial(by_aiperf, aiperf, setting),
        partial(by_guidellm, guidellm, setting),
        partial(by_footplate, setting),
    ]
    found: list[Measured] = []
    for turn in range(1, ROUNDS + 1):
        for concurrency in LEVELS:
            # A prefix cache may hold what one seed sent before.
            seed = 10 * turn + concurrency
            found += [beside_server(setting.served, partial(measure, concurrency, seed)) for measure in tools]
        tools = [*tools[1:], tools[0]]
    rows = compared(found)
    write(found, rows)
    for measured in found:
        assert measured.input_tokens == pytest.approx(setting.input_tokens, abs=2), measured.tool
        assert measured.output_tokens == OUTPUT_TOKENS, measured.tool
        assert REQUESTS - 2 <= measured.requests <= REQUESTS + 1, measured.tool
    late = [
        f"{measured.more['client']['lag_ms']['p95']:.2f} ms at a load of {measured.load_1min}"
        for measured in found
        if measured.tool == OURS and measured.more["client"]["lag_ms"]["p95"] > MAX_LAG * measured.ttft_ms
    ]
    assert not late, f"this machine is too busy to measure on, our client lagged by {'; '.join(late)} (p95)"
    apart = [
        f"{name_of(row)} of {row['tool']} is {row[COMPARED[row['figure']]]:.3f} of ours"
        f" (± {row[COMPARED[row['figure']] + '_error']:.3f})"
        for row in rows
        if row["concurrency"] == 1 and abs(row[COMPARED[row["figure"]]] - 1) > TOLERANCE
    ]
    assert not apart, f"apart by more than {TOLERANCE:.3f}: {'; '.join(apart)}"


COMPARED = {"ttft_ms": "plain", "itl_ms": "over_server"}
SERVED = {"ttft_ms": "vllm:time_to_first_token_seconds", "itl_ms": "vllm:inter_token_latency_seconds"}


def beside_server(served: ServeProcess, measure: Callable[[], Measured]) -> Measured:
    """A run, with the server's means of its requests."""

    def sums() -> dict[str, tuple[float, float]]:
        served.await_settled()
        return {
            key: (served.metric(f"{name}_sum"), served.metric(f"{name}_count"))
            for key, name in SERVED.items()
        }

    before = sums()
    measured = measure()
    means = {
        f"served_{key}": 1000 * (total - before[key][0]) / (count - before[key][1])
        for key, (total, count) in sums().items()
    }
    return replace(measured, **means)


def geometric(shares: list[float]) -> tuple[float, float]:
    """(geometric mean, its standard error)."""
    logs = [math.log(share) for share in shares]
    mean = math.exp(statistics.mean(logs))
    return mean, mean * statistics.stdev(logs) / math.sqrt(len(logs))


def compared(found: list[Measured]) -> list[dict[str, Any]]:
    """For each tool, level and figure: the median over the rounds and its spread, and shares of ours, as the
    tools report (`plain`) and over the server's own figures in the same run (`over_server`).
    """
    rows = []
    for concurrency in LEVELS:
        for figure in ("ttft_ms", "itl_ms"):
            by_tool: dict[str, list[Measured]] = {}
            for each in found:
                if each.concurrency == concurrency:
                    by_tool.setdefault(each.tool, []).append(each)
            for tool, runs in by_tool.items():
                values, ours = ([getattr(run, figure) for run in of] for of in (runs, by_tool[OURS]))
                base, our_base = (
                    [getattr(run, f"served_{figure}") for run in of] for of in (runs, by_tool[OURS])
                )
                plain = [value / our for value, our in zip(values, ours, strict=True)]
                of_ours = [share * b / a for share, a, b in zip(plain, base, our_base, strict=True)]
                rows.append(
                    {"concurrency": concurrency, "figure": figure, "tool": tool}
                    | dict(zip(("over_server", "over_server_error"), geometric(of_ours), strict=True))
                    | dict(zip(("plain", "plain_error"), geometric(plain), strict=True))
                    | {"served_median": statistics.median(base)}
                    | spread(values)
                )
    return rows


def name_of(row: dict[str, Any]) -> str:
    return str(row["figure"]).removesuffix("_ms").upper()


def write(found: list[Measured], rows: list[dict[str, Any]]) -> None:
    """The figures, whether they agree or not."""
    RESULTS.mkdir(exist_ok=True)
    head = facts()
    result = head | {
        "command": "make clients",
        "model": SMALL,
        "rounds": ROUNDS,
        "content_tokens": CONTENT_TOKENS,
        "output_tokens": OUTPUT_TOKENS,
        "tolerance": TOLERANCE,
        "agreement": rows,
        "runs": [asdict(measured) for measured in found],
    }
    (RESULTS / "agreement.json").write_text(json.dumps(result, indent=1) + "\n")
    lines = [
        f"Medians of {ROUNDS} rounds in turn, each with another tool first, ms; {SMALL},",
        f"{CONTENT_TOKENS} prompt tokens and a template, {OUTPUT_TOKENS} output tokens,",
        f"{REQUESTS} requests a run; the server has half of the cores, the tools the other half.",
        "ITL is a request's mean here, as aiperf and guidellm define it: our TPOT. Shares of ours are",
        "geometric means by round with their standard errors: as reported, and over the server's own means",
        "in the same run. Compared are TTFT as reported and ITL over the server's.",
        f"{head['hardware']}; commit {head['commit']}; load at the end {head['load_1min']}.",
        "",
        "| concurrency | figure | tool | median | lowest to highest | server's | share | over server's |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        lines.append(
            f"| {row['concurrency']} | {name_of(row)} | {row['tool']} | {row['median']} "
            f"| {row['min']} to {row['max']} | {row['served_median']:.4g} "
            f"| {row['plain']:.3f} ± {row['plain_error']:.3f} "
            f"| {row['over_server']:.3f} ± {row['over_server_error']:.3f} |"
        )
    (RESULTS / "agreement.md").write_text("\n".join(lines) + "\n")
