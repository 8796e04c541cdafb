"""The wheel: its files, its metadata, and imports from it without other packages."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
import tomllib
import zipfile
from email.parser import Parser
from pathlib import Path

import pytest
from support.sources import REPOSITORY, ROOTS
from support.time_limits import PATIENCE_SECONDS

# Runs in a new interpreter that finds the wheel and not the checkout. Imports of third-party modules fail for those in
# `absent`, or, where `present` is given, for all others.
IMPORT_ALONE = """
import importlib, sys
wheel, checkout = sys.argv[1:3]
modules, present, absent = (argument.split() for argument in sys.argv[3:])
sys.path[:] = [wheel, *(p for p in sys.path if not p.startswith(checkout) or "site-packages" in p)]

class Missing:
    def find_spec(self, name, path=None, target=None):
        top = name.split(".")[0]
        if top in sys.stdlib_module_names or not (name in absent or present and top not in present):
            return None
        raise ModuleNotFoundError(f"{name} is not installed here", name=name)

sys.meta_path.insert(0, Missing())
for name in modules:
    module = importlib.import_module(name)
    assert module.__file__.startswith(wheel), module.__file__
"""


@pytest.fixture(scope="module")
def archive(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel of this tree, without the CPU kernels, which take long to compile."""
    out = tmp_path_factory.mktemp("wheel")
    run("hatchling", "build", "-t", "wheel", "-d", out)
    (archive,) = out.glob("*.whl")
    return archive


@pytest.fixture(scope="module")
def wheel(archive: Path) -> Path:
    with zipfile.ZipFile(archive) as content:
        content.extractall(archive.parent / "content")
    return archive.parent / "content"


def run(*command: str | Path) -> None:
    """Run a module of Python without a network."""
    environment = os.environ | {"LINECLEAR_NATIVE": "0", "PIP_NO_INDEX": "1", "PIP_DISABLE_PIP_VERSION_CHECK": "1"}
    words = [sys.executable, "-m", *command]
    subprocess.run(words, cwd=REPOSITORY, env=environment, check=True, capture_output=True, timeout=PATIENCE_SECONDS)


@pytest.fixture(scope="module")
def bare(archive: Path) -> Path:
    """The programs of an environment with lineclear's wheel and nothing else."""
    venv = archive.parent / "venv"
    run("venv", "--without-pip", venv)
    run("pip", "--python", venv / "bin/python", "install", "-q", "--no-deps", "--no-compile", archive)
    return venv / "bin"


def metadata(wheel: Path) -> dict[str, list[str]]:
    (path,) = wheel.glob("*.dist-info/METADATA")
    parsed = Parser().parsestr(path.read_text())
    return {key: parsed.get_all(key, []) for key in ("Name", "Version", "Requires-Dist", "License-Expression")}


def import_alone(wheel: Path, modules: str, present: str = "", absent: str = "") -> None:
    """Import `modules` from the wheel with only `present`, or all but `absent`, installed."""
    command = [sys.executable, "-I", "-c", IMPORT_ALONE, str(wheel), str(REPOSITORY), modules, present, absent]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=PATIENCE_SECONDS, env={"PATH": os.environ["PATH"]}
    )
    assert done.returncode == 0, done.stderr


def modules_of(wheel: Path, package: str) -> str:
    folder = wheel / "lineclear" / package
    return " ".join(sorted(f"lineclear.{package}.{p.stem}" for p in folder.glob("*.py") if p.stem != "__init__"))


def test_wheel_contains_every_source(wheel: Path) -> None:
    for root in ROOTS:
        sources = [
            p.relative_to(root) for suffix in ("py", "pyi", "proto") for p in root.rglob(f"lineclear/**/*.{suffix}")
        ]
        assert len(sources) > 1
        assert [s for s in sources if not (wheel / s).is_file()] == []


def test_wheel_contains_nothing_else(wheel: Path) -> None:
    assert {p.name for p in wheel.iterdir() if not p.name.endswith(".dist-info")} == {"lineclear"}
    assert not list(wheel.rglob("__pycache__"))
    assert not (wheel / "lineclear/__init__.py").exists()


