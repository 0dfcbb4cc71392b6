"""Whether a request is kept: both must want it, and there must be a reason."""

from __future__ import annotations

from dataclasses import replace

import pytest

from footplate.platform.capture.policy import CaptureMode, CapturePolicy, Ending, Why, why_capture

FINE = Ending("req_1", False, True, 0.1, 0.01)
ERRORS = CapturePolicy(CaptureMode.ERRORS, 1.0, 1.0, 0.5)
SAMPLED = replace(ERRORS, mode=CaptureMode.SAMPLED)


@pytest.mark.parametrize(
    ("policy", "ending", "why"),
    [
        (ERRORS, FINE, None),
        (ERRORS, replace(FINE, has_failed=True), Why.ERROR),
        (ERRORS, replace(FINE, first_token_s=1.1), Why.SLOW_FIRST_TOKEN),
        (ERRORS, replace(FINE, token_s=0.6), Why.SLOW_TOKENS),
        (ERRORS, replace(FINE, first_token_s=1.0, token_s=0.5), None),
        (replace(ERRORS, slow_first_token_s=None), replace(FINE, first_token_s=99.0), None),
        (ERRORS, replace(FINE, has_failed=True, has_begun=False), None),
        (SAMPLED, FINE, Why.SAMPLE),
        (SAMPLED, replace(FINE, has_failed=True), Why.ERROR),
        (replace(SAMPLED, sample_ratio=0.0), FINE, None),
        (CapturePolicy(), replace(FINE, has_failed=True), None),
    ],
)
def test_each_reason(policy: CapturePolicy, ending: Ending, why: Why | None) -> None:
    assert why_capture(policy, True, ending) is why
    assert why_capture(policy, False, ending) is None


def test_a_sample_is_an_even_share_and_the_same_each_time() -> None:
    policy = replace(SAMPLED, sample_ratio=0.1)

    def chosen() -> list[int]:
        return [n for n in range(20_000) if why_capture(policy, True, replace(FINE, request_id=f"req_{n}"))]

    assert 1_800 < len(chosen()) < 2_200
    assert chosen() == chosen()
