"""The text side of one model in one object: what a gateway or an engine needs to speak with it in text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from footplate.engine.errors import InvalidRequest, LoadError
from footplate.engine.text.chat_template import ChatTemplate, Message
from footplate.engine.text.choice import ChoiceDecoder
from footplate.engine.text.detokenizer import TokenTexts
from footplate.engine.text.tokenizer import (
    Tokenizer,
    placeholder_tokenizer,
    tokenizer_from_folder,
    tokenizer_from_gguf,
)
from footplate.engine.types import SamplingParams
from footplate.engine.weights.files import read_bounded, read_json_object
from footplate.engine.weights.gguf import GgufFile
from footplate.engine.weights.source import ModelSource, resolve_source

_MAX_TEMPLATE_BYTES = 1 << 20


class TextPipeline:
    """Encode, decode and template for one model. Immutable after loading; safe in any thread."""

    def __init__(self, tokenizer: Tokenizer, chat_template: ChatTemplate | None) -> None:
        self.tokenizer = tokenizer
        self.chat_template = chat_template
        vocabulary = tokenizer.vocabulary
        self._shown = TokenTexts(vocabulary.token_bytes)
        self._hidden = self._shown.hiding(vocabulary.special_ids)
        self._longest_token = max(map(len, vocabulary.token_bytes), default=1)

    @classmethod
    def load(
        cls,
        source: str,
        chat_template_file: str | Path | None = None,
        models_dir: str | Path | None = None,
    ) -> TextPipeline:
        """Load from a source string of the configuration; reads no weights.

        Raises:
            LoadError: source, tokenizer or template can't be used; the message names it.
        """
        resolved = resolve_source(source, models_dir)
        tokenizer, template = _LOADERS[resolved.kind](resolved)
        origin = str(resolved.path)
        if chat_template_file is not None:
            origin = str(chat_template_file)
            template = _read_template(Path(chat_template_file))
        if template is None:
            return cls(tokenizer, None)
        return cls(tokenizer, ChatTemplate(template, origin, _special_texts(tokenizer, str(resolved.path))))

    @property
    def vocab_size(self) -> int:
        """Ids the tokenizer knows; the model's head can be wider."""
        return self.tokenizer.vocabulary.size

    @property
    def bos_token_id(self) -> int | None:
        return self.tokenizer.vocabulary.bos_token_id

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        """Ids that end an answer unless the caller ignores EOS."""
        return self.tokenizer.vocabulary.eos_token_ids

    @property
    def prefix_ids(self) -> tuple[int, ...]:
        """What stands in front of plain prompts: BOS, or nothing."""
        return self.tokenizer.vocabulary.prefix_ids

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Ids of a plain prompt, with BOS and EOS as the file asks. Takes about a second for a megabyte, so
        large texts belong in a thread.

        Raises:
            InvalidRequest: the text is no valid Unicode.
        """
        return self.tokenizer.encode(text, add_special_tokens)

    def least_tokens(self, text: str) -> int:
        """A lower bound of the ids in `text`, at once: refuses absurd prompts before they are tokenised."""
        return len(text) // self._longest_token

    def encode_chat(self, messages: Sequence[Message], add_generation_prompt: bool = True) -> list[int]:
        """Ids of a conversation. BOS stands in front exactly once if template or file ask for it.

        Raises:
            InvalidRequest: there is no chat template, or it refuses the messages (`param` is `messages`).
        """
        rendered = self.apply_chat_template(messages, add_generation_prompt)
        return self.encode_rendered_chat(rendered)

    def encode_rendered_chat(self, rendered: str) -> list[int]:
        """The second half of `encode_chat`, for callers that want to look at the text first."""
        return self.tokenizer.with_prefix(self.tokenizer.encode(rendered, add_special_tokens=False))

    def apply_chat_template(self, messages: Sequence[Message], add_generation_prompt: bool = True) -> str:
        """The prompt text of a conversation.

        Raises:
            InvalidRequest: there is no chat template, or it refuses the messages.
        """
        if self.chat_template is None:
            raise InvalidRequest(
                "this model has no chat template; use /v1/completions, or have an operator set one",
                param="messages",
            )
        return self.chat_template.render(messages, add_generation_prompt)

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """The text of ids; unknown ids write nothing, bytes that are no UTF-8 become U+FFFD."""
        return self.token_texts(skip_special_tokens).decode(token_ids)

    def token_text(self, token_id: int) -> str:
        """One id's text as a logprob entry shows it, control tokens included."""
        return self._shown.bytes_of(token_id).decode("utf-8", "replace")

    def token_bytes(self, token_id: int) -> bytes:
        return self._shown.bytes_of(token_id)

    def check_ids(self, token_ids: Sequence[int], param: str = "prompt") -> None:
        """Raises InvalidRequest when an id is outside the vocabulary."""
        if token_ids and not (min(token_ids) >= 0 and max(token_ids) < self.vocab_size):
            raise InvalidRequest(
                f"{param} holds a token id outside the vocabulary; ids go from 0 to {self.vocab_size - 1}",
                param,
            )

    def bad_words_ids(self, words: Sequence[str]) -> tuple[tuple[int, ...], ...]:
        """Id sequences that write a word, at the start of a text and after a space."""
        sequences: dict[tuple[int, ...], None] = {}
        for word in words:
            stripped = word.lstrip(" ")
            for written in (word, stripped, " " + stripped):
                ids = tuple(self.encode(written, add_special_tokens=False))
                if ids:
                    sequences[ids] = None
        return tuple(sequences)

    def choice_decoder(self, params: SamplingParams, keeps_end_entry: bool = False) -> ChoiceDecoder:
        """A fresh decoder for one choice of one request; see `ChoiceDecoder` for `keeps_end_entry`."""
        texts = self.token_texts(params.skip_special_tokens)
        special_ids = self.tokenizer.vocabulary.special_ids
        return ChoiceDecoder(texts, special_ids, params, keeps_end_entry)

    def token_texts(self, skip_special_tokens: bool) -> TokenTexts:
        """Each id's text, with control tokens hidden or shown. Shared: read only."""
        return self._hidden if skip_special_tokens else self._shown


