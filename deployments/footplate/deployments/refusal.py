"""An engine's refusal as a value, so that it crosses Serve without a traceback or a log of the request."""

from __future__ import annotations

from dataclasses import dataclass

from footplate.engine.errors import EngineDead, EngineError, EngineOverloaded, InvalidRequest, RequestTooLarge


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why an engine didn't take a request."""

    kind: str
    message: str
    param: str | None = None
    retry_after_s: float = 1.0

    @staticmethod
    def of(error: EngineError) -> Refusal:
        """The refusal that stands for an error of the engine's door."""
        return Refusal(
            kind=type(error).__name__,
            message=str(error),
            param=getattr(error, "param", None),
            retry_after_s=getattr(error, "retry_after_s", 1.0),
        )

    def to_error(self) -> EngineError:
        """The error to raise in the gateway; an unknown kind is a dead engine."""
        if self.kind == RequestTooLarge.__name__:
            return RequestTooLarge(self.message, self.param)
        if self.kind == InvalidRequest.__name__:
            return InvalidRequest(self.message, self.param)
        if self.kind == EngineOverloaded.__name__:
            return EngineOverloaded(self.message, self.retry_after_s)
        return EngineDead(self.message)
