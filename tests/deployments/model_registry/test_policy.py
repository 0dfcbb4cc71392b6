"""What is done about wanted models and what runs: every action, and none for what did not change."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from footplate.deployments.model_registry.policy import (
    FIRST_RETRY_S,
    MAX_RETRY_S,
    SETTLE_S,
    AppState,
    Decision,
    Deploy,
    End,
    Memory,
    SeenApplication,
    Sight,
    after_failure,
    decide,
)
from footplate.platform.model_registry import ModelState


def app(
    model: str = "m", generation: int = 1, state: AppState = AppState.RUNNING, **more: object
) -> SeenApplication:
    count = 1 if state is AppState.RUNNING else 0
    return SeenApplication(model, generation, state, **{"num_replicas": count, **more})  # type: ignore[arg-type]


def failed(generation: int = 1, reason: str = "no such tensor") -> SeenApplication:
    return app(generation=generation, state=AppState.FAILED, reason=reason)


def decided(
    generation: int, *applications: SeenApplication, memory: Memory | None = None, now: float = 0.0
) -> Decision:
    return decide({"m": generation}, {}, applications, memory or Memory(), now)


def sight(decision: Decision, model: str = "m") -> Sight:
    return next(found for found in decision.sights if found.model == model)


def test_a_wanted_model_that_does_not_run_is_deployed() -> None:
    decision = decided(1)
    assert decision.actions == (Deploy("m", 1),)
    assert sight(decision).state is ModelState.STARTING


def test_a_model_that_runs_as_wanted_is_named_by_no_action_whatever_becomes_of_others() -> None:
    wanted = {"kept": 4, "new": 1, "changed": 2}
    applications = [app("kept", 4), app("changed", 1), app("gone", 1)]
    decision = decide(wanted, {"gone": 1}, applications, Memory(), 0.0)
    assert set(decision.actions) == {Deploy("new", 1), Deploy("changed", 2), End("gone", 1)}
    assert sight(decision, "kept") == Sight("kept", ModelState.READY, 4, 4, 1)


def test_applications_of_nobody_we_know_are_left_alone() -> None:
    assert decide({}, {}, [app("someone-elses")], Memory(), 0.0).actions == ()


def test_an_old_generation_ends_once_the_new_one_has_run_for_a_while() -> None:
    both = app(generation=1), app(generation=2)
    first = decided(2, *both)
    assert first.actions == ()
    assert sight(first) == Sight("m", ModelState.READY, 2, 2, 2)
    assert decided(2, *both, memory=first.memory, now=SETTLE_S - 0.1).actions == ()
    assert decided(2, *both, memory=first.memory, now=SETTLE_S).actions == (End("m", 1),)


def test_the_old_generation_serves_while_the_new_one_starts_and_when_it_fails() -> None:
    starting = decided(2, app(generation=1), app(generation=2, state=AppState.STARTING))
    assert starting.actions == ()
    assert sight(starting) == Sight("m", ModelState.UPDATING, 2, 1, 1)
    decision = decided(2, app(generation=1), failed(2))
    assert decision.actions == (End("m", 2),)
    assert sight(decision) == Sight("m", ModelState.FAILED, 2, 1, 1, "no such tensor", FIRST_RETRY_S)


def test_a_failed_generation_is_tried_again_later_and_later_with_its_reason_kept() -> None:
    memory, now, waits = Memory(), 0.0, []
    for _ in range(8):
        decision = decided(1, failed(), memory=memory, now=now)
        [trial] = decision.memory.trials.values()
        waits.append(trial.retry_at - now)
        # Its end takes a while; the retry's time has begun all the same.
        assert decided(1, app(state=AppState.ENDING), memory=decision.memory, now=now).actions == ()
        assert decided(1, memory=decision.memory, now=trial.retry_at - 0.1).actions == ()
        again = decided(1, memory=decision.memory, now=trial.retry_at)
        assert again.actions == (Deploy("m", 1),)
        retried = decided(1, app(state=AppState.STARTING), memory=again.memory, now=trial.retry_at + 1)
        assert sight(retried).state is ModelState.FAILED
        assert sight(retried).reason == "no such tensor"
        memory, now = retried.memory, trial.retry_at + 1
    assert waits == [10, 20, 40, 80, 160, MAX_RETRY_S, MAX_RETRY_S, MAX_RETRY_S]


def test_another_version_is_tried_at_once_and_a_success_forgets_failures() -> None:
    memory = decided(1, failed()).memory
    assert decided(2, memory=memory).actions == (Deploy("m", 2),)
    assert decided(1, app(), memory=memory).memory.trials == {}


def test_a_refused_deployment_counts_as_a_failure() -> None:
    memory = after_failure(Memory(), "m", 1, "it can't be deployed", 5.0)
    decision = decided(1, memory=memory, now=6.0)
    assert decision.actions == ()
    assert sight(decision) == Sight(
        "m", ModelState.FAILED, 1, None, 0, "it can't be deployed", FIRST_RETRY_S - 1
    )


def test_where_there_is_no_room_for_both_the_old_one_goes_first() -> None:
    def round_(*applications: SeenApplication) -> Decision:
        return decide({"m": 2}, {}, applications, Memory(), 0.0, lambda _: False)

    assert round_(app()).actions == (End("m", 1),)
    assert round_(app(state=AppState.ENDING)).actions == ()
    # Nothing of it is left: then it starts, room or not, and Serve waits for what it books.
    assert round_().actions == (Deploy("m", 2),)


def test_a_removed_model_is_gone_once_its_last_stream_is() -> None:
    def round_(*applications: SeenApplication) -> Decision:
        return decide({}, {"m": 3}, applications, Memory(), 0.0)

    assert round_(app(generation=2), app(generation=3)).actions == (End("m", 2), End("m", 3))
    draining = round_(app(generation=3, state=AppState.ENDING, num_replicas=1))
    assert draining.actions == ()
    assert draining.gone == ()
    assert sight(draining) == Sight("m", ModelState.REMOVING, 3, None, 1)
    assert round_().gone == ("m",)


def test_only_what_cannot_change_by_itself_is_settled() -> None:
    assert decided(1, app()).is_settled
    assert not decided(1, app(state=AppState.STARTING)).is_settled
    assert not decided(1, failed()).is_settled
    assert decided(1, memory=decided(1, failed()).memory).is_settled
    assert not decided(
        1, app(state=AppState.STARTING), memory=decided(1, failed()).memory, now=99.0
    ).is_settled
    # It is scaled to none.
    assert decided(1, app(num_replicas=0)).is_settled


@given(
    st.lists(
        st.builds(
            SeenApplication,
            st.sampled_from("ab"),
            st.integers(1, 3),
            st.sampled_from(AppState),
            st.integers(0, 2),
        ),
        unique_by=lambda each: (each.model, each.generation),
    ),
    st.dictionaries(st.sampled_from("ab"), st.integers(1, 3)),
    st.booleans(),
    st.floats(0, 100),
)
def test_what_serves_as_wanted_is_never_ended_and_nothing_is_deployed_twice(
    applications: list[SeenApplication], wanted: dict[str, int], has_room: bool, now: float
) -> None:
    removed = {model: 3 for model in "ab" if model not in wanted}
    decision = decide(wanted, removed, applications, Memory(), now, lambda _: has_room)
    running = {(each.model, each.generation): each for each in applications}
    for action in decision.actions:
        found = running.get((action.model, action.generation))
        if isinstance(action, Deploy):
            assert found is None
            assert wanted[action.model] == action.generation
        else:
            assert found is not None
            assert found.state is not AppState.ENDING
            if wanted.get(action.model) == action.generation:
                assert found.state is AppState.FAILED
    assert len(set(decision.actions)) == len(decision.actions)
