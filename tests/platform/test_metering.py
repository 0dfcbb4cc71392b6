"""What a request's usage event says, whichever way it ends; see tests/deployments for real stores."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import pytest

from footplate.billing.usage import (
    AttemptOutcome,
    EventSkeleton,
    EventState,
    Progress,
    TokenCounts,
    UsageEvent,
)
from footplate.engine.errors import EngineDead, EngineOverloaded
from footplate.platform.admission import Admission
from footplate.platform.metering import LostRequestMeter, Metering
from footplate.platform.metrics import LimitMetrics
from footplate.platform.settlement import Settlement
from footplate.tenancy.limiter.local import LocalLimiter
from footplate.tenancy.limiter.reservations import LostRequest
from footplate.tenancy.quotas import Quota
from tests.builders import TENANT_KEY, known_principals, model_card, principal
from tests.platform.conftest import Rig, chat_body, events, text_body

pytestmark = pytest.mark.anyio
CHAT, TEXT = "/v1/chat/completions", "/v1/completions"


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@dataclass
class Events:
    """A sink that keeps what it takes; durable when told so."""

    taken: list[UsageEvent] = field(default_factory=list)
    waiting: list[asyncio.Future[None]] = field(default_factory=list)
    may_begin: bool = True
    is_slow: bool = False

    def take(self, event: UsageEvent) -> asyncio.Future[Any]:
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.taken.append(event)
        self.waiting.append(future)
        if not self.is_slow:
            self.land()
        return future

    def land(self) -> None:
        for future in self.waiting:
            if not future.done():
                future.set_result(None)


@dataclass
class Metered:
    rig: Rig
    sink: Events
    settlement: Settlement
    limiter: LocalLimiter

    async def told(self) -> None:
        while self.settlement.num_ending:
            await asyncio.sleep(0)

    async def post(self, path: str, body: Any) -> Any:
        response = await self.rig.post(path, body)
        await self.told()
        return response

    async def leave(self, body: Any, num_steps: int) -> None:
        """Ask, and go once the engine has made so many steps."""
        task = asyncio.create_task(self.rig.post(TEXT, body))
        generations = self.rig.engine.generations
        count = len(generations)
        while len(generations) == count or generations[-1].num_steps < num_steps:
            await asyncio.sleep(0)
        await asyncio.sleep(0)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await self.told()

    @property
    def event(self) -> UsageEvent:
        [event] = self.sink.taken
        return event


@pytest.fixture
def metered(make_rig: Callable[..., Rig]) -> Metered:
    limiter, sink = LocalLimiter(), Events()
    settlement = Settlement(limiter, sink=sink)
    cards = [model_card(aliases=("small",))]
    rig = make_rig(cards, admission=Admission(limiter, settlement, LimitMetrics(), Metering(sink)))
    charged = replace(principal(), cost_center="4711", labels=(("env", "prod"), ("team", "blue")))
    rig.keys.principals = {**known_principals(), TENANT_KEY: charged}
    return Metered(rig, sink, settlement, limiter)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", [CHAT, TEXT])
async def test_an_answer_is_one_event_with_all_that_a_bill_names(
    metered: Metered, path: str, stream: bool
) -> None:
    metered.rig.emits([500] * 6, ends_with_stop=False, cached_tokens=1)
    asked = chat_body if path == CHAT else text_body
    response = await metered.post(path, asked(model="small", stream=stream, n=2))
    event, skeleton = metered.event, metered.event.skeleton
    num_prompt = len(metered.rig.engine.requests[0].prompt_token_ids)
    assert event.event_id == response.headers["x-request-id"]
    assert event.tokens == TokenCounts(num_prompt - 1, 1, 12)
    assert (event.state, event.is_estimated) == (EventState.COMPLETED, False)
    assert (skeleton.tenant_id, skeleton.key_id, skeleton.endpoint) == ("tenant-a", "key-a", path)
    assert (skeleton.requested_model, skeleton.target_model) == ("small", "smollm2-135m")
    assert skeleton.cost_center == "4711" and dict(skeleton.labels) == {"env": "prod", "team": "blue"}
    assert event.first_token_at is not None and event.started_at <= event.first_token_at <= event.ended_at
    [attempt] = event.attempts
    assert (attempt.replica, attempt.outcome) == ("0", AttemptOutcome.COMPLETED)
    # The engines know it by a name that begins with the event's.
    assert [each.request_id for each in metered.rig.engine.requests] == [f"{event.event_id}-0"]


async def test_several_prompts_are_one_event_with_an_attempt_each(metered: Metered) -> None:
    """FAULTS b2 13: one request, however many attempts."""
    metered.rig.emits([500] * 3, ends_with_stop=False)
    await metered.post(TEXT, text_body(prompt=[[5] * 4, [6] * 7], max_tokens=3))
    assert metered.event.tokens == TokenCounts(11, 0, 6)
    assert [attempt.tokens.total for attempt in metered.event.attempts] == [7, 10]


async def test_what_was_made_until_the_engine_heard_of_it_is_billed(metered: Metered) -> None:
    """FAULTS b1 1 and 3."""
    metered.rig.emits([500] * 50, hold_after=3, steps_unseen=2, cached_tokens=4)
    await metered.leave(text_body(prompt=[5] * 10, max_tokens=50), 3)
    event = metered.event
    assert (event.state, event.is_estimated) == (EventState.CLIENT_CANCELLED, False)
    assert event.tokens == TokenCounts(6, 4, 5)


async def test_a_client_that_leaves_before_the_first_token_pays_its_prompt(metered: Metered) -> None:
    metered.rig.emits([500] * 50, hold_after=0)
    await metered.leave(text_body(prompt=[5] * 10, max_tokens=50), 0)
    # Nothing says how much of the prompt was in the cache.
    assert (metered.event.tokens, metered.event.is_estimated) == (TokenCounts(10, 0, 0), True)


async def test_where_nobody_knows_what_was_made_the_event_is_an_estimate(metered: Metered) -> None:
    """FAULTS b1 2: as far as it was seen, and never free."""
    metered.rig.emits([500] * 50, hold_after=3, loses_count=True)
    await metered.leave(text_body(prompt=[5] * 10, max_tokens=50), 3)
    assert (metered.event.tokens, metered.event.is_estimated) == (TokenCounts(10, 0, 3), True)


async def test_a_count_that_can_not_be_is_an_estimate_and_no_lost_event(metered: Metered) -> None:
    """FAULTS b1 10."""
    metered.rig.emits([500] * 3, ends_with_stop=False, cached_tokens=99)
    assert (await metered.post(TEXT, text_body(prompt=[5] * 10))).status_code == 200
    assert (metered.event.tokens, metered.event.is_estimated) == (TokenCounts(0, 10, 3), True)


async def test_tokens_beyond_a_stop_string_are_not_billed_and_the_engine_is_told(metered: Metered) -> None:
    ids = metered.rig.pipeline.encode("one two three four five six")
    metered.rig.emits(ids, steps_per_batch=len(ids))
    response = await metered.post(TEXT, text_body(stop=" three", max_tokens=50))
    assert response.json()["usage"]["completion_tokens"] == metered.event.tokens.output == 3
    assert metered.rig.engine.generations[0].used == {0: 3}


async def test_a_failure_is_billed_as_far_as_it_came_and_free_before_its_first_token(
    metered: Metered,
) -> None:
    metered.rig.emits([500] * 50, failure=EngineDead("lost"), fail_after=4)
    await metered.post(TEXT, text_body(prompt=[5] * 10, max_tokens=50, stream=True))
    assert (metered.event.state, metered.event.is_estimated) == (EventState.FAILED, True)
    assert metered.event.tokens == TokenCounts(10, 0, 4)
    metered.sink.taken.clear()
    metered.rig.emits([500] * 50, failure=EngineDead("lost"), fail_after=0)
    await metered.post(TEXT, text_body(prompt=[5] * 10, max_tokens=50))
    assert (metered.event.state, metered.event.tokens) == (EventState.FAILED, TokenCounts())


async def test_what_no_engine_has_begun_is_no_event(metered: Metered) -> None:
    metered.rig.emits([500], refusal=EngineOverloaded("full"))
    assert (await metered.post(TEXT, text_body())).status_code == 503
    assert (await metered.post(TEXT, text_body(max_tokens=10**6))).status_code == 400
    assert metered.sink.taken == [] and metered.settlement.num_open == 0


async def test_the_answer_waits_for_no_event_and_the_hold_for_its_own(metered: Metered) -> None:
    metered.sink.is_slow = True
    caller = metered.rig.keys.principals[TENANT_KEY]
    quota = Quota(max_concurrent_requests=1)
    metered.rig.keys.principals[TENANT_KEY] = replace(caller, tenant_quota=quota)
    response = await metered.rig.post(TEXT, text_body(stream=True))
    assert events(response)
    assert metered.event.state is EventState.COMPLETED
    assert metered.settlement.num_open == 1
    assert (await metered.rig.post(TEXT, text_body())).status_code == 429
    # It is not left to whoever finds its lease over, either.
    assert metered.limiter.knows("tenant-a", metered.event.event_id)
    metered.sink.land()
    await metered.told()
    assert (await metered.rig.post(TEXT, text_body())).status_code == 200
    metered.sink.land()
    await metered.told()


async def test_nothing_new_begins_while_nothing_can_be_recorded(metered: Metered) -> None:
    metered.sink.may_begin = False
    refused = await metered.post(TEXT, text_body())
    assert (refused.status_code, refused.headers["retry-after"]) == (503, "1")
    assert refused.json()["error"]["code"] == "server_is_overloaded"
    assert metered.rig.engine.generations == []


async def test_a_lost_request_becomes_an_estimate_of_what_it_had_come_to(metered: Metered) -> None:
    await metered.post(TEXT, text_body(prompt=[5] * 10))
    skeleton = metered.event.skeleton
    metered.sink.taken.clear()
    meter = LostRequestMeter(Metering(metered.sink))
    progress = Progress(skeleton.target_model, output=7, input_cached=4, replica="2").to_bytes()
    damaged = LostRequest("b", b"no note", b"")
    await meter.take_care([damaged, LostRequest("a", skeleton.to_bytes(), progress)])
    event = metered.event
    assert (event.state, event.is_estimated) == (EventState.GATEWAY_LOST, True)
    assert event.tokens == TokenCounts(6, 4, 7) and meter.num_unreadable == 1
    assert EventSkeleton.from_bytes(skeleton.to_bytes()) == skeleton
