"""Bodies that nobody thought of: whatever the schema allows, and what it doesn't, is no server error."""

from __future__ import annotations

import json
from typing import Any

import anyio
import schemathesis
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from schemathesis.checks import not_a_server_error

from tests.builders import TENANT_KEY
from tests.platform.conftest import Rig, chat_body, text_body


def test_no_request_that_the_schema_allows_or_forbids_is_a_server_error(rig: Rig) -> None:
    schema = schemathesis.openapi.from_asgi(
        "/openapi.json", rig.app, headers={"authorization": f"Bearer {TENANT_KEY}"}
    )
    results: list[Any] = list(schema.get_all_operations())
    operations = [result.ok() for result in results]
    assert len(operations) >= 8
    for operation in operations:

        @settings(max_examples=20, deadline=None, suppress_health_check=list(HealthCheck), database=None)
        @given(case=operation.as_strategy())
        def answers(case: Any) -> None:
            response = case.call(headers={"authorization": f"Bearer {TENANT_KEY}"})
            case.validate_response(response, checks=[not_a_server_error])

        answers()


_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=6,
)
_FIELDS = (
    "messages prompt max_tokens max_completion_tokens temperature top_p n stop seed logit_bias logprobs "
    "top_logprobs stream stream_options echo top_k min_p tools min_tokens stop_token_ids bad_words "
    "allowed_token_ids prompt_logprobs cache_salt metadata priority repetition_penalty response_format "
    "return_token_ids suffix model"
).split()


@settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))
@given(name=st.sampled_from(_FIELDS), value=_JSON, is_chat=st.booleans(), is_streamed=st.booleans())
def test_any_value_in_any_field_is_answered(
    rig: Rig, name: str, value: Any, is_chat: bool, is_streamed: bool
) -> None:
    body = (chat_body if is_chat else text_body)(stream=is_streamed)
    body[name] = value
    path = "/v1/chat/completions" if is_chat else "/v1/completions"
    response = anyio.run(rig.post, path, json.dumps(body).encode())
    assert response.status_code in (200, 400, 404), response.text
