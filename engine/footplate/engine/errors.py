"""What can go wrong at the engine's door and in its loaders.

    EngineError
    ├── InvalidRequest          the request itself is wrong; `param` names the field
    │   └── RequestTooLarge     it can never fit: context length or KV pool
    ├── EngineOverloaded        it could run later: queue full, shutting down
    ├── EngineDead              the step loop failed; the replica must be replaced
    └── LoadError               weights, tokenizer or configuration can't be used; names the thing

Messages say what was asked, what the limit is and what to do. They never hold prompt text.
Each class pickles whole: all arguments go to `super().__init__`.
"""

from __future__ import annotations


class EngineError(Exception):
    """Root of the tree; never raised itself."""


class InvalidRequest(EngineError):
    """The request is wrong and would be wrong again; `param` is the field to mend."""

    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(message, param)
        self.message = message
        self.param = param

    def __str__(self) -> str:
        return self.message


class RequestTooLarge(InvalidRequest):
    """Prompt plus allowed output is over the context length or over the whole KV pool."""


class EngineOverloaded(EngineError):
    """The engine refuses now and would accept later."""

    def __init__(self, message: str, retry_after_s: float = 1.0) -> None:
        super().__init__(message, retry_after_s)
        self.message = message
        self.retry_after_s = retry_after_s

    def __str__(self) -> str:
        return self.message


class EngineDead(EngineError):
    """The step loop ended with a fault; nothing more will come from this engine."""


class LoadError(EngineError):
    """A model can't be loaded; the message names the file, tensor, type or key and the mend."""
