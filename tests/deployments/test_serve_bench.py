"""The figures of `footplate bench serve`, from times that are known."""

from __future__ import annotations

import json
import random
from itertools import islice

import numpy as np
import pytest

from footplate.deployments.serve_bench.events import StreamReader
from footplate.deployments.serve_bench.figures import (
    Arrival,
    Client,
    Level,
    Sample,
    distribution,
    missed_slos,
    parse_slos,
    summary,
    token_times,
)
from footplate.deployments.serve_bench.prompts import Form, Load, Prompt


def sample(*at_s: float, due_s: float = 0.0, tokens: int | None = None, error: str | None = None) -> Sample:
    """A request whose events came one by one at these times, and that ended 10 ms after the last."""
    arrivals = [Arrival(at) for at in at_s]
    return Sample(
        due_s,
        due_s,
        (at_s[-1] if at_s else due_s) + 0.01,
        arrivals,
        num_output_tokens=len(at_s) if tokens is None else tokens,
        error=error,
    )


def level(*samples: Sample, lags_s: tuple[float, ...] = (0.0,), cpu_s: float = 0.0, **slos: float) -> Level:
    return Level("concurrency", 1, samples, 2.0, Client(lags_s, cpu_s), slos=slos)


def test_known_gaps_give_known_figures() -> None:
    figures = summary(level(sample(0.1, 0.11, 0.13, 0.17), sample(0.3, 0.34)))
    assert figures["ttft_ms"] == {
        "p50": 200.0, "p90": 280.0, "p95": 290.0, "p99": 298.0, "mean": 200.0, "min": 100.0, "max": 300.0,
        "count": 2,
    }  # fmt: skip
    assert [figures["itl_ms"][name] for name in ("p50", "p90", "mean", "max", "count")] == [
        20,
        40,
        27.5,
        40,
        4,
    ]
    assert figures["tpot_ms"]["min"] == pytest.approx(70 / 3, abs=1e-3)
    assert (figures["tpot_ms"]["max"], figures["e2e_ms"]["max"]) == (40.0, 350.0)
    assert (figures["output_tokens_s"], figures["requests_s"]) == (3.0, 1.0)


def test_several_tokens_in_one_event_share_its_gap() -> None:
    told = Sample(0, 0, 1, [Arrival(0.1, 1, 1), Arrival(0.2, 1, 4), Arrival(0.25, 1, 1)], num_output_tokens=6)
    times = token_times(told)
    assert times.itl == [(pytest.approx(25), 4), (pytest.approx(50), 1)]
    assert times.gap == [pytest.approx(100), pytest.approx(50)]
    assert (times.tpot, times.is_estimated) == (pytest.approx(30), False)
    # nothing but the usage tells that there are more tokens than events
    spread = token_times(sample(0.1, 0.2, 0.3, tokens=9))
    assert spread.itl == [(pytest.approx(25), 4), (pytest.approx(25), 4)]
    assert (spread.tpot, spread.is_estimated) == (pytest.approx(25), True)


def test_events_of_one_read_are_one_arrival() -> None:
    times = token_times(
        Sample(0, 0, 1, [Arrival(0.1), Arrival(0.2, 2), Arrival(0.3, 1)], num_output_tokens=4)
    )
    assert times.itl == [(pytest.approx(50), 2), (pytest.approx(100), 1)]
    assert (times.tpot, times.is_estimated) == (pytest.approx(200 / 3), False)


def test_the_clock_of_a_request_begins_when_it_was_due() -> None:
    late = Sample(1.0, 3.0, 3.6, [Arrival(3.5)], num_output_tokens=1)
    times = token_times(late)
    assert (times.ttft, times.e2e) == (pytest.approx(2500), pytest.approx(2600))
    assert (times.itl, times.tpot) == ([], None)
    assert summary(level(late))["client"]["is_late"]


