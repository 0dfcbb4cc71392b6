"""What a tenant is, and what may stand in the texts that people give to tenants and keys. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any
from unicodedata import normalize
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError

from footplate.tenancy.api_keys import LOOKS_LIKE_A_KEY
from footplate.tenancy.errors import InvalidValue
from footplate.tenancy.quotas import Quota

MAX_NAME = 128
MAX_LABELS = 16
MAX_LABEL_VALUE = 256
TENANT_ID = re.compile(r"tnt_[0-9a-f]{16}", re.ASCII)
_TIMEZONE = re.compile(r"[A-Za-z0-9_+\-/]{1,64}", re.ASCII)
_LABEL_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}", re.ASCII)
# What Python takes for printable and no screen shows: Unicode's Default_Ignorable_Code_Point beyond format
# characters, and two symbols that are blank.
_INVISIBLE = re.compile(
    "[\u034f\u115f\u1160\u17b4\u17b5\u180b-\u180f\u2800\u3164\ufe00-\ufe0f\uffa0"
    "\U0001d159\U000e0100-\U000e01ef]"
)
# Objects whose own names are fields, so that an error can name one of them.
_HOLDERS = frozenset({"quota", "before", "after", "replacement", "answer"})


@dataclass(frozen=True, slots=True)
class Tenant:
    """One customer of the platform: a team of the company."""

    id: str
    name: str
    cost_center: str = ""
    # Tenants of one group may use each other's cached blocks.
    share_group: str | None = None
    is_suspended: bool = False
    created_at: datetime | None = None
    labels: Mapping[str, str] = field(default_factory=dict)
    # None: the default holds.
    quota: Quota | None = None
    # What days are in its reports and files when nobody says otherwise; None: those of the books.
    timezone: str | None = None
    # Whether prompts and answers may be kept, where the platform keeps any.
    captures_content: bool = False

    def fields(self) -> dict[str, Any]:
        """As it is shown and as it stands in audit records; the quota is shown apart."""
        return {
            "id": self.id,
            "object": "tenant",
            "name": self.name,
            "cost_center": self.cost_center,
            "share_group": self.share_group,
            "timezone": self.timezone,
            "labels": dict(self.labels),
            "captures_content": self.captures_content,
            "state": "suspended" if self.is_suspended else "active",
            "created_at": time_text(self.created_at),
        }


def time_text(at: datetime | None) -> str | None:
    """RFC 3339 in UTC, to the second."""
    return None if at is None else at.strftime("%Y-%m-%dT%H:%M:%SZ")


def check_text(name: str, text: str, *, least: int = 0) -> str:
    """A text of one line as it is kept.

    Raises:
        InvalidValue: it is too long, too short, or holds control characters or invisible ones.
    """
    text = normalised(text)
    if not least <= len(text) <= MAX_NAME or not _is_visible(text):
        raise InvalidValue(f"{name} must be one line of {least} to {MAX_NAME} visible characters", name)
    return text


def normalised(text: str) -> str:
    """In NFC and without blanks around it, so that what looks the same is the same."""
    return normalize("NFC", text.strip())


def check_timezone(name: str) -> str:
    """A name of the IANA database. Raises InvalidValue."""
    try:
        # A name that is a path would be opened.
        if not _TIMEZONE.fullmatch(name):
            raise ValueError
        ZoneInfo(name)
    except (ZoneInfoNotFoundError, ValueError, OSError):
        raise InvalidValue(
            "there is no such time zone in the IANA database; write UTC or Europe/Berlin", "timezone"
        ) from None
    return name


def check_labels(labels: Mapping[str, str]) -> dict[str, str]:
    """Labels as they are kept. Raises InvalidValue."""
    if len(labels) > MAX_LABELS:
        raise InvalidValue(f"there are {len(labels)} labels; at most {MAX_LABELS} are allowed", "labels")
    for name, value in labels.items():
        if not _LABEL_NAME.fullmatch(name):
            message = "a label's name is 1 to 64 letters, digits, '.', '_' or '-', and begins with no sign"
            raise InvalidValue(message, "labels")
        if len(value) > MAX_LABEL_VALUE or not _is_visible(value):
            raise InvalidValue(
                f"a label's value is one line of at most {MAX_LABEL_VALUE} visible characters", "labels"
            )
    return dict(labels)


def refuse_keys(fields: Mapping[str, Any]) -> None:
    """Look through everything that is about to be stored, names inside objects too.

    Raises:
        InvalidValue: a text holds an API key, which would be stored and shown in clear.
    """
    for name, value in fields.items():
        if name in _HOLDERS and isinstance(value, Mapping):
            refuse_keys(value)
        elif any(LOOKS_LIKE_A_KEY.search(text) for text in _texts(value)):
            raise InvalidValue(f"{name} holds an API key; keys must not be written down here", name)


def mask_keys(value: Any) -> Any:
    """The same JSON value with `[key]` in place of every API key in it, names inside objects too."""
    if isinstance(value, str):
        return LOOKS_LIKE_A_KEY.sub("[key]", value)
    if isinstance(value, Mapping):
        return {mask_keys(name): mask_keys(inner) for name, inner in value.items()}
    return [mask_keys(inner) for inner in value] if isinstance(value, list | tuple) else value


def _is_visible(text: str) -> bool:
    return text.isprintable() and not _INVISIBLE.search(text)


def _texts(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for name, inner in value.items():
            yield from (name, *_texts(inner))
    elif isinstance(value, list | tuple):
        for inner in value:
            yield from _texts(inner)
