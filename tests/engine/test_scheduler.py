"""What each step computes, who gives way, what the door refuses, and that aborts leave nothing behind."""

from __future__ import annotations

import dataclasses
import random
from typing import Any

import pytest

import footplate.engine.step as step_module
from footplate.engine.errors import EngineOverloaded, InvalidRequest, RequestTooLarge
from footplate.engine.prefix import PrefixHasher
from footplate.engine.types import EngineRequest, FinishReason
from tests.engine.engine_builders import VOCAB, Driver, make_request
from tests.engine.stub_device import EOS, draw, oracle

Chunk = tuple[int, int, int, bool]


def chunks(driver: Driver, step: int = -1) -> list[Chunk]:
    """(sequence id, start, tokens, whether it draws) of each row of a step."""
    return [(r.sequence_id, r.start, r.num_tokens, r.samples) for r in driver.outputs[step].rows]


def cached_tokens(driver: Driver, request_id: str) -> int:
    return sum(d.cached_tokens for d in driver.deltas if d.request_id == request_id)


def answer(driver: Driver, *requests: EngineRequest) -> None:
    """Run to the end; every choice says what it says alone."""
    driver.run()
    for request in requests:
        for index in range(request.params.n):
            want = oracle(request, index, VOCAB, request.params.max_tokens or 0)
            assert driver.tokens[request.request_id, index] == want
    assert driver.scheduler.pool.num_held == 0


# --- one budget -----------------------------------------------------------------------------------------


def test_a_long_prompt_is_cut_to_the_steps_budget() -> None:
    driver, request = Driver(max_num_batched_tokens=32), make_request("r", 70, max_tokens=2)
    driver.add(request)
    answer(driver, request)
    steps = [chunks(driver, i) for i in range(4)]
    # only the chunk that reaches the prompt's end draws
    assert steps == [[(0, 0, 32, False)], [(0, 32, 32, False)], [(0, 64, 6, True)], [(0, 70, 1, True)]]


def test_decodes_come_first_and_prompts_get_the_rest_of_the_budget() -> None:
    driver = Driver(max_num_batched_tokens=16)
    requests = [make_request("old", 4), make_request("new", [9] * 40), make_request("newer", 3)]
    driver.add(requests[0])
    driver.step()
    for request in requests[1:]:
        driver.add(request)
    for _ in range(3):
        driver.step()
    assert chunks(driver, 1) == [(0, 4, 1, True), (1, 0, 15, False)]
    assert chunks(driver, 2) == [(0, 5, 1, True), (1, 15, 15, False)]
    assert chunks(driver, 3) == [(0, 6, 1, True), (1, 30, 10, True), (2, 0, 3, True)]
    assert all(output.num_tokens <= 16 for output in driver.outputs)
    answer(driver, *requests)


def test_a_sequence_whose_last_token_is_in_flight_is_not_run_again() -> None:
    driver, request = Driver(ahead=True), make_request("r", 4, max_tokens=2)
    driver.add(request)
    answer(driver, request)
    assert driver.device.tokens_computed == 5  # the second output token is never computed


@pytest.mark.parametrize("ahead", [False, True])
def test_an_end_found_while_the_next_step_flies_discards_its_draw(ahead: bool) -> None:
    request = make_request("r", 5, max_tokens=30)
    third = oracle(request, 0, VOCAB, 30)[2]
    request = make_request("r", 5, max_tokens=30, stop_token_ids=(third,))
    driver = Driver(ahead=ahead)
    driver.add(request)
    answer(driver, request)
    assert driver.tokens["r", 0][-1] == third and len(driver.tokens["r", 0]) <= 3
    assert driver.ended["r", 0] is FinishReason.STOP


def test_eos_and_stop_tokens_wait_for_min_tokens() -> None:
    """FAULTS a56."""
    seed = next(s for s in range(500) if draw([1, 2, 3], s, VOCAB) == EOS)
    driver = Driver()
    eager = make_request("eager", 3, seed=seed, ignore_eos=False)
    patient = make_request("patient", 3, seed=seed, ignore_eos=False, min_tokens=2)
    driver.add(eager)
    driver.add(patient)
    answer(driver, eager, patient)
    assert driver.tokens["eager", 0] == [EOS]
    assert len(driver.tokens["patient", 0]) >= 2


# --- the door -------------------------------------------------------------------------------------------