def test_percentiles_are_numpys_and_weights_are_counts() -> None:
    rng = random.Random(5)
    values = [rng.expovariate(1) for _ in range(101)]
    found, counts = distribution(values), [rng.randrange(1, 5) for _ in values]
    assert found is not None and found["p90"] == pytest.approx(np.percentile(values, 90), abs=1e-3)
    weighted = distribution(values, counts)
    repeated = sorted(value for value, count in zip(values, counts, strict=True) for _ in range(count))
    assert weighted is not None and weighted["count"] == len(repeated)
    assert weighted["p95"] == pytest.approx(repeated[-(-len(repeated) * 95 // 100) - 1], abs=1e-3)
    assert distribution([]) is None


def test_goodput_counts_requests_that_hold_every_limit() -> None:
    samples = [
        sample(0.1, 0.11, 0.12),  # good
        sample(0.3, 0.31, 0.32),  # first token too late
        sample(0.1, 0.4, 0.41),  # a gap too long
        sample(error="http_429"),
    ]
    figures = summary(level(*samples, ttft=200.0, itl=50.0, e2e=1000.0))
    assert figures["goodput"] == {
        "slo_ms": {"ttft": 200.0, "itl": 50.0, "e2e": 1000.0},
        "share": 0.25,
        "requests_s": 0.5,
        "missed": {"ttft": 1, "itl": 1},
    }
    assert (figures["errors"], figures["completed"]) == ({"http_429": 1}, 3)
    assert summary(level(*samples))["goodput"] is None


def test_itl_is_held_by_95_percent_of_the_tokens_and_gap_by_the_longest() -> None:
    times = token_times(sample(*(0.01 * n for n in range(1, 40)), 1.0))
    assert missed_slos(times, {"itl": 20.0, "gap": 20.0, "tpot": 20.0}) == ["gap", "tpot"]


def test_a_late_client_has_no_goodput() -> None:
    good = sample(0.1, 0.11, 0.12)
    assert summary(level(good, lags_s=(0.0015,), ttft=200.0))["goodput"]["share"] == 1
    late = summary(level(good, lags_s=(0.0,) * 50 + (0.02,), ttft=200.0))
    assert late["client"]["is_late"] and late["goodput"] is None
    assert "event loop was" in only_reason(late)
    busy = summary(level(good, cpu_s=1.9, ttft=200.0))
    assert "95% of a core" in only_reason(busy) and busy["goodput"] is None


def only_reason(figures: dict[str, object]) -> str:
    client = figures["client"]
    assert isinstance(client, dict)
    [reason] = client["reasons"]
    return str(reason)


@pytest.mark.parametrize("text", ["ttft", "ttft:", "ttft:x", "ttft:0", "ttft:nan", "speed:5", "itl:5,itl:6"])
def test_limits_that_mean_nothing_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"ttft|speed|itl"):
        parse_slos(text)
    assert parse_slos(" ttft:500, itl:50.5 ") == {"ttft": 500.0, "itl": 50.5}


def event(**fields: object) -> bytes:
    return b"data: " + json.dumps(fields).encode() + b"\n\n"


def chat(**delta: object) -> bytes:
    return event(choices=[{"index": 0, "delta": delta}], usage=None)


DONE = b"data: [DONE]\n\n"
USAGE = event(choices=[], usage={"prompt_tokens": 7, "completion_tokens": 3})


def test_a_stream_is_read_the_same_however_it_is_cut() -> None:
    whole = chat(role="assistant", content="") + chat(content="ä") + b": keep-alive\n\n" + USAGE + DONE
    for step in (1, 2, 7, len(whole)):
        reader = StreamReader()
        for at in range(0, len(whole), step):
            reader.feed(whole[at : at + step], float(at))
        reader.end()
        assert [(a.num_events, a.num_tokens) for a in reader.arrivals] == [(1, None)], step
        assert (reader.count("prompt_tokens"), reader.count("completion_tokens")) == (7, 3)
        assert reader.error is None


def test_the_role_chunk_is_no_first_token() -> None:
    reader = StreamReader()
    pieces = [chat(role="assistant", content=""), chat(reasoning_content="a"), chat(content="b"), chat()]
    for at, piece in enumerate(pieces):
        reader.feed(piece, float(at))
    assert [arrival.at_s for arrival in reader.arrivals] == [1.0, 2.0]


def test_tokens_of_an_event_are_told_by_ids_or_by_a_usage_that_runs_along() -> None:
    by_ids = StreamReader()
    by_ids.feed(event(choices=[{"text": "", "token_ids": [5, 6]}]), 1.0)  # half a character: still tokens
    by_ids.feed(event(choices=[{"text": "", "token_ids": []}]), 2.0)
    assert by_ids.arrivals == [Arrival(1.0, 1, 2)]
    running = StreamReader()
    for at, total in enumerate((1, 4, 4)):
        text = "x" if at < 2 else ""
        running.feed(event(choices=[{"text": text}], usage={"completion_tokens": total}), float(at))
    assert running.arrivals == [Arrival(0.0, 1, 1), Arrival(1.0, 1, 3)]
    # a usage on the last choice alone is the sum, not what that event brought
    at_end = StreamReader()
    at_end.feed(event(choices=[{"text": "a"}]), 0.0)
    at_end.feed(event(choices=[{"text": "b"}], usage={"completion_tokens": 5}), 1.0)
    assert at_end.arrivals == [Arrival(0.0), Arrival(1.0)] and at_end.count("completion_tokens") == 5


@pytest.mark.parametrize(
    ("tail", "error"),
    [
        (b"", "cut"),
        (event(error={"message": "secret", "code": "server_error"}) + DONE, "stream_error:server_error"),
        (event(error={"message": "secret", "code": "has blanks"}) + DONE, "stream_error:unknown"),
        (b"data: {\n\n" + DONE, "bad_event"),
        (DONE, None),
    ],
)
def test_a_stream_that_fails_is_an_error_by_kind(tail: bytes, error: str | None) -> None:
    reader = StreamReader()
    reader.feed(chat(content="a") + tail, 0.0)
    reader.end()
    assert reader.error == error


@pytest.mark.parametrize(
    ("usages", "is_bad"),
    [
        ([{"completion_tokens": 5, "prompt_tokens": 90}], False),
        ([{"completion_tokens": 1}, {"completion_tokens": 1}, {"completion_tokens": 5}], False),
        ([{"completion_tokens": None, "prompt_tokens_details": None}], False),
        ([{"completion_tokens": 6}], True),
        ([{"completion_tokens": 10**18}, {"completion_tokens": 5}], True),
        ([{"completion_tokens": 3}, {"completion_tokens": 2}], True),
        ([{"completion_tokens": -1}], True),
        ([{"completion_tokens": "5"}], True),
        ([{"completion_tokens": True}], True),
        ([{"prompt_tokens": 101}], True),
        ([{"prompt_tokens_details": {"cached_tokens": 101}}], True),
    ],
)
def test_counts_that_can_not_be_are_seen(usages: list[dict[str, object]], is_bad: bool) -> None:
    reader = StreamReader()
    for usage in usages:
        reader.feed(event(choices=[{"text": "a"}], usage=usage), 0.0)
    assert reader.is_usage_bad(5, 100) is is_bad
    assert reader.error is None


@pytest.mark.parametrize(
    ("extra", "most"),
    [({}, 9), ({"max_completion_tokens": 20}, 20), ({"n": 3}, 27), ({"max_tokens": None}, None)],
)
def test_what_a_request_asks_for_bounds_what_it_can_be_told(
    extra: dict[str, object], most: int | None
) -> None:
    found = Form("completions", "m", extra=extra).most_tokens(Prompt([1, 2], 9))
    assert found.output == most and 2 <= found.input < 20_000


def test_the_same_seed_sends_the_same_prompts_and_each_level_others() -> None:
    def texts(load: Load, level: int) -> list[list[Prompt]]:
        return list(islice(load.chains(level, 5), 5))

    for workload in ("synthetic", "decode", "mixed", "prefix", "sessions"):
        load = Load(workload, 40, 8, 0.1, 49_000, seed=3)
        assert texts(load, 0) == texts(load, 0)
        assert texts(load, 0) != texts(load, 1)
        assert texts(load, 0) != texts(Load(workload, 40, 8, 0.1, 49_000, seed=4), 0)
    [[prompt]] = texts(Load("synthetic", 40, 8, 1.0, 49_000, seed=3), 0)[:1]
    assert isinstance(prompt.text, str) and len(prompt.text.split()) == 40


def test_a_body_has_what_was_asked_for_and_more() -> None:
    body = Form("completions", "m", extra={"temperature": 0.5, "return_token_ids": True}).body(
        Prompt([1, 2], 9)
    )
    assert (body["prompt"], body["max_tokens"], body["ignore_eos"]) == ([1, 2], 9, True)
    assert (body["temperature"], body["return_token_ids"]) == (0.5, True)
    plain = Form("chat", "m", ignores_eos=False).body(Prompt("hi", 9))
    assert plain["messages"] == [{"role": "user", "content": "hi"}] and "ignore_eos" not in plain
