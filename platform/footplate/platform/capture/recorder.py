"""Keeps what a request said and was told, off its path: a sink hears it, a thread redacts and writes it."""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Protocol

from prometheus_client.core import CounterMetricFamily
from prometheus_client.metrics_core import Metric

from footplate.billing.usage import EventState
from footplate.engine.text.choice import TextPiece
from footplate.platform.capture.policy import CapturePolicy, Ending, Why, may_capture, why_capture
from footplate.platform.capture.redaction import MARGIN, MAX_CHARACTERS, redact
from footplate.platform.capture.store import CaptureRecord, CaptureWriter
from footplate.platform.generation import Choice, PromptRun, RequestRun, Sink
from footplate.platform.metering import RequestFacts
from footplate.platform.telemetry.inference import InferenceRecord

_LOGGER = logging.getLogger(__name__)
MAX_WAITING = 128
# Prompt tokens and characters of answers that wait: about 100 MiB at most.
MAX_WAITING_UNITS = 2_000_000
MAX_TEXTS = 16
DELETE_ROWS = 500
_COUNTERS = (
    ("written", "Requests whose content was kept"),
    ("dropped", "Requests whose content was to be kept, and found no room on its way"),
    ("failed", "Requests whose content could not be redacted or written"),
    ("expired", "Kept contents whose time was over, deleted"),
)


class Decodes(Protocol):
    """Of a text pipeline: what makes text of a prompt's ids. Any thread may call it."""

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str: ...


@dataclass(frozen=True, slots=True)
class _Waiting:
    """One request that is to be kept, not yet redacted. `prompts`: a text, or ids for the decoder."""

    facts: RequestFacts
    model: str
    why: Why
    error: str | None
    first_token_s: float | None
    at: datetime
    prompts: Sequence[str | Sequence[int]]
    answers: Sequence[str]
    num_prompts: int
    num_answers: int
    decoder: Decodes | None

    @property
    def units(self) -> int:
        return sum(map(len, self.prompts)) + sum(map(len, self.answers))


def _utc_now() -> datetime:
    return datetime.now(UTC)


class CaptureRecorder:
    """`begin` and `take` belong to the event loop and never wait or fail; one thread does the rest.

    The thread also deletes what has expired, whether anything new is kept or not.
    """

    def __init__(
        self,
        policy: CapturePolicy,
        store: CaptureWriter,
        *,
        keep_for: timedelta,
        max_waiting: int = MAX_WAITING,
        sweep_s: float = 300.0,
        now: Callable[[], datetime] = _utc_now,
    ) -> None:
        self.policy = policy
        self._store = store
        self._keep_for = keep_for
        self._max_waiting = max_waiting
        self._sweep_s = sweep_s
        self._now = now
        self._waiting: deque[_Waiting] = deque()
        self._waiting_units = 0
        self._is_closing = False
        self._told = threading.Condition()
        self._counts: Counter[str] = Counter()
        self._thread = threading.Thread(target=self._run, name="capture", daemon=True)

    def start(self) -> None:
        """Let the thread begin."""
        self._thread.start()

    def close(self, timeout_s: float = 5.0) -> None:
        """Write what waits, as far as there is time. Blocks."""
        with self._told:
            self._is_closing = True
            self._told.notify()
        if self._thread.ident is not None:
            self._thread.join(timeout_s)

    def begin(self, facts: RequestFacts, decoders: Mapping[str, Decodes]) -> Hearing | None:
        """What listens to a request of a tenant that has opted in; None for all others."""
        if not may_capture(self.policy, facts.principal.captures_content):
            return None
        return Hearing(self, facts, decoders)

    def take(self, waiting: _Waiting) -> None:
        """Let one be written, or drop it where too many wait."""
        with self._told:
            is_full = len(self._waiting) >= self._max_waiting
            if self._is_closing or is_full or self._waiting_units + waiting.units > MAX_WAITING_UNITS:
                self._counts["dropped"] += 1
                return
            self._waiting.append(waiting)
            self._waiting_units += waiting.units
            self._told.notify()

    def now(self) -> datetime:
        """Of the clock it was given."""
        return self._now()

    def families(self) -> Iterator[Metric]:
        """As Prometheus wants them."""
        for name, text in _COUNTERS:
            yield CounterMetricFamily(f"footplate_captures_{name}", text, value=self._counts[name])

    def _run(self) -> None:
        swept_at: float | None = None
        while True:
            if swept_at is None or time.monotonic() - swept_at >= self._sweep_s:
                self._sweep()
                swept_at = time.monotonic()
            with self._told:
                if not self._waiting:
                    if self._is_closing:
                        return
                    self._told.wait(max(0.0, swept_at + self._sweep_s - time.monotonic()))
                    continue
                waiting = self._waiting.popleft()
                self._waiting_units -= waiting.units
            self._write(waiting)

    def _write(self, waiting: _Waiting) -> None:
        try:
            self._store.add([_record(waiting, self._keep_for)])
            self._counts["written"] += 1
        except Exception as error:
            # Not tried again, and never written as it was: a bug in a pattern must not let anything through.
            self._counts["failed"] += 1
            _LOGGER.warning("a captured request was not kept", extra={"error_type": type(error).__name__})

    def _sweep(self) -> None:
        try:
            num_deleted = DELETE_ROWS
            while num_deleted == DELETE_ROWS and not self._is_closing:
                num_deleted = self._store.delete_expired(DELETE_ROWS)
                self._counts["expired"] += num_deleted
        except Exception as error:
            _LOGGER.warning("expired captures were not deleted", extra={"error_type": type(error).__name__})


