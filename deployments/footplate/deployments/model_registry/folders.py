"""Where the files of models that are added over the admin API may lie.

Whoever adds a model would otherwise choose what the server reads: a tenant gets a chat template's text from
`/v1/tokenize`. Of weights nobody gets to see a byte, so they may lie anywhere but where the system and this
platform keep their own, unless the operator names folders. The configuration file is the operator's own and
names what it likes.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from footplate.platform.settings import ModelSettings, Settings
from footplate.tenancy.errors import InvalidValue

SETTING = "security.models_folders"
SYSTEM = tuple(map(Path, ("/dev", "/etc", "/proc", "/run", "/sys", "/var/run")))


@dataclass(frozen=True, slots=True)
class ModelFolders:
    """`allowed`: folders, links resolved; with `weights_anywhere` only for what can be read over HTTP.
    `closed`: folders and files that stay closed within them, but for `models_dir`, where packages are put
    together."""

    allowed: tuple[Path, ...]
    closed: tuple[Path, ...]
    models_dir: Path
    weights_anywhere: bool = False

    @classmethod
    def of(cls, settings: Settings, config_file: Path | None, data_dir: Path) -> ModelFolders:
        """Those of the settings; without any, the folder of models and that of the configuration file."""
        models_dir = (data_dir / "models").resolve()
        named = settings.security.models_folders
        if named is not None:
            allowed = [Path(each).expanduser() for each in named]
        else:
            allowed = [models_dir, *([] if config_file is None else [config_file.absolute().parent])]
        files_url = settings.storage.files_url
        secret = (
            data_dir,
            config_file,
            settings.security.master_key_file,
            settings.telemetry.otlp_headers_file,
            files_url if files_url.startswith("/") else None,
        )
        closed = [Path(each).expanduser().resolve() for each in secret if each]
        resolved = tuple(each.resolve() for each in allowed)
        return cls(resolved, (*SYSTEM, *closed), models_dir, weights_anywhere=named is None)

    def check(self, model: ModelSettings) -> None:
        """Refuse what lies elsewhere, and say nothing of what is there.

        Raises:
            InvalidValue: names the field and the setting.
        """
        kind, _, path = model.source.partition(":")
        given = {"source": None if kind == "package" else path, "chat_template": model.chat_template}
        for field, named in given.items():
            is_anywhere = self.weights_anywhere and field == "source"
            if named is not None and not self._is_open(named, is_anywhere=is_anywhere):
                raise _refusal(field)

    def _is_open(self, given: str, *, is_anywhere: bool) -> bool:
        try:
            path = Path(given).expanduser().resolve()
        except (OSError, RuntimeError, ValueError):  # a loop of links, an unknown user, no path at all
            return False
        if not is_anywhere and not any(path.is_relative_to(folder) for folder in self.allowed):
            return False
        is_closed = any(path.is_relative_to(each) for each in self.closed)
        return not is_closed or path.is_relative_to(self.models_dir)


def _refusal(field: str) -> InvalidValue:
    return InvalidValue(
        f"{field} lies outside the folders of {SETTING}, from which this server reads it; "
        "put the file there, or have the operator name its folder",
        field,
    )
