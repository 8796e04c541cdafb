"""The repository as a whole: nothing is about one machine, versions are written once, what is used is declared."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import threading
import tomllib
from collections.abc import Iterator
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest
import zmq
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from support.sockets import bare_context
from support.sources import REPOSITORY, ROOTS, imports
from support.time_limits import PATIENCE_SECONDS

PROJECT = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]


def tracked() -> list[Path]:
    """Every file in git that is there and is text."""
    listed = subprocess.run(
        ["git", "ls-files", "-z"], cwd=REPOSITORY, check=True, capture_output=True, timeout=PATIENCE_SECONDS
    ).stdout
    paths = [REPOSITORY / os.fsdecode(name) for name in listed.split(b"\0") if name]
    return [p for p in paths if p.is_file() and not p.is_symlink() and b"\0" not in p.read_bytes()[:8192]]


# --- nothing about one machine -------------------------------------------------------------------------------------

FOREIGN = [
    *(r"pypi\.org", r"pythonhosted\.org", r"registry\.npmjs", r"download\.pytorch\.org"),
    *(r"\bdocker\.io/", r"\bghcr\.io/", r"\bquay\.io/", r"\bnvcr\.io/"),
    *(f"--{flag}" for flag in ("index.url", "extra-index.url", "find-links", "trusted-host")),
    *(r"/(work|root)/", r"/opt/wheels", r"/home/\w", r"[A-Z]:\\Users"),
    # Keys that should never be written down.
    *("-----BEGIN [A-Z ]*PRIVATE KEY", r"\bAKIA[0-9A-Z]{16}\b", r"\bgh[pousr]_\w{36}\b", r"\bhf_\w{34}\b"),
]


def test_no_machine_registry_or_secret_is_named() -> None:
    pattern = re.compile("|".join(FOREIGN))
    found = [
        f"{path.relative_to(REPOSITORY)}:{number}: {match[0]}"
        for path in tracked()
        if path != Path(__file__)
        for number, line in enumerate(path.read_text(errors="replace").splitlines(), 1)
        if (match := pattern.search(line))
    ]
    assert found == []


@pytest.mark.parametrize(
    "line", ["https://pypi~.org/simple", "pip --index~-url x", "cd /wo~rk/main", "/home/me/x", "C:\\Users\\me"]
)
def test_such_a_line_would_be_found(line: str) -> None:
    """A tilde keeps the line itself from being one."""
    assert re.search("|".join(FOREIGN), line.replace("~", ""))


def test_git_has_no_large_file_but_the_demonstration_model() -> None:
    listed = subprocess.run(
        ["git", "ls-files", "-z"], cwd=REPOSITORY, check=True, capture_output=True, timeout=PATIENCE_SECONDS
    ).stdout
    paths = [REPOSITORY / os.fsdecode(name) for name in listed.split(b"\0") if name]
    large = [p for p in paths if p.is_file() and p.stat().st_size > 1_000_000]
    assert [str(p) for p in large if p.relative_to(REPOSITORY).parts[0] != "demo"] == []


# --- written once --------------------------------------------------------------------------------------------------


def test_the_version_is_written_in_pyproject_alone() -> None:
    """Images and their README carry it as a tag (tests/deploy compares); code asks importlib.metadata."""
    quoted = re.compile(rf"""["']{re.escape(PROJECT["version"])}["']|__version__\s*=""")
    code = [p for p in tracked() if p.suffix == ".py" and p.is_relative_to(REPOSITORY)]
    shipped = [p for p in code if any(p.is_relative_to(root) for root in ROOTS)]
    assert len(shipped) > 20
    assert [str(p) for p in shipped if quoted.search(p.read_text())] == []


def test_the_version_in_the_pages_is_the_version() -> None:
    tags = re.compile(r"lineclear-(?:scheduler|worker):(\d[\w.]*\d)")
    found = {tag for p in tracked() if p.suffix in (".md", ".yaml") for tag in tags.findall(p.read_text())}
    assert found <= {PROJECT["version"]}


# --- what is used is declared, what is declared is pinned -----------------------------------------------------------


def declared(*extras: str) -> set[str]:
    """Distributions that the base and these extras name, with the extras they name in turn."""
    found: set[str] = set()
    todo = [*PROJECT["dependencies"], *(r for e in extras for r in PROJECT["optional-dependencies"][e])]
    while todo:
        requirement = Requirement(todo.pop())
        if requirement.name == PROJECT["name"]:
            todo += [r for e in requirement.extras for r in PROJECT["optional-dependencies"][e]]
        else:
            found.add(canonicalize_name(requirement.name))
    return found


def third_party(paths: list[Path]) -> Iterator[tuple[str, str]]:
    """(module, place) for each import in `paths` that is neither ours nor the standard library's."""
    local = {p.name.split(".")[0] for folder in ("tests", "demo", "bench") for p in (REPOSITORY / folder).glob("*")}
    for path in paths:
        for item in imports(path.read_text(), "ours.ours.ours.ours", is_package=False):
            top = item.names[0].split(".")[0]
            if top not in sys.stdlib_module_names | local | {"lineclear", "ours"} and not _is_beside(path, top):
                yield item.names[0], f"{path.relative_to(REPOSITORY)}:{item.line}"


def _is_beside(path: Path, module: str) -> bool:
    return (path.parent / f"{module}.py").exists() or (path.parent / module).is_dir()


# Modules that a distribution shares with others, and what is asked for only where it is there.
DISTRIBUTION = {"google.rpc": "googleapis-common-protos", "google.protobuf": "protobuf"}
OPTIONAL = {"triton", "flashinfer", "flash_attn"}


@pytest.mark.parametrize(
    ("folder", "extras"),
    [
        ("protos/lineclear", ("scheduler", "worker")),
        ("scheduler_svc", ("scheduler",)),
        ("gpu_worker", ("worker",)),
        ("client", ("cli",)),
        *(("tests", ("dev",)), ("demo", ("dev",)), ("bench", ("dev",)), ("docs", ("dev",))),
    ],
)
def test_what_is_imported_is_declared(folder: str, extras: tuple[str, ...]) -> None:
    known, distributions = declared(*extras), packages_distributions()
    paths = [p for p in tracked() if p.suffix == ".py" and p.is_relative_to(REPOSITORY / folder)]
    missing = []
    for module, place in third_party(paths):
        shared = {d for prefix, d in DISTRIBUTION.items() if module.startswith(prefix)}
        sources = shared or {canonicalize_name(d) for d in distributions.get(module.split(".")[0], [])}
        if not sources & known and module.split(".")[0] not in OPTIONAL:
            missing.append(f"{place}: {module}")
    assert missing == []


def pins() -> dict[str, str]:
    lines = (REPOSITORY / "constraints.txt").read_text().splitlines()
    return {canonicalize_name(n): v for n, _, v in (line.partition("==") for line in lines if not line.startswith("#"))}


def test_what_is_declared_is_pinned() -> None:
    assert declared("dev") - set(pins()) == set()


def test_pins_are_exact_and_allowed_by_pyproject() -> None:
    for name, version in pins().items():
        assert re.fullmatch(r"\d[\w.]*", version), f"{name}=={version}"
    for text in (*PROJECT["dependencies"], *(r for e in PROJECT["optional-dependencies"].values() for r in e)):
        requirement = Requirement(text)
        if requirement.name != PROJECT["name"]:
            pin = pins()[canonicalize_name(requirement.name)]
            assert requirement.specifier.contains(pin, prereleases=True), f"{text}, but {pin} is pinned"


# --- tests that end --------------------------------------------------------------------------------------------------


def test_what_a_test_did_not_send_keeps_nobody_waiting() -> None:
    """Of a socket that was closed in passing, with a message for somebody who never came."""
    context = bare_context()
    forgotten = context.socket(zmq.PUSH)
    forgotten.connect("ipc:///nowhere/at/all.sock")
    forgotten.send(b"x")
    forgotten.close()
    ended = threading.Thread(target=context.term, daemon=True)
    ended.start()
    ended.join(PATIENCE_SECONDS)
    assert not ended.is_alive()


def test_tests_make_their_sockets_in_one_place() -> None:
    tests = REPOSITORY / "tests"
    makes = re.compile(r"zmq\.(asyncio\.)?Context(\.instance)?\(")
    found = [str(p.relative_to(tests)) for p in sorted(tests.rglob("*.py")) if makes.search(p.read_text())]
    assert found == ["support/sockets.py"]


# --- the way in ----------------------------------------------------------------------------------------------------


def test_ci_runs_the_tests_and_ends() -> None:
    script = REPOSITORY / ".ci/run"
    assert os.access(script, os.X_OK)
    text = script.read_text()
    assert text.startswith("#!/usr/bin/env bash\n")
    assert "set -euo pipefail" in text
    assert re.search(r"timeout .*\d+ make test", text)


def test_make_names_its_targets() -> None:
    done = subprocess.run(["make", "help"], cwd=REPOSITORY, capture_output=True, text=True, timeout=PATIENCE_SECONDS)
    assert done.returncode == 0
    assert {"demo", "test", "serve", "lint", "format", "stubs", "clean"} <= set(re.findall(r"make (\w+)", done.stdout))


def test_make_says_which_python_it_needs(tmp_path: Path) -> None:
    """An empty PATH but for the tools that make itself uses."""
    for tool in ("sh", "sed", "test", "echo", "awk"):
        found = next((p for d in ("/bin", "/usr/bin") if (p := Path(d) / tool).exists()), None)
        if found:
            (tmp_path / tool).symlink_to(found)
    for name in ("Makefile", "constraints.txt", "pyproject.toml"):
        (tmp_path / name).write_bytes((REPOSITORY / name).read_bytes())
    make = next(str(p) for d in os.environ["PATH"].split(os.pathsep) if (p := Path(d) / "make").exists())
    done = subprocess.run(
        [make, "demo"],
        cwd=tmp_path,
        env={"PATH": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=PATIENCE_SECONDS,
    )
    assert done.returncode != 0
    assert "No Python >= 3.11" in done.stdout
    assert "make demo PYTHON=" in done.stdout
