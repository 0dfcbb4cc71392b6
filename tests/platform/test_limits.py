"""What a tenant's limits do to its requests: refusals, headers, what is reserved and what is settled."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, replace
from typing import Any

import httpx
import httpx2
import openai
import pytest

from footplate.engine.errors import EngineDead, EngineOverloaded
from footplate.platform.admission import Admission
from footplate.platform.metrics import LimitMetrics
from footplate.platform.settlement import Settlement
from footplate.tenancy.errors import LimiterUnavailable
from footplate.tenancy.limiter.breaker import Breaker
from footplate.tenancy.limiter.degrading import DegradedConfig, DegradedMode, DegradingLimiter
from footplate.tenancy.limiter.limits import Limit, LimitKind, Scope
from footplate.tenancy.limiter.local import LocalLimiter
from footplate.tenancy.quotas import LimitMode, Quota
from tests.builders import ADMIN_KEY, SCRAPE_KEY, TENANT_KEY, known_principals, model_card, principal
from tests.platform.conftest import Rig, chat_body, events, text_body

pytestmark = pytest.mark.anyio
CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
OTHER_KEY = "fp_other_secret"


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@dataclass(slots=True)
class Limited:
    """A rig whose tenant has a quota, with a clock that moves only when told to."""

    rig: Rig
    limiter: LocalLimiter
    settlement: Settlement
    now_ms: int = 10**9

    def set(self, tenant: Quota, key: Quota | None = None) -> None:
        caller = replace(principal(), tenant_quota=tenant, key_quota=key)
        other = replace(caller, key_id="key-b", key_quota=None)
        self.rig.keys.principals = {**known_principals(), TENANT_KEY: caller, OTHER_KEY: other}

    async def used(self, kind: LimitKind, key_id: str | None = None) -> int:
        """What a limit of the tenant or a key counts now, once every end that was begun is told."""
        await self.told()
        [state] = await self.limiter.peek("tenant-a", [Limit(Scope("tenant-a", key_id), kind, 10**9)])
        return state.used

    async def told(self) -> None:
        while self.settlement.num_ending:
            await asyncio.sleep(0)

    async def post(self, path: str, body: Any, key: str = TENANT_KEY) -> httpx.Response:
        response = await self.rig.post(path, body, key)
        await self.told()
        return response


@pytest.fixture
def limited(make_rig: Callable[..., Rig]) -> Limited:
    found: list[Limited] = []
    limiter = LocalLimiter(clock_ms=lambda: found[0].now_ms)
    settlement = Settlement(limiter, clock=lambda: found[0].now_ms / 1000)
    cards = [model_card(aliases=("small",)), model_card("large", aliases=("big",))]
    rig = make_rig(cards, admission=Admission(limiter, settlement, LimitMetrics()))
    found.append(Limited(rig, limiter, settlement))
    return found[0]


TPM, DAY = LimitKind.TOKENS_PER_MINUTE, LimitKind.TOKENS_PER_DAY
RPM, RUNNING = LimitKind.REQUESTS_PER_MINUTE, LimitKind.MAX_CONCURRENT_REQUESTS


async def test_remaining_falls_by_what_was_used_and_headers_are_strictly_right(limited: Limited) -> None:
    """FAULTS b4 41 and 42."""
    limited.set(Quota(requests_per_minute=10, tokens_per_minute=1_000))
    limited.rig.emits([500] * 6, ends_with_stop=False)
    used = 0
    for turn in range(5):
        response = await limited.post(TEXT, text_body(max_tokens=20))
        usage = response.json()["usage"]
        reserved = usage["prompt_tokens"] + 20
        assert usage["completion_tokens"] == 6
        headers = response.headers
        assert headers["x-ratelimit-limit-requests"] == "10"
        assert headers["x-ratelimit-remaining-requests"] == str(9 - turn)
        assert headers["x-ratelimit-limit-tokens"] == "1000"
        assert headers["x-ratelimit-remaining-tokens"] == str(1_000 - used - reserved)
        assert headers["x-ratelimit-reset-tokens"] == headers["x-ratelimit-reset-requests"] == "1m1s"
        used += usage["total_tokens"]
        assert await limited.used(TPM) == used


async def test_streams_and_refusals_have_the_headers_too(limited: Limited) -> None:
    limited.set(Quota(requests_per_minute=1, tokens_per_day=1_000))
    first = await limited.post(CHAT, chat_body(stream=True, max_tokens=5))
    assert events(first)
    assert first.headers["x-ratelimit-remaining-requests"] == "0"
    # Five minutes' buckets: a day's window is whole again one bucket after a day at most.
    assert first.headers["x-ratelimit-reset-tokens"].startswith("24h")
    refused = await limited.post(CHAT, chat_body(stream=True, max_tokens=5))
    error = refused.json()["error"]
    assert (refused.status_code, error["code"], error["type"]) == (429, "rate_limit_exceeded", "requests")
    assert refused.headers["x-ratelimit-remaining-requests"] == "0"
    assert refused.headers["x-ratelimit-remaining-tokens"] == str(1_000 - await limited.used(DAY))
    assert "x-should-retry" not in refused.headers


async def test_a_call_after_retry_after_passes(limited: Limited) -> None:
    limited.set(Quota(requests_per_minute=2))
    for _ in range(2):
        assert (await limited.post(TEXT, text_body())).status_code == 200
        limited.now_ms += 10_300
    refused = await limited.post(TEXT, text_body())
    wait_s = int(refused.headers["retry-after"])
    limited.now_ms += (wait_s - 2) * 1_000
    assert (await limited.post(TEXT, text_body())).status_code == 429
    limited.now_ms += 2_000
    assert (await limited.post(TEXT, text_body())).status_code == 200


async def test_without_limits_there_are_no_headers_and_nothing_is_counted(limited: Limited) -> None:
    limited.set(Quota())
    response = await limited.post(TEXT, text_body())
    assert not [name for name in response.headers if name.startswith("x-ratelimit")]
    assert limited.settlement.num_open == 0


@pytest.mark.parametrize(
    ("quota", "body", "needed"),
    [
        (Quota(tokens_per_minute=20), {"max_tokens": 30}, "tokens a minute"),
        (Quota(tokens_per_day=0), {}, "tokens a day"),
        (Quota(requests_per_minute=0), {}, "requests a minute"),
        (Quota(max_concurrent_requests=0), {}, "requests at a time"),
        (Quota(monthly_budget_pico=0), {}, "budget"),
        (Quota(per_model={"smollm2-135m": Quota(requests_per_minute=0)}), {}, "for this model"),
    ],
    ids=["too large", "no tokens", "no requests", "none at a time", "no budget", "not this model"],
)
async def test_what_can_never_pass_is_insufficient_quota(
    limited: Limited, quota: Quota, body: dict[str, Any], needed: str
) -> None:
    """FAULTS b3 33: 0 refuses all."""
    limited.set(quota)
    refused = await limited.post(TEXT, text_body(**body))
    assert (refused.status_code, refused.json()["error"]["code"]) == (429, "insufficient_quota")
    assert refused.headers["x-should-retry"] == "false" and "retry-after" not in refused.headers
    assert needed in refused.json()["error"]["message"]
    assert limited.rig.engine.generations == [] and limited.settlement.num_open == 0


@pytest.mark.parametrize(
    "quota", [Quota(tokens_per_day=0), Quota(monthly_budget_pico=0)], ids=["no tokens", "no budget"]
)
@pytest.mark.parametrize("path", [CHAT, TEXT])
async def test_whoever_may_use_nothing_is_refused_before_the_body_is_read(
    limited: Limited, path: str, quota: Quota
) -> None:
    """Parsing and tokenising cost everybody: a body that would be a 400 shows that none was done."""
    for tenant, key in ((quota, None), (Quota(), quota)):
        limited.set(tenant, key)
        refused = await limited.post(path, {"model": "smollm2-135m", "nonsense": [1]})
        assert (refused.status_code, refused.json()["error"]["code"]) == (429, "insufficient_quota")
    limited.set(replace(quota, mode=LimitMode.SHADOW))
    assert (await limited.post(path, {"model": "smollm2-135m", "nonsense": [1]})).status_code == 400


@pytest.mark.parametrize("path", [CHAT, TEXT])
async def test_every_choice_and_the_prompt_as_tokenised_are_reserved(limited: Limited, path: str) -> None:
    """FAULTS b3 34: n=4 of 10 tokens each reserve 40; the prompt counts once, the answers' sum is settled."""
    limited.set(Quota(tokens_per_minute=1_000))
    limited.rig.emits([500] * 7, ends_with_stop=False)
    body = chat_body(n=4, max_tokens=10) if path == CHAT else text_body(n=4, max_tokens=10)
    response = await limited.post(path, body)
    num_prompt = len(limited.rig.engine.requests[0].prompt_token_ids)
    assert response.headers["x-ratelimit-remaining-tokens"] == str(1_000 - num_prompt - 40)
    assert await limited.used(TPM) == num_prompt + 28


