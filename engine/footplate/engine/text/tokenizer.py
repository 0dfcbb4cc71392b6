"""Tokenizers out of GGUF metadata and out of Hugging Face folders. What is not known fails, with its name."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from tokenizers import Tokenizer as FastTokenizer

from footplate.engine.errors import InvalidRequest, LoadError
from footplate.engine.text.byte_level import PRE_TOKENIZATIONS, ByteLevelEncoder, build_byte_level
from footplate.engine.text.sentencepiece import SPACE_MARK, SentencePieceEncoder, byte_fallback_ids
from footplate.engine.text.vocabulary import Vocabulary, byte_level_bytes, byte_token_value, end_ids
from footplate.engine.weights.config_values import checked_ids, checked_integer
from footplate.engine.weights.files import (
    MAX_TOKENIZER_BYTES,
    parse_json_object,
    read_bounded,
    read_json_object,
)

MAX_VOCABULARY = 1 << 24
# `tokenizer.ggml.token_type`
_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED, _BYTE = range(1, 7)


class Encoder(Protocol):
    """Text to ids without BOS and EOS; control tokens written in the text are read as such."""

    def encode(self, text: str) -> list[int]: ...


@dataclass(frozen=True, slots=True)
class Tokenizer:
    """One model's text coding: an encoder and the vocabulary it speaks. Immutable; safe in any thread."""

    encoder: Encoder
    vocabulary: Vocabulary

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Ids of a text, with the BOS and EOS that the file asks for; one that begins with BOS gets no more.

        Raises:
            InvalidRequest: the text holds lone surrogates, so it is no Unicode text.
        """
        try:
            text.encode()
        except UnicodeEncodeError:
            raise InvalidRequest("the text holds lone surrogates and can't be encoded as UTF-8") from None
        ids = self.encoder.encode(text)
        return self.with_special_tokens(ids) if add_special_tokens else ids

    def with_special_tokens(self, ids: list[int]) -> list[int]:
        """`ids` between the file's prefix and suffix, unless they stand there already."""
        prefix, suffix = list(self.vocabulary.prefix_ids), list(self.vocabulary.suffix_ids)
        if ids[: len(prefix)] == prefix:
            prefix = []
        return [*prefix, *ids, *suffix]

    def with_prefix(self, ids: list[int]) -> list[int]:
        """`ids` after the file's prefix (BOS), unless it is there already; an answer follows, so no EOS."""
        prefix = list(self.vocabulary.prefix_ids)
        return ids if ids[: len(prefix)] == prefix else [*prefix, *ids]


def tokenizer_from_gguf(metadata: Mapping[str, Any], origin: str) -> Tokenizer:
    """The tokenizer that a GGUF file's `tokenizer.ggml.*` keys describe; `origin` names the file in errors.

    Raises:
        LoadError: a key is missing or of the wrong length, or the tokenizer's kind is not one we know.
    """
    kind = _required(metadata, "tokenizer.ggml.model", origin)
    tokens: list[str] = _required(metadata, "tokenizer.ggml.tokens", origin)
    types: list[int] = metadata.get("tokenizer.ggml.token_type") or [_NORMAL] * len(tokens)
    if len(types) != len(tokens):
        raise LoadError(
            f"{origin}: tokenizer.ggml.token_type has {len(types)} entries for {len(tokens)} tokens"
        )
    if kind == "gpt2":
        encoder, token_bytes = _byte_level_parts(metadata, tokens, types, origin)
    elif kind == "llama":
        encoder, token_bytes = _sentencepiece_parts(metadata, tokens, types, origin)
    else:
        raise LoadError(f"{origin}: tokenizer.ggml.model is {kind!r}; known are gpt2 and llama")
    return Tokenizer(encoder, _gguf_vocabulary(metadata, tokens, types, token_bytes, origin))


def _required(metadata: Mapping[str, Any], key: str, origin: str) -> Any:
    value = metadata.get(key)
    if value is None:
        raise LoadError(f"{origin}: metadata {key!r} is missing, so there is no tokenizer")
    return value


