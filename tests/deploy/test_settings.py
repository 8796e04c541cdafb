"""Check that flags and variables in deploy/ are settings of the two processes, with valid values."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml
from support.sources import REPOSITORY
from support.time_limits import PATIENCE_SECONDS

from lineclear.scheduler import settings as scheduler
from lineclear.worker import settings as worker

DEPLOY = REPOSITORY / "deploy"
FILES = sorted(p for p in DEPLOY.rglob("*") if p.suffix in (".yaml", ".md", ".Dockerfile"))


def arguments() -> list[tuple[str, list[str]]]:
    """Return process and flags of every container that deploy/ starts."""
    found = []
    for path in FILES:
        for document in yaml.safe_load_all(path.read_text()) if path.suffix == ".yaml" else ():
            for name, container in _containers(document):
                flags = container.get("args") or container.get("command") or []
                if flags:
                    defaults = [re.sub(r"\$\{\w+:-(.*?)\}", r"\1", flag) for flag in flags]
                    found.append((name.removeprefix("lineclear-"), defaults))
    return [(name, flags) for name, flags in found if name in ("scheduler", "worker")]


def _containers(document: dict[str, Any]) -> list[tuple[str, dict[str, Any]]]:
    if "services" in document:
        return list(document["services"].items())
    pod = document.get("spec", {}).get("template", {}).get("spec", {})
    return [(c["name"], c) for kind in ("initContainers", "containers") for c in pod.get(kind, [])]


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [n for n in os.environ if n.startswith("LINECLEAR_")]:
        monkeypatch.delenv(name)


@pytest.mark.parametrize(("process", "flags"), arguments())
def test_process_accepts_its_flags(process: str, flags: list[str]) -> None:
    if process == "scheduler":
        settings, rest = scheduler.load(flags)
        assert rest == ()
        assert settings.socket_directory == "/run/lineclear/sockets"
    else:
        assert worker.load(flags).socket_directory == "/run/lineclear/sockets"


def test_every_container_is_found() -> None:
    assert [process for process, _ in arguments()].count("scheduler") == 3
    assert [process for process, _ in arguments()].count("worker") == 4


@pytest.mark.parametrize("path", FILES, ids=lambda p: p.name)
def test_every_variable_is_a_setting(path: Path) -> None:
    known = {f"LINECLEAR_{name}".upper() for name in scheduler.SchedulerSettings.model_fields}
    known |= {f"LINECLEAR_WORKER_{name}".upper() for name in worker.WorkerSettings.model_fields}
    # Set by Kubernetes, and mentioned in the files.
    known |= {"LINECLEAR_PORT"}
    assert set(re.findall(r"\bLINECLEAR_[A-Z_]+", path.read_text())) <= known


@pytest.mark.parametrize("path", FILES, ids=lambda p: p.name)
def test_every_mentioned_flag_exists(path: Path) -> None:
    """Also in prose. Flags of other tools are listed below."""
    settings = {
        "--" + name.replace("_", "-")
        for model in (scheduler.SchedulerSettings, worker.WorkerSettings)
        for name in model.model_fields
    }
    others = {
        *("--build", "--build-arg", "--format", "--from", "--platform", "--scale"),  # docker, podman
        *("--entrypoint", "--network", "--rm", "--time"),  # docker run, docker stop
        *("--no-cache-dir", "--no-deps", "--compile", "--prefix", "--python", "--without-pip"),  # pip, venv
        "--link",  # requirements.py
        *("--yes", "--no-install-recommends", "--include", "--variant", "--architectures"),  # apt-get, mmdebstrap
        *("--directory", "--owner", "--group", "--mode"),  # install
        *("--from-literal", "--revision", "--local-dir", "--model-server-metrics-port"),  # kubectl, hf, endpoint picker
        *("--interval", "--timeout", "--start-period", "--retries"),  # HEALTHCHECK
    }
    mentioned = set(re.findall(r"(?<![\w-])--[a-z][a-z-]*", path.read_text()))
    assert mentioned <= settings | others


def test_systemd_unit(tmp_path: Path) -> None:
    """It waits for the drain, does not repeat what cannot help, and is what systemd accepts and calls protected."""
    text = (DEPLOY / "systemd/lineclear.service").read_text()
    unit = dict(re.findall(r"^(\w+)=(.+)$", text.replace("\\\n", " "), re.MULTILINE))
    program, command, *flags = shlex.split(unit["ExecStart"])
    assert (Path(program).name, command) == ("lineclear", "serve")
    assert int(unit["TimeoutStopSec"]) > scheduler.load(flags)[0].drain_timeout_seconds + 10
    assert unit["RestartPreventExitStatus"] == "78 79"
    if (analyze := shutil.which("systemd-analyze")) is None:
        pytest.skip("systemd-analyze is not installed: apt-get install systemd")
    path = tmp_path / "lineclear.service"
    path.write_text(text.replace(program, "/bin/true"))
    for words in (["verify", "--man=no"], ["security", "--offline=true", "--threshold=25"]):
        done = subprocess.run([analyze, *words, path], capture_output=True, text=True, timeout=PATIENCE_SECONDS)
        assert (done.returncode, done.stderr) == (0, "")
