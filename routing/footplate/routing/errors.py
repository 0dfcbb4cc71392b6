"""What can be wrong with what routing is given.

RoutingError
├── InvalidClassifier: weights that can't be read or trained
└── InvalidEvaluation: a labelled set, or an option of its evaluation, that can't be used
"""

from __future__ import annotations


class RoutingError(Exception):
    """Base of all. `message` is a sentence for whoever gave it."""

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.message = message


class InvalidClassifier(RoutingError):
    """Weights that can't be read or trained."""


class InvalidEvaluation(RoutingError):
    """A labelled set, or an option of its evaluation, that can't be used."""