def test_a_request_that_exactly_fills_the_pool_runs() -> None:
    """FAULTS a31."""
    driver = Driver(4)  # 16 tokens; the last output token needs no place, nothing is computed from it
    for name, prompt, output in (("prompt", 16, 1), ("output", 1, 16), ("both", 9, 8)):
        request = make_request(name, prompt, max_tokens=output)
        driver.add(request)
        answer(driver, request)


@pytest.mark.parametrize(
    ("prompt", "output", "param"),
    [(17, 0, "prompt"), (17, None, "prompt"), (16, 2, "max_tokens"), (1, 17, "max_tokens")],
)
def test_one_token_over_the_pool_is_refused_at_once(prompt: int, output: int | None, param: str) -> None:
    """FAULTS a31."""
    driver = Driver(4)
    with pytest.raises(RequestTooLarge, match=r"17 tokens") as refused:
        driver.add(make_request("r", prompt, max_tokens=output))
    assert refused.value.param == param
    assert not driver.scheduler.has_work


def test_the_models_length_bounds_prompt_and_output_together() -> None:
    driver = Driver(64, max_model_len=20)
    driver.add(make_request("exact", 12, max_tokens=8))
    with pytest.raises(RequestTooLarge, match="20 tokens"):
        driver.add(make_request("over", 12, max_tokens=9))
    with pytest.raises(RequestTooLarge):
        driver.add(make_request("long", 21, max_tokens=0))
    driver.run()


def test_without_max_tokens_the_rest_of_the_context_may_be_filled() -> None:
    for blocks, length in ((64, 20), (4, 17)):  # the model's length, then the pool's
        driver = Driver(blocks, max_model_len=20)
        driver.add(make_request("r", 12, max_tokens=None))
        driver.run()
        assert len(driver.tokens["r", 0]) == length - 12
        assert driver.ended["r", 0] is FinishReason.LENGTH


def test_no_output_asked_means_no_output() -> None:
    """FAULTS a32."""
    driver = Driver(max_num_batched_tokens=8)
    driver.add(make_request("r", 12, max_tokens=0, prompt_logprobs=0))
    driver.run()
    assert driver.tokens["r", 0] == [] and driver.ended["r", 0] is FinishReason.LENGTH
    (delta,) = driver.deltas
    assert delta.prompt_logprobs is not None and len(delta.prompt_logprobs) == 12


def test_a_full_queue_is_overload_until_it_moves() -> None:
    driver = Driver(max_waiting=3)
    driver.add(make_request("r0", 4, max_tokens=1))
    driver.add(make_request("r1", 4, max_tokens=1, n=2))  # its second choice is held back, and waits too
    with pytest.raises(EngineOverloaded, match="limit is 3"):
        driver.add(make_request("r2", 4))
    driver.run()
    driver.add(make_request("r2", 4))
    driver.run()


def test_an_id_is_free_again_after_its_end() -> None:
    driver = Driver()
    driver.add(make_request("r", 4, max_tokens=1))
    with pytest.raises(InvalidRequest, match="already running"):
        driver.add(make_request("r", 5, max_tokens=1))
    driver.run()
    driver.ended.clear()
    driver.add(make_request("r", 5, max_tokens=1))
    driver.run()
    assert len(driver.tokens["r", 0]) == 2


@pytest.mark.parametrize(
    "changes",
    [
        {"prompt_token_ids": []},
        {"prompt_token_ids": [1, -1]},
        {"prompt_token_ids": [VOCAB]},
        {"prompt_token_ids": [1.0]},
        {"prompt_token_ids": ["1"]},
        {"prompt_token_ids": [2**70]},
        {"adapter_id": "x"},
        {"kv_transfer": {}},
        {"weight": 0.0},
        {"weight": float("nan")},
        {"weight": float("inf")},
        {"weight": "1"},
        {"priority": 0.5},
        {"priority": None},
    ],
)
def test_a_wrong_request_is_refused_and_the_next_one_runs(changes: dict[str, Any]) -> None:
    """FAULTS a33."""
    driver, good = Driver(), make_request("r", 4)
    with pytest.raises(InvalidRequest) as refused:
        driver.add(dataclasses.replace(good, **changes))
    assert refused.value.param
    driver.add(good)
    answer(driver, good)


