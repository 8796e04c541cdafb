"""LocalServer: it serves, reports why it did not start, and always exits with its program."""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from support.engine_harness import eventually
from support.time_limits import PATIENCE_SECONDS

from lineclear.client import Client, LocalServer, ServerStartError, local_server


def worker(option: str, what: str) -> tuple[str, ...]:
    """Flags for the demonstration model with another worker."""
    return ("--demo", "--worker-command", shlex.join([sys.executable, option, what]))


TOY = worker("-m", "support.toy_worker_command")
NEVER_JOINS = worker(
    "-c", "from lineclear.process.parent_death import die_with_parent as arm; import signal; arm(); signal.pause()"
)
REFUSES = worker("-c", "import sys; sys.stderr.write('lineclear-worker: not like this\\n'); raise SystemExit(78)")


@pytest.fixture(autouse=True)
def a_toy_of_the_models_size(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("LINECLEAR_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("TOY_OPTIONS", json.dumps({"vocab_size": 4096}))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(sys.path))


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[subprocess.Popen[bytes]]:
    """Every process that is started, and its arguments."""
    processes: list[subprocess.Popen[bytes]] = []

    class Watched(subprocess.Popen[bytes]):
        def __init__(self, *arguments: object, **settings: object) -> None:
            super().__init__(*arguments, **settings)  # type: ignore[call-overload]
            processes.append(self)

    monkeypatch.setattr(subprocess, "Popen", Watched)
    return processes


def test_server_serves_until_the_block_ends(started: list[subprocess.Popen[bytes]]) -> None:
    with LocalServer(*TOY, "--served-model-name", "mine") as server, Client(server.target, max_attempts=1) as client:
        assert client.model().model_id == "mine"
        assert server.is_running
        assert len(client.generate("The capital of France is", max_tokens=3, ignore_eos=True).token_ids) == 3
        assert '"process": "scheduler"' not in server.log.read_text(), "what is no warning is not logged"
        folder = server.log.parent
        assert folder.stat().st_mode & 0o077 == 0, "nobody else can reach it"
    assert [process.returncode for process in started] == [0]
    assert not server.is_running
    assert not folder.exists()
    server.close()


@pytest.mark.parametrize(
    ("flags", "why"),
    [
        (
            ("--demo", "--no-such-flag"),
            "^the server ended with exit code 78: lineclear-scheduler: there is no flag --no-such-flag",
        ),
        (REFUSES, "exit code 79: lineclear-worker: not like this; the worker cannot run with this configuration"),
    ],
    ids=["flag", "worker"],
)
def test_failed_start_has_the_reason(started: list[subprocess.Popen[bytes]], flags: tuple[str, ...], why: str) -> None:
    with pytest.raises(ServerStartError, match=why):
        LocalServer(*flags)
    assert all(process.returncode is not None for process in started)


def test_start_timeout_stops_the_server(started: list[subprocess.Popen[bytes]]) -> None:
    with pytest.raises(ServerStartError, match=r"not ready after 1\.5 s: its log is empty"):
        LocalServer(*NEVER_JOINS, start_timeout_seconds=1.5)
    assert [process.returncode for process in started] == [0]


@pytest.mark.parametrize("flag", ["--listen=127.0.0.1:1", "--no-spawn-worker"])
def test_reserved_flag_is_a_value_error(flag: str, started: list[subprocess.Popen[bytes]]) -> None:
    with pytest.raises(ValueError, match=flag.partition("=")[0]):
        LocalServer("--demo", flag)
    assert started == []


def test_missing_packages_name_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local_server, "missing", lambda: ["torch"])
    with pytest.raises(ServerStartError, match=r"torch is not installed; this brings .*: pip install "):
        LocalServer("--demo")


def test_stop_timeout_kills_the_server(started: list[subprocess.Popen[bytes]]) -> None:
    server = LocalServer(*TOY, stop_timeout_seconds=0.2)
    started[0].send_signal(signal.SIGSTOP)
    server.close()
    assert started[0].returncode == -signal.SIGKILL


@pytest.mark.parametrize("end", [signal.SIGKILL, signal.SIGINT])
def test_server_exits_with_its_program(end: signal.Signals) -> None:
    """However that ends; and a Ctrl-C, which a terminal sends to a whole group of processes, is the program's alone."""
    program = f"""
import signal, time
from lineclear.client import LocalServer
signal.signal(signal.SIGINT, signal.default_int_handler)  # tests that run in the background may ignore it
with LocalServer(*{TOY!r}) as server:
    print(server._process.pid, server.log.parent, flush=True)
    while True:
        time.sleep(0.1)  # not for ever: an interrupt may come just before
"""
    running = subprocess.Popen(
        [sys.executable, "-c", program], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, process_group=0
    )
    assert running.stdout is not None
    try:
        pid, folder = running.stdout.readline().decode().split()
        assert os.getpgid(int(pid)) != running.pid
        running.send_signal(end)
        running.wait(PATIENCE_SECONDS)
    finally:
        running.kill()
        running.wait()
        running.stdout.close()
    eventually(lambda: not Path(f"/proc/{pid}").exists())
    assert Path(folder).exists() == (end is signal.SIGKILL)
