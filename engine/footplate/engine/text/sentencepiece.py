"""SentencePiece BPE by score: the best-scored neighbours merge first.

Loading is two dictionaries, so a vocabulary of 262,144 pieces is ready at once; words that come again are
remembered. Source: Kudo and Richardson, "SentencePiece" (2018), and the piece types of its model format.
"""

from __future__ import annotations

import heapq
import re
import time
from collections.abc import Mapping, Sequence

from footplate.engine.text.vocabulary import byte_token_value

SPACE_MARK = "\u2581"  # how pieces write a space
_CACHED_WORDS = 65_536
_CACHED_WORD_CHARACTERS = 64
_WORDS_PER_TURN = 2_000


class SentencePieceEncoder:
    """Text to ids. `pieces` merge by rank (lower first), `atoms` are matched whole before anything merges.

    Neither holds the space mark: both are written with plain spaces, as the text is.
    """

    def __init__(
        self,
        pieces: Mapping[str, tuple[float, int]],
        atoms: Mapping[str, int],
        byte_ids: Sequence[int] | None,
        unknown_id: int | None,
        control_ids: frozenset[int],
        add_space_prefix: bool,
    ) -> None:
        self._pieces = pieces
        self._atoms = _AtomSplitter(atoms)
        self._byte_ids = byte_ids
        self._unknown_id = unknown_id
        self._control_ids = control_ids
        self._add_space_prefix = add_space_prefix
        self._word_boundary = _word_boundary(pieces)
        self._words: dict[str, tuple[int, ...]] = {}

    def encode(self, text: str) -> list[int]:
        """Ids of `text`, without BOS and EOS. Safe in any thread; lets other threads in on long texts."""
        text = text.replace(SPACE_MARK, " ")
        ids: list[int] = []
        after_control = True
        for part in self._atoms.split(text):
            if isinstance(part, int):
                ids.append(part)
                after_control = part in self._control_ids
                continue
            if self._add_space_prefix and after_control:
                part = " " + part
            after_control = False
            self._encode_plain(part, ids)
        return ids

    def _encode_plain(self, text: str, ids: list[int]) -> None:
        known = self._words
        for index, word in enumerate(self._word_boundary.split(text), 1):
            found = known.get(word)
            if found is None:
                found = self._encode_word(word)
            ids.extend(found)
            if index % _WORDS_PER_TURN == 0:
                time.sleep(0)  # gives the interpreter lock away, so that streams keep flowing meanwhile

    def _encode_word(self, word: str) -> tuple[int, ...]:
        ids = tuple(self._ids_of_symbols(_merge(word, self._pieces)))
        if len(word) <= _CACHED_WORD_CHARACTERS:
            if len(self._words) >= _CACHED_WORDS:
                self._words = {}
            self._words[word] = ids
        return ids

    def _ids_of_symbols(self, symbols: Sequence[str]) -> list[int]:
        ids: list[int] = []
        for symbol in symbols:
            piece = self._pieces.get(symbol)
            if piece is not None:
                ids.append(piece[1])
            elif self._byte_ids is not None:
                ids.extend(self._byte_ids[byte] for byte in _written_bytes(symbol))
            elif self._unknown_id is not None and ids[-1:] != [self._unknown_id]:
                ids.append(self._unknown_id)  # a run of unknown characters is one unknown token
        return ids


def byte_fallback_ids(tokens: Sequence[tuple[int, str]]) -> list[int] | None:
    """The 256 ids of the byte tokens in byte order; None when the vocabulary lacks any of them."""
    by_value = {byte_token_value(text): token_id for token_id, text in tokens}
    if any(value not in by_value for value in range(256)):
        return None
    return [by_value[value] for value in range(256)]


def _written_bytes(symbol: str) -> bytes:
    """Bytes of a character that is no piece; a space is written as the mark."""
    return (SPACE_MARK if symbol == " " else symbol).encode("utf-8")


def _word_boundary(pieces: Mapping[str, tuple[float, int]]) -> re.Pattern[str]:
    """Where text may be cut without changing any merge: before a space that follows a non-space.

    A few vocabularies hold pieces with a space inside; the characters before such a space do not cut.
    """
    joining = set(re.findall(r"([^ \0]) ", "\0".join(pieces)))
    return re.compile(f"(?<=[^ {re.escape(''.join(sorted(joining)))}])(?= )")


def _merge(word: str, pieces: Mapping[str, tuple[float, int]]) -> list[str]:
    """Merge neighbours, best rank first and leftmost among equals, until no pair is a piece."""
    if len(word) < 2:
        return [word] if word else []
    symbols = list(word)
    following = [*range(1, len(word)), -1]
    preceding = list(range(-1, len(word) - 1))
    queue: list[tuple[float, int, int, str]] = []

    def offer(left: int, right: int) -> None:
        joined = symbols[left] + symbols[right]
        piece = pieces.get(joined)
        if piece is not None:
            heapq.heappush(queue, (piece[0], left, right, joined))

    for left in range(len(word) - 1):
        offer(left, left + 1)
    while queue:
        _, left, right, joined = heapq.heappop(queue)
        # An entry is stale once either side has grown or been swallowed.
        if following[left] != right or symbols[left] + symbols[right] != joined:
            continue
        symbols[left] = joined
        symbols[right] = ""
        after = following[right]
        following[left], following[right] = after, -2
        if after >= 0:
            preceding[after] = left
            offer(left, after)
        if preceding[left] >= 0:
            offer(preceding[left], left)
    return [symbol for symbol in symbols if symbol]


class _AtomSplitter:
    """Cuts a text at tokens that are matched whole: leftmost first, longest first."""

    def __init__(self, atoms: Mapping[str, int]) -> None:
        self._atoms = atoms
        lengths: dict[str, set[int]] = {}
        for text in atoms:
            lengths.setdefault(text[:2], set()).add(len(text))
        # A one-character atom is a candidate whatever follows it, so its key stands for its longer kin too.
        for key in [key for key in lengths if len(key) == 1]:
            for longer in [other for other in lengths if len(other) == 2 and other[0] == key]:
                lengths[key] |= lengths.pop(longer)
        self._lengths = {key: sorted(found, reverse=True) for key, found in lengths.items()}
        self._candidate = re.compile("|".join(re.escape(key) for key in self._lengths) or "(?!)")

    def split(self, text: str) -> list[str | int]:
        """Atoms as ids and the texts between them; no empty texts."""
        parts: list[str | int] = []
        begin = 0
        match = self._candidate.search(text)
        while match is not None:
            at = match.start()
            found = self._longest(text, at, match.group())
            if found is None:
                match = self._candidate.search(text, at + 1)
                continue
            if at > begin:
                parts.append(text[begin:at])
            parts.append(self._atoms[found])
            begin = at + len(found)
            match = self._candidate.search(text, begin)
        if begin < len(text):
            parts.append(text[begin:])
        return parts

    def _longest(self, text: str, at: int, key: str) -> str | None:
        for length in self._lengths[key]:
            candidate = text[at : at + length]
            if candidate in self._atoms and len(candidate) == length:
                return candidate
        return None