# --- prefix cache ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(("prompt", "hit"), [(16, 12), (17, 16), (18, 16), (3, 0), (4, 0), (5, 4)])
def test_the_second_call_computes_the_prompt_less_the_hit(prompt: int, hit: int) -> None:
    """At least one token is computed, since its logits draw the next one; and only full blocks are hits."""
    # FAULTS a17 and a19
    driver = Driver()
    first, second = (make_request(name, prompt, max_tokens=1) for name in ("first", "second"))
    driver.add(first)
    answer(driver, first)
    assert (driver.device.tokens_computed, cached_tokens(driver, "first")) == (prompt, 0)
    driver.add(second)
    answer(driver, second)
    assert cached_tokens(driver, "second") == hit
    assert driver.device.tokens_computed == prompt + (prompt - hit)
    stats = driver.scheduler.stats()
    assert (stats.prefix_queries, stats.prefix_hits, stats.prompt_tokens) == (2 * prompt, hit, 2 * prompt)


def test_prompts_that_differ_in_their_last_part_block_share_the_full_ones() -> None:
    """FAULTS a24."""
    driver = Driver()
    ours, theirs = [1, 2, 3, 4, 5, 6, 7, 8, 9], [1, 2, 3, 4, 5, 6, 7, 8, 10]
    for name, prompt in (("ours", ours), ("theirs", theirs)):
        request = make_request(name, prompt)
        driver.add(request)
        answer(driver, request)
    assert cached_tokens(driver, "theirs") == 8


def test_generated_tokens_are_a_cached_prefix_of_the_next_turn() -> None:
    driver, first = Driver(), make_request("first", 6, max_tokens=6)
    driver.add(first)
    answer(driver, first)
    turn = [*first.prompt_token_ids, *driver.tokens["first", 0], 3]
    second = make_request("second", turn)
    driver.add(second)
    answer(driver, second)
    assert cached_tokens(driver, "second") == 8  # 11 of the 12 tokens were computed: two full blocks


def test_running_sequences_share_blocks_with_newcomers() -> None:
    driver = Driver()
    requests = [make_request("old", 12, max_tokens=12), make_request("new", 14, max_tokens=2)]
    driver.add(requests[0])
    driver.step()
    driver.add(requests[1])
    driver.step()
    assert driver.scheduler.pool.num_held == 5  # 0, 1, 2 shared, one more each
    answer(driver, *requests)


def test_those_that_begin_in_one_step_share_what_it_computes() -> None:
    driver = Driver()
    shared = list(range(1, 13))
    requests = [make_request(f"r{i}", [*shared, 20 + i], max_tokens=4) for i in range(3)]
    requests.append(make_request("theirs", [*shared, 20], "other", max_tokens=4))
    for request in requests:
        driver.add(request)
    driver.step()
    assert driver.device.tokens_computed == 13 + 1 + 1 + 13
    answer(driver, *requests)
    assert [cached_tokens(driver, request.request_id) for request in requests] == [0, 12, 12, 0]


def test_prompt_logprobs_do_not_read_the_cache() -> None:
    """FAULTS a16."""
    driver = Driver(max_num_batched_tokens=8)
    for name in ("first", "second"):
        driver.add(make_request(name, 18, max_tokens=2, prompt_logprobs=0))
        driver.run()
    told = [d.prompt_logprobs for d in driver.deltas if d.prompt_logprobs]
    assert len(told) == 2 and told[0] == told[1] and len(told[0]) == 18
    assert cached_tokens(driver, "second") == 0
    assert driver.device.tokens_computed == 2 * 19


def test_with_the_cache_off_nothing_is_shared() -> None:
    driver = Driver(prefix_caching=False)
    for name in ("first", "second"):
        driver.add(make_request(name, 16))
        driver.run()
    assert cached_tokens(driver, "second") == 0 and driver.scheduler.stats().prefix_hits == 0


def test_colliding_hashes_give_a_miss_and_the_right_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    """FAULTS a15."""
    monkeypatch.setattr(PrefixHasher, "child", lambda self, parent, token_ids: b"same")
    driver = Driver()
    requests = [make_request(f"r{i}", [i % 3, *range(i % 5, 20)], "ab"[i % 2]) for i in range(12)]
    for request in requests:
        driver.add(request)
        driver.step()
    answer(driver, *requests)


