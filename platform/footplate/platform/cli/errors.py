"""What a command can't do."""

from __future__ import annotations


class CommandError(Exception):
    """A command failed; the message says what happened and the mend, in one line."""