async def test_several_prompts_are_one_request_and_all_their_tokens(limited: Limited) -> None:
    limited.set(Quota(requests_per_minute=5, tokens_per_minute=1_000))
    response = await limited.post(TEXT, text_body(prompt=["one two", "three"], max_tokens=3))
    num_prompt = sum(len(request.prompt_token_ids) for request in limited.rig.engine.requests)
    assert response.headers["x-ratelimit-remaining-tokens"] == str(1_000 - num_prompt - 6)
    assert await limited.used(RPM) == 1


async def test_max_tokens_is_not_asked_for_where_no_limit_counts_tokens(limited: Limited) -> None:
    """FAULTS b3 29."""
    limited.set(Quota(requests_per_minute=5))
    assert (await limited.post(CHAT, chat_body())).status_code == 200
    assert limited.rig.engine.requests[0].params.max_tokens > 8_000


async def test_an_open_ended_answer_may_have_what_the_whole_limit_leaves(limited: Limited) -> None:
    limited.set(Quota(tokens_per_minute=500), Quota(tokens_per_day=300))
    assert (await limited.post(CHAT, chat_body(n=2))).status_code == 200
    request = limited.rig.engine.requests[0]
    assert request.params.max_tokens == (300 - len(request.prompt_token_ids)) // 2