def _load_gguf(source: ModelSource) -> tuple[Tokenizer, str | None]:
    metadata = GgufFile(source.path).metadata
    template: Any = metadata.get("tokenizer.chat_template")
    return tokenizer_from_gguf(metadata, str(source.path)), template


def _load_folder(source: ModelSource) -> tuple[Tokenizer, str | None]:
    return tokenizer_from_folder(source.path), _folder_template(source.path)


def _load_dummy(source: ModelSource) -> tuple[Tokenizer, str | None]:
    folder = source.path.parent
    if (folder / "tokenizer.json").is_file():
        return tokenizer_from_folder(folder), _folder_template(folder)
    return placeholder_tokenizer(read_json_object(source.path)), None


_LOADERS = {"gguf": _load_gguf, "hf": _load_folder, "dummy": _load_dummy}


def _folder_template(folder: Path) -> str | None:
    """`chat_template.jinja`, or the (default) one inside `tokenizer_config.json`."""
    path = folder / "chat_template.jinja"
    if path.is_file():
        return _read_template(path)
    config = folder / "tokenizer_config.json"
    template: Any = read_json_object(config).get("chat_template") if config.is_file() else None
    if isinstance(template, list):
        by_name = {
            entry.get("name"): entry.get("template") for entry in template if isinstance(entry, Mapping)
        }
        template = by_name.get("default")
    return template if isinstance(template, str) else None


def check_template_file(path: Path) -> None:
    """Raises LoadError where a file can't be a model's chat template; nothing is rendered."""
    ChatTemplate(_read_template(path), str(path), {})


def _read_template(path: Path) -> str:
    try:
        return read_bounded(path, _MAX_TEMPLATE_BYTES).decode("utf-8")
    except UnicodeDecodeError:
        raise LoadError(f"{path}: the chat template is not UTF-8") from None


def _special_texts(tokenizer: Tokenizer, origin: str) -> dict[str, str]:
    vocabulary = tokenizer.vocabulary

    def text(token_id: int | None) -> str:
        if token_id is not None and not 0 <= token_id < vocabulary.size:
            raise LoadError(
                f"{origin}: the first or last token has the id {token_id}; "
                f"ids go from 0 to {vocabulary.size - 1}"
            )
        return "" if token_id is None else vocabulary.token_bytes[token_id].decode("utf-8", "replace")

    return {
        "bos_token": text(vocabulary.bos_token_id),
        "eos_token": text(next(iter(vocabulary.eos_token_ids), None)),
    }
