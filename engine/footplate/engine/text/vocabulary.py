"""What each token id stands for, in bytes, and which ids begin and end texts."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache

# Control tokens that end a turn. A file whose vocabulary holds one ends answers there as well as at its EOS.
END_OF_TURN_TEXTS = frozenset(
    {
        "<|im_end|>",
        "<|eot_id|>",
        "<|eom_id|>",
        "<|end|>",
        "<|end_of_turn|>",
        "<end_of_turn>",
        "<turn|>",
        "<|END_OF_TURN_TOKEN|>",
    }
)


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """Token ids as raw bytes. `token_bytes[id]` is empty for ids that write nothing.

    `special_ids` are control tokens: read in prompts, hidden in answers unless asked for. `prefix_ids` and
    `suffix_ids` are what the file says to put around a plain prompt (BOS, EOS).
    """

    token_bytes: Sequence[bytes]
    special_ids: frozenset[int]
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()
    prefix_ids: tuple[int, ...] = ()
    suffix_ids: tuple[int, ...] = ()

    @property
    def size(self) -> int:
        return len(self.token_bytes)


@lru_cache(maxsize=1)
def byte_of_character() -> dict[str, int]:
    """The printable alphabet of byte-level BPE, by character.

    Bytes that print stand for themselves; the other 68 take the code points from 256 on, in order.
    Source: GPT-2 (Radford et al., 2019).
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    table = {chr(byte): byte for byte in printable}
    others = (byte for byte in range(256) if byte not in set(printable))
    table.update({chr(256 + index): byte for index, byte in enumerate(others)})
    return table


def byte_level_bytes(token: str) -> bytes:
    """The bytes of a byte-level token; a token with characters outside that alphabet stands for itself."""
    table = byte_of_character()
    try:
        return bytes([table[character] for character in token])
    except KeyError:
        return token.encode("utf-8", "replace")


def byte_token_value(token: str) -> int | None:
    """The byte behind a fallback token such as `<0xE2>`, or None when the text has not that form."""
    if len(token) != 6 or not token.startswith("<0x") or token[5] != ">":
        return None
    try:
        return int(token[3:5], 16)
    except ValueError:
        return None


def end_ids(texts: Iterable[tuple[int, str]], eos_ids: Iterable[int | None]) -> tuple[int, ...]:
    """Ids that end an answer: those the file names, then end-of-turn control tokens, without repeats.

    `texts` are the control tokens only: an ordinary token that looks like one must not end anything.
    """
    named = [token_id for token_id in eos_ids if token_id is not None]
    turns = [token_id for token_id, text in texts if text in END_OF_TURN_TEXTS]
    return tuple(dict.fromkeys([*named, *turns]))