async def test_cached_tokens_count_by_their_weight(limited: Limited) -> None:
    limited.set(Quota(tokens_per_minute=1_000, cached_token_weight=0.25))
    limited.rig.emits([500] * 4, ends_with_stop=False, cached_tokens=2)
    usage = (await limited.post(TEXT, text_body(prompt=[5, 6, 7]))).json()["usage"]
    assert usage["prompt_tokens_details"]["cached_tokens"] == 2
    # One token as such, two at a quarter rounded up, and four of the answer.
    assert await limited.used(TPM) == 1 + 1 + 4


async def test_a_key_narrows_its_tenants_terms_and_never_widens_them(limited: Limited) -> None:
    """FAULTS b8 80: a tenant's admin may set its keys' quotas."""
    limited.set(
        Quota(tokens_per_minute=1_000, priority=2, weight=2.0, cached_token_weight=0.5),
        Quota(priority=-5, weight=100.0, cached_token_weight=0.0),
    )
    limited.rig.emits([500], ends_with_stop=False, cached_tokens=2)
    await limited.post(TEXT, text_body(prompt=[5, 6, 7], priority=1))
    request = limited.rig.engine.requests[0]
    assert (request.priority, request.weight, request.tenant) == (3, 2.0, "tenant-a")
    assert await limited.used(TPM) == 1 + 1 + 1
    limited.set(Quota(), Quota(priority=4, weight=0.5))
    await limited.post(TEXT, text_body())
    assert (limited.rig.engine.requests[1].priority, limited.rig.engine.requests[1].weight) == (4, 0.5)


