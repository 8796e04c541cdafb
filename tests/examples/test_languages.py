"""The examples in other languages: the commands of examples/README.md, and the output that it shows.

The examples call a server through a proxy, which refuses the first call of each as a server that starts does.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2
from support.npm import find_buf
from support.service import Service, running, wait_for
from support.sources import REPOSITORY

pytestmark = pytest.mark.exhaustive

EXAMPLES = REPOSITORY / "examples"
PAGE = (EXAMPLES / "README.md").read_text(encoding="utf-8")
OUTPUT = re.findall(r"^```text\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)[0]
BUILD_SECONDS = 1200.0
GENERATE, WATCH = "/lineclear.v1.InferenceService/Generate", "/grpc.health.v1.Health/Watch"
GO_PATH = os.environ.get("GOPATH", "/usr/share/gocode")
GO_PACKAGES = "google.golang.org/grpc/credentials/insecure google.golang.org/protobuf/proto"


@dataclass(frozen=True)
class Language:
    """The folder of an example, a command that fails without its toolchain, and the command that installs that."""

    folder: str
    probe: str
    install: str
    has_retry_policy: bool = True
    has_health_check: bool = True


LANGUAGES = (
    Language("python", "python -c 'import grpc_tools'", "pip install grpcio-tools googleapis-common-protos"),
    Language(
        "go",
        f"command -v protoc-gen-go protoc-gen-go-grpc && test $(go env GOTOOLCHAIN) && (go list {GO_PACKAGES} || "
        "GO111MODULE=on go list -m google.golang.org/grpc@latest)",  # before Go 1.21 there is no GOTOOLCHAIN
        "of a Debian newer than 12: apt install golang-go golang-google-grpc-dev "
        "golang-google-genproto-dev protoc-gen-go protoc-gen-go-grpc",
    ),
    Language("typescript-grpc-js", "node --version && npm --version", "apt install npm", has_health_check=False),
    Language("typescript-connect", "node --version && npm --version", "apt install npm", False, has_health_check=False),
    Language(
        "java",
        "command -v javac protoc grpc_java_plugin && cd /usr/share/java && ls grpc-netty.jar perfmark-api.jar",
        "apt install default-jdk-headless protobuf-compiler protobuf-compiler-grpc-java-plugin libgrpc-java "
        "libprotobuf-java libgoogle-gson-java libnetty-java libperfmark-java libgeronimo-annotation-1.3-spec-java",
        has_health_check=False,
    ),
    Language(
        "cpp",
        "command -v make g++ protoc grpc_cpp_plugin && pkg-config --exists grpc++",
        "apt install g++ make pkg-config protobuf-compiler protobuf-compiler-grpc libgrpc++-dev",
    ),
    Language(
        "ruby",
        "command -v protoc grpc_ruby_plugin && ruby -e 'require \"grpc\"'",
        "apt install ruby-grpc protobuf-compiler protobuf-compiler-grpc",
    ),
    Language(
        "rust",
        f"command -v protoc && cargo fetch --manifest-path {EXAMPLES}/rust/Cargo.toml",
        "apt install cargo protobuf-compiler, and librust-tonic-dev with librust-tonic-build-dev or crates.io",
        has_retry_policy=False,
        has_health_check=False,
    ),
)


class Proxy(grpc.GenericRpcHandler):
    """Forwards the bytes of every call to `target`, and refuses each call of Generate that is the first of a client."""

    def __init__(self, target: str) -> None:
        self._channel = grpc.insecure_channel(target)
        self._server = grpc.server(ThreadPoolExecutor(16), handlers=[self])
        self.address = f"127.0.0.1:{self._server.add_insecure_port('127.0.0.1:0')}"
        self.calls: list[tuple[str, dict[str, Any]]] = []
        self.watched: list[str] = []
        self._server.start()

    def service(self, details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler[bytes, bytes]:
        def forward(requests: Iterator[bytes], context: grpc.ServicerContext) -> Iterator[bytes]:
            self.calls.append((details.method, dict(details.invocation_metadata or ())))
            if details.method == GENERATE and len(self.generated()) == 1:
                context.abort(grpc.StatusCode.UNAVAILABLE, "the server starts")
            if details.method == WATCH:
                requests = iter([self._note(next(requests))])
            remaining = min(context.time_remaining() or BUILD_SECONDS, BUILD_SECONDS)
            call: Any = self._channel.stream_stream(details.method)(requests, timeout=remaining)
            context.add_callback(call.cancel)
            try:
                yield from call
            except grpc.RpcError as error:
                status: Any = error
                context.set_trailing_metadata(status.trailing_metadata() or ())
                context.abort(status.code(), status.details())

        return grpc.stream_stream_rpc_method_handler(forward)

    def _note(self, request: bytes) -> bytes:
        self.watched.append(health_pb2.HealthCheckRequest.FromString(request).service)
        return request

    def generated(self) -> list[dict[str, Any]]:
        """Return the metadata of each call of Generate."""
        return [metadata for method, metadata in list(self.calls) if method == GENERATE]

    def close(self) -> None:
        self._server.stop(None).wait()
        self._channel.close()


@pytest.fixture(scope="module")
def service() -> Iterator[Service]:
    with running(model=REPOSITORY / "demo/model-tiny") as service:
        yield service


@pytest.fixture
def proxy(service: Service) -> Iterator[Proxy]:
    proxy = Proxy(service.target)
    yield proxy
    proxy.close()


def commands(folder: str) -> str:
    """Return the commands of an example, from its section of the page."""
    found = re.findall(rf"^### [^\n]*\({folder}/\)\n.*?^```bash\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
    assert len(found) == 1, folder
    return str(found[0])


def environment(tmp_path: Path) -> dict[str, str]:
    path = os.pathsep.join((str(Path(sys.executable).parent), str(Path(find_buf()).parent), os.environ["PATH"]))
    if not (Path(GO_PATH.split(":")[-1]) / "src/google.golang.org/grpc").exists():
        return os.environ | {"PATH": path}
    return os.environ | {"PATH": path, "GO111MODULE": "off", "GOPATH": f"{tmp_path}:{GO_PATH}"}


def copied(folder: str, tmp_path: Path) -> Path:
    """Copy an example and what it reads. Debian has Go packages as sources, which need the path of go.mod's module."""
    home = tmp_path / ("src/example" if folder == "go" else f"examples/{folder}")
    shutil.copytree(EXAMPLES / folder, home, ignore=shutil.ignore_patterns("gen", "node_modules", "target", "classes"))
    shutil.copy(EXAMPLES / "service_config.json", home.parent)
    shutil.copy(REPOSITORY / "buf.yaml", tmp_path)
    for root in ("protos", "third_party", "common"):
        shutil.copytree(REPOSITORY / root, tmp_path / root, ignore=lambda _, names: {n for n in names if ".py" in n})
    return home


