"""What the engine's door refuses: every field of a request out of its range, named."""

from __future__ import annotations

from array import array
from collections.abc import Iterable

from footplate.engine.errors import InvalidRequest, RequestTooLarge
from footplate.engine.types import BATCH_PRIORITY, EngineRequest, SamplingParams

MAX_LOGPROBS = 20
MAX_CHOICES = 128
MAX_SEED = 2**64
MIN_WEIGHT = 1e-6
SEED_STEP = 0xBF58476D1CE4E5B9


def choice_seed(seed: int, index: int) -> int:
    """The seed of choice `index`: the request's own for the first, spread over 64 bits for the others."""
    return (seed + index * SEED_STEP) % MAX_SEED


def max_output_tokens(request: EngineRequest, max_model_len: int, kv_tokens: int) -> int:
    """How many tokens each choice may generate: what was asked for, else what there is room for.

    Raises:
        RequestTooLarge: prompt and output can never fit the context or the pool of `kv_tokens`.
    """
    num_prompt, wanted = len(request.prompt_token_ids), request.params.max_tokens
    # the last output token needs no place in the pool: nothing is computed from it
    limit = min(max_model_len, kv_tokens + 1)
    room = limit - num_prompt
    if num_prompt <= min(max_model_len, kv_tokens) and room >= (1 if wanted is None else wanted):
        return room if wanted is None else wanted
    asked = "its output" if wanted is None else f"{wanted} output tokens"
    raise RequestTooLarge(
        f"{num_prompt} prompt tokens and {asked} are more than this model holds ({limit} tokens); "
        "shorten the prompt or lower max_tokens",
        "max_tokens" if num_prompt < limit else "prompt",
    )


def validate_request(request: EngineRequest, vocab_size: int) -> None:
    """
    Raises:
        InvalidRequest: a field is missing or out of its range.
    """
    if not request.prompt_token_ids:
        raise InvalidRequest("the prompt is empty; it needs at least one token", "prompt")
    _check_ids("prompt", request.prompt_token_ids, vocab_size)
    if request.adapter_id is not None:
        raise InvalidRequest("no adapter is loaded in this engine", "adapter_id")
    if request.kv_transfer is not None:
        raise InvalidRequest("this engine does not transfer KV blocks", "kv_transfer")
    _check_range("weight", request.weight, MIN_WEIGHT, 1 / MIN_WEIGHT)
    _check_int("priority", request.priority, -(2**31), BATCH_PRIORITY)
    validate_params(request.params, vocab_size)


def validate_params(params: SamplingParams, vocab_size: int) -> None:
    """
    Raises:
        InvalidRequest: a sampling parameter is out of its range.
    """
    _check_range("temperature", params.temperature, 0, 1e4)
    _check_range("top_p", params.top_p, 0, 1)
    _check_range("min_p", params.min_p, 0, 1)
    _check_range("presence_penalty", params.presence_penalty, -2, 2)
    _check_range("frequency_penalty", params.frequency_penalty, -2, 2)
    _check_range("repetition_penalty", params.repetition_penalty, 1e-4, 1e4)
    _check_int("top_k", params.top_k, -1, 2**31)
    _check_int("n", params.n, 1, MAX_CHOICES)
    _check_int("min_tokens", params.min_tokens, 0, 2**31)
    if params.max_tokens is not None:
        _check_int("max_tokens", params.max_tokens, 0, 2**31)
        if params.min_tokens > params.max_tokens:
            raise InvalidRequest(
                f"min_tokens {params.min_tokens} is over max_tokens {params.max_tokens}", "min_tokens"
            )
    if params.seed is not None:
        _check_int("seed", params.seed, -(2**63), MAX_SEED - 1)
    for name in ("logprobs", "prompt_logprobs"):
        if getattr(params, name) is not None:
            _check_int(name, getattr(params, name), 0, MAX_LOGPROBS)
    _check_ids("stop_token_ids", params.stop_token_ids, vocab_size)
    _check_ids("allowed_token_ids", params.allowed_token_ids, vocab_size)
    _check_ids("logit_bias", params.logit_bias, vocab_size)
    for bias in params.logit_bias.values():
        _check_range("logit_bias", bias, -100, 100)
    for word in params.bad_words_ids:
        if not word:
            raise InvalidRequest("a bad word is empty", "bad_words")
        _check_ids("bad_words", word, vocab_size)


def _check_range(name: str, value: float, low: float, high: float) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not low <= value <= high:
        raise InvalidRequest(f"{name} must be a number from {low:g} to {high:g}", name)


def _check_int(name: str, value: int, low: int, high: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise InvalidRequest(f"{name} must be a whole number from {low} to {high}", name)


def _check_ids(name: str, ids: Iterable[int], vocab_size: int) -> None:
    try:
        numbers = array("q", ids)
    except (TypeError, OverflowError):
        raise InvalidRequest(f"{name} must hold token ids, whole numbers", name) from None
    if numbers and not (min(numbers) >= 0 and max(numbers) < vocab_size):
        raise InvalidRequest(f"{name} holds a token id outside 0..{vocab_size - 1}", name)
