"""Bodies with many faults are answered without a description of each."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from footplate.platform.http.admin.schemas import QuotaBody
from footplate.platform.http.complexity import MAX_KEYS
from footplate.platform.http.errors import MAX_TOLD_FAULTS
from footplate.platform.http.schemas import ChatCompletionBody, CompletionBody, parse_body
from tests.platform.conftest import Rig, chat_body

pytestmark = pytest.mark.anyio


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.mark.parametrize("field", ["metadata", "logit_bias"])
async def test_of_many_faults_none_is_described(rig: Rig, field: str) -> None:
    for num_wrong, param in ((MAX_TOLD_FAULTS, field), (MAX_TOLD_FAULTS + 1, None), (MAX_KEYS, None)):
        wrong = {str(number): [] for number in range(num_wrong)}
        response = await rig.post("/v1/chat/completions", chat_body(**{field: wrong}))
        error = response.json()["error"]
        assert (response.status_code, error["code"], error["param"]) == (400, "invalid_value", param)
        assert (str(num_wrong) in error["message"]) == (param is None)


async def test_unknown_parameters_are_named_up_to_the_limit(rig: Rig) -> None:
    few = {f"p{number}": 1 for number in range(MAX_TOLD_FAULTS)}
    error = (await rig.post("/v1/chat/completions", chat_body(**few))).json()["error"]
    assert (error["code"], error["param"]) == ("unsupported_parameter", "p0")
    error = (await rig.post("/v1/chat/completions", chat_body(**few, another=1))).json()["error"]
    assert (error["code"], error["param"]) == ("invalid_value", None)
    many = {f"p{number}": 1 for number in range(700_000)}
    error = (await rig.post("/v1/chat/completions", chat_body(**many))).json()["error"]
    assert "limit" in error["message"]


@pytest.mark.parametrize(
    ("kind", "body"),
    [
        (CompletionBody, '{"model":"m","prompt":"a","bad_words":[%s]}'),
        (CompletionBody, '{"model":"m","prompt":"a","stop_token_ids":[%s]}'),
        (CompletionBody, '{"model":"m","prompt":"a","allowed_token_ids":[%s]}'),
        (CompletionBody, '{"model":"m","prompt":"a","stop":[%s]}'),
        (CompletionBody, '{"model":"m","prompt":[%s]}'),
        (ChatCompletionBody, '{"model":"m","messages":[%s]}'),
        (ChatCompletionBody, '{"model":"m","messages":[{"role":"user","content":[%s]}]}'),
        (QuotaBody, '{"allowed_models":[%s]}'),
    ],
)
def test_lists_stop_at_their_first_fault(kind: Any, body: str) -> None:
    with pytest.raises(ValidationError) as caught:
        parse_body(kind, (body % ",".join(["1.5"] * 2000)).encode())
    # One for each form that the value could have had.
    assert caught.value.error_count() <= 4
