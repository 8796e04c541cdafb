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
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The unpacked wheel of this tree."""
    out = tmp_path_factory.mktemp("wheel")
    build = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(out)]
    subprocess.run(build, cwd=REPOSITORY, check=True, capture_output=True, timeout=PATIENCE_SECONDS)
    (archive,) = out.glob("*.whl")
    with zipfile.ZipFile(archive) as content:
        content.extractall(out / "content")
    return out / "content"


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


def test_licence_is_included(wheel: Path) -> None:
    (licence,) = wheel.glob("*.dist-info/licenses/LICENSE")
    assert "Apache License" in licence.read_text()
    assert metadata(wheel)["License-Expression"] == ["Apache-2.0"]


def test_bare_install_needs_grpc_and_protobuf_only(wheel: Path) -> None:
    bare = [r for r in metadata(wheel)["Requires-Dist"] if "extra ==" not in r]
    names = {r.split(">")[0].split("<")[0].split("=")[0].strip() for r in bare}
    assert names == {"googleapis-common-protos", "grpcio", "grpcio-status", "protobuf"}


@pytest.mark.parametrize("extra", ["cli", "scheduler"])
def test_torch_is_a_worker_dependency(wheel: Path, extra: str) -> None:
    wanted = [r for r in metadata(wheel)["Requires-Dist"] if f"extra == '{extra}'" in r]
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


def test_schema_imports_alone(wheel: Path) -> None:
    import_alone(wheel, "lineclear.v1.inference_pb2_grpc", present=BARE)


def test_client_imports_with_grpc_and_protobuf_only(wheel: Path) -> None:
    modules = "lineclear.client lineclear.errors lineclear.status_codec"
    import_alone(wheel, modules, present=BARE, absent="google.api lineclear.scheduler lineclear.worker")


def test_embedded_scheduler_imports_with_nothing_else(wheel: Path) -> None:
    import_alone(wheel, "lineclear.embedded", present="lineclear", absent="google grpc zmq torch")


def test_scheduler_imports_without_torch(wheel: Path) -> None:
    import_alone(wheel, modules_of(wheel, "scheduler"), absent="torch transformers lineclear.worker lineclear.client")


def test_worker_threads_import_without_torch(wheel: Path) -> None:
    modules = "lineclear.worker.runner_interface lineclear.worker.step_loop lineclear.worker.scheduler_link"
    import_alone(wheel, modules, absent="torch transformers grpc lineclear.scheduler lineclear.client")


def test_import_alone_hides_packages(wheel: Path) -> None:
    with pytest.raises(AssertionError, match="grpc is not installed here"):
        import_alone(wheel, "lineclear.v1.inference_pb2_grpc", absent="grpc")
