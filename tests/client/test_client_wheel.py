"""The wheel of the client alone: what it has, what it needs, and that it works by itself."""

from __future__ import annotations

import os
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path
from typing import Any

import pytest
from support.sources import REPOSITORY
from support.time_limits import PATIENCE_SECONDS

from lineclear.client import __version__

CLIENT = REPOSITORY / "client"
MAX_BYTES = 1_500_000
"""Of all sources. The largest are the stubs of the public API."""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("client")
    build = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(out)]
    subprocess.run(build, cwd=CLIENT, check=True, capture_output=True, timeout=PATIENCE_SECONDS)
    (archive,) = out.glob("*.whl")
    assert archive.name == f"lineclear_client-{project(REPOSITORY)['version']}-py3-none-any.whl"
    with zipfile.ZipFile(archive) as content:
        content.extractall(out / "content")
    return out / "content"


def project(folder: Path) -> dict[str, Any]:
    return dict(tomllib.loads((folder / "pyproject.toml").read_text())["project"])


def test_projects_agree() -> None:
    ours, whole = project(CLIENT), project(REPOSITORY)
    for name in ("dependencies", "requires-python", "license", "license-files"):
        assert ours[name] == whole[name], name
    assert ours["optional-dependencies"] == {name: whole["optional-dependencies"][name] for name in ("cli", "lm-eval")}
    assert ours["scripts"] == {"lineclear": whole["scripts"]["lineclear"]}
    assert __version__ == whole["version"]


def test_wheel_has_the_client_and_nothing_of_a_server(wheel: Path) -> None:
    files = {path.relative_to(wheel): path for path in wheel.rglob("*") if path.is_file()}
    own = {path for path in files if path.parts[0] == "lineclear"}
    sources = [
        path.relative_to(root)
        for root, pattern in ((CLIENT, "**/*"), (REPOSITORY / "protos", "**/*"), (REPOSITORY / "tools", "render/*"))
        for path in root.glob(f"lineclear/{pattern}")
        if path.is_file() and path.suffix != ".pyc"
    ]
    assert own == set(sources)
    assert {path.parts[1] for path in own if len(path.parts) > 2} == {"cli", "client", "render", "v1"}
    assert sum(path.stat().st_size for path in files.values()) < MAX_BYTES
    (licence,) = wheel.glob("*.dist-info/licenses/LICENSE")
    assert licence.read_text() == (REPOSITORY / "LICENSE").read_text()


# Finds the wheel and not the checkout, and refuses every import except the standard library, gRPC (which needs
# typing_extensions), protobuf, google.rpc and the packages of lineclear that the client may import.
PROGRAM = """
import asyncio, sys
wheel, checkout = sys.argv[1:]
sys.path[:] = [wheel, *(p for p in sys.path if not p.startswith(checkout) or "site-packages" in p)]
class Blocker:
    rooms = {"client", "errors", "exit_codes", "extras", "api_limits", "status_codec", "v1"}
    def find_spec(self, name, path=None, target=None):
        top, _, rest = name.partition(".")
        if top == "lineclear":
            allowed = not rest or rest.partition(".")[0] in self.rooms
        else:
            allowed = top in sys.stdlib_module_names or top in ("grpc", "google", "typing_extensions")
            allowed = allowed and not name.startswith("google.api")
        if not allowed:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
sys.meta_path.insert(0, Blocker())
from lineclear.client import AsyncClient, Client, LocalServer, Sampling, local_server
from lineclear.client.testing import FakeTransport
from lineclear.errors import Unreachable
assert local_server.__file__.startswith(wheel)
fake = FakeTransport("hello world")
print(Client(transport=fake).generate("x", Sampling(top_k=1)).text)
print(len(Client(transport=fake).generate_batch(["a", "b"], progress=True)))
print(asyncio.run(AsyncClient(transport=fake).generate("x")).text)
try:
    Client("unix:/nonexistent/socket", max_attempts=1).generate("x")
except Unreachable as error:
    print(error.code)
"""


def test_wheel_works_with_grpc_and_protobuf_alone(wheel: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-I", "-c", PROGRAM, str(wheel), f"{REPOSITORY}/"],
        capture_output=True, text=True, timeout=PATIENCE_SECONDS, env={"PATH": os.environ["PATH"]},
    )  # fmt: skip
    assert done.stdout.splitlines() == ["hello world", "2", "hello world", "UNAVAILABLE"], done.stderr