async def test_limits_of_tenant_and_key_both_hold(limited: Limited) -> None:
    limited.set(Quota(requests_per_minute=3), Quota(requests_per_minute=1))
    assert (await limited.post(TEXT, text_body())).headers["x-ratelimit-remaining-requests"] == "0"
    refused = await limited.post(TEXT, text_body())
    assert "This key's limit" in refused.json()["error"]["message"]
    # Another key of the tenant has what the tenant has left.
    other = await limited.post(TEXT, text_body(), OTHER_KEY)
    assert other.headers["x-ratelimit-remaining-requests"] == "1"


async def test_a_model_that_is_not_allowed_is_not_there(limited: Limited) -> None:
    """FAULTS b8 78 and 79: not by its alias either, nor in lists, nor in shadow mode."""
    limited.set(Quota(allowed_models=frozenset({"large"}), mode=LimitMode.SHADOW))
    unknown = await limited.post(TEXT, text_body(model="no-such-model"))
    for name in ("smollm2-135m", "small"):
        for path, body in ((CHAT, chat_body), (TEXT, text_body)):
            hidden = await limited.post(path, body(model=name))
            assert hidden.status_code == 404
            assert hidden.json() == unknown.json()
        tokenised = await limited.post("/v1/tokenize", {"model": name, "prompt": "Hi"})
        assert tokenised.json() == unknown.json()
        async with limited.rig.http() as http:
            assert (await http.get(f"/v1/models/{name}")).json() == unknown.json()
    async with limited.rig.http() as http:
        listed = (await http.get("/v1/models")).json()["data"]
    assert [model["id"] for model in listed] == ["large", "big"]
    assert (await limited.post(TEXT, text_body(model="big"))).status_code == 200
    # A key can't add to what its tenant may use.
    limited.set(Quota(allowed_models=frozenset({"large"})), Quota(allowed_models=frozenset({"smollm2-135m"})))
    assert (await limited.post(TEXT, text_body())).status_code == 404
    assert (await limited.post(TEXT, text_body(model="large"))).status_code == 404


async def test_an_alias_in_a_quota_means_its_model(limited: Limited) -> None:
    limited.set(Quota(allowed_models=frozenset({"small"})))
    for name in ("smollm2-135m", "small"):
        assert (await limited.post(TEXT, text_body(model=name))).status_code == 200
    assert (await limited.post(TEXT, text_body(model="large"))).status_code == 404
    async with limited.rig.http() as http:
        listed = (await http.get("/v1/models")).json()["data"]
    assert [model["id"] for model in listed] == ["smollm2-135m", "small"]
    # Limits under both names hold at once, by whichever one asks, and other models have none of them.
    one, two = Quota(requests_per_minute=1), Quota(max_context_tokens=64)
    limited.set(Quota(per_model={"small": one, "smollm2-135m": two}))
    long = await limited.post(TEXT, text_body(model="small", prompt=[5] * 60, max_tokens=5))
    assert long.json()["error"]["code"] == "context_length_exceeded"
    assert (await limited.post(TEXT, text_body())).status_code == 200
    for name, status in (("small", 429), ("smollm2-135m", 429), ("large", 200)):
        assert (await limited.post(TEXT, text_body(model=name))).status_code == status


