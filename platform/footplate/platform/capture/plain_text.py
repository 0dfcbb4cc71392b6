"""A text as it reads: without full-width forms, invisible characters and encoded @; places kept. Pure."""

from __future__ import annotations

import re
import unicodedata
from dataclasses import dataclass

# A few characters unfold to whole phrases; those hide nothing.
_MAX_UNFOLDED = 3
_HIDDEN = frozenset({"Cf", "Mn", "Me"})
_DASHES, _FULL_STOPS = "\u2010\u2011\u2012\u2013\u2014\u2015\u2212", "\u3002\uff61"
_OTHER_FORMS = dict.fromkeys(_DASHES, "-") | dict.fromkeys(_FULL_STOPS, ".")
_ENCODED_AT = re.compile(r"%(?:25){0,3}40|&#0{0,4}64;?|&#[xX]0{0,4}40;?|&commat;|\\u0040|\\x40")


@dataclass(frozen=True, slots=True)
class PlainText:
    """What a text reads as. `starts`: where each of its characters begins in the original; its end, last."""

    text: str
    starts: list[int]

    def original(self, begin: int, end: int) -> tuple[int, int]:
        """A range that isn't empty, in the original."""
        # Several characters may come of one.
        return self.starts[begin], max(self.starts[end], self.starts[end - 1] + 1)


def plain_text(text: str) -> PlainText | None:
    """None where a text reads as it stands."""
    edits = [(match.start(), match.end(), "@") for match in _ENCODED_AT.finditer(text)]
    if not text.isascii():
        changed = {each: plain for each in set(text) if (plain := _plain(each)) != each}
        if changed:
            edits += [(at, at + 1, changed[each]) for at, each in enumerate(text) if each in changed]
            edits.sort()
    if not edits:
        return None
    parts: list[str] = []
    starts: list[int] = []
    at = 0
    for begin, end, plain in edits:
        parts += (text[at:begin], plain)
        starts.extend(range(at, begin))
        starts.extend([begin] * len(plain))
        at = end
    parts.append(text[at:])
    starts.extend(range(at, len(text) + 1))
    return PlainText("".join(parts), starts)


def _plain(character: str) -> str:
    if character.isascii():
        return character
    if (other := _OTHER_FORMS.get(character)) is not None:
        return other
    if unicodedata.category(character) in _HIDDEN:
        return ""
    folded = unicodedata.normalize("NFKC", character)
    return folded if len(folded) <= _MAX_UNFOLDED else character
