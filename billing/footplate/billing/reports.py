"""Usage reports: what is asked for, and the rows that answer. Pure.

Every grouping of the same usage sums to the same totals, in every column: the classes of tokens are disjoint,
and a request is counted once, in the row of the class `input` where rows are told apart by class.
"""

from __future__ import annotations

import base64
import binascii
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum

from footplate.billing.errors import InvalidReport
from footplate.billing.money import decimal_text
from footplate.billing.time_ranges import TimeRange
from footplate.billing.usage import KeyId, ModelName, TenantId

MAX_GROUPS = 8
MAX_LABEL_CHARS = 64
MAX_LIMIT = 10_000
DEFAULT_LIMIT = 1_000
LABEL_PREFIX = "label:"


class GroupBy(StrEnum):
    """What rows can be told apart by, beside labels."""

    TENANT = "tenant"
    KEY = "key"
    MODEL = "model"
    REQUESTED_MODEL = "requested_model"
    CLASS = "class"
    DAY = "day"
    HOUR = "hour"
    COST_CENTER = "cost_center"
    LABEL = "label"


@dataclass(frozen=True, slots=True)
class Group:
    """One column that rows are told apart by; `label` is the name of a label."""

    by: GroupBy
    label: str = ""

    @property
    def name(self) -> str:
        """As it is asked for, and the name of the column."""
        return f"{LABEL_PREFIX}{self.label}" if self.by is GroupBy.LABEL else self.by.value


def parse_groups(text: str | None) -> tuple[Group, ...]:
    """Groups from a list with commas, such as `tenant,day,label:app`. Raises InvalidReport."""
    groups = tuple(_group(name.strip()) for name in (text or "").split(",") if name.strip())
    if len(groups) != len(set(groups)):
        raise InvalidReport("group_by names something twice", "group_by")
    if len(groups) > MAX_GROUPS:
        raise InvalidReport(f"group_by takes at most {MAX_GROUPS} names", "group_by")
    return groups


def _group(name: str) -> Group:
    if name.startswith(LABEL_PREFIX):
        label = name.removeprefix(LABEL_PREFIX)
        if not 1 <= len(label) <= MAX_LABEL_CHARS or not label.isprintable():
            raise InvalidReport("group_by: label:NAME wants the name of a label", "group_by")
        return Group(GroupBy.LABEL, label)
    known = [each.value for each in GroupBy if each is not GroupBy.LABEL]
    if name not in known:
        raise InvalidReport(f"group_by takes {', '.join(known)} and label:NAME, with commas", "group_by")
    return Group(GroupBy(name))


@dataclass(frozen=True, slots=True)
class UsageFilter:
    """Whose use is counted; None is everybody's."""

    tenant_id: TenantId | None = None
    key_id: KeyId | None = None
    model: ModelName | None = None

    def fields(self) -> dict[str, str]:
        """Those that are set."""
        named = {"tenant_id": self.tenant_id, "key_id": self.key_id, "model": self.model}
        return {name: value for name, value in named.items() if value is not None}


@dataclass(frozen=True, slots=True)
class UsageSums:
    """Control totals: requests, tokens by class, and pico owed."""

    requests: int = 0
    input_uncached: int = 0
    input_cached: int = 0
    output: int = 0
    cost: int = 0

    @property
    def input(self) -> int:
        """Cached ones included."""
        return self.input_uncached + self.input_cached

    @property
    def total(self) -> int:
        """All tokens, each once."""
        return self.input + self.output

    def __add__(self, other: UsageSums) -> UsageSums:
        return UsageSums(
            self.requests + other.requests,
            self.input_uncached + other.input_uncached,
            self.input_cached + other.input_cached,
            self.output + other.output,
            self.cost + other.cost,
        )

    def fields(self) -> dict[str, int | str]:
        """As every answer and file shows it; money as decimal text."""
        return {
            "requests": self.requests,
            "input_tokens": self.input,
            "cached_input_tokens": self.input_cached,
            "output_tokens": self.output,
            "total_tokens": self.total,
            "cost": decimal_text(self.cost),
        }


def total_of(sums: Iterable[UsageSums]) -> UsageSums:
    """All of them together."""
    total = UsageSums()
    for each in sums:
        total += each
    return total


@dataclass(frozen=True, slots=True)
class ReportRow:
    """Sums of one combination of groups; `values` in the order of the groups, "" where there is none."""

    values: tuple[str, ...]
    sums: UsageSums


@dataclass(frozen=True, slots=True)
class ReportQuery:
    """What is asked for: at most `limit` rows after the one whose values are `after`."""

    span: TimeRange
    groups: tuple[Group, ...] = ()
    filter: UsageFilter = UsageFilter()
    limit: int = DEFAULT_LIMIT
    after: tuple[str, ...] | None = None

    def __post_init__(self) -> None:
        if not 1 <= self.limit <= MAX_LIMIT:
            raise InvalidReport(f"limit must be from 1 to {MAX_LIMIT}", "limit")


@dataclass(frozen=True, slots=True)
class Report:
    """A page of rows, in the order of their values, and the totals of all rows of all pages."""

    rows: Sequence[ReportRow]
    totals: UsageSums
    # Requests that wait for a price: their tokens are counted, and they cost nothing yet.
    unpriced_requests: int
    has_more: bool


def report_fields(query: ReportQuery, report: Report, currency: str) -> dict[str, object]:
    """As the API answers."""
    names = [group.name for group in query.groups]
    following = cursor(report.rows[-1].values) if report.has_more and report.rows else None
    return {
        "object": "usage_report",
        **query.span.fields(),
        "currency": currency,
        "group_by": names,
        "data": [{**dict(zip(names, row.values, strict=True)), **row.sums.fields()} for row in report.rows],
        "totals": report.totals.fields(),
        "unpriced_requests": report.unpriced_requests,
        "has_more": report.has_more,
        "next": following,
    }


def cursor(values: Sequence[str]) -> str:
    """A text that stands for a row in the order of all rows."""
    return base64.urlsafe_b64encode(json.dumps(list(values)).encode()).decode().rstrip("=")


def parse_cursor(text: str | None, groups: Sequence[Group]) -> tuple[str, ...] | None:
    """The values that a cursor stands for. Raises InvalidReport for what is none of such a report."""
    if text is None:
        return None
    try:
        padded = text.encode("ascii") + b"=" * (-len(text) % 4)
        values = json.loads(base64.b64decode(padded, altchars=b"-_", validate=True))
    except (ValueError, RecursionError, binascii.Error):
        values = None
    is_whole = isinstance(values, list) and len(values) == len(groups)
    if not is_whole or not all(isinstance(each, str) and "\0" not in each for each in values):
        raise InvalidReport("after is no `next` of this report; leave it out to begin anew", "after")
    return tuple(values)
