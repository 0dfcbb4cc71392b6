"""Quotas: how much of the platform a tenant or a key may use, and of which models. Pure.

A quota is written the same way everywhere (admin API, settings, table, audit): a mapping of the names in
`Quota`, with budgets as decimal strings. `Quota.parse` reads it and `Quota.fields` writes it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from math import isfinite
from typing import Any

from footplate.tenancy.errors import InvalidQuota

PICO = 10**12  # budgets are integers of 10⁻¹² of the currency's unit
MAX_AMOUNT = 10**15  # Valkey's scripts count in doubles, which are exact up to 2**53
MAX_SHOWN = 10**24  # larger numbers are not repeated in errors
MAX_PRIORITY = 100
MIN_WEIGHT, MAX_WEIGHT = 0.01, 1000.0
MAX_MODELS = 256
_MONEY = re.compile(r"(\d{1,12})(?:\.(\d{1,12}))?", re.ASCII)
MAX_NAME_CHARS = 256

AMOUNTS = (
    "requests_per_minute",
    "tokens_per_minute",
    "tokens_per_day",
    "max_concurrent_requests",
    "max_context_tokens",
)
BUDGETS = ("monthly_budget", "monthly_soft_budget")
OF_A_MODEL = (*AMOUNTS, "mode")
_PLAIN = ("priority", "weight", "cached_token_weight")
# All names of a quota's fields, in the order in which they are shown.
FIELDS = (
    *AMOUNTS,
    "allowed_models",
    "per_model",
    "priority",
    "weight",
    *BUDGETS,
    "cached_token_weight",
    "mode",
)


class LimitMode(StrEnum):
    """Whether a limit refuses, or only counts and says what it would have refused."""

    ENFORCE = "enforce"
    SHADOW = "shadow"


@dataclass(frozen=True, slots=True)
class Quota:
    """The limits of one holder, a tenant or a key; None is unlimited or unset, 0 refuses all.

    Where a key's quota leaves `priority`, `weight` or `cached_token_weight` unset, its tenant's holds. All
    else of both quotas holds at once.

    Raises:
        InvalidQuota: a value is outside what its field allows.
    """

    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None
    tokens_per_day: int | None = None
    max_concurrent_requests: int | None = None
    # Prompt and answer together, in tokens.
    max_context_tokens: int | None = None
    # None: every model. Empty: none.
    allowed_models: frozenset[str] | None = None
    # Further limits by model, each counted apart; these hold `OF_A_MODEL` alone.
    per_model: Mapping[str, Quota] = field(default_factory=dict)
    # As the engine has it: lower runs first.
    priority: int | None = None
    # The share under the fair policy, beside other tenants'; 1 is usual.
    weight: float | None = None
    # In 10⁻¹² of the currency's unit, by calendar month. The soft one warns and refuses nothing.
    monthly_budget_pico: int | None = None
    monthly_soft_budget_pico: int | None = None
    # What a cached input token counts for in tokens a minute and a day; 1 where unset.
    cached_token_weight: float | None = None
    mode: LimitMode = LimitMode.ENFORCE

    def __post_init__(self) -> None:
        for name in AMOUNTS:
            _check_number(name, getattr(self, name), 0, MAX_AMOUNT)
        _check_number("priority", self.priority, -MAX_PRIORITY, MAX_PRIORITY)
        _check_number("weight", self.weight, MIN_WEIGHT, MAX_WEIGHT)
        _check_number("cached_token_weight", self.cached_token_weight, 0, 1)
        for name in BUDGETS:
            _check_number(name, getattr(self, f"{name}_pico"), 0, PICO * PICO)
        _check_models("allowed_models", self.allowed_models or ())
        _check_models("per_model", self.per_model)
        for quota in self.per_model.values():
            others = sorted(set(quota.fields()) - set(OF_A_MODEL))
            if others:
                raise InvalidQuota(
                    f"{others[0]} can't be set for one model; {', '.join(OF_A_MODEL)} can",
                    f"per_model.{others[0]}",
                )

    def allows(self, *names: str) -> bool:
        """Whether this quota lets its holder use a model, by any name of what finally answers."""
        return self.allowed_models is None or not self.allowed_models.isdisjoint(names)

    def fields(self) -> dict[str, Any]:
        """All that is set, as JSON values, in a fixed order; `parse` reads it back."""
        found: dict[str, Any] = {name: getattr(self, name) for name in AMOUNTS}
        found["allowed_models"] = None if self.allowed_models is None else sorted(self.allowed_models)
        found["per_model"] = {name: self.per_model[name].fields() for name in sorted(self.per_model)} or None
        found |= {"priority": self.priority, "weight": self.weight}
        found |= {name: _money_text(getattr(self, f"{name}_pico")) for name in BUDGETS}
        found |= {"cached_token_weight": self.cached_token_weight, "mode": str(self.mode)}
        return {name: value for name, value in found.items() if value is not None}

    @staticmethod
    def parse_new(values: Mapping[str, Any]) -> Quota:
        """As `parse`, for what somebody writes now: refused is also what older versions stored."""
        quota = Quota.parse(values)
        soft, hard = quota.monthly_soft_budget_pico, quota.monthly_budget_pico
        if soft is not None and hard is not None and soft > hard:
            raise InvalidQuota(
                f"monthly_soft_budget is {_money_text(soft)}, above monthly_budget, {_money_text(hard)}: it "
                "would never warn; lower it or raise the other",
                "monthly_soft_budget",
            )
        return quota

    @staticmethod
    def parse(values: Mapping[str, Any]) -> Quota:
        """A quota from JSON values; a field that is left out is unset, and so is one that is null.

        Raises:
            InvalidQuota: a field is unknown, of the wrong type, or outside what it allows.
        """
        return _parse(values, LimitMode.ENFORCE)


def _parse(values: Mapping[str, Any], mode: LimitMode) -> Quota:
    given = {name: value for name, value in values.items() if value is not None}
    for name in given:
        if name not in FIELDS:
            raise InvalidQuota(f"a quota has no such field; it has {', '.join(FIELDS)}", name)
    if "mode" in given:
        mode = _mode(given["mode"])
    arguments: dict[str, Any] = {name: given[name] for name in (*AMOUNTS, *_PLAIN) if name in given}
    arguments |= {f"{name}_pico": _money(name, given[name]) for name in BUDGETS if name in given}
    if "allowed_models" in given:
        arguments["allowed_models"] = frozenset(_names("allowed_models", given["allowed_models"]))
    if "per_model" in given:
        arguments["per_model"] = _per_model(given["per_model"], mode)
    return Quota(**arguments, mode=mode)


def _per_model(given: Any, mode: LimitMode) -> dict[str, Quota]:
    if not isinstance(given, Mapping) or not all(isinstance(value, Mapping) for value in given.values()):
        raise InvalidQuota("per_model is an object of quotas by the name of their model", "per_model")
    _check_models("per_model", given)
    found = {}
    for model, values in given.items():
        try:
            # The holder's mode, where a model has none of its own.
            found[model] = _parse(values, mode)
        except InvalidQuota as error:
            # Not which model: its name is whatever somebody wrote, and errors are logged and passed on.
            raise InvalidQuota(error.message, f"per_model.{error.field}") from None
    return found


def _check_number(name: str, value: float | None, least: float, most: float) -> None:
    """Whole numbers where both bounds are whole and no weight is meant."""
    if value is None:
        return
    kinds: tuple[type, ...] = (int, float) if name.endswith("weight") else (int,)
    # No float, however large, holds every whole number that JSON can.
    if type(value) not in kinds or (isinstance(value, float) and not isfinite(value)):
        what = "a number" if float in kinds else "a whole number"
        raise InvalidQuota(f"{name} must be {what} or null; it is {_described(value)}", name)
    if not least <= value <= most:
        shown: object = _money_text(int(value)) if name in BUDGETS else value
        if abs(value) > MAX_SHOWN:
            shown = "too large" if value > 0 else "too small"
        bounds = [_money_text(int(bound)) if name in BUDGETS else f"{bound:g}" for bound in (least, most)]
        if name in AMOUNTS:
            bounds[1] = str(most)
        raise InvalidQuota(f"{name} is {shown}; it must be from {bounds[0]} to {bounds[1]}, or null", name)


def _check_models(name: str, models: Sequence[str] | frozenset[str] | Mapping[str, Any]) -> None:
    if len(models) > MAX_MODELS:
        raise InvalidQuota(f"{name} names {len(models)} models; at most {MAX_MODELS} are allowed", name)
    if not all(
        isinstance(model, str) and 0 < len(model) <= MAX_NAME_CHARS and model.isprintable()
        for model in models
    ):
        raise InvalidQuota(f"{name} must hold names of 1 to {MAX_NAME_CHARS} printable characters", name)


def _names(name: str, given: Any) -> list[str]:
    if not isinstance(given, list | tuple | set | frozenset) or not all(isinstance(v, str) for v in given):
        raise InvalidQuota(f"{name} must be a list of models' names or null; it is {_described(given)}", name)
    return list(given)


def _mode(given: Any) -> LimitMode:
    try:
        return LimitMode(given)
    except ValueError:
        raise InvalidQuota(f"mode must be {' or '.join(LimitMode)}", "mode") from None


def _money(name: str, given: Any) -> int:
    found = _MONEY.fullmatch(given) if isinstance(given, str) else None
    if found is None:
        raise InvalidQuota(
            f"{name} must be a decimal string such as '250.00', of at most 12 digits on either side, or null",
            name,
        )
    whole, fraction = found[1], found[2] or ""
    return int(whole) * PICO + int(fraction.ljust(12, "0"))


def _money_text(pico: int | None) -> str | None:
    """With two digits after the point, or as many as it needs."""
    if pico is None:
        return None
    whole, rest = divmod(pico, PICO)
    return f"{whole}.{f'{rest:012d}'.rstrip('0').ljust(2, '0')}"


def _described(value: Any) -> str:
    names = {bool: "a boolean", str: "a string", list: "a list", dict: "an object", int: "a number"}
    return names.get(
        type(value), "a number with a fraction" if isinstance(value, float) else "something else"
    )


UNLIMITED = Quota()
