"""What chat and text completions share in their frames: heads, usage, logprob entries."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from footplate.engine.text.choice import ChoiceDecoder, TextPiece
from footplate.engine.text.pipeline import TextPipeline
from footplate.engine.types import FinishReason, ModelCard, TokenLogprob, TokenUsage
from footplate.platform.generation import Choice, PromptRun

# Of token ids and candidates in one answer: from here on, some ten milliseconds of work.
LARGE_ANSWER_ENTRIES = 5_000
LOWEST_LOGPROB = -9999.0  # stands for minus infinity, which JSON can't write
encode = msgspec.json.Encoder().encode


@dataclass(frozen=True, slots=True)
class Head:
    """What every frame of one response repeats."""

    id: str
    object: str
    created: int
    model: str
    system_fingerprint: str
    service_tier: str | None = None

    @staticmethod
    def new(
        prefix: str,
        object_name: str,
        card: ModelCard,
        service_tier: str | None,
        now: Callable[[], float] = time.time,
    ) -> Head:
        tier = "default" if service_tier is not None else None
        return Head(
            prefix + secrets.token_hex(12), object_name, int(now()), card.name, card.fingerprint, tier
        )

    def fields(self, object_name: str | None = None) -> dict[str, Any]:
        fields: dict[str, Any] = {
            "id": self.id,
            "object": object_name or self.object,
            "created": self.created,
            "model": self.model,
            "system_fingerprint": self.system_fingerprint,
        }
        if self.service_tier is not None:
            fields["service_tier"] = self.service_tier
        return fields

    def event_start(self) -> bytes:
        """An event up to its next field; a comma and that field follow."""
        return b"data: " + encode(self.fields())[:-1]


def usage_fields(usage: TokenUsage) -> dict[str, Any]:
    """OpenAI's usage object, details always included."""
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.total_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens, "audio_tokens": 0},
        "completion_tokens_details": {
            "reasoning_tokens": 0,
            "audio_tokens": 0,
            "accepted_prediction_tokens": usage.accepted_draft_tokens,
            "rejected_prediction_tokens": usage.rejected_draft_tokens,
        },
    }


def finish_name(reason: FinishReason | None) -> str | None:
    """A finish reason as clients know it; failures never get this far."""
    return None if reason is None else str(reason.value)


class EventEnds:
    """What ends each event before the one that carries the whole usage.

    `fixed` is the same for all events, or None where each tells what its choice has used so far
    (`continuous_usage_stats`, as vLLM has it).
    """

    def __init__(self, *, includes_usage: bool, is_continuous: bool) -> None:
        null = b'],"usage":null}\n\n' if includes_usage else b"]}\n\n"
        self.fixed: bytes | None = None if is_continuous else null
        self._prompts: dict[int, PromptRun] = {}

    def begin(self, prompt: PromptRun) -> None:
        """To be told before any of its choices is asked for."""
        if self.fixed is None:
            self._prompts.update((choice.index, prompt) for choice in prompt.choices)

    def of(self, choice: Choice) -> bytes:
        if self.fixed is not None:
            return self.fixed
        prompt = self._prompts[choice.index]
        num_prompt = len(prompt.request.prompt_token_ids)
        usage = TokenUsage(num_prompt, choice.decoder.num_tokens, prompt.cached_tokens)
        return b'],"usage":' + encode(usage_fields(usage)) + b"}\n\n"


def usage_event(start: bytes, usage: TokenUsage) -> bytes:
    """The last event before `[DONE]`; `start` is what each event of the stream begins with."""
    return start + b',"choices":[],"usage":' + encode(usage_fields(usage)) + b"}\n\n"


def finish_part(decoder: ChoiceDecoder) -> bytes:
    """What ends the last chunk of a choice."""
    finish = encode(finish_name(decoder.finish_reason))
    return b',"finish_reason":%b,"stop_reason":%b}' % (finish, encode(decoder.stop_reason))


def details_part(logprobs: bytes, piece: TextPiece, *, shows_ids: bool) -> bytes:
    """What a chunk tells of its tokens, from encoded logprobs on."""
    ids = b',"token_ids":' + encode(piece.token_ids) if shows_ids else b""
    return b',"logprobs":' + logprobs + ids


def finite(logprob: float) -> float:
    return logprob if logprob > LOWEST_LOGPROB else LOWEST_LOGPROB


def chat_logprobs(pipeline: TextPipeline, entries: Sequence[TokenLogprob]) -> list[dict[str, Any]]:
    """Entries as chat completions show them."""
    return [
        {
            **_token_fields(pipeline, entry.token_id, entry.logprob),
            "top_logprobs": [_token_fields(pipeline, token_id, logprob) for token_id, logprob in entry.top],
        }
        for entry in entries
    ]


def _token_fields(pipeline: TextPipeline, token_id: int, logprob: float) -> dict[str, Any]:
    return {
        "token": pipeline.token_text(token_id),
        "bytes": list(pipeline.token_bytes(token_id)),
        "logprob": finite(logprob),
    }


def prompt_logprob_fields(
    pipeline: TextPipeline, entries: Sequence[TokenLogprob | None] | None
) -> list[dict[str, Any] | None]:
    """`prompt_logprobs` as peers show them: for each position the candidates by id, null for the first."""
    shown: list[dict[str, Any] | None] = []
    for entry in entries or ():
        if entry is None:
            shown.append(None)
            continue
        candidates = {token_id: (logprob, rank) for rank, (token_id, logprob) in enumerate(entry.top, 1)}
        candidates[entry.token_id] = (entry.logprob, entry.rank)
        shown.append(
            {
                str(token_id): {
                    "logprob": finite(logprob),
                    "rank": rank,
                    "decoded_token": pipeline.token_text(token_id),
                }
                for token_id, (logprob, rank) in candidates.items()
            }
        )
    return shown
