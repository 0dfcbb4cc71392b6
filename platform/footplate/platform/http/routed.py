"""From a request's model name to the models that may answer it, and their prompts, ready to run."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from footplate.engine.errors import EngineError, InvalidRequest
from footplate.engine.text.pipeline import TextPipeline
from footplate.engine.types import ModelCard, SamplingParams
from footplate.platform.admission import Terms
from footplate.platform.generation import PromptRun
from footplate.platform.http.schemas import (
    MAX_CHOICES,
    ChatCompletionBody,
    ChatMessage,
    CompletionBody,
    GenerationBody,
)
from footplate.routing.cascade import Cascade, CascadeReason, Decision, Policy, Target
from footplate.routing.prompt_facts import PromptFacts, prompt_facts, tags_in


@dataclass(frozen=True, slots=True)
class Leg:
    """One model that may answer a request.

    `is_heard`: the log-probabilities of its tokens decide whether it does. `first_number`: what its prompts
    are numbered from, so that the engines' journals tell the legs of one request apart.
    """

    card: ModelCard
    pipeline: TextPipeline
    terms: Terms
    is_heard: bool = False
    is_optional: bool = False
    first_number: int = 0

    def params(self, params: SamplingParams) -> SamplingParams:
        """What the engine is asked for: of a leg that is heard also what the client did not ask to see."""
        return replace(params, logprobs=0) if self.is_heard and params.logprobs is None else params


@dataclass(frozen=True, slots=True)
class Plan:
    """What a request's model name leads to: a model, or a route's one or two."""

    requested_model: str
    legs: tuple[Leg, ...]
    cascade: Cascade | None = None
    decision: Decision | None = None


@dataclass(frozen=True, slots=True)
class Prepared:
    """A leg's prompts, and what makes the client's answer of them."""

    prompts: Sequence[PromptRun]
    sink: Any


@dataclass(frozen=True, slots=True)
class PreparedLeg:
    """Both together."""

    leg: Leg
    prompts: Sequence[PromptRun]
    sink: Any


async def prepared(
    plan: Plan, prepare: Callable[[Leg], Awaitable[Prepared]]
) -> tuple[Plan, list[PreparedLeg]]:
    """Each leg's prompts. A leg that may be left out is, where the request does not fit its model.

    Raises:
        InvalidRequest, RequestTooLarge: the request does not fit a model that has to take it, or fits none.
    """
    ready: list[PreparedLeg] = []
    for leg in plan.legs:
        try:
            made = await prepare(leg)
        except EngineError:
            # Each may be left out, but not all of them.
            if not leg.is_optional or (leg is plan.legs[-1] and not ready):
                raise
            continue
        ready.append(PreparedLeg(leg, made.prompts, made.sink))
    if plan.legs[0].is_optional and ready[0].leg is not plan.legs[0]:
        plan = replace(plan, decision=Decision(Target.LARGE, CascadeReason.SMALL_REFUSED))
    return plan, ready


def leg_numbers(num_legs: int) -> tuple[int, ...]:
    """What the prompts of each leg are numbered from."""
    return tuple(number * MAX_CHOICES for number in range(num_legs))


def check_routable(plan: Plan, body: GenerationBody) -> None:
    """Raises InvalidRequest for token ids in a request whose model, and so its vocabulary, is still open."""
    if plan.cascade is None:
        return
    given = [name for name in ("logit_bias", "stop_token_ids", "allowed_token_ids") if getattr(body, name)]
    if isinstance(body, CompletionBody) and not prompt_texts(body.prompt):
        given.append("prompt")
    if given:
        raise InvalidRequest(
            f"{given[0]} holds token ids, which mean something else to each model of a route. Name one of "
            "its models, or leave them out.",
            given[0],
        )


def chat_facts(body: ChatCompletionBody, cascade: Cascade) -> PromptFacts:
    """What a route may know of a conversation; nothing where the answer itself is what it judges."""
    if cascade.policy is Policy.CONFIDENCE:
        return PromptFacts(0)
    has_tools = bool(body.tools or body.functions)
    return prompt_facts(message_texts(body.messages), has_tools=has_tools, tags=_tags(body))


def completion_facts(body: CompletionBody, cascade: Cascade) -> PromptFacts:
    """The same of plain prompts."""
    wants_answer = body.max_tokens != 0
    if cascade.policy is Policy.CONFIDENCE:
        return PromptFacts(0, wants_answer=wants_answer)
    return prompt_facts(prompt_texts(body.prompt), wants_answer=wants_answer, tags=_tags(body))


def message_texts(messages: Sequence[ChatMessage]) -> list[str]:
    """The text of each message."""
    return [
        message.content
        if isinstance(message.content, str)
        else "\n".join(part.text or "" for part in message.content or ())
        for message in messages
    ]


def prompt_texts(prompt: str | Sequence[Any]) -> list[str]:
    """Those of plain prompts that are texts, not ids."""
    given = [prompt] if isinstance(prompt, str) else prompt
    return [text for text in given if isinstance(text, str)]


def _tags(body: GenerationBody) -> frozenset[str]:
    """Of the client's `metadata.tags`."""
    return tags_in((body.metadata or {}).get("tags", ""))