@pytest.mark.parametrize(
    "quota",
    [
        Quota(max_context_tokens=64),
        Quota(per_model={"smollm2-135m": Quota(max_context_tokens=64)}),
    ],
    ids=["tenant", "model"],
)
async def test_prompt_and_answer_fit_the_context_that_may_be_used(limited: Limited, quota: Quota) -> None:
    limited.set(quota)
    refused = await limited.post(TEXT, text_body(prompt=[5] * 60, max_tokens=5))
    error = refused.json()["error"]
    assert (refused.status_code, error["code"]) == (400, "context_length_exceeded")
    assert "64 tokens" in error["message"] and "65 were asked for" in error["message"]
    assert (await limited.post(TEXT, text_body(prompt=[5] * 60, max_tokens=4))).status_code == 200
    await limited.post(CHAT, chat_body())
    request = limited.rig.engine.requests[-1]
    assert request.params.max_tokens == 64 - len(request.prompt_token_ids)


async def test_shadow_mode_counts_and_refuses_nothing(limited: Limited) -> None:
    limited.set(
        Quota(
            requests_per_minute=1,
            tokens_per_minute=0,
            max_context_tokens=3,
            monthly_budget_pico=0,
            mode=LimitMode.SHADOW,
        )
    )
    for _ in range(3):
        response = await limited.post(TEXT, text_body())
        assert response.status_code == 200
        assert not [name for name in response.headers if name.startswith("x-ratelimit")]
    assert await limited.used(RPM) == 3
    async with limited.rig.http(SCRAPE_KEY) as http:
        shown = (await http.get("/metrics")).text
    assert 'footplate_limit_shadow_exceeded_total{kind="requests_per_minute"} 2.0' in shown
    assert 'footplate_limit_shadow_exceeded_total{kind="tokens_per_minute"} 3.0' in shown


async def test_refusals_are_counted_by_reason(limited: Limited) -> None:
    limited.set(Quota(requests_per_minute=1))
    for _ in range(3):
        await limited.post(TEXT, text_body())
    async with limited.rig.http(SCRAPE_KEY) as http:
        shown = (await http.get("/metrics")).text
    assert 'footplate_limit_refusals_total{reason="over_window"} 2.0' in shown


async def test_requests_at_a_time(limited: Limited) -> None:
    limited.set(Quota(max_concurrent_requests=1))
    limited.rig.emits([500] * 5, hold_after=2)
    running = asyncio.create_task(limited.rig.post(TEXT, text_body()))
    while not limited.settlement.num_open:
        await asyncio.sleep(0)
    refused = await limited.rig.post(TEXT, text_body())
    assert (refused.status_code, refused.headers["retry-after"]) == (429, "1")
    assert "when another ends" in refused.json()["error"]["message"]
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    limited.rig.says("Hello.")
    assert await limited.used(RUNNING) == 0
    assert (await limited.post(TEXT, text_body())).status_code == 200


async def test_work_that_never_began_counts_for_nothing(limited: Limited) -> None:
    """FAULTS b4 46, and what the engine refuses or fails before a token."""
    limited.set(Quota(requests_per_minute=9, tokens_per_minute=900))
    for script in (
        {"refusal": EngineOverloaded("full", 3)},
        {"refusal": EngineDead("gone")},
        {"failure": EngineDead("lost")},
    ):
        limited.rig.emits([500] * 5, **script)
        assert (await limited.post(TEXT, text_body())).status_code >= 500
    assert (await limited.used(RPM), await limited.used(TPM)) == (0, 0)


async def test_an_answer_that_fails_is_charged_as_far_as_it_came(limited: Limited) -> None:
    limited.set(Quota(tokens_per_minute=900))
    limited.rig.emits([500] * 50, failure=EngineDead("lost"), fail_after=4)
    response = await limited.post(TEXT, text_body(prompt=[5] * 10, max_tokens=50, stream=True))
    assert '"error"' in response.text
    assert await limited.used(TPM) == 10 + 4


