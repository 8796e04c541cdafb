"""A light installation prints the pip command that installs what is missing."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from support.sources import REPOSITORY
from support.time_limits import PATIENCE_SECONDS

from lineclear import extras


@pytest.mark.parametrize(
    ("origin", "command"),
    [
        (None, "pip install 'lineclear[all]'"),
        ({"url": "file:///a%20b/x.whl", "archive_info": {}}, "pip install 'lineclear[all] @ file:///a%20b/x.whl'"),
        ({"url": "file:///a%20b", "dir_info": {}}, "pip install 'lineclear[all] @ file:///a%20b'"),
        ({"url": "file:///a%20b", "dir_info": {"editable": True}}, "pip install --editable '/a b[all]'"),
        (
            {"url": "https://host/x.git", "vcs_info": {"vcs": "git", "commit_id": "abc"}},
            "pip install 'lineclear[all] @ git+https://host/x.git@abc'",
        ),
    ],
)
def test_install_command_names_the_origin(
    monkeypatch: pytest.MonkeyPatch, origin: dict[str, Any] | None, command: str
) -> None:
    text = None if origin is None else json.dumps(origin)
    monkeypatch.setattr(extras, "distribution", lambda name: SimpleNamespace(read_text=lambda file: text))
    assert extras.install_command("all") == command


@pytest.mark.parametrize(
    ("origin", "extra", "command"),
    [
        (None, "cli", "pip install 'lineclear-client[cli]'"),
        (None, "all", "pip install 'lineclear[all]'"),
        ({"url": "file:///a/client", "dir_info": {}}, "cli", "pip install 'lineclear-client[cli] @ file:///a/client'"),
        ({"url": "file:///a/client", "dir_info": {}}, "all", "pip install 'lineclear[all] @ file:///a'"),
        ({"url": "file:///a/client", "dir_info": {"editable": True}}, "all", "pip install --editable '/a[all]'"),
        (
            {"url": "https://h/x.git", "vcs_info": {"vcs": "git", "commit_id": "abc"}, "subdirectory": "client"},
            "cli",
            "pip install 'lineclear-client[cli] @ git+https://h/x.git@abc#subdirectory=client'",
        ),
    ],
)
def test_install_command_of_the_client_alone(
    monkeypatch: pytest.MonkeyPatch, origin: dict[str, Any] | None, extra: str, command: str
) -> None:
    def found(name: str) -> Any:
        if name == "lineclear":
            raise PackageNotFoundError(name)
        return SimpleNamespace(read_text=lambda file: None if origin is None else json.dumps(origin))

    monkeypatch.setattr(extras, "distribution", found)
    assert extras.install_command(extra) == command


@pytest.fixture(scope="module")
def bare(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An environment with lineclear's wheel and nothing else, made without a network."""
    folder = tmp_path_factory.mktemp("bare")
    environment = os.environ | {"LINECLEAR_NATIVE": "0", "PIP_NO_INDEX": "1", "PIP_DISABLE_PIP_VERSION_CHECK": "1"}

    def run(*command: str | Path) -> None:
        subprocess.run(
            [sys.executable, "-m", *command],
            cwd=REPOSITORY,
            env=environment,
            check=True,
            capture_output=True,
            timeout=PATIENCE_SECONDS,
        )

    run("hatchling", "build", "-t", "wheel", "-d", folder)
    (wheel,) = folder.glob("*.whl")
    run("venv", "--without-pip", folder / "venv")
    run("pip", "--python", folder / "venv/bin/python", "install", "-q", "--no-deps", "--no-compile", wheel)
    return folder


@pytest.mark.parametrize(
    ("command", "package", "extra"),
    [
        ("lineclear-scheduler", "structlog", "scheduler"),
        ("lineclear-worker", "structlog", "worker"),
        ("python -m lineclear.planner", "pydantic", "scheduler"),
        ("lineclear", "rich", "cli"),
    ],
)
def test_missing_package_prints_the_install_command(bare: Path, command: str, package: str, extra: str) -> None:
    (wheel,) = bare.glob("*.whl")
    program, *words = command.split()
    done = subprocess.run(
        [bare / "venv/bin" / program, *words, "--demo"], capture_output=True, text=True, timeout=PATIENCE_SECONDS
    )
    assert done.returncode == (2 if command == "lineclear" else 78)
    assert len(done.stderr.splitlines()) == 1, done.stderr
    assert package in done.stderr
    assert f"pip install 'lineclear[{extra}] @ {wheel.as_uri()}'" in done.stderr
