"""A server that this program starts and that exits with it.

from lineclear.client import Client, LocalServer

with LocalServer("--model", "/path/to/model") as server, Client(server.target) as client:
    print(client.generate("Once upon a time", max_tokens=64).text)
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

from lineclear.errors import LineclearError
from lineclear.extras import install_command

from ._sync.client import Client
from .results import HealthStatus

MODULE = "lineclear.scheduler.main"
# requirement; markers and extra == "name", as in the metadata of a package
_REQUIREMENT = re.compile(r"""^([A-Za-z0-9._-]+)[^\[;]*;\s*extra\s*==\s*['"](?:scheduler|worker)['"]\s*$""")
_DECIDED_HERE = ("--listen", "--no-spawn-worker", "--no-exit-on-stdin-close")
_POLL_SECONDS = 0.05
_ANSWER_SECONDS = 1.0
_LAST_BYTES = 64 * 1024


class ServerStartError(Exception):
    """The server did not start. The message has the reasons from its log."""


class LocalServer:
    """A scheduler and its worker, at `target`. Close it, or use it as a context manager.

    Only the user of this program can connect. `flags` are those of `lineclear serve`. The server exits when this
    program ends, even if it is killed: a pipe connects the two. Ctrl-C does not reach the server. Its log (warnings and
    errors by default; see LINECLEAR_LOG_LEVEL) is in the file `log` until `close`.
    """

    def __init__(self, *flags: str, start_timeout_seconds: float = 600.0, stop_timeout_seconds: float = 60.0) -> None:
        """Start the server and wait until it serves. Raises ServerStartError, and ValueError for a reserved flag."""
        ours = flags[: flags.index("--")] if "--" in flags else flags
        if decided := [flag for flag in ours if flag.partition("=")[0] in _DECIDED_HERE]:
            raise ValueError(f"{decided[0]}: is set by LocalServer; use `lineclear serve` to set it")
        if absent := missing():
            raise ServerStartError(
                f"a server needs more than the client: {', '.join(absent)} is not installed; "
                f"this brings scheduler and worker: {install_command('all')}"
            )
        self._stop_timeout_seconds = stop_timeout_seconds
        self._folder = tempfile.TemporaryDirectory(prefix="lineclear-local-", ignore_cleanup_errors=True)
        self._socket = Path(self._folder.name) / "api.sock"
        self.target = f"unix:{self._socket}"
        self.log = Path(self._folder.name) / "log"
        # The environment overrides the file of --config, and a flag overrides the environment.
        environment = {"LINECLEAR_LOG_LEVEL": "warning", "LINECLEAR_DRAIN_LINGER_SECONDS": "0"} | dict(os.environ)
        environment |= {"LINECLEAR_LISTEN": self.target, "LINECLEAR_LOG_FORMAT": "json"}
        with self.log.open("wb") as log:
            self._process = subprocess.Popen(
                [*command(["--exit-on-stdin-close"]), *flags],
                env=environment,
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=log,
                start_new_session=True,
            )
        try:
            self._wait_until_serving(start_timeout_seconds)
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    @property
    def is_running(self) -> bool:
        """Whether the process of the server runs. `Client.health` says whether it serves."""
        return self._process.poll() is None

    def close(self) -> None:
        """Shut down gracefully, as SIGTERM does. Kill the server after `stop_timeout_seconds`."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(self._stop_timeout_seconds)
        except subprocess.TimeoutExpired:
            self._process.kill()  # its worker exits too
            self._process.wait()
        self._folder.cleanup()

    def _wait_until_serving(self, timeout_seconds: float) -> None:
        give_up_at = time.monotonic() + timeout_seconds
        with Client(self.target, max_attempts=1) as client:
            while not self._serves(client):
                if (code := self._process.poll()) is not None:
                    raise ServerStartError(f"the server ended with exit code {code}: {_reasons(self.log)}")
                if time.monotonic() >= give_up_at:
                    raise ServerStartError(
                        f"the server was not ready after {timeout_seconds:g} s: {_reasons(self.log)}"
                    )
                time.sleep(_POLL_SECONDS)

    def _serves(self, client: Client) -> bool:
        if not self._socket.exists():  # an earlier call would start the reconnect backoff of gRPC
            return False
        try:
            return client.health(timeout_seconds=_ANSWER_SECONDS) is HealthStatus.SERVING
        except LineclearError:
            return False


def command(arguments: Sequence[str]) -> list[str]:
    """Return the command line of the scheduler. -P: a file in the working directory must not shadow a package."""
    return [sys.executable, "-P", "-m", MODULE, "--spawn-worker", *arguments]


def missing() -> list[str]:
    """Return the packages of a server that are not installed: of the extras `scheduler` and `worker`, or lineclear."""
    try:
        required = importlib.metadata.requires("lineclear") or ()
    except importlib.metadata.PackageNotFoundError:
        return ["lineclear"] if importlib.util.find_spec("lineclear.scheduler") is None else []
    found = map(_REQUIREMENT.match, required)
    absent = sorted({match[1] for match in found if match is not None and not _installed(match[1])})
    if not absent and importlib.util.find_spec("lineclear.scheduler") is None:
        return ["lineclear.scheduler"]
    return absent


def _installed(name: str) -> bool:
    try:
        importlib.metadata.distribution(name)
    except importlib.metadata.PackageNotFoundError:
        return importlib.util.find_spec(name.replace("-", "_")) is not None
    return True


def _reasons(log: Path) -> str:
    """Return the reasons in the last lines of a log, or the last line."""
    with log.open("rb") as file:
        file.seek(max(0, log.stat().st_size - _LAST_BYTES))
        lines = file.read().decode(errors="replace").splitlines()
    found = dict.fromkeys(reason for line in lines for reason in _reasons_in(line))
    return "; ".join(found) or (lines[-1] if lines else "its log is empty")


def _reasons_in(line: str) -> Iterator[str]:
    try:
        entry = json.loads(line)
    except ValueError:
        if line.startswith("lineclear-"):  # a process with wrong flags has no log yet
            yield line
        return
    if isinstance(entry, dict) and entry.get("level") == "error":
        yield from (entry[name] for name in ("problem", "reason") if isinstance(entry.get(name), str))
