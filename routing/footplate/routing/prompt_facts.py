"""What a cascade may know of a prompt before a model has seen it: counts and shares, never the text. Pure.

One pass of a few regular expressions over at most `MAX_LOOKED_AT` characters from the end of the prompt,
where the question stands. Lengths are those of the whole prompt.
"""

from __future__ import annotations

import re
import unicodedata
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields

MAX_LOOKED_AT = 4_000
UNKNOWN = "unknown"
_WORD = re.compile(r"[^\W\d_]+")
_NUMBER = re.compile(r"\d+")
_CODE = re.compile(
    r"```|\bdef \w+\(|\bclass \w+|#include|\bfunction\b|\bSELECT\b|[{};]\s*$|=>|==", re.MULTILINE
)
_OPTION = re.compile(r"^[ \t]*\(?[A-Ea-e1-5][).:]\s", re.MULTILINE)
# Words that are frequent in one language and rare in the others.
_COMMON: Mapping[str, frozenset[str]] = {
    "en": frozenset("the of and is to in that it what which are was for with this you how from does".split()),
    "de": frozenset("der die das und ist nicht ein eine mit den von wie auf für sich wird ich sie".split()),
    "fr": frozenset("le la les des et est une dans que pour qui sur pas avec sont ce vous quelle".split()),
    "es": frozenset("el los las del y una por con para como más pero está qué cuál son su lo".split()),
    "it": frozenset("il gli della di che non sono per con una più è come quale nel questo".split()),
    "pt": frozenset("os das do uma não com para mais são que em um qual você isso".split()),
}
# Scripts that tell of a language by themselves, by the beginning of their characters' names.
_SCRIPTS = (
    ("CJK", "zh"),
    ("HIRAGANA", "ja"),
    ("KATAKANA", "ja"),
    ("HANGUL", "ko"),
    ("CYRILLIC", "ru"),
    ("ARABIC", "ar"),
    ("HEBREW", "he"),
    ("DEVANAGARI", "hi"),
    ("GREEK", "el"),
    ("THAI", "th"),
)
# All that `language_of` can say.
LANGUAGES = (*sorted({*_COMMON, *(language for _, language in _SCRIPTS)}), UNKNOWN)
MAX_TAGS = 32
_BETWEEN_TAGS = re.compile(r"[\s,;]+")


@dataclass(frozen=True, slots=True)
class PromptFacts:
    """Numbers of a prompt. `last_…`: of its last line with more than a label such as `A:`, the question."""

    num_characters: int
    num_messages: int = 1
    num_lines: int = 1
    num_words: int = 0
    digit_share: float = 0.0
    longest_number: int = 0  # digits
    last_words: int = 0
    last_numbers: int = 0
    last_longest_number: int = 0  # digits
    last_commas: int = 0
    last_quotes: int = 0
    last_capitals: int = 0  # words with a capital, the first one left out
    last_word_length: float = 0.0  # characters of a word, on average
    num_options: int = 0  # lines such as `B) …`
    has_code: bool = False
    has_tools: bool = False
    # Whether tokens are to be generated at all.
    wants_answer: bool = True
    language: str = UNKNOWN
    tags: frozenset[str] = frozenset()

    def numbers(self) -> dict[str, float]:
        """All that is a number or a yes or no, by name: what a classifier weighs and an admin may see."""
        return {
            each.name: float(getattr(self, each.name))
            for each in fields(self)
            if each.name not in ("language", "tags", "wants_answer")
        }


def prompt_facts(
    texts: Sequence[str],
    *,
    has_tools: bool = False,
    wants_answer: bool = True,
    tags: frozenset[str] = frozenset(),
) -> PromptFacts:
    """The facts of a conversation's messages, or of one or more prompts; the last one asks."""
    num_characters = sum(map(len, texts))
    text = (texts[-1] if texts else "")[-MAX_LOOKED_AT:]
    lines = [line for line in text.split("\n") if line.strip()]
    last = _question(lines)
    words, last_words = _WORD.findall(text), _WORD.findall(last)
    numbers, last_numbers = _NUMBER.findall(text), _NUMBER.findall(last)
    return PromptFacts(
        num_characters,
        len(texts),
        max(1, len(lines)),
        len(words),
        sum(map(len, numbers)) / max(1, len(text)),
        max(map(len, numbers), default=0),
        len(last_words),
        len(last_numbers),
        max(map(len, last_numbers), default=0),
        last.count(","),
        sum(map(last.count, "'\"")),
        sum(word[0].isupper() for word in last_words[1:]),
        sum(map(len, last_words)) / max(1, len(last_words)),
        len(_OPTION.findall(text)),
        bool(_CODE.search(text)),
        has_tools,
        wants_answer,
        language_of(words),
        tags,
    )


def tags_in(text: str) -> frozenset[str]:
    """The first `MAX_TAGS` tags of a text: words between commas, semicolons or spaces, in any case."""
    return frozenset([tag for tag in _BETWEEN_TAGS.split(text.casefold()) if tag][:MAX_TAGS])


def language_of(words: Sequence[str]) -> str:
    """A guess from frequent words and from scripts: a code of two letters, or `unknown`."""
    letters = "".join(words)[:200]
    scripts = Counter(map(_script, letters))
    script, count = scripts.most_common(1)[0] if scripts else ("", 0)
    if script and 2 * count > len(letters):
        # Japanese is written with Chinese characters too.
        return "ja" if script == "zh" and scripts["ja"] else script
    counts = Counter(word.lower() for word in words)
    hits = {name: sum(counts[word] for word in common) for name, common in _COMMON.items()}
    best = max(hits, key=lambda name: hits[name])
    return best if hits[best] else UNKNOWN


def _script(letter: str) -> str:
    if letter < "\u0370":
        return ""
    name = unicodedata.name(letter, "")
    return next((language for begin, language in _SCRIPTS if name.startswith(begin)), "")


def _question(lines: Sequence[str]) -> str:
    """The last line that is more than a label for the answer or one of its options."""
    for line in reversed(lines):
        if len(_WORD.findall(line)) > 1 and not _OPTION.match(line):
            return line
    return lines[-1] if lines else ""