class Hearing:
    """Listens to one request's answer, and hands it over at its end if it is to be kept."""

    def __init__(
        self, recorder: CaptureRecorder, facts: RequestFacts, decoders: Mapping[str, Decodes]
    ) -> None:
        self._recorder = recorder
        self._facts = facts
        self._decoders = decoders
        # By choice, for a route's two models number theirs alike.
        self._texts: dict[Choice, list[str]] = {}
        self._lengths: Counter[Choice] = Counter()

    def beside(self, sink: Sink) -> Sink:
        """A sink that gives everything on, and is listened to."""
        return _HeardSink(sink, self._hear)

    def ended(self, run: RequestRun, record: InferenceRecord, state: EventState | None) -> None:
        """It is over, as `InferenceRecord.ended` is told too."""
        usage, first_s = run.usage(), run.first_token_s
        num_after = usage.completion_tokens - 1
        took_s = record.clock() - record.begun_at
        ending = Ending(
            self._facts.request_id,
            state in (None, EventState.FAILED),
            run.has_begun,
            first_s,
            (took_s - first_s) / num_after if first_s is not None and num_after > 0 else None,
        )
        why = why_capture(self._recorder.policy, self._facts.principal.captures_content, ending)
        if why is None:
            return
        choices = [choice for prompt in run.prompts for choice in prompt.choices]
        self._recorder.take(
            _Waiting(
                self._facts,
                run.served_model,
                why,
                record.error or (state.value if state is not None else EventState.FAILED.value)
                if ending.has_failed
                else None,
                first_s,
                self._recorder.now(),
                [_prompt(prompt) for prompt in run.prompts[:MAX_TEXTS]],
                ["".join(self._texts.get(choice, ())) for choice in choices[:MAX_TEXTS]],
                len(run.prompts),
                len(choices),
                self._decoders.get(run.served_model),
            )
        )

    def _hear(self, choice: Choice, text: str) -> None:
        # Some more than will be kept, so that what lies across the end is seen whole.
        if self._lengths[choice] <= MAX_CHARACTERS + MARGIN and choice.index < MAX_TEXTS:
            self._lengths[choice] += len(text)
            self._texts.setdefault(choice, []).append(text)


class _HeardSink:
    def __init__(self, sink: Sink, hear: Callable[[Choice, str], None]) -> None:
        self._sink = sink
        self._hear = hear

    def begin(self, prompt: PromptRun) -> None:
        self._sink.begin(prompt)

    def piece(self, choice: Choice, piece: TextPiece) -> None:
        self._hear(choice, piece.text)
        self._sink.piece(choice, piece)

    def end(self, choice: Choice) -> None:
        self._sink.end(choice)


def _prompt(prompt: PromptRun) -> str | Sequence[int]:
    return prompt.request.prompt_token_ids if prompt.text is None else prompt.text


def _record(waiting: _Waiting, keep_for: timedelta) -> CaptureRecord:
    found: Counter[str] = Counter()
    is_cut = max(waiting.num_prompts, waiting.num_answers) > MAX_TEXTS

    def clean(texts: Sequence[str]) -> list[str]:
        nonlocal is_cut
        each = [redact(text, MAX_CHARACTERS // max(1, len(texts))) for text in texts]
        for one in each:
            found.update(one.found)
            is_cut = is_cut or one.is_cut
        # What PostgreSQL's texts can't hold.
        return [one.text.replace("\0", "\ufffd") for one in each]

    facts = waiting.facts
    prompts, answers = (
        clean([_text(waiting.decoder, prompt) for prompt in waiting.prompts]),
        clean(waiting.answers),
    )
    return CaptureRecord(
        facts.request_id,
        facts.principal.tenant_id,
        facts.principal.key_id,
        waiting.model,
        facts.endpoint,
        waiting.why.value,
        waiting.at,
        waiting.at + keep_for,
        waiting.error,
        waiting.first_token_s,
        prompts,
        answers,
        dict(found),
        is_cut,
    )


def _text(decoder: Decodes | None, prompt: str | Sequence[int]) -> str:
    if isinstance(prompt, str):
        return prompt
    # Decoded with its control tokens, so that it reads as the model read it.
    return "" if decoder is None else decoder.decode(prompt, skip_special_tokens=False)