def _byte_level_parts(
    metadata: Mapping[str, Any], tokens: Sequence[str], types: Sequence[int], origin: str
) -> tuple[Encoder, list[bytes]]:
    name = metadata.get("tokenizer.ggml.pre", "default")
    pre_tokenization = PRE_TOKENIZATIONS.get(name)
    if pre_tokenization is None:
        known = ", ".join(sorted(PRE_TOKENIZATIONS))
        raise LoadError(f"{origin}: tokenizer.ggml.pre is {name!r}; known are {known}")
    if metadata.get("tokenizer.ggml.add_space_prefix"):
        raise LoadError(
            f"{origin}: tokenizer.ggml.add_space_prefix is set on a byte-level tokenizer; not supported"
        )
    merges = _required(metadata, "tokenizer.ggml.merges", origin)
    tokenizer = build_byte_level(
        tokens,
        merges,
        pre_tokenization,
        special=[text for text, kind in zip(tokens, types, strict=True) if kind == _CONTROL],
        user_defined=[text for text, kind in zip(tokens, types, strict=True) if kind == _USER_DEFINED],
    )
    plain = (_NORMAL, _UNUSED)
    token_bytes = [
        byte_level_bytes(text) if kind in plain else text.encode()
        for text, kind in zip(tokens, types, strict=True)
    ]
    return ByteLevelEncoder(tokenizer), token_bytes


def _sentencepiece_parts(
    metadata: Mapping[str, Any], tokens: Sequence[str], types: Sequence[int], origin: str
) -> tuple[Encoder, list[bytes]]:
    scores: list[float] = _required(metadata, "tokenizer.ggml.scores", origin)
    if len(scores) != len(tokens):
        raise LoadError(f"{origin}: tokenizer.ggml.scores has {len(scores)} entries for {len(tokens)} tokens")
    texts = [token.replace(SPACE_MARK, " ") for token in tokens]
    token_bytes = [text.encode() for text in texts]
    pieces: dict[str, tuple[float, int]] = {}
    atoms: dict[str, int] = {}
    byte_tokens: list[tuple[int, str]] = []
    for token_id, (text, score, kind) in enumerate(zip(texts, scores, types, strict=True)):
        if kind == _NORMAL:
            pieces[text] = (-score, token_id)
        elif kind in (_CONTROL, _USER_DEFINED):
            atoms[text] = token_id
        elif kind == _BYTE:
            byte_tokens.append((token_id, text))
    for token_id, text in byte_tokens:
        value = byte_token_value(text)
        if value is None:
            raise LoadError(f"{origin}: token {token_id} is of type byte but has not the form <0xNN>")
        token_bytes[token_id] = bytes([value])
    encoder = SentencePieceEncoder(
        pieces,
        atoms,
        byte_fallback_ids(byte_tokens),
        metadata.get("tokenizer.ggml.unknown_token_id"),
        frozenset(token_id for token_id, kind in enumerate(types) if kind == _CONTROL),
        bool(metadata.get("tokenizer.ggml.add_space_prefix", True)),
    )
    return encoder, token_bytes


def _gguf_vocabulary(
    metadata: Mapping[str, Any],
    tokens: Sequence[str],
    types: Sequence[int],
    token_bytes: Sequence[bytes],
    origin: str,
) -> Vocabulary:
    def named_id(name: str) -> int | None:
        token_id = metadata.get(f"tokenizer.ggml.{name}_token_id")
        if token_id is not None and not 0 <= token_id < len(tokens):
            raise LoadError(
                f"{origin}: tokenizer.ggml.{name}_token_id is {token_id}, outside {len(tokens)} tokens"
            )
        return token_id

    bos, eos = named_id("bos"), named_id("eos")
    special = [token_id for token_id, kind in enumerate(types) if kind in (_CONTROL, _UNKNOWN)]
    add_bos = metadata.get("tokenizer.ggml.add_bos_token")
    if add_bos is None:  # SentencePiece files of the first years leave the flag out and mean yes
        add_bos = metadata["tokenizer.ggml.model"] == "llama"
    add_eos = metadata.get("tokenizer.ggml.add_eos_token", False)
    return Vocabulary(
        token_bytes=token_bytes,
        special_ids=frozenset(special),
        bos_token_id=bos,
        eos_token_ids=end_ids(
            ((token_id, tokens[token_id]) for token_id in special), (eos, named_id("eot"), named_id("eom"))
        ),
        prefix_ids=(bos,) if add_bos and bos is not None else (),
        suffix_ids=(eos,) if add_eos and eos is not None else (),
    )


