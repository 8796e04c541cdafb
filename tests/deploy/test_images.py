"""Check the Dockerfiles with hadolint, and their users, layers, labels and health checks."""

from __future__ import annotations

import importlib.metadata
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
from support.sources import REPOSITORY
from support.time_limits import PATIENCE_SECONDS

PROJECT = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
DOCKERFILES = sorted((REPOSITORY / "deploy").glob("*.Dockerfile"))


@pytest.fixture(params=DOCKERFILES, ids=lambda p: p.name)
def dockerfile(request: pytest.FixtureRequest) -> Path:
    return request.param


def instructions(path: Path) -> list[tuple[str, str]]:
    """Return (instruction, arguments) of each logical line."""
    logical = re.sub(r"\\\n", " ", "\n".join(x for x in path.read_text().splitlines() if not x.startswith("#")))
    return [
        (word, " ".join(rest.split()))
        for word, _, rest in (line.partition(" ") for line in logical.splitlines() if line)
    ]


def final_stage(path: Path) -> list[tuple[str, str]]:
    found = instructions(path)
    return found[max(i for i, (word, _) in enumerate(found) if word == "FROM") :]


def test_hadolint_has_no_findings(dockerfile: Path) -> None:
    hadolint = Path(sys.executable).with_name("hadolint")
    found = subprocess.run(
        [hadolint, "--disable-ignore-pragma", dockerfile], capture_output=True, text=True, timeout=PATIENCE_SECONDS
    )
    assert (found.returncode, found.stdout) == (0, ""), found.stderr


def test_stop_signal_reaches_the_process(dockerfile: Path) -> None:
    """In the exec form; a shell would not forward SIGTERM."""
    (entry,) = (rest for word, rest in final_stage(dockerfile) if word == "ENTRYPOINT")
    (command,) = json.loads(entry)
    assert command == f"lineclear-{dockerfile.stem}"
    assert command in PROJECT["scripts"]


def test_image_user_is_that_of_the_manifests(dockerfile: Path) -> None:
    """The user is numeric, as runAsNonRoot requires, and owns the socket folder."""
    (user,) = (rest for word, rest in final_stage(dockerfile) if word == "USER")
    uid, gid = map(int, user.split(":"))
    assert 0 not in (uid, gid)
    compose = (REPOSITORY / "deploy/compose.yaml").read_text()
    assert f'user: "{user}"' in compose
    runs = [rest for word, rest in final_stage(dockerfile) if word == "RUN"]
    assert any(f"install --directory --owner={uid} --group={gid} --mode=0700 /run/lineclear " in run for run in runs)


def test_each_pip_install_is_constrained(dockerfile: Path) -> None:
    """By a variable of its stage or of its base stage."""
    stages: dict[str, set[str]] = {}
    variables: set[str] = set()
    installs = 0
    for word, rest in instructions(dockerfile):
        if word == "FROM":
            base, _, name = rest.partition(" AS ")
            variables = stages[name] = set(stages.get(base, ()))
        elif word == "ENV":
            variables |= {pair.partition("=")[0] for pair in rest.split()}
        elif word == "RUN" and re.search(r"pip\b.* install", rest):
            installs += 1
            assert "PIP_CONSTRAINT" in variables
            assert "--no-deps" not in rest or "PIP_BUILD_CONSTRAINT" in variables
    assert installs == 2


def test_only_the_worker_has_torch() -> None:
    scheduler, worker = (p.read_text().split("\n", 1)[1] for p in DOCKERFILES)
    assert "torch" not in scheduler
    pin = re.search(r"^torch==\S+$", (REPOSITORY / "constraints.txt").read_text(), re.MULTILINE)
    assert pin is not None
    assert f"ARG TORCH={pin[0]}\n" in worker


def test_worker_with_cuda_has_a_c_compiler() -> None:
    """For Triton. The command is run with programs that print what they are called with."""
    (run,) = (rest for word, rest in final_stage(DOCKERFILES[1]) if word == "RUN" and "gcc" in rest)
    script = 'rm() { :; }; apt-get() { echo "$@"; }; ' + run
    printed = [
        subprocess.run(
            ["/bin/bash", "-ec", script], env={"TORCH": torch}, capture_output=True, text=True, check=True
        ).stdout
        for torch in ("", "torch==2.13.0", "torch==2.13.0+cpu")
    ]
    assert printed[0] == printed[1] != ""
    assert "install --yes --no-install-recommends gcc=4:12.2.0-* libc6-dev=2.36-*" in printed[0]
    assert printed[2] == ""


def test_copied_files_are_in_the_build_context(dockerfile: Path) -> None:
    """.dockerignore admits only the files that the images copy."""
    admitted = {line[1:] for line in (REPOSITORY / ".dockerignore").read_text().splitlines() if line.startswith("!")}
    copied = {
        source
        for word, rest in instructions(dockerfile)
        if word == "COPY" and "--from" not in rest
        for source in rest.split()[:-1]
    }
    assert copied | {"deploy/health_check.py"} == admitted, "only the scheduler copies health_check.py"
    assert [name for name in copied if not (REPOSITORY / name).exists()] == []


