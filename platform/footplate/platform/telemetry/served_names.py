"""The names under which something is, or has been, served: those that telemetry may tell."""

from __future__ import annotations

from footplate.platform.ports import InferenceClient
from footplate.platform.settings import Settings


class ServedNames:
    """Models, their aliases and routes. Names only come: series of a model that is gone keep theirs."""

    def __init__(self, settings: Settings, client: InferenceClient) -> None:
        self._client = client
        self._names = {name for model in settings.models for name in (model.name, *model.aliases)}
        self._names |= {route.name for route in settings.routes}
        self._frozen = frozenset(self._names)

    def __call__(self) -> frozenset[str]:
        """The names by now; any thread may ask."""
        found = {name for card in list(self._client.models().values()) for name in (card.name, *card.aliases)}
        if not found <= self._names:
            self._names |= found
            self._frozen = frozenset(self._names)
        return self._frozen
