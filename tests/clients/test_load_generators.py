"""aiperf, guidellm and `footplate bench serve` measure one server in turn, and find the same.

They take turns in rounds, each time another one first, so that what changes on the machine meanwhile meets
all of them. Compared is the geometric mean of a tool's shares of ours by round, which is the ratio of the
geometric means of the medians that the two report: it says what their medians say, uses every round where a
median of shares uses the middle one or two, and has a standard error. A round's share has a standard
deviation of about 0.12 on two cores with nothing else on them, so the figure of 15 rounds has one of 0.03,
and the bound lies three of them away.

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
from collections.abc import Iterator
from dataclasses import asdict, dataclass
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
ROUNDS = int(os.environ.get("CLIENTS_ROUNDS", "15"))
LEVELS = tuple(int(part) for part in os.environ.get("CLIENTS_CONCURRENCY", "1").split(","))
REQUESTS, WARM = 20, 4
CONTENT_TOKENS, OUTPUT_TOKENS = 96, 32
TOLERANCE = 0.10
# Late is a lag of 2 ms in one of a hundred moments, for the sake of 99th percentiles. A run or two of that
# are nothing to a mean of medians, and all are in it; more of them tell of a machine that has other work.
MAX_LATE_SHARE = 0.2
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
            found += [measure(concurrency, seed) for measure in tools]
        tools = [*tools[1:], tools[0]]
    rows = compared(found)
    write(found, rows)
    for measured in found:
        assert measured.input_tokens == pytest.approx(setting.input_tokens, abs=2), measured.tool
        assert measured.output_tokens == OUTPUT_TOKENS, measured.tool
        assert REQUESTS - 2 <= measured.requests <= REQUESTS + 1, measured.tool
    late = [
        (measured.concurrency, measured.load_1min, measured.more["client"]["reasons"])
        for measured in found
        if measured.tool == OURS and measured.more["client"]["is_late"]
    ]
    num_ours = sum(measured.tool == OURS for measured in found)
    assert len(late) <= MAX_LATE_SHARE * num_ours, f"this machine is too busy to measure on: {late}"
    apart = [
        f"{name_of(row)} of {row['tool']} is {row['of_ours']:.3f} of ours (± {row['standard_error']:.3f})"
        for row in rows
        if row["concurrency"] == 1 and abs(row["of_ours"] - 1) > TOLERANCE
    ]
    assert not apart, f"apart by more than {TOLERANCE:.3f}: {'; '.join(apart)}"


def compared(found: list[Measured]) -> list[dict[str, Any]]:
    """For each tool, level and figure: the median over the rounds and its spread, and the geometric mean of
    its shares of ours in the same round, since a machine's speed drifts, with that mean's standard error.
    """
    rows = []
    for concurrency in LEVELS:
        for figure in ("ttft_ms", "itl_ms"):
            by_tool: dict[str, list[float]] = {}
            for each in found:
                if each.concurrency == concurrency:
                    by_tool.setdefault(each.tool, []).append(getattr(each, figure))
            for tool, values in by_tool.items():
                shares = [math.log(value / ours) for value, ours in zip(values, by_tool[OURS], strict=True)]
                of_ours = math.exp(statistics.mean(shares))
                row = {
                    "concurrency": concurrency,
                    "figure": figure,
                    "tool": tool,
                    "of_ours": of_ours,
                    "standard_error": of_ours * statistics.stdev(shares) / math.sqrt(len(shares)),
                }
                rows.append(row | spread(values))
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
        "ITL is a request's mean here, as aiperf and guidellm define it: our TPOT.",
        f"{head['hardware']}; commit {head['commit']}; load at the end {head['load_1min']}.",
        "",
        "| concurrency | figure | tool | median | lowest to highest | of ours, by round | standard error |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        lines.append(
            f"| {row['concurrency']} | {name_of(row)} | {row['tool']} | {row['median']} "
            f"| {row['min']} to {row['max']} | {row['of_ours']:.3f} | {row['standard_error']:.3f} |"
        )
    (RESULTS / "agreement.md").write_text("\n".join(lines) + "\n")