async def test_a_client_that_leaves_is_charged_its_prompt_and_what_it_got(limited: Limited) -> None:
    """FAULTS b1 3: neither nothing nor the full reservation."""
    limited.set(Quota(requests_per_minute=9, tokens_per_minute=900))
    for hold_after, got in ((0, 0), (3, 3)):
        limited.rig.emits([500] * 50, hold_after=hold_after, steps_unseen=2)
        before = await limited.used(TPM)
        task = asyncio.create_task(limited.rig.post(TEXT, text_body(prompt=[5] * 10, max_tokens=50)))
        generations = limited.rig.engine.generations
        count = len(generations)
        while len(generations) == count or generations[-1].num_steps < hold_after:
            await asyncio.sleep(0)
        await asyncio.sleep(0)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        assert await limited.used(TPM) - before == 10 + got + 2
    assert await limited.used(RPM) == 2


async def test_a_client_that_leaves_while_the_limits_are_asked_leaves_nothing_held(
    limited: Limited, monkeypatch: pytest.MonkeyPatch
) -> None:
    limited.set(Quota(max_concurrent_requests=1))
    asked, answer, taken = asyncio.Event(), asyncio.Event(), asyncio.Event()
    reserve = limited.limiter.reserve

    async def slowly(*arguments: Any) -> Any:
        asked.set()
        await answer.wait()
        decision = await reserve(*arguments)
        taken.set()
        return decision

    monkeypatch.setattr(limited.limiter, "reserve", slowly)
    task = asyncio.create_task(limited.rig.post(TEXT, text_body()))
    await asked.wait()
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    answer.set()
    await taken.wait()
    assert await limited.used(RUNNING) == 0
    assert limited.rig.engine.generations == []


async def test_beats_tell_how_far_a_request_has_come_and_renew_its_lease(limited: Limited) -> None:
    limited.set(Quota(tokens_per_minute=900, max_concurrent_requests=1))
    limited.rig.emits([500] * 50, hold_after=7)
    task = asyncio.create_task(limited.rig.post(TEXT, text_body(prompt=[5] * 10, max_tokens=50)))
    while not limited.rig.engine.generations or limited.rig.engine.generations[0].num_steps < 7:
        await asyncio.sleep(0)
    await asyncio.sleep(0)
    for _ in range(3):
        limited.now_ms += 20_000
        await limited.settlement.beat()
    assert await limited.used(RUNNING) == 1
    # A gateway that is stopped past its lease: what its beats told stays used, and no end counts again.
    limited.now_ms += 31_000
    assert await limited.used(RUNNING) == 0
    used = await limited.used(TPM)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    assert await limited.used(TPM) == used


async def test_what_runs_is_counted_again_after_the_store_lost_its_data(limited: Limited) -> None:
    limited.set(Quota(tokens_per_minute=60, max_concurrent_requests=1))
    limited.rig.emits([500] * 50, hold_after=3)
    task = asyncio.create_task(limited.rig.post(TEXT, text_body(prompt=[5] * 10, max_tokens=50)))
    while not limited.settlement.num_open:
        await asyncio.sleep(0)
    limited.limiter.__init__(clock_ms=lambda: limited.now_ms)  # type: ignore[misc]
    assert await limited.used(RUNNING) == 0
    await limited.settlement.beat()
    assert (await limited.used(RUNNING), await limited.used(TPM)) == (1, 60)
    refused = await limited.rig.post(TEXT, text_body())
    assert refused.status_code == 429
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    assert await limited.used(RUNNING) == 0


async def test_admins_keys_and_bad_bodies_reach_no_limit(limited: Limited) -> None:
    limited.set(Quota(requests_per_minute=1))
    assert (await limited.post(TEXT, text_body(), ADMIN_KEY)).status_code == 403
    assert (await limited.post(TEXT, text_body(temperature="hot"))).status_code == 400
    assert (await limited.post(TEXT, text_body(model="none"))).status_code == 404
    assert (await limited.post(TEXT, text_body(prompt=[5] * 9_000))).status_code == 400
    assert await limited.used(RPM) == 0


