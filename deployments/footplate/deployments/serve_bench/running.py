"""One run of `footplate bench serve`: ask what the server takes, warm up, measure each level."""

from __future__ import annotations

import asyncio
import json
import signal
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any, Literal

from footplate.deployments.serve_bench.driver import Bounds, Driver, sample_of
from footplate.deployments.serve_bench.figures import Level, summary
from footplate.deployments.serve_bench.http_stream import Answer, StreamClient, Target
from footplate.deployments.serve_bench.prompts import Form, Load, Prompt
from footplate.platform.cli.errors import CommandError

_MAX_MESSAGE = 300
# Prompts of warm-ups and of the very first request are those of levels that no run has.
_WARM_LEVEL, _FIRST_LEVEL = 998, 999
_REFUSED = (400, 422)
Kind = Literal["concurrency", "rate"]


@dataclass(frozen=True, slots=True)
class Plan:
    """What to measure. `input_tokens` is the length of synthetic prompts as the server counts it."""

    levels: Sequence[float]
    kind: Kind
    input_tokens: int
    load: Load
    form: Form
    bounds: Bounds
    num_warm: int
    slos: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class Run:
    """What was found out about the server, and the figures of each level that was begun."""

    form: Form
    load: Load
    levels: list[dict[str, Any]]
    is_interrupted: bool


async def run(target: Target, plan: Plan, on_level: Callable[[dict[str, Any]], None]) -> Run:
    """Measure all levels in order. SIGINT ends the level that runs; what it has so far is kept.

    Raises:
        CommandError: the server can't be reached, or refuses the very first request.
    """
    client = StreamClient(target)
    form, load = await _suited(client, plan)
    driver = Driver(client, form, plan.bounds)
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGINT, driver.stop)
    levels: list[dict[str, Any]] = []
    try:
        for index, value in enumerate(plan.levels):
            await driver.warm_up(_streams(plan, value), load.chains(_WARM_LEVEL, None), plan.num_warm)
            if driver.is_stopped:
                break
            figures = summary(await _level(driver, plan, load, index, value))
            levels.append(figures)
            on_level(figures)
            if driver.is_stopped:
                break
    finally:
        loop.remove_signal_handler(signal.SIGINT)
        client.close()
    return Run(form, load, levels, driver.is_stopped)


def _streams(plan: Plan, value: float) -> int:
    return int(value) if plan.kind == "concurrency" else plan.num_warm


async def _level(driver: Driver, plan: Plan, load: Load, index: int, value: float) -> Level:
    drawn = load.chains(index, plan.bounds.max_requests)
    # A whole set is drawn with its first prompt, which takes a second or two of the large ones.
    chains = chain([next(drawn)], drawn)
    if plan.kind == "concurrency":
        found = await driver.closed(int(value), chains)
    else:
        found = await driver.open(value, chains, seed=load.seed)
    return replace(found, slos=plan.slos)


async def _suited(client: StreamClient, plan: Plan) -> tuple[Form, Load]:
    """The form that the server takes, and synthetic prompts of the length that was asked for.

    `ignore_eos` is left out where it is refused. How many tokens a template adds is what the server counts
    more than there are words.
    """
    form, load = plan.form, plan.load
    driver = Driver(client, form, plan.bounds)
    num_words = max(1, plan.input_tokens)
    prompt = next(load.chains(_FIRST_LEVEL, 1))[0]
    if load.workload == "synthetic":
        prompt = next(replace(load, num_words=num_words).chains(_FIRST_LEVEL, 1))[0]
    answer = await _first(driver, prompt, form)
    if answer.status in _REFUSED and form.ignores_eos:
        form = replace(form, ignores_eos=False)
        answer = await _first(driver, prompt, form)
    sample = sample_of(answer, 0.0, 0.0)
    # One token may be hidden, or half of a character.
    if sample.error not in (None, "no_output"):
        raise CommandError(f"the first request failed: {_refusal(answer, sample.error)}")
    if load.workload != "synthetic" or sample.num_input_tokens is None:
        return form, replace(load, num_words=num_words)
    num_more = sample.num_input_tokens - num_words
    if num_more >= num_words:
        raise CommandError(
            f"--input-tokens {plan.input_tokens}: the model's template alone takes {num_more}; ask for more"
        )
    return form, replace(load, num_words=num_words - num_more)


async def _first(driver: Driver, prompt: Prompt, form: Form) -> Answer:
    try:
        return await driver.ask(prompt, output_len=1, form=form)
    except TimeoutError:
        raise CommandError("the first request got no answer in time; see --timeout") from None
    except OSError:
        raise CommandError(
            "the server can't be connected to; give --url http://HOST:PORT, or set FOOTPLATE_URL"
        ) from None


def _refusal(answer: Answer, kind: str | None) -> str:
    """The server's words about the first request, which holds nobody's content."""
    try:
        error = json.loads(answer.body)["error"]
        message = str(error["message"])[:_MAX_MESSAGE]
    except (ValueError, KeyError, TypeError):
        return str(kind)
    return f"{message} ({kind})"