def test_packages_are_typed(wheel: Path) -> None:
    # The namespace carries one too, for the modules that lie in no package, such as lineclear.errors.
    packages = [wheel / "lineclear", *(p.parent for p in wheel.glob("lineclear/*/__init__.py"))]
    assert {p.name for p in packages} >= {"lineclear", "v1", "wire", "scheduler", "worker", "client"}
    assert [str(p) for p in packages if not (p / "py.typed").is_file()] == []


def test_metadata_has_licence_and_dependencies(wheel: Path) -> None:
    """A bare install needs gRPC and protobuf only, and only the worker needs torch."""
    (licence,) = wheel.glob("*.dist-info/licenses/LICENSE")
    assert "Apache License" in licence.read_text()
    found = metadata(wheel)
    assert found["License-Expression"] == ["Apache-2.0"]
    bare = [r for r in found["Requires-Dist"] if "extra ==" not in r]
    names = {r.split(">")[0].split("<")[0].split("=")[0].strip() for r in bare}
    assert names == {"googleapis-common-protos", "grpcio", "grpcio-status", "protobuf"}
    for extra in ("cli", "scheduler"):
        wanted = [r for r in found["Requires-Dist"] if f"extra == '{extra}'" in r]
        assert wanted
        assert not [r for r in wanted if r.startswith(("torch", "transformers", "lineclear[worker", "lineclear[all"))]


def test_commands_exist(wheel: Path) -> None:
    scripts = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]["scripts"]
    assert set(scripts) == {"lineclear", "lineclear-scheduler", "lineclear-worker"}
    for target in scripts.values():
        module, function = target.split(":")
        path = wheel / Path(*module.split("."))
        source = (path / "__init__.py" if path.is_dir() else path.with_suffix(".py")).read_text()
        bound = [getattr(s, "names", [s]) for s in ast.parse(source).body]  # an import binds several names
        assert function in {getattr(b, "asname", None) or getattr(b, "name", None) for names in bound for b in names}, (
            target
        )


# Top-level modules of the client's dependencies.
BARE = "lineclear grpc grpc_status google typing_extensions"


@pytest.mark.parametrize(
    ("modules", "present", "absent"),
    [
        ("lineclear.v1.inference_pb2_grpc", BARE, ""),
        (
            *("lineclear.client lineclear.errors lineclear.status_codec", BARE),
            "google.api lineclear.scheduler lineclear.worker",
        ),
        ("lineclear.embedded", "lineclear", "google grpc zmq torch"),
        ("lineclear.scheduler.*", "", "torch transformers lineclear.worker lineclear.client"),
        (
            *("lineclear.worker.loop.step_loop lineclear.worker.loop.scheduler_link", ""),
            "torch transformers grpc lineclear.scheduler lineclear.client",
        ),
    ],
    ids=["schema", "client", "embedded", "scheduler", "worker threads"],
)
def test_part_imports_without_the_others(wheel: Path, modules: str, present: str, absent: str) -> None:
    if modules == "lineclear.scheduler.*":
        modules = modules_of(wheel, "scheduler")
    import_alone(wheel, modules, present=present, absent=absent)


def test_import_alone_hides_packages(wheel: Path) -> None:
    with pytest.raises(AssertionError, match="grpc is not installed here"):
        import_alone(wheel, "lineclear.v1.inference_pb2_grpc", absent="grpc")


@pytest.mark.parametrize(
    ("command", "package", "extra"),
    [
        ("lineclear-scheduler", "structlog", "scheduler"),
        ("lineclear-worker", "structlog", "worker"),
        ("python -m lineclear.planner", "pydantic", "scheduler"),
        ("lineclear", "rich", "cli"),
    ],
)
def test_missing_package_prints_the_install_command(
    bare: Path, archive: Path, command: str, package: str, extra: str
) -> None:
    program, *words = command.split()
    done = subprocess.run([bare / program, *words, "--demo"], capture_output=True, text=True, timeout=PATIENCE_SECONDS)
    assert done.returncode == (2 if command == "lineclear" else 78)
    assert len(done.stderr.splitlines()) == 1, done.stderr
    assert package in done.stderr
    assert f"pip install 'lineclear[{extra}] @ {archive.as_uri()}'" in done.stderr
