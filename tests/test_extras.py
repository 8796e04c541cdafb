"""A light installation prints the pip command that installs what is missing."""

from __future__ import annotations

import json
from importlib.metadata import PackageNotFoundError
from types import SimpleNamespace
from typing import Any

import pytest

from lineclear import extras

ALONE = {"url": "file:///a/client", "dir_info": {}}
GIT = {"url": "https://h/x.git", "vcs_info": {"vcs": "git", "commit_id": "abc"}}


@pytest.mark.parametrize(
    ("origin", "is_client_alone", "extra", "command"),
    [
        (None, False, "all", "pip install 'lineclear[all]'"),
        (
            {"url": "file:///a%20b/x.whl", "archive_info": {}},
            *(False, "all", "pip install 'lineclear[all] @ file:///a%20b/x.whl'"),
        ),
        (
            {"url": "file:///a%20b", "dir_info": {}},
            *(False, "all", "pip install 'lineclear[all] @ file:///a%20b'"),
        ),
        (
            {"url": "file:///a%20b", "dir_info": {"editable": True}},
            *(False, "all", "pip install --editable '/a b[all]'"),
        ),
        (GIT, False, "all", "pip install 'lineclear[all] @ git+https://h/x.git@abc'"),
        (None, True, "cli", "pip install 'lineclear-client[cli]'"),
        (None, True, "all", "pip install 'lineclear[all]'"),
        (ALONE, True, "cli", "pip install 'lineclear-client[cli] @ file:///a/client'"),
        (ALONE, True, "all", "pip install 'lineclear[all] @ file:///a'"),
        ({**ALONE, "dir_info": {"editable": True}}, True, "all", "pip install --editable '/a[all]'"),
        (
            {**GIT, "subdirectory": "client"},
            *(True, "cli", "pip install 'lineclear-client[cli] @ git+https://h/x.git@abc#subdirectory=client'"),
        ),
    ],
)
def test_install_command_names_the_origin(
    monkeypatch: pytest.MonkeyPatch, origin: dict[str, Any] | None, is_client_alone: bool, extra: str, command: str
) -> None:
    def found(name: str) -> Any:
        if is_client_alone and name == "lineclear":
            raise PackageNotFoundError(name)
        return SimpleNamespace(read_text=lambda file: None if origin is None else json.dumps(origin))

    monkeypatch.setattr(extras, "distribution", found)
    assert extras.install_command(extra) == command
