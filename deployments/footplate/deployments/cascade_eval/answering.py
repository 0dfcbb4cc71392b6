"""Both models' answers to a labelled set, by engines in this process, one after the other."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from footplate.engine.llm import LLM, Output
from footplate.engine.types import SamplingParams, SequenceDelta
from footplate.routing.cascade import (
    Cascade,
    Policy,
    answer_score,
    decide,
)
from footplate.routing.errors import InvalidEvaluation
from footplate.routing.evaluation import Answer, Answered, LabelledItem, is_right
from footplate.routing.prompt_facts import prompt_facts


@dataclass(frozen=True, slots=True)
class ModelAnswer:
    """One model's answer to one item. `logprobs`: of its delivered tokens, as a gateway hears them."""

    id: str
    is_right: bool
    num_prompt: int
    num_output: int
    logprobs: tuple[float, ...]

    @property
    def answer(self) -> Answer:
        """What an evaluation needs of it."""
        return Answer(self.is_right, self.num_prompt, self.num_output)


@dataclass(frozen=True, slots=True)
class ModelAnswers:
    """A model's answers in the order of the items, and how long the engine took for all of them."""

    source: str
    seconds: float
    answers: tuple[ModelAnswer, ...]


@dataclass(frozen=True, slots=True)
class AskedModel:
    """A model's source. `chat_template`: a file; None: its own."""

    source: str
    chat_template: Path | None = None


def answer_all(
    model: AskedModel,
    items: Sequence[LabelledItem],
    max_tokens: int,
    options: dict[str, Any],
    models_dir: Path,
    *,
    as_chat: bool = False,
) -> ModelAnswers:
    """Greedy answers of one line each, to plain prompts or to a user's messages.

    Raises:
        EngineError: the model can't be used, or has no chat template where one is needed.
    """
    params = SamplingParams(max_tokens=max_tokens, temperature=0.0, stop=("\n",), logprobs=0)
    with LLM(model.source, chat_template=model.chat_template, models_dir=models_dir, **options) as llm:
        begin = time.perf_counter()
        if as_chat:
            outputs = llm.chat([[{"role": "user", "content": item.prompt}] for item in items], params)
        else:
            outputs = llm.generate([item.prompt for item in items], params)
        seconds = time.perf_counter() - begin
        answers = [
            ModelAnswer(
                item.id,
                is_right(output.text, item.answers),
                output.usage.prompt_tokens,
                output.usage.completion_tokens,
                _delivered(llm, output, params),
            )
            for item, output in zip(items, outputs, strict=True)
        ]
    return ModelAnswers(model.source, seconds, tuple(answers))


def _delivered(llm: LLM, output: Output, params: SamplingParams) -> tuple[float, ...]:
    """The entries of the tokens whose text goes out: of an end or a stop string none does."""
    decoder = llm.text.choice_decoder(params)
    entries = tuple(output.logprobs or ())
    delta = SequenceDelta("", 0, tuple(output.token_ids), entries, output.finish_reason)
    return tuple(entry.logprob for piece in decoder.push(delta) for entry in piece.logprobs)


def judged(
    cascade: Cascade, items: Sequence[LabelledItem], small: ModelAnswers, large: ModelAnswers
) -> list[Answered]:
    """Each item with its two answers and the policy's score of it."""
    found = []
    for item, ours, theirs in zip(items, small.answers, large.answers, strict=True):
        is_asked_first = cascade.policy is Policy.CONFIDENCE
        if is_asked_first:
            score = answer_score(ours.logprobs, cascade.after_tokens)
        else:
            score = decide(cascade, prompt_facts([item.prompt])).score or 0.0
        tried = min(cascade.after_tokens, ours.num_output) if is_asked_first else 0
        found.append(
            Answered(item.id, item.split, item.tag, ours.answer, theirs.answer, score, is_asked_first, tried)
        )
    return found


def write_answers(path: Path, answers: ModelAnswers) -> None:
    """Keep them: a first line for the model, then one for each item. No texts are in it."""
    lines = [json.dumps({"source": answers.source, "seconds": round(answers.seconds, 3)})]
    for each in answers.answers:
        shown = asdict(each) | {"logprobs": [round(value, 4) for value in each.logprobs]}
        lines.append(json.dumps(shown))
    path.write_text("\n".join(lines) + "\n", "utf-8")


def read_answers(path: Path, items: Sequence[LabelledItem]) -> ModelAnswers:
    """What `write_answers` has kept. Raises InvalidEvaluation when it is not for these items."""
    try:
        head, *lines = [json.loads(line) for line in path.read_text("utf-8").splitlines()]
        answers = tuple(
            ModelAnswer(
                line["id"],
                line["is_right"],
                line["num_prompt"],
                line["num_output"],
                tuple(line["logprobs"]),
            )
            for line in lines
        )
        source, seconds = str(head["source"]), float(head["seconds"])
    except OSError as error:
        raise InvalidEvaluation(f"{path} can't be read: {error.strerror}") from None
    except (ValueError, KeyError, TypeError):
        raise InvalidEvaluation(f"{path} holds no answers of an earlier run") from None
    if [answer.id for answer in answers] != [item.id for item in items]:
        raise InvalidEvaluation(f"{path} is of another set")
    return ModelAnswers(source, seconds, answers)