def health_check(port: int) -> subprocess.CompletedProcess[str]:
    (check,) = (rest for word, rest in final_stage(DOCKERFILES[0]) if word == "HEALTHCHECK")
    command = json.loads(check[check.index("[") :])
    assert command[:4] == ["python3", "-I", "-S", "/opt/health_check.py"]
    assert command[5:] == ["50052"]
    script = REPOSITORY / "deploy/health_check.py"
    arguments = [sys.executable, "-I", "-S", script, command[4], str(port)]
    return subprocess.run(arguments, capture_output=True, text=True, timeout=PATIENCE_SECONDS)


@pytest.mark.parametrize("extra", ["scheduler", "worker"])
def test_dependency_layer_is_complete(extra: str) -> None:
    """The product is installed above this layer with --no-deps."""
    dockerfile = (REPOSITORY / f"deploy/{extra}.Dockerfile").read_text()
    assert f"requirements.py {extra} >" in dockerfile or f"ARG EXTRAS={extra}\n" in dockerfile
    script = REPOSITORY / "deploy/requirements.py"
    done = subprocess.run([sys.executable, script, extra], cwd=REPOSITORY, capture_output=True, text=True, check=True)
    required = importlib.metadata.requires("lineclear") or ()
    wanted = [line for line in required if f'extra == "{extra}"' in line or "extra ==" not in line]
    needed, listed = ({re.split(r"[\[>=<;]", line)[0] for line in of} for of in (wanted, done.stdout.splitlines()))
    assert needed - {"lineclear"} <= listed
    assert ("torch" in listed) == (extra == "worker")
    assert "lineclear" not in listed


def test_layers_and_labels(dockerfile: Path) -> None:
    """The product is above its dependencies, its modules are compiled, and the image has no pip."""
    found, final = instructions(dockerfile), final_stage(dockerfile)
    copies = [rest for word, rest in final if word == "COPY" and "--from" in rest]
    assert copies == ["--from=dependencies /opt/lineclear /opt/lineclear", "--from=product /opt/product /opt/product"]
    stages = [i for i, (word, _) in enumerate(found) if word == "FROM"]
    before = [rest for word, rest in found[: stages[1]] if word == "COPY"]
    assert before == ["constraints.txt pyproject.toml deploy/requirements.py ./"], (
        "source files would rebuild the layer"
    )
    runs = [rest for word, rest in found if word == "RUN"]
    assert all("--without-pip" in run for run in runs if " venv " in run)
    assert all("--compile" in run for run in runs if "pip" in run and " install " in run)
    assert any(run.endswith("bill_of_materials.py /opt/product/sbom.cdx.json") for run in runs)
    assert any("rm -rf /usr/local/bin/pip*" in rest for _, rest in final)
    (labels,) = (rest for word, rest in final if word == "LABEL")
    version = PROJECT["version"]
    for label in (f'title="lineclear-{dockerfile.stem}"', f'version="{version}"', 'licenses="Apache-2.0"'):
        assert f"org.opencontainers.image.{label}" in labels
    assert 'org.opencontainers.image.revision="${REVISION}"' in labels
    assert not re.search(r"x86|amd64|arm64|aarch64", dockerfile.read_text()), "images are for each architecture"


def test_copied_files_build_the_package(dockerfile: Path, tmp_path: Path) -> None:
    """Build the wheel from exactly the files that the image copies."""
    copies = [rest.split() for word, rest in instructions(dockerfile) if word == "COPY" and "--from" not in rest]
    context = tmp_path / "src"
    (context / "demo/model").mkdir(parents=True)  # as the Dockerfile does
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
    # Skip the CPU kernels, which take long to compile.
    environment = os.environ | {"LINECLEAR_NATIVE": "0"}
    done = subprocess.run(build, cwd=context, env=environment, capture_output=True, text=True, timeout=PATIENCE_SECONDS)
    assert done.returncode == 0, done.stderr
    assert list((context / "dist").glob("*.whl"))


@pytest.mark.parametrize(
    ("status", "expected"), [(HealthCheckResponse.SERVING, 0), (HealthCheckResponse.NOT_SERVING, 1), (None, 1)]
)
def test_health_check_follows_liveness(status: int | None, expected: int) -> None:
    servicer = health.HealthServicer()
    if status is not None:
        servicer.set("liveness", status)
    server = grpc.server(futures.ThreadPoolExecutor(1))
    add_HealthServicer_to_server(servicer, server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        assert health_check(port).returncode == expected
    finally:
        server.stop(None).wait(PATIENCE_SECONDS)
    done = health_check(port)
    assert (done.returncode, done.stderr[:11]) == (1, "no answer: ")


def test_health_check_imports_little() -> None:
    """The check runs every ten seconds."""
    code = "import sys; sys.argv = ['', '127.0.0.1', '1']; before = set(sys.modules); import health_check; "
    code += "print(sorted({name.partition('.')[0] for name in set(sys.modules) - before} - sys.stdlib_module_names))"
    done = subprocess.run([sys.executable, "-S", "-c", code], cwd=REPOSITORY / "deploy", capture_output=True, text=True)
    assert done.stdout == "['health_check']\n", done.stderr
