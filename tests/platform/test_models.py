"""Finding a model by name or alias, and what a client is told when there is none."""

from __future__ import annotations

import pytest

from footplate.engine.errors import EngineOverloaded
from footplate.engine.types import ModelCard
from footplate.platform.errors import ModelNotFound
from footplate.platform.models import find_model

CARD = ModelCard("small", "package:x", 100, 100, 10, "packed", "fp_1", aliases=("tiny",))


def test_a_model_is_found_by_name_and_by_alias() -> None:
    assert find_model({"small": CARD}, "small") is CARD
    assert find_model({"small": CARD}, "tiny") is CARD


def test_a_model_that_is_not_served_is_not_found() -> None:
    with pytest.raises(ModelNotFound):
        find_model({"small": CARD}, "large")


def test_while_no_replica_has_answered_clients_are_to_come_again() -> None:
    """A 404 would end a client for good that is only early."""
    with pytest.raises(EngineOverloaded, match="try again"):
        find_model({}, "small")
