"""Takes what names a person or opens a door out of a text, by its form. Pure.

Every step is linear in the text, or looks at a bounded stretch for each place where it may begin: runs are
taken whole (possessive quantifiers), then looked at. Doubt redacts: any seven digits in a row are gone, and
so is a long mixed string of letters and digits. What has no form, as names and addresses have none, stays.
"""

from __future__ import annotations

import ipaddress
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from footplate.platform.capture.plain_text import plain_text

MAX_CHARACTERS = 32_768
# Read beyond the end of what is kept, so that a secret that lies across the end is seen whole.
MARGIN = 4_096
_MIN_DIGITS = 7
_MIN_RANDOM = 32

Span = tuple[int, int, str]

# The first that begins at a place names what is taken out there.
_PATTERNS: tuple[tuple[str, re.Pattern[str]], ...] = (
    (
        "private_key",
        # To the end of the text where no end is marked.
        re.compile(
            r"-----BEGIN [A-Z0-9 ]{0,40}PRIVATE KEY[A-Z ]{0,10}-----"
            r"(?s:.*?)(?:-----END [A-Z0-9 ]{0,40}PRIVATE KEY[A-Z ]{0,10}-----|\Z)"
        ),
    ),
    # The last @ before a slash ends it: what is written raw may hold others.
    ("url_password", re.compile(r"://[^\s/:@]{0,128}+:([^\s/]{1,256})@")),
    (
        "secret",
        re.compile(r"(?i)\bcookie[\"']?[ \t]{0,4}[:=][ \t]{0,4}[\"']?([^\s=;,\"']{1,128}+=[^\r\n\"']++)"),
    ),
    (
        "secret",
        re.compile(
            r"(?i)\b(?:phpsessid|jsessionid|sess(?:ion)?[ _-]?id|sid)[\"']?[ \t]{0,4}[:=][ \t]{0,4}[\"']?"
            r"([^\s\"',;]{3,}+)"
        ),
    ),
    ("secret", re.compile(r"(?i)\b(?:bearer|basic)[ \t:=]{1,4}+([^\s\"',;]{6,}+)")),
    (
        "secret",
        re.compile(
            r"(?i)(?:pass(?:word|wd|wort|phrase)|kennwort|secret|api[ _-]?key|access[ _-]?key|token|"
            r"authorization)"
            r"[\"']?[ \t]{0,4}(?:[:=]|\bis\b)[ \t]{0,4}[\"']?(?!bearer\b|basic\b)([^\s\"',;]{3,}+)"
        ),
    ),
    ("ip_address", re.compile(r"(?<![\d.])(?:\d{1,3}\.){3}\d{1,3}(?!\d)")),
    ("iban", re.compile(r"(?<![A-Za-z0-9])[A-Z]{2}\d{2}(?:[ -]?[A-Z0-9]{4}){2,7}(?:[ -]?[A-Z0-9]{1,3})?")),
    ("iban", re.compile(r"(?<![A-Za-z0-9])[A-Za-z]{2}\d{2}[A-Za-z0-9]{11,30}(?![A-Za-z0-9])")),
)
_DOMAIN = re.compile(r"@[^\W_](?:[\w.-]*[^\W_])?")
_DIGITS = re.compile(r"[+(]{0,2}\d(?:[ \u00a0\u202f().\-/]{0,2}+\d)*+")
_SSN = re.compile(r"\d{3}[ -]\d{2}[ -]\d{4}")
_COLONS = re.compile(r"[0-9A-Fa-f]{0,4}+:[0-9A-Fa-f:.]*+")
_RUN = re.compile(r"[A-Za-z0-9_.+/=~-]{12,}+")
_KEY = re.compile(
    r"(?:^|[^A-Za-z0-9])(?:fp_|sk[-_]|pk[-_]|rk_|AKIA|ASIA|gh[opsur]_|github_pat_|glpat-|xox[a-z]-|AIza|hf_|"
    r"npm_|pypi-|ya29\.|xapp-|whsec_|dop_v1_|shp(?:at|ca|pa|ss)_|SG\.[A-Za-z0-9_-]{16})"
)
_HEX = re.compile(r"[0-9A-Fa-f]{32,}+")


@dataclass(frozen=True, slots=True)
class Redacted:
    """A text without what was found, each replaced by its kind in brackets, and how many of each kind.

    `is_cut`: the text was longer than what is kept.
    """

    text: str
    found: Mapping[str, int]
    is_cut: bool


