"""The repository as a whole: no machine paths or secrets, versions written once, imports declared and pinned."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import threading
import tomllib
from collections.abc import Iterator, Sequence
from functools import cache
from importlib.metadata import packages_distributions
from pathlib import Path

import zmq
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from support.slow_tests import SLOW, TESTS
from support.sockets import bare_context
from support.sources import REPOSITORY, ROOTS, imports
from support.time_limits import PATIENCE_SECONDS

PROJECT = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]


@cache
def tracked() -> list[Path]:
    """Return the text files in git that exist."""
    return [p for p in listed() if not p.is_symlink() and b"\0" not in p.read_bytes()[:8192]]


def listed() -> list[Path]:
    """Return the files in git that exist."""
    command = ["git", "ls-files", "-z"]
    names = subprocess.run(command, cwd=REPOSITORY, check=True, capture_output=True, timeout=PATIENCE_SECONDS).stdout
    return [path for name in names.split(b"\0") if name and (path := REPOSITORY / os.fsdecode(name)).is_file()]


FOREIGN = [
    *(r"pypi\.org", r"pythonhosted\.org", r"registry\.npmjs", r"download\.pytorch\.org"),
    *(r"\bdocker\.io/", r"\bghcr\.io/", r"\bquay\.io/", r"\bnvcr\.io/"),
    *(f"--{flag}" for flag in ("index.url", "extra-index.url", "find-links", "trusted-host")),
    *(r"/(work|root)/", r"/opt/wheels", r"/home/\w", r"[A-Z]:\\Users"),
    # Keys that should never be written down.
    *("-----BEGIN [A-Z ]*PRIVATE KEY", r"\bAKIA[0-9A-Z]{16}\b", r"\bgh[pousr]_\w{36}\b", r"\bhf_\w{34}\b"),
]


def test_no_machine_registry_or_secret() -> None:
    pattern = re.compile("|".join(FOREIGN))
    found = [
        f"{path.relative_to(REPOSITORY)}:{number}: {match[0]}"
        for path in tracked()
        if path != Path(__file__)
        for number, line in enumerate(path.read_text(errors="replace").splitlines(), 1)
        if (match := pattern.search(line))
    ]
    assert found == []


def test_foreign_line_is_found() -> None:
    parts = (
        *(("https://py", "pi.org/simple"), ("pip --index-", "url x"), ("cd /", "work/main")),
        *(("/ho", "me/me/x"), ("C:\\Us", "ers\\me")),
    )  # so that this file has none of them
    for begin, end in parts:
        assert re.search("|".join(FOREIGN), begin + end)


def test_no_large_files() -> None:
    large = [p for p in listed() if p.stat().st_size > 1_000_000]
    assert [str(p) for p in large if p.relative_to(REPOSITORY).parts[0] != "demo"] == []


def test_version_is_written_once() -> None:
    """Code reads it with importlib.metadata; the tags of images equal it."""
    quoted = re.compile(rf"""["']{re.escape(PROJECT["version"])}["']|__version__\s*=\s*["']""")
    shipped = [p for p in tracked() if p.suffix == ".py" and any(p.is_relative_to(root) for root in ROOTS)]
    assert shipped
    assert [str(p) for p in shipped if quoted.search(p.read_text())] == []
    tags = re.compile(r"lineclear-(?:scheduler|worker):(\d[\w.]*\d)")
    found = {tag for p in tracked() if p.suffix in (".md", ".yaml") for tag in tags.findall(p.read_text())}
    assert found <= {PROJECT["version"]}


def declared(*extras: str) -> set[str]:
    """Return the distributions that the base and `extras` require, with the extras that those name."""
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
    """Yield (module, place) for each import of a third-party module in `paths`."""
    local = {p.name.split(".")[0] for folder in ("tests", "demo", "bench") for p in (REPOSITORY / folder).glob("*")}
    for path in paths:
        for module, line in imports(path.read_text()):
            top = module.split(".")[0]
            if top not in sys.stdlib_module_names | local | {"lineclear"} and not _is_beside(path, top):
                yield module, f"{path.relative_to(REPOSITORY)}:{line}"


def _is_beside(path: Path, module: str) -> bool:
    return (path.parent / f"{module}.py").exists() or (path.parent / module).is_dir()


# Modules that several distributions share, and modules imported only if they are installed.
DISTRIBUTION = {
    "google.rpc": "googleapis-common-protos",
    "google.protobuf": "protobuf",
    "smg_grpc_proto": "smg-grpc-proto",
}
OPTIONAL = {"triton", "flashinfer", "flash_attn", "lm_eval", "mkdocs"}


EXTRAS = {
    "protos/lineclear": ("scheduler", "worker"),
    "common": ("scheduler", "worker"),
    "scheduler_svc": ("scheduler", "gateway", "tracing"),
    "gpu_worker": ("worker",),
    "client/lineclear": ("cli",),
    "tools/lineclear/planner": ("scheduler",),
    "tools/lineclear/render": ("cli",),
    "embedded": (),
    **dict.fromkeys(("tests", "demo", "bench", "docs"), ("dev",)),
}
"""The extras of pyproject.toml whose packages each folder may import."""


def test_imports_are_declared() -> None:
    distributions, missing = packages_distributions(), []
    for folder, extras in EXTRAS.items():
        known = declared(*extras)
        paths = [p for p in tracked() if p.suffix == ".py" and p.is_relative_to(REPOSITORY / folder)]
        for module, place in third_party(paths):
            shared = {d for prefix, d in DISTRIBUTION.items() if module.startswith(prefix)}
            sources = shared or {canonicalize_name(d) for d in distributions.get(module.split(".")[0], [])}
            if not sources & known and module.split(".")[0] not in OPTIONAL:
                missing.append(f"{place}: {module}")
    assert missing == []


def pins() -> dict[str, str]:
    lines = (REPOSITORY / "constraints.txt").read_text().splitlines()
    return {canonicalize_name(n): v for n, _, v in (line.partition("==") for line in lines if not line.startswith("#"))}


def test_dependencies_are_pinned() -> None:
    found = pins()
    assert declared("dev") - set(found) == set()
    for name, version in found.items():
        assert re.fullmatch(r"\d[\w.]*", version), f"{name}=={version}"
    for text in (*PROJECT["dependencies"], *(r for e in PROJECT["optional-dependencies"].values() for r in e)):
        requirement = Requirement(text)
        if requirement.name != PROJECT["name"]:
            pin = found[canonicalize_name(requirement.name)]
            assert requirement.specifier.contains(pin, prereleases=True), f"{text}, but {pin} is pinned"


def run(words: Sequence[str | Path], environment: dict[str, str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(words, env=environment, capture_output=True, text=True, timeout=PATIENCE_SECONDS)


def test_unsent_message_does_not_block_exit() -> None:
    context = bare_context()
    sender = context.socket(zmq.PUSH)
    sender.connect("ipc:///nowhere/at/all.sock")
    sender.send(b"x")
    sender.close()
    ended = threading.Thread(target=context.term, daemon=True)
    ended.start()
    ended.join(PATIENCE_SECONDS)
    assert not ended.is_alive()


def test_sockets_are_made_in_one_place() -> None:
    tests = REPOSITORY / "tests"
    makes = re.compile(r"zmq\.(asyncio\.)?Context(\.instance)?\(")
    found = [str(p.relative_to(tests)) for p in sorted(tests.rglob("*.py")) if makes.search(p.read_text())]
    assert found == ["support/sockets.py"]


def test_slow_tests_exist_and_no_others_are_marked() -> None:
    """`make test-slow` imports the files of SLOW only."""
    marked = [p.name for p in TESTS.rglob("*.py") if re.search(r"mark\.slow\b", p.read_text())]
    assert marked == ["conftest.py"]
    for name in SLOW:
        file, _, function = name.partition("::")
        path = TESTS / file
        assert path.exists(), name
        assert f"def {function.partition('[')[0]}" in path.read_text() if function else True, name


def test_ci_fails_with_either_run(tmp_path: Path) -> None:
    """With a `make` whose targets do nothing but fail or not."""
    (tmp_path / ".ci").mkdir()
    shutil.copy(REPOSITORY / ".ci/run", tmp_path / ".ci/run")
    for first, second, is_good in (("true", "true", True), ("false", "true", False), ("true", "false", False)):
        (tmp_path / "Makefile").write_text(f"test:\n\t@echo quick; {first}\ntest-slow:\n\t@echo slow; {second}\n")
        environment = {name: value for name, value in os.environ.items() if not name.startswith(("MAKE", "MFLAGS"))}
        done = run([tmp_path / ".ci/run"], environment)
        assert ((done.returncode == 0), done.stdout.split()) == (is_good, ["quick", "slow"])


def test_make_names_the_python_it_needs(tmp_path: Path) -> None:
    """With a PATH that has only the tools that the Makefile itself uses."""
    for tool in ("sh", "sed", "test", "echo", "awk"):
        found = next((p for d in ("/bin", "/usr/bin") if (p := Path(d) / tool).exists()), None)
        if found:
            (tmp_path / tool).symlink_to(found)
    for name in ("Makefile", "constraints.txt", "pyproject.toml"):
        (tmp_path / name).write_bytes((REPOSITORY / name).read_bytes())
    make = next(str(p) for d in os.environ["PATH"].split(os.pathsep) if (p := Path(d) / "make").exists())
    done = run([make, "-C", str(tmp_path), "demo"], {"PATH": str(tmp_path)})
    assert done.returncode != 0
    assert "No Python >= 3.11" in done.stdout
    assert "make demo PYTHON=" in done.stdout