# --- several choices ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("prompt", "copies", "held"),
    [
        # Two full blocks are shared; the third, half full, is copied for each fork: 2 + 3 blocks.
        (10, ((2, 3), (2, 4)), 5),
        # The last prompt token is computed again for its logits, so the block it stands in is copied.
        (8, ((1, 3), (1, 4)), 1 + 3 + 1),
        # The last token begins a block: two blocks are shared, nothing is copied.
        (9, (), 2 + 3),
    ],
)
def test_choices_hold_the_prompt_once_and_copy_only_the_block_they_go_on_in(
    prompt: int, copies: tuple[tuple[int, int], ...], held: int
) -> None:
    driver, request = Driver(), make_request("r", prompt, n=3, max_tokens=3)
    driver.add(request)
    driver.step()
    assert len(driver.outputs[0].rows) == 1  # the others wait for the prompt
    driver.step()
    assert driver.outputs[1].copies == copies
    assert driver.scheduler.pool.num_held == held
    answer(driver, request)
    # the prompt once, its last token twice more, and two tokens of each choice
    assert driver.device.tokens_computed == prompt + 2 + 3 * 2


def test_prompt_logprobs_are_computed_for_one_choice_only() -> None:
    driver, request = Driver(), make_request("r", 10, n=3, max_tokens=2, prompt_logprobs=0)
    driver.add(request)
    answer(driver, request)
    assert driver.device.tokens_computed == 10 + 2 + 3  # prompt, forks, one token of each choice
    assert [d.index for d in driver.deltas if d.prompt_logprobs] == [0]


def test_choices_go_on_when_the_first_is_cancelled_before_the_prompt_is_done() -> None:
    for after in range(3):
        driver, request = Driver(max_num_batched_tokens=8), make_request("r", 20, n=3)
        driver.add(request)
        for _ in range(after):
            driver.step()
        driver.scheduler.abort("r", 0)
        driver.run()
        assert driver.ended["r", 0] is FinishReason.ABORT
        for index in (1, 2):
            assert driver.tokens["r", index] == oracle(request, index, VOCAB, 8)


# --- preemption and order -------------------------------------------------------------------------------


def admissions(driver: Driver) -> list[tuple[int, ...]]:
    """First prompt tokens of the sequences that entered, in order."""
    return [new.token_ids[:1] for output in driver.outputs for new in output.new_rows]


@pytest.mark.parametrize("ahead", [False, True])
def test_preempted_sequence_keeps_its_place_in_line(ahead: bool) -> None:
    driver = Driver(8, ahead=ahead, max_num_seqs=2)
    requests = [make_request(f"r{i}", [i] * 8, max_tokens=20 if i < 2 else 2) for i in range(3)]
    for request in requests:
        driver.add(request)
    answer(driver, *requests)
    assert driver.scheduler.stats().preemptions >= 1
    assert admissions(driver) == [(0,), (1,), (1,), (2,)]  # the newest of two gives way, and returns first


@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("caching", [False, True])
def test_preempted_sequences_say_what_they_say_alone(ahead: bool, caching: bool) -> None:
    """FAULTS a25."""
    driver = Driver(12, ahead=ahead, prefix_caching=caching)
    requests = [make_request(f"r{i}", list(range(1, 9 + i)), max_tokens=24) for i in range(6)]
    for request in requests:
        driver.add(request)
    answer(driver, *requests)
    assert driver.scheduler.stats().preemptions > 0
    assert sum(len(t) for t in driver.tokens.values()) == 6 * 24  # nothing twice


def test_a_preempted_sequence_takes_up_its_own_cached_blocks() -> None:
    """FAULTS a18."""
    driver = Driver(8, max_num_seqs=2, policy="priority")
    low = make_request("low", [5] * 20, max_tokens=4, priority=1)
    driver.add(low)
    driver.step()
    high = make_request("high", [6] * 14, max_tokens=1)  # 4 blocks: 3 are free, and low's tail goes first
    driver.add(high)
    answer(driver, low, high)
    assert driver.scheduler.stats().preemptions == 1
    resumed = next(r for o in driver.outputs[1:] for r in o.rows if r.sequence_id == 0)
    assert resumed.start == 16  # four of its five blocks were still there
    assert cached_tokens(driver, "low") == 0  # usage tells of the first admission only


