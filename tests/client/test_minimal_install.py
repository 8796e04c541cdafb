"""The client works with gRPC and protobuf alone, and the command names the extra that is missing."""

from __future__ import annotations

import subprocess
import sys
import textwrap

from support.time_limits import PATIENCE_SECONDS

from lineclear.extras import install_command

# Refuses every import except the standard library, gRPC (which needs typing_extensions), protobuf, google.rpc and the
# packages of lineclear that the client may import.
BLOCKER = """
import sys
class Blocker:
    rooms = {"cli", "client", "errors", "exit_codes", "extras", "api_limits", "status_codec", "v1"}
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
"""


def run(program: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", BLOCKER + textwrap.dedent(program), *arguments],
        capture_output=True, text=True, timeout=PATIENCE_SECONDS, check=False,
    )  # fmt: skip


def test_library_needs_only_grpc_and_protobuf() -> None:
    done = run("""
        import asyncio
        from lineclear.client import AsyncClient, Client, Sampling
        from lineclear.client.testing import FakeTransport
        from lineclear.errors import Unreachable
        fake = FakeTransport("hello world")
        print(Client(transport=fake).generate("x", Sampling(top_k=1)).text)
        print(len(Client(transport=fake).generate_batch(["a", "b"], progress=True)))
        print(asyncio.run(AsyncClient(transport=fake).generate("x")).text)
        try:
            Client("unix:/nonexistent/socket", max_attempts=1).generate("x")
        except Unreachable as error:
            print(error.code)
        outside = {name.partition(".")[0] for name in sys.modules} - set(sys.stdlib_module_names)
        print(sorted(outside & {"torch", "zmq", "structlog", "rich", "typer", "pydantic", "transformers"}))
    """)
    assert done.stdout.splitlines() == ["hello world", "2", "hello world", "UNAVAILABLE", "[]"], done.stderr


def test_command_without_its_extra_names_it() -> None:
    done = run("from lineclear.cli import main; main()", "health")
    assert done.returncode == 2
    assert install_command("cli") in done.stderr
    assert "Traceback" not in done.stderr
