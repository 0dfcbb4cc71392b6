"""A quota is written one way everywhere, and what it can't be is refused in words that help."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from footplate.tenancy.errors import InvalidQuota
from footplate.tenancy.quotas import AMOUNTS, PICO, LimitMode, Quota

_amounts = st.none() | st.integers(0, 10**15)
_money = st.none() | st.integers(0, 10**18)
_modes = st.sampled_from(LimitMode)
_of_a_model = st.builds(Quota, **dict.fromkeys(AMOUNTS, _amounts), mode=_modes)
_names = st.text("abc-._/:1", min_size=1, max_size=8)
_quotas = st.builds(
    Quota,
    **dict.fromkeys(AMOUNTS, _amounts),
    allowed_models=st.none() | st.frozensets(_names, max_size=4),
    per_model=st.dictionaries(_names, _of_a_model, max_size=3),
    priority=st.none() | st.integers(-100, 100),
    weight=st.none() | st.floats(0.01, 1000),
    monthly_budget_pico=_money,
    monthly_soft_budget_pico=_money,
    cached_token_weight=st.none() | st.floats(0, 1),
    mode=_modes,
)


@given(_quotas)
def test_what_is_written_reads_back_the_same(quota: Quota) -> None:
    assert Quota.parse(quota.fields()) == quota


def test_null_is_unset_and_zero_is_a_limit() -> None:
    quota = Quota.parse({"tokens_per_day": None, "requests_per_minute": 0, "monthly_budget": "0"})
    assert quota == Quota(requests_per_minute=0, monthly_budget_pico=0)
    assert Quota.parse({"allowed_models": []}) == Quota(allowed_models=frozenset())
    assert not Quota.parse({"allowed_models": []}).allows("a")
    assert Quota.parse({"allowed_models": ["a"]}).allows("a")
    assert Quota().allows("a")


@pytest.mark.parametrize(
    ("text", "pico"),
    [("250", 250 * PICO), ("0.10", PICO // 10), ("0.000000000001", 1), ("999999999999", PICO * PICO - PICO)],
)
def test_money_is_exact(text: str, pico: int) -> None:
    assert Quota.parse({"monthly_budget": text}).monthly_budget_pico == pico


def test_a_model_without_a_mode_has_its_holders() -> None:
    quota = Quota.parse(
        {"mode": "shadow", "per_model": {"a": {"tokens_per_day": 1}, "b": {"mode": "enforce"}}}
    )
    assert quota.per_model["a"].mode is LimitMode.SHADOW
    assert quota.per_model["b"].mode is LimitMode.ENFORCE


@pytest.mark.parametrize(
    ("values", "field", "words"),
    [
        ({"requests_per_minute": -1}, "requests_per_minute", "is -1; it must be from 0 to 1000000000000000"),
        ({"tokens_per_day": 10**15 + 1}, "tokens_per_day", "must be from 0"),
        ({"tokens_per_day": 10**4000}, "tokens_per_day", "is too large; it must be from 0"),
        ({"weight": 10**4000}, "weight", "is too large; it must be from 0.01"),
        ({"priority": -(10**4000)}, "priority", "is too small; it must be from -100"),
        ({"tokens_per_minute": 1.5}, "tokens_per_minute", "a number with a fraction"),
        ({"tokens_per_minute": True}, "tokens_per_minute", "a boolean"),
        ({"max_concurrent_requests": "4"}, "max_concurrent_requests", "a string"),
        ({"weight": 0}, "weight", "from 0.01 to 1000"),
        ({"weight": float("nan")}, "weight", "must be a number"),
        ({"cached_token_weight": 1.01}, "cached_token_weight", "from 0 to 1"),
        ({"priority": 101}, "priority", "from -100 to 100"),
        ({"monthly_budget": 10}, "monthly_budget", "decimal string"),
        ({"monthly_budget": "-1"}, "monthly_budget", "decimal string"),
        ({"monthly_budget": "1e3"}, "monthly_budget", "decimal string"),
        ({"monthly_soft_budget": "0.0000000000001"}, "monthly_soft_budget", "at most 12 digits"),
        ({"mode": "off"}, "mode", "enforce or shadow"),
        ({"allowed_models": "a"}, "allowed_models", "list of models"),
        ({"allowed_models": ["\n"]}, "allowed_models", "printable"),
        ({"allowed_models": [f"m{i}" for i in range(257)]}, "allowed_models", "at most 256"),
        ({"per_model": []}, "per_model", "object of quotas"),
        ({"per_model": {"a": {"monthly_budget": "1"}}}, "per_model.monthly_budget", "for one model"),
        ({"per_model": {"a": {"per_model": {"b": {}}}}}, "per_model.per_model", "for one model"),
        ({"per_model": {"a": {"tokens_per_day": -1}}}, "per_model.tokens_per_day", "from 0"),
        ({"rpm": 1}, "rpm", "has no such field; it has requests_per_minute"),
    ],
)
def test_what_no_quota_may_be_is_refused_with_field_and_mend(
    values: dict[str, Any], field: str, words: str
) -> None:
    with pytest.raises(InvalidQuota, match=words) as caught:
        Quota.parse(values)
    assert caught.value.field == field