@pytest.mark.parametrize("policy", ["priority", "fair"])
@pytest.mark.parametrize("ahead", [False, True])
def test_a_higher_class_preempts_a_lower_one(policy: str, ahead: bool) -> None:
    driver = Driver(8, policy=policy, ahead=ahead)
    low = [make_request(f"low{i}", [i] * 12, max_tokens=4, priority=5) for i in range(2)]
    for request in low:
        driver.add(request)
    driver.step()
    high = make_request("high", [9] * 16, max_tokens=4, priority=0)
    driver.add(high)
    answer(driver, high, *low)
    assert driver.scheduler.stats().preemptions >= 1
    assert next(iter(driver.ended)) == ("high", 0)
    assert admissions(driver)[2] == (9,)


def test_an_equal_class_preempts_nobody() -> None:
    driver = Driver(10, policy="priority")  # two of five blocks each
    requests = [make_request(f"r{i}", [i] * 16, max_tokens=4, priority=3) for i in range(4)]
    for request in requests:
        driver.add(request)
    answer(driver, *requests)
    assert driver.scheduler.stats().preemptions == 0
    assert admissions(driver) == [(0,), (1,), (2,), (3,)]


def test_fcfs_knows_no_classes_even_when_blocks_run_out() -> None:
    driver = Driver(8, policy="fcfs", max_num_seqs=2)
    old = make_request("old", [1] * 8, max_tokens=20, priority=9)
    new = make_request("new", [2] * 8, max_tokens=20, priority=0)
    driver.add(old)
    driver.add(new)
    answer(driver, old, new)
    assert admissions(driver) == [(1,), (2,), (2,)]  # the newest gives way
    assert list(driver.ended) == [("old", 0), ("new", 0)]


# --- aborts ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("whole", [True, False])
def test_an_abort_ends_a_request_in_any_state_and_once(whole: bool) -> None:
    for steps in range(8):  # waiting, mid-prompt, held-back and forked choices, decoding, ended
        driver = Driver(max_num_batched_tokens=8)
        driver.add(make_request("r", 20, n=2, max_tokens=3))
        driver.add(make_request("other", 6))
        for _ in range(steps):
            driver.step()
        for _ in range(3):
            driver.scheduler.abort("r", None if whole else 1)
            driver.scheduler.check()
        driver.scheduler.abort("unknown")
        driver.scheduler.abort("r", 7)
        answer(driver, make_request("other", 6))
        assert set(driver.ended) == {("r", 0), ("r", 1), ("other", 0)}
        driver.scheduler.abort("r")
        assert not driver.scheduler.has_work


def test_an_aborted_waiting_request_never_runs() -> None:
    driver = Driver(max_num_seqs=1)
    for i in range(3):
        driver.add(make_request(f"r{i}", [i] * 4, max_tokens=2))
    driver.step()
    driver.scheduler.abort("r1")
    driver.run()
    assert admissions(driver) == [(0,), (2,)]
    assert driver.ended["r1", 0] is FinishReason.ABORT


def test_blocks_and_row_return_only_after_the_last_step_that_touches_them_was_read() -> None:
    """FAULTS a41."""
    driver = Driver(4, max_num_seqs=1)
    driver.add(make_request("old", [1] * 8, max_tokens=8))
    assert driver.launch() and driver.launch()  # two steps in flight
    driver.scheduler.abort("old")
    driver.add(make_request("new", [2] * 8, max_tokens=1))
    assert driver.scheduler.pool.num_held == 3
    assert not driver.launch()  # the only row may still be written
    driver.read()  # the first step
    assert driver.scheduler.pool.num_held == 3
    assert not driver.launch()
    driver.read()  # the second
    assert driver.scheduler.pool.num_held == 0
    answer(driver, make_request("new", [2] * 8, max_tokens=1))
    assert driver.ended["old", 0] is FinishReason.ABORT and driver.tokens["old", 0] == []


def test_a_sequence_that_ends_by_itself_keeps_its_blocks_until_the_next_step_is_read() -> None:
    request = make_request("r", 3, max_tokens=9)
    first = oracle(request, 0, VOCAB, 1)[0]
    driver = Driver(4)
    driver.add(make_request("r", 3, max_tokens=9, stop_token_ids=(first,)))
    driver.launch()
    driver.launch()
    driver.read()
    assert driver.ended["r", 0] is FinishReason.STOP and driver.scheduler.pool.num_held == 1
    driver.read()
    assert driver.tokens["r", 0] == [first] and driver.scheduler.pool.num_held == 0


