"""Ids to text, one id at a time: only whole characters go out, and the pieces join to the full decode."""

from __future__ import annotations

from codecs import utf_8_decode
from collections.abc import Iterable, Sequence


class TokenTexts:
    """Each id's bytes, and its text where those bytes are whole characters. Shared by all answers of a model.

    Ids outside the vocabulary (a padded head can name them) write nothing.
    """

    __slots__ = ("raw", "texts")

    def __init__(self, token_bytes: Sequence[bytes]) -> None:
        self.raw = list(token_bytes)
        self.texts = [_whole_text(data) for data in self.raw]

    def hiding(self, token_ids: Iterable[int]) -> TokenTexts:
        """A copy in which these ids write nothing."""
        copy = TokenTexts(())
        copy.raw, copy.texts = self.raw.copy(), self.texts.copy()
        for token_id in token_ids:
            copy.raw[token_id], copy.texts[token_id] = b"", ""
        return copy

    def bytes_of(self, token_id: int) -> bytes:
        return self.raw[token_id] if 0 <= token_id < len(self.raw) else b""

    def decode(self, token_ids: Iterable[int]) -> str:
        """The text of all ids together; bytes that are no UTF-8 become U+FFFD."""
        return b"".join(map(self.bytes_of, token_ids)).decode("utf-8", "replace")


def _whole_text(data: bytes) -> str | None:
    try:
        return data.decode()
    except UnicodeDecodeError:
        return None


class Detokenizer:
    """One answer's decoder. `push` gives the characters that an id completes; `flush` ends the text.

    For any ids, the joined results equal `TokenTexts.decode` of all of them.
    """

    __slots__ = ("_pending", "_table", "_texts")

    def __init__(self, table: TokenTexts) -> None:
        self._table = table
        self._texts = table.texts
        self._pending = b""

    def push(self, token_id: int) -> str:
        if not self._pending:
            try:
                text = self._texts[token_id]
            except IndexError:
                return ""
            if text is not None and token_id >= 0:
                return text
        data = self._pending + self._table.bytes_of(token_id)
        text, consumed = utf_8_decode(data, "replace", False)
        self._pending = data[consumed:]
        return text

    def bytes_of(self, token_id: int) -> bytes:
        """What an id writes, after hiding."""
        return self._table.bytes_of(token_id)

    def flush(self) -> str:
        """What an unfinished character at the end becomes: U+FFFD, or nothing when none is open."""
        pending, self._pending = self._pending, b""
        return pending.decode("utf-8", "replace")