def tokenizer_from_folder(folder: Path) -> Tokenizer:
    """The tokenizer of a Hugging Face folder: `tokenizer.json`, with EOS from its configuration files.

    Raises:
        LoadError: `tokenizer.json` is missing, damaged, or decodes in a way we do not know.
    """
    path = folder / "tokenizer.json"
    if not path.exists():
        raise LoadError(f"{path} is missing")
    text = read_bounded(path, MAX_TOKENIZER_BYTES)
    described = parse_json_object(path, text)
    try:
        fast = FastTokenizer.from_str(text.decode("utf-8"))
    except Exception as error:  # the library raises bare Exception
        raise LoadError(f"{path}: can't be loaded ({error})") from None
    fast.no_truncation()
    fast.no_padding()
    try:
        added = {entry["id"]: entry for entry in described.get("added_tokens") or ()}
        special = {token_id: entry["content"] for token_id, entry in added.items() if entry.get("special")}
    except (KeyError, TypeError, AttributeError):
        raise LoadError(f"{path}: added_tokens is no list of objects with id and content") from None
    prefix, suffix = _surrounding_ids(fast)
    eos = _folder_eos_ids(folder, fast)
    return Tokenizer(
        ByteLevelEncoder(fast),
        Vocabulary(
            token_bytes=_folder_token_bytes(fast, described, added, path),
            special_ids=frozenset(special),
            bos_token_id=prefix[0] if prefix else None,
            eos_token_ids=end_ids(special.items(), eos),
            prefix_ids=prefix,
            suffix_ids=suffix,
        ),
    )


def _surrounding_ids(fast: FastTokenizer) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """What the file's own post-processor puts before and after a text."""
    bare = fast.encode("a", add_special_tokens=False).ids
    full = fast.encode("a", add_special_tokens=True).ids
    for begin in range(len(full) - len(bare) + 1):
        if full[begin : begin + len(bare)] == bare:
            return tuple(full[:begin]), tuple(full[begin + len(bare) :])
    return (), ()


def _folder_eos_ids(folder: Path, fast: FastTokenizer) -> list[int]:
    generation, config = folder / "generation_config.json", folder / "tokenizer_config.json"
    named: Any = read_json_object(generation).get("eos_token_id") if generation.is_file() else None
    if named is not None:
        return list(checked_ids(named, f"{generation}: eos_token_id"))
    token: Any = read_json_object(config).get("eos_token") if config.is_file() else None
    text = token.get("content") if isinstance(token, dict) else token
    token_id = fast.token_to_id(text) if isinstance(text, str) else None
    return [] if token_id is None else [token_id]


def _folder_token_bytes(
    fast: FastTokenizer, described: Mapping[str, Any], added: Mapping[int, Any], path: Path
) -> list[bytes]:
    kinds = set(_decoder_kinds(described.get("decoder")))
    if "ByteLevel" in kinds:
        to_bytes = byte_level_bytes
    elif kinds & {"ByteFallback", "Metaspace"}:
        to_bytes = _piece_bytes
    else:
        raise LoadError(f"{path}: decoder {sorted(kinds)} is not known; known are ByteLevel and ByteFallback")
    vocabulary: dict[str, int] = fast.get_vocab(with_added_tokens=True)
    size = max(vocabulary.values(), default=0) + 1
    if size > MAX_VOCABULARY:
        raise LoadError(f"{path}: a token has the id {size - 1}, {MAX_VOCABULARY - 1} is the limit")
    table = [b""] * size
    for text, token_id in vocabulary.items():
        table[token_id] = text.encode() if token_id in added else to_bytes(text)
    return table


def _decoder_kinds(decoder: Any) -> Iterable[str]:
    if isinstance(decoder, dict):
        yield str(decoder.get("type"))
        for inner in decoder.get("decoders", []):
            yield from _decoder_kinds(inner)


def _piece_bytes(token: str) -> bytes:
    value = byte_token_value(token)
    return token.replace(SPACE_MARK, " ").encode() if value is None else bytes([value])


class _ByteEncoder:
    def encode(self, text: str) -> list[int]:
        return list(text.encode())


def placeholder_tokenizer(config: Mapping[str, Any]) -> Tokenizer:
    """For random weights without a tokenizer: ids below 256 are bytes, the others write their own number."""
    size = max(256, checked_integer(config.get("vocab_size", 256), "config.json: vocab_size"))
    ends = checked_ids(config.get("eos_token_id"), "config.json: eos_token_id")
    table = [bytes([token_id]) if token_id < 256 else b" %d" % token_id for token_id in range(size)]
    return Tokenizer(_ByteEncoder(), Vocabulary(table, frozenset(ends) - set(range(256)), eos_token_ids=ends))
