"""A name alone lets nothing pass: values have forms, and none has room for a sentence."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from footplate.platform.telemetry import allow_list
from footplate.platform.telemetry.allow_list import AllowList, allowed_names

COLLECTOR = Path(__file__).parents[3] / "infra" / "otel" / "collector.yaml"
ALL: dict[str, Any] = {
    **allow_list.ATTRIBUTES,
    **allow_list.RESOURCE,
    **allow_list.LABELS,
    **{name: form for name, form in allow_list.LOG_FIELDS.items() if name != "event"},
}
SENTENCES = (
    "tell me a secret",
    "tell me",
    "Zürich",
    "a\nb",
    "canary=1",
    "x" * 200,
    "o'clock",
    'say "no"',
    "<b>",
    "?q=1",
)


@pytest.mark.parametrize("name", sorted(ALL))
def test_no_form_has_room_for_a_sentence(name: str) -> None:
    allowed = AllowList(lambda: frozenset({"m"}))
    for sentence in SENTENCES:
        for value in (sentence, [sentence], (sentence,), {"a": sentence}, sentence.encode()):
            kept = allowed.attribute(name, value, ALL)
            assert kept in (None, "_unknown", "_OTHER"), (name, value, kept)


@given(st.text())
def test_models_are_those_that_are_served(name: str) -> None:
    allowed = AllowList(lambda: frozenset({"m"}))
    assert allowed.model(name) == ("m" if name == "m" else "_unknown")


@given(st.text(), st.text())
def test_names_of_spans_are_made_of_ours(verb: str, subject: str) -> None:
    assert AllowList().span_name(verb, subject) == "other"
    assert AllowList().span_name("chat", subject) == "chat _unknown"
    assert re.fullmatch(r"POST( /[\w./{}:-]*)?", AllowList().span_name("POST", subject), re.ASCII)


def test_what_content_is_called_is_on_no_list() -> None:
    words = ("message", "prompt", "content", "text", "tool", "stop_sequences", "query", "header", "user")
    found = [name for name in allowed_names() for word in words if word in name]
    assert found == ["footplate.prompts"]


def test_the_collector_lets_pass_what_this_list_does() -> None:
    """The second wall is as wide as the first, so that nothing is lost on the way."""
    config = yaml.safe_load(COLLECTOR.read_text())
    through = set(config["processors"]["redaction"]["allowed_keys"])
    conventions = {"gen_ai_operation_name", "gen_ai_provider_name", "gen_ai_request_model"}
    conventions |= {"gen_ai_response_model", "error_type"}
    assert set(allowed_names()) - conventions <= through
    text = COLLECTOR.read_text()
    [spans] = re.findall(r'IsMatch\(span\.name, "([^"]+)"\)', text)
    [events] = re.findall(r'IsMatch\(spanevent\.name, "([^"]+)"\)', text)
    for name in (*allow_list.SPANS, "chat m", "POST /v1/files/{file_id}", "HEAD", "OPTIONS"):
        assert re.match(spans, name), name
    for name in allow_list.EVENTS:
        assert re.match(events.replace("\\\\", "\\"), name), name