@pytest.mark.parametrize("language", LANGUAGES, ids=lambda language: language.folder)
def test_example_prints_what_the_page_shows(language: Language, service: Service, proxy: Proxy, tmp_path: Path) -> None:
    variables = environment(tmp_path)
    probed = subprocess.run(
        ["bash", "-c", language.probe], capture_output=True, text=True, env=variables, timeout=BUILD_SECONDS
    )
    if probed.returncode:
        pytest.skip(f"its toolchain is missing; install it: {language.install} ({probed.stderr[-200:]})")
    before = service.client.stats().counters
    script = commands(language.folder).replace("127.0.0.1:50051", proxy.address)
    if "GO111MODULE" in variables:
        script = script.replace("go mod tidy", "")
    done = subprocess.run(
        ["bash", "-ec", script],
        cwd=copied(language.folder, tmp_path),
        capture_output=True,
        text=True,
        env=variables,
        timeout=BUILD_SECONDS,
    )
    assert done.stdout[-len(OUTPUT) :] == OUTPUT, done.stdout + done.stderr[-3000:]
    assert done.returncode == 0
    # The refused call, its repetition, and the calls that end by deadline, cancel and error.
    attempts = [metadata.get("grpc-previous-rpc-attempts") for metadata in proxy.generated()]
    assert attempts == [None, "1" if language.has_retry_policy else None, None, None, None]
    assert set(proxy.watched) == ({"readiness"} if language.has_health_check else set())

    def both_ended() -> bool:
        now = service.client.stats().counters
        ended = now.requests_cancelled + now.requests_expired - before.requests_cancelled - before.requests_expired
        return ended == 2 and service.is_idle()

    wait_for(both_ended, "the server ends the request with a deadline and the cancelled one")
