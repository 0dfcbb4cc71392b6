"""Byte-level BPE: the pre-tokenisers by the name that GGUF files give them, and an encoder over them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers
from tokenizers.pre_tokenizers import PreTokenizer

_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_WORDS = r"|[^\r\n\p{L}\p{N}]?\p{L}+"
_REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"


@dataclass(frozen=True, slots=True)
class PreTokenization:
    """How text is cut before merging. `whole_words`: a word that is a token needs no merges to be one."""

    build: Callable[[], PreTokenizer]
    unicode_nfc: bool = False
    whole_words: bool = False


def _gpt2() -> PreTokenizer:
    return pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)


def _single_digits() -> PreTokenizer:
    return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), _gpt2()])


def _split_by(pattern: str) -> Callable[[], PreTokenizer]:
    def build() -> PreTokenizer:
        return pre_tokenizers.Sequence(
            [
                pre_tokenizers.Split(Regex(pattern), behavior="isolated"),
                pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
            ]
        )

    return build


_LLAMA3 = PreTokenization(_split_by(_CONTRACTIONS + _WORDS + r"|\p{N}{1,3}" + _REST), whole_words=True)
_QWEN2 = PreTokenization(_split_by(_CONTRACTIONS + _WORDS + r"|\p{N}" + _REST), unicode_nfc=True)

# Names of `tokenizer.ggml.pre`. A name is added here only with a test that compares its ids with a reference.
PRE_TOKENIZATIONS: Mapping[str, PreTokenization] = MappingProxyType(
    {
        "default": PreTokenization(_gpt2),
        "gpt-2": PreTokenization(_gpt2),
        "smollm": PreTokenization(_single_digits),
        "starcoder": PreTokenization(_single_digits),
        "llama-bpe": _LLAMA3,
        "llama3": _LLAMA3,
        "llama-v3": _LLAMA3,
        "qwen2": _QWEN2,
    }
)


class ByteLevelEncoder:
    """Text to ids with a `tokenizers.Tokenizer`, without BOS and EOS."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer

    def encode(self, text: str) -> list[int]:
        """Ids of `text`. Safe in any thread."""
        # The batch call, unlike the single one, releases the interpreter lock while it works.
        ids: list[int] = self._tokenizer.encode_batch_fast([text], add_special_tokens=False)[0].ids
        return ids


def build_byte_level(
    tokens: Sequence[str],
    merges: Sequence[str],
    pre_tokenization: PreTokenization,
    special: Sequence[str],
    user_defined: Sequence[str],
) -> Tokenizer:
    """A tokenizer out of a vocabulary in id order and merges in rank order, each `left right`."""
    pairs = [(left, right) for left, _, right in (merge.partition(" ") for merge in merges)]
    vocabulary = {token: token_id for token_id, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(vocabulary, pairs, ignore_merges=pre_tokenization.whole_words))
    if pre_tokenization.unicode_nfc:
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenization.build()
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in special])
    tokenizer.add_tokens([AddedToken(text, special=False, normalized=False) for text in user_defined])
    return tokenizer