def redact(text: str, max_characters: int = MAX_CHARACTERS) -> Redacted:
    """The first `max_characters` of a text, redacted."""
    seen = text[: max_characters + MARGIN]
    spans = _merged(sorted(_all_spans(seen), key=lambda span: (span[0], -span[1])))
    parts: list[str] = []
    found: Counter[str] = Counter()
    end = 0
    for begin, until, kind in spans:
        if begin >= max_characters:
            break
        parts += (seen[end:begin], f"[{kind}]")
        found[kind] += 1
        end = until
    if end < max_characters:
        parts.append(seen[end:max_characters])
    return Redacted("".join(parts), dict(found), len(text) > max_characters)


def _merged(spans: list[Span]) -> list[Span]:
    """Those that overlap become one, of the first's kind."""
    merged: list[Span] = []
    for begin, end, kind in spans:
        if merged and begin < merged[-1][1]:
            first, before, name = merged[-1]
            merged[-1] = (first, max(before, end), name)
        else:
            merged.append((begin, end, kind))
    return merged


def _all_spans(text: str) -> Iterator[Span]:
    """As the text stands, and as it reads; what is found in either goes."""
    yield from _spans(text)
    plain = plain_text(text)
    if plain is not None:
        for begin, end, kind in _spans(plain.text):
            yield *plain.original(begin, end), kind


def _spans(text: str) -> Iterator[Span]:
    passwords_end: set[int] = set()
    for kind, pattern in _PATTERNS:
        group = pattern.groups
        for match in pattern.finditer(text):
            yield match.start(group), match.end(group), kind
            if kind == "url_password":
                passwords_end.add(match.end(group))
    yield from _emails(text, passwords_end)
    yield from _ipv6(text)
    yield from _numbers(text)
    yield from _tokens(text)


def _emails(text: str, passwords_end: set[int]) -> Iterator[Span]:
    """Not where an @ ends a URL's password: that is taken out as what it is."""
    least = 0
    for match in _DOMAIN.finditer(text):
        begin = match.start()
        if begin in passwords_end:
            continue
        # To the left by hand: a pattern that begins anywhere would be tried everywhere.
        while begin > least and (text[begin - 1].isalnum() or text[begin - 1] in "._%+'-"):
            begin -= 1
        if begin < match.start():
            yield begin, match.end(), "email"
        least = match.end()


def _ipv6(text: str) -> Iterator[Span]:
    for match in _COLONS.finditer(text):
        run = match[0].rstrip(".")
        begin, end = match.span()
        is_in_word = text[begin - 1 : begin].isalnum() or text[end : end + 1].isalnum()
        if is_in_word or not 2 <= len(run) <= 45 or run.count(":") < 2:
            continue
        for candidate in (run, run.rstrip(":")):
            try:
                ipaddress.IPv6Address(candidate)
            except ValueError:
                continue
            if candidate != "::":
                yield begin, begin + len(candidate), "ip_address"
            break


def _numbers(text: str) -> Iterator[Span]:
    for match in _DIGITS.finditer(text):
        digits = [int(each) for each in match[0] if each.isdecimal()]
        if len(digits) < _MIN_DIGITS:
            continue
        if 13 <= len(digits) <= 19 and _is_luhn(digits):
            kind = "card"
        else:
            kind = "ssn" if _SSN.fullmatch(match[0]) else "phone"
        yield match.start(), match.end(), kind


def _is_luhn(digits: list[int]) -> bool:
    total = 0
    for place, digit in enumerate(reversed(digits)):
        twice = digit * 2 if place % 2 else digit
        total += twice - 9 if twice > 9 else twice
    return total % 10 == 0


def _tokens(text: str) -> Iterator[Span]:
    for match in _RUN.finditer(text):
        run = match[0]
        if "eyJ" in run and "." in run:
            kind = "jwt"
        elif _KEY.search(run):
            kind = "api_key"
        elif len(run) >= _MIN_RANDOM and (_is_mixed(run) or _HEX.search(run)):
            kind = "secret"
        else:
            continue
        yield match.start(), match.end(), kind


def _is_mixed(run: str) -> bool:
    """Letters of both cases and digits, as random strings have them and words have not."""
    return (
        any("0" <= each <= "9" for each in run)
        and any("a" <= each <= "z" for each in run)
        and any("A" <= each <= "Z" for each in run)
    )