@pytest.fixture
async def sdk(limited: Limited) -> AsyncIterator[openai.AsyncOpenAI]:
    http = httpx2.AsyncClient(transport=httpx2.ASGITransport(limited.rig.app))
    client = openai.AsyncOpenAI(api_key=TENANT_KEY, base_url="http://test/v1", http_client=http)
    yield client
    await client.close()


@pytest.mark.parametrize("stream", [False, True], ids=["body", "stream"])
async def test_the_sdk_retries_what_time_helps_and_nothing_else(
    limited: Limited, sdk: openai.AsyncOpenAI, monkeypatch: pytest.MonkeyPatch, stream: bool
) -> None:
    waits: list[float] = []

    async def wait(seconds: float) -> None:
        waits.append(seconds)
        limited.now_ms += round(seconds * 1_000)

    monkeypatch.setattr("openai._base_client.anyio.sleep", wait)

    async def ask(**fields: Any) -> None:
        answer = await sdk.completions.create(
            model="smollm2-135m", prompt=[5, 6], stream=stream, **{"max_tokens": 4, **fields}
        )
        if stream:
            _ = [chunk async for chunk in answer]
        await limited.told()

    # A minute's requests, of which the first leaves within what the SDK is willing to wait.
    limited.set(Quota(requests_per_minute=1))
    await ask()
    limited.now_ms += 20_000
    await ask()
    assert len(waits) == 1 and 40 <= waits[0] <= 42
    # What a day has used comes back after more than the SDK is willing to wait: it does not even begin.
    limited.set(Quota(requests_per_minute=10, tokens_per_day=10))
    limited.rig.emits([500] * 8, ends_with_stop=False)
    await ask(max_tokens=8)
    with pytest.raises(openai.RateLimitError) as late:
        await ask()
    assert late.value.code == "rate_limit_exceeded" and int(late.value.response.headers["retry-after"]) > 60
    assert len(waits) == 1
    for quota, code in (
        (Quota(tokens_per_minute=5), "insufficient_quota"),
        (Quota(requests_per_minute=0), "insufficient_quota"),
        (Quota(monthly_budget_pico=0), "insufficient_quota"),
    ):
        limited.set(quota)
        num_waits = len(waits)
        with pytest.raises(openai.RateLimitError) as refused:
            await ask()
        assert refused.value.code == code
        assert len(waits) == num_waits, "tried again in vain"
    limited.set(Quota(allowed_models=frozenset()))
    with pytest.raises(openai.NotFoundError):
        await ask()
    limited.set(Quota(max_context_tokens=3))
    with pytest.raises(openai.BadRequestError):
        await ask()
    assert len(waits) == 1


class AwayLimiter(LocalLimiter):
    """A shared limiter whose store is away."""

    async def reserve(self, *_: Any) -> Any:
        raise LimiterUnavailable("away")


@pytest.mark.parametrize("mode", DegradedMode)
async def test_each_degraded_mode_answers_as_declared(
    make_rig: Callable[..., Rig], mode: DegradedMode
) -> None:
    config = DegradedConfig(dict.fromkeys(LimitKind, mode), local_share=0.5)
    limiter = DegradingLimiter(AwayLimiter(), LocalLimiter(), Breaker(), config)
    rig = make_rig(admission=Admission(limiter, Settlement(limiter), LimitMetrics()))
    rig.keys.principals = {TENANT_KEY: replace(principal(), tenant_quota=Quota(requests_per_minute=4))}
    responses = [await rig.post(TEXT, text_body()) for _ in range(4)]
    statuses = [response.status_code for response in responses]
    assert statuses == {"local": [200, 200, 429, 429], "closed": [503] * 4, "open": [200] * 4}[mode]
    if mode is DegradedMode.CLOSED:
        assert responses[0].headers["retry-after"] == "1"
        assert responses[0].json()["error"]["code"] == "server_is_overloaded"
