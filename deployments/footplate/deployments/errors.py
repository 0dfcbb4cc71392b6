"""What can go wrong between the parts of a running platform.

DeploymentError
├── ChannelError        the token channel can't be used
│   ├── FrameError      bytes that are no frame of ours, or of another version
│   └── ChannelRefused  the peer did not prove that it holds the channel key
├── EngineStartFault    an engine can't start; see `model_registry.start_faults`
└── StartupError        the platform can't start; the message says what is wrong and the mend
"""

from __future__ import annotations


class DeploymentError(Exception):
    """Root of the tree; never raised itself."""


class ChannelError(DeploymentError):
    """The token channel to a peer can't be used."""


class FrameError(ChannelError):
    """Bytes that don't follow the frame format; the connection must be closed."""


class ChannelRefused(ChannelError):
    """The peer failed the mutual challenge, or speaks another version."""


class StartupError(DeploymentError):
    """`footplate serve` can't start. `mend` is what the operator should do."""

    def __init__(self, message: str, mend: str = "") -> None:
        super().__init__(message, mend)
        self.message = message
        self.mend = mend

    def __str__(self) -> str:
        return f"{self.message}; {self.mend}" if self.mend else self.message
