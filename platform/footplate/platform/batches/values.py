"""Files, batches and their lines, as values. Nothing here holds content of a line."""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from enum import StrEnum

from footplate.billing.usage import BatchId, EventId

MAX_LINES = 50_000
MAX_FILE_BYTES = 200_000_000
# As long as the body of a request may be.
MAX_LINE_BYTES = 8 << 20
MAX_SHOWN_FAULTS = 64
WINDOW = "24h"
WINDOW_S = 24 * 3600
BATCH_FILE_S = 30 * 24 * 3600
BATCH_PURPOSE, OUTPUT_PURPOSE = "batch", "batch_output"


@dataclass(frozen=True, slots=True)
class FileLimits:
    """What one tenant may keep."""

    max_files: int = 1_000
    max_stored_bytes: int = 10 << 30
    max_file_bytes: int = MAX_FILE_BYTES


@dataclass(frozen=True, slots=True)
class StoredFile:
    """One file of a tenant; its bytes stand under `key` in the file store."""

    id: str
    tenant_id: str
    purpose: str
    filename: str
    num_bytes: int
    created_at: datetime
    expires_at: datetime | None = None

    @property
    def key(self) -> str:
        """Where its bytes are."""
        return file_key(self.tenant_id, self.id)


class BatchStatus(StrEnum):
    """See `states` for what follows what."""

    VALIDATING = "validating"
    FAILED = "failed"
    IN_PROGRESS = "in_progress"
    FINALIZING = "finalizing"
    COMPLETED = "completed"
    EXPIRED = "expired"
    CANCELLING = "cancelling"
    CANCELLED = "cancelled"


class LineState(StrEnum):
    """Of one line. `WAITING` and `RUNNING` are unfinished."""

    WAITING = "waiting"
    RUNNING = "running"
    SUCCEEDED = "succeeded"
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class LineFault:
    """Why a file can't be a batch. The sentence quotes nothing of it."""

    code: str
    message: str
    line: int | None = None
    param: str | None = None

    def fields(self) -> dict[str, object]:
        """As the API shows it."""
        return {"code": self.code, "line": self.line, "message": self.message, "param": self.param}


@dataclass(frozen=True, slots=True)
class LineSpan:
    """Where a line stands in the input file: its number from 1, first byte and length."""

    number: int
    offset: int
    num_bytes: int


@dataclass(frozen=True, slots=True)
class LineTokens:
    """What the answer of a line used; cached ones are part of the input."""

    input: int = 0
    cached: int = 0
    output: int = 0

    def __add__(self, other: LineTokens) -> LineTokens:
        return LineTokens(self.input + other.input, self.cached + other.cached, self.output + other.output)


@dataclass(frozen=True, slots=True)
class LineCounts:
    """How many lines there are and how many have ended: with an answer, or with an error for one."""

    total: int = 0
    completed: int = 0
    failed: int = 0


@dataclass(frozen=True, slots=True)
class NewBatch:
    """A batch that somebody asks for."""

    tenant_id: str
    key_id: str
    endpoint: str
    input_file_id: str
    metadata: Mapping[str, str] = field(default_factory=dict)
    output_expires_after_s: int | None = None


@dataclass(frozen=True, slots=True)
class Batch:
    """One batch, as it stands."""

    id: str
    tenant_id: str
    key_id: str
    endpoint: str
    input_file_id: str
    metadata: Mapping[str, str]
    output_expires_after_s: int | None
    status: BatchStatus
    created_at: datetime
    expires_at: datetime
    # When it came to each status that it has been in.
    stamps: Mapping[BatchStatus, datetime] = field(default_factory=dict)
    # What a finalizing one ends as.
    ending: BatchStatus | None = None
    model: str | None = None
    faults: tuple[LineFault, ...] = ()
    counts: LineCounts = LineCounts()
    tokens: LineTokens = LineTokens()
    output_file_id: str | None = None
    error_file_id: str | None = None

    @property
    def input_key(self) -> str:
        """Where its lines are."""
        return file_key(self.tenant_id, self.input_file_id)

    @property
    def folder(self) -> str:
        """Where the answers of its lines are, until it is finalized."""
        return batch_folder(self.tenant_id, self.id)


@dataclass(frozen=True, slots=True)
class ClaimedLine:
    """A line that one worker may run now: nobody else does while its lease lasts."""

    batch_id: str
    tenant_id: str
    key_id: str
    endpoint: str
    input_file_id: str
    span: LineSpan
    # Grows with every claim: what an earlier holder says of the line afterwards counts for nothing.
    attempt: int
    num_failures: int = 0
    # Attempts whose workers were lost: one of them may have left an answer.
    lost_attempts: tuple[int, ...] = ()

    @property
    def key(self) -> tuple[str, int]:
        """What it is among all lines."""
        return self.batch_id, self.span.number

    @property
    def event_id(self) -> EventId:
        """Of its usage event, whichever attempt it ends with."""
        return line_event_id(self.batch_id, self.span.number)

    @property
    def request_id(self) -> str:
        """Of this attempt, as reservations, engines and logs know it."""
        return f"{self.event_id}.{self.attempt}"

    @property
    def input_key(self) -> str:
        """Where its line is."""
        return file_key(self.tenant_id, self.input_file_id)

    def result_key(self, attempt: int) -> str:
        """Where the answer of an attempt is kept."""
        return result_key(self.tenant_id, self.batch_id, self.span.number, attempt)


@dataclass(frozen=True, slots=True)
class LineEnd:
    """How a line ended: with the answer that an attempt has kept."""

    state: LineState
    attempt: int
    status: int
    tokens: LineTokens = LineTokens()


@dataclass(frozen=True, slots=True)
class LineRow:
    """A line of a batch that is being finalized."""

    span: LineSpan
    state: LineState
    # Of the answer that counts; None while there is none.
    result_attempt: int | None = None
    lost_attempts: tuple[int, ...] = ()


def new_file_id() -> str:
    """A random id."""
    return f"file-{secrets.token_hex(12)}"


def new_batch_id() -> str:
    """A random id."""
    return f"batch_{secrets.token_hex(12)}"


def result_file_ids(batch_id: str) -> tuple[str, str]:
    """The ids of a batch's output and error file: the same however often it is finalized."""
    name = batch_id.removeprefix("batch_")
    return f"file-{name}o", f"file-{name}e"


def line_event_id(batch_id: str, number: int) -> EventId:
    """The event of a line; it stands in the output file as the line's id."""
    return EventId(f"batch_req_{batch_id.removeprefix('batch_')}_{number}")


def event_of_request(request_id: str) -> tuple[str, int]:
    """The event that a request id belongs to, and which attempt at it: 0 for what is no batch's line."""
    if request_id.startswith("batch_req_"):
        event_id, dot, attempt = request_id.rpartition(".")
        if dot and attempt.isdecimal():
            return event_id, int(attempt)
    return request_id, 0


def file_key(tenant_id: str, file_id: str) -> str:
    """Where a file's bytes are."""
    return f"{tenant_id}/files/{file_id}"


def batch_folder(tenant_id: str, batch_id: BatchId | str) -> str:
    """Where the answers of a batch's lines are."""
    return f"{tenant_id}/batches/{batch_id}"


def result_key(tenant_id: str, batch_id: str, number: int, attempt: int) -> str:
    """Where the answer of an attempt at a line is kept."""
    return f"{batch_folder(tenant_id, batch_id)}/{number:05d}.{attempt}"