def test_the_source_of_a_copy_stays_until_the_copying_step_was_read() -> None:
    driver = Driver()
    driver.add(make_request("r", 6, n=2, max_tokens=1))
    driver.launch()  # the leader draws its only token,
    driver.launch()  # and the fork copies the leader's second block
    assert driver.outputs[1].copies == ((1, 2),)
    driver.read()
    assert driver.ended["r", 0] is FinishReason.LENGTH
    assert driver.scheduler.pool.num_held == 3
    driver.read()
    assert driver.scheduler.pool.num_held == 0


def test_an_abort_amid_prompt_logprobs_leaves_nothing() -> None:
    """FAULTS a43."""
    driver = Driver(max_num_batched_tokens=8)
    driver.add(make_request("r", 30, prompt_logprobs=0))
    driver.step()
    driver.launch()
    (sequence,) = driver.scheduler.live_sequences()
    assert len(sequence.prompt_logprobs) == 8
    driver.scheduler.abort("r")
    driver.read()
    assert sequence.prompt_logprobs == []
    assert not any(d.prompt_logprobs for d in driver.deltas)
    driver.run()  # idle, and checked to be empty


@pytest.mark.parametrize("ahead", [False, True])
def test_after_500_random_requests_with_aborts_every_block_is_free(ahead: bool) -> None:
    """FAULTS a42."""
    rng = random.Random(7)
    driver = Driver(16, ahead=ahead, policy="fair", max_num_batched_tokens=24)
    live: list[str] = []
    for number in range(500):
        prompt = [rng.randrange(3)] * rng.randrange(20) + [rng.randrange(VOCAB)]
        request = make_request(
            f"r{number}",
            prompt,
            rng.choice("abc"),
            priority=rng.randrange(2),
            n=rng.choice([1, 1, 1, 3]),
            max_tokens=rng.randrange(20),
            seed=number,
            ignore_eos=bool(rng.randrange(2)),
        )
        driver.add(request)
        live.append(request.request_id)
        for _ in range(rng.randrange(3)):
            driver.step()
        if rng.random() < 0.3:
            driver.scheduler.abort(rng.choice(live[-20:]), rng.choice([None, 0, 1]))
    driver.run()
    stats = driver.scheduler.stats()
    assert stats.preemptions > 0 and stats.finished["abort"] > 20
    pool = driver.scheduler.pool
    assert (pool.num_held, pool.num_free, stats.running, stats.waiting) == (0, 16, 0, 0)


def test_the_prompt_work_of_a_step_is_bounded_and_counts_depth(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step_module, "DEPTH_TOKENS", 32)
    driver = Driver(128, step_work=24, max_num_batched_tokens=256)
    driver.add(make_request("deep", 200, max_tokens=1))
    driver.run()
    chunks = [(row.start, row.num_tokens) for output in driver.outputs for row in output.rows]
    assert chunks[0] == (0, 24)
    assert all(n * (1 + start / 32) <= 24 or n == 1 for start, n in chunks)
    assert [n for _, n in chunks] == sorted((n for _, n in chunks), reverse=True)


def test_a_short_prompt_does_not_wait_for_a_long_one_of_its_own_tenant() -> None:
    driver = Driver(128, policy="fair", step_work=32, max_num_batched_tokens=256)
    driver.add(make_request("long", 400, max_tokens=1))
    driver.step()
    driver.add(make_request("short", 6, max_tokens=1))
    driver.step()
    assert driver.ended.keys() == {("short", 0)}
    driver.run()
    assert driver.ended.keys() == {("short", 0), ("long", 0)}


def test_fcfs_gives_a_long_prompt_the_whole_step() -> None:
    driver = Driver(128, policy="fcfs", step_work=32, max_num_batched_tokens=256)
    driver.add(make_request("long", 400, max_tokens=1))
    driver.step()
    driver.add(make_request("short", 6, max_tokens=1))
    driver.step()
    assert not driver.ended


def test_what_was_aborted_counts_as_running_until_its_step_is_read() -> None:
    driver = Driver(ahead=True)
    driver.add(make_request("a", 5))
    driver.launch()
    driver.scheduler.abort("a")
    assert driver.scheduler.stats().running == 1
    driver.read()
    assert driver.scheduler.stats().running == 0
