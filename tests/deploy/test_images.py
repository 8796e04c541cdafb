"""The Dockerfiles: clean under hadolint, as small and as powerless as they promise."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
from concurrent import futures
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health
from grpc_health.v1.health_pb2 import HealthCheckResponse
from grpc_health.v1.health_pb2_grpc import add_HealthServicer_to_server
from support.patience import PATIENCE_SECONDS
from support.sources import REPOSITORY

DOCKERFILES = sorted((REPOSITORY / "deploy").glob("*.Dockerfile"))


@pytest.fixture(params=DOCKERFILES, ids=lambda p: p.name)
def dockerfile(request: pytest.FixtureRequest) -> Path:
    return request.param


def instructions(path: Path) -> list[tuple[str, str]]:
    """(instruction, rest) for each logical line."""
    logical = re.sub(r"\\\n", " ", "\n".join(x for x in path.read_text().splitlines() if not x.startswith("#")))
    return [
        (word, " ".join(rest.split()))
        for word, _, rest in (line.partition(" ") for line in logical.splitlines() if line)
    ]


def final_stage(path: Path) -> list[tuple[str, str]]:
    found = instructions(path)
    return found[max(i for i, (word, _) in enumerate(found) if word == "FROM") :]


def test_there_is_one_for_each_process() -> None:
    assert [p.name for p in DOCKERFILES] == ["scheduler.Dockerfile", "worker.Dockerfile"]


def test_hadolint_finds_nothing(dockerfile: Path) -> None:
    hadolint = Path(sys.executable).with_name("hadolint")
    found = subprocess.run(
        [hadolint, "--disable-ignore-pragma", dockerfile], capture_output=True, text=True, timeout=PATIENCE_SECONDS
    )
    assert (found.returncode, found.stdout) == (0, ""), found.stderr


def test_hadolint_would_find_something(tmp_path: Path) -> None:
    bad = tmp_path / "Dockerfile"
    bad.write_text("FROM python:latest\nRUN cd /tmp\n")
    assert subprocess.run(
        [Path(sys.executable).with_name("hadolint"), bad], capture_output=True, timeout=PATIENCE_SECONDS
    ).returncode


def test_the_process_is_told_to_stop_itself(dockerfile: Path) -> None:
    """The exec form: with a shell in between, SIGTERM would not arrive."""
    scripts = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]["scripts"]
    (entry,) = (rest for word, rest in final_stage(dockerfile) if word == "ENTRYPOINT")
    (command,) = json.loads(entry)
    assert command == f"lineclear-{dockerfile.stem}"
    assert command in scripts


def test_it_is_not_root_and_says_so_in_a_number(dockerfile: Path) -> None:
    users = [rest for word, rest in final_stage(dockerfile) if word == "USER"]
    assert users == ["10001:10001"]


def test_the_socket_folder_is_private_from_the_start(dockerfile: Path) -> None:
    assert ("RUN", "install --directory --owner=10001 --group=10001 --mode=0700 /run/lineclear") in final_stage(
        dockerfile
    )


def test_everything_installed_is_pinned(dockerfile: Path) -> None:
    text = dockerfile.read_text()
    assert "PIP_CONSTRAINT=" in text
    assert "PIP_BUILD_CONSTRAINT=" in text


def test_only_the_worker_has_torch() -> None:
    scheduler, worker = (p.read_text().split("\n", 1)[1] for p in DOCKERFILES)
    assert "'.[scheduler]'" in scheduler
    assert "torch" not in scheduler
    assert "'.[worker]'" in worker
    pin = re.search(r"^torch==\S+$", (REPOSITORY / "constraints.txt").read_text(), re.MULTILINE)
    assert pin is not None
    assert f"ARG TORCH={pin[0]}\n" in worker


def test_whatever_is_copied_is_in_the_context(dockerfile: Path) -> None:
    """.dockerignore lets nothing through that is not named in it."""
    let_through = {line[1:] for line in (REPOSITORY / ".dockerignore").read_text().splitlines() if line.startswith("!")}
    copied = {
        source
        for word, rest in instructions(dockerfile)
        if word == "COPY" and "--from" not in rest
        for source in rest.split()[:-1]
    }
    assert copied == let_through
    assert [name for name in copied if not (REPOSITORY / name).exists()] == []


def health_check(target: str) -> subprocess.CompletedProcess[str]:
    """What the image runs, asking `target`."""
    (check,) = (rest for word, rest in final_stage(DOCKERFILES[0]) if word == "HEALTHCHECK")
    command = json.loads(check[check.index("[") :])
    assert command[:2] == ["python", "-c"]
    code = command[2].replace("127.0.0.1:50052", target)
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=PATIENCE_SECONDS)


def test_what_is_copied_suffices_to_build_the_package(dockerfile: Path, tmp_path: Path) -> None:
    """Images are not built here; this is the step of theirs that asks most of the files they have."""
    copies = [rest.split() for word, rest in instructions(dockerfile) if word == "COPY" and "--from" not in rest]
    context = tmp_path / "src"
    context.mkdir()
    for *sources, target in copies:
        for source in sources:
            where = context / target if target.endswith("/") else (context / target).parent
            where.mkdir(parents=True, exist_ok=True)
            name = where / Path(source).name if target.endswith("/") else context / target
            if (REPOSITORY / source).is_dir():
                shutil.copytree(REPOSITORY / source, name, ignore=shutil.ignore_patterns("__pycache__", "*.so"))
            else:
                shutil.copy(REPOSITORY / source, name)
    build = [sys.executable, "-m", "hatchling", "build", "-t", "wheel"]
    # Whether there is a compiler is the image's; compiling here would only take long.
    environment = os.environ | {"LINECLEAR_NATIVE": "0"}
    done = subprocess.run(build, cwd=context, env=environment, capture_output=True, text=True, timeout=PATIENCE_SECONDS)
    assert done.returncode == 0, done.stderr
    assert list((context / "dist").glob("*.whl"))


def test_the_health_check_fails_where_nobody_answers(tmp_path: Path) -> None:
    done = health_check(f"unix:{tmp_path}/none.sock")
    assert done.returncode == 1
    assert "StatusCode.UNAVAILABLE" in done.stderr


@pytest.mark.parametrize(
    ("status", "expected"), [(HealthCheckResponse.SERVING, 0), (HealthCheckResponse.NOT_SERVING, 1)]
)
def test_the_health_check_believes_the_service_liveness(tmp_path: Path, status: int, expected: int) -> None:
    servicer = health.HealthServicer()
    servicer.set("liveness", status)
    server = grpc.server(futures.ThreadPoolExecutor(1))
    add_HealthServicer_to_server(servicer, server)
    assert server.add_insecure_port(f"unix:{tmp_path}/health.sock")
    server.start()
    try:
        assert health_check(f"unix:{tmp_path}/health.sock").returncode == expected
    finally:
        server.stop(None).wait(PATIENCE_SECONDS)
