"""The pages: what is made from code is fresh, links lead somewhere, and what the README tells people to type works."""

from __future__ import annotations

import re
import shlex
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.buf import find_buf
from support.service import DEMO_MODEL, Service, running
from support.sources import ROOTS
from support.time_limits import PATIENCE_SECONDS

from lineclear.process import command_line
from lineclear.scheduler.flag_aliases import FLAG_ALIASES
from lineclear.scheduler.settings import SchedulerSettings
from lineclear.worker.settings import WorkerSettings

REPOSITORY = Path(__file__).parents[1]
PAGES = sorted(p for p in REPOSITORY.glob("**/*.md") if not {".venv", "node_modules"} & set(p.parts))
README = (REPOSITORY / "README.md").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def service() -> Iterator[Service]:
    with running() as service:
        yield service


@pytest.mark.parametrize("page", ["configuration.md", "exit-codes.md", "protocol.md", "reliability.md"])
def test_a_page_made_from_code_is_fresh(page: str, tmp_path: Path) -> None:
    subprocess.run(
        [sys.executable, REPOSITORY / "docs/generate.py", "--out", tmp_path], check=True, timeout=PATIENCE_SECONDS
    )
    fresh = (tmp_path / page).read_text(encoding="utf-8")
    assert fresh == (REPOSITORY / "docs" / page).read_text(encoding="utf-8"), "run: python docs/generate.py"


@pytest.mark.parametrize("page", PAGES, ids=lambda p: str(p.relative_to(REPOSITORY)))
def test_links_lead_somewhere(page: Path) -> None:
    links = re.findall(r"\]\(([^)#\s]+)\)", page.read_text(encoding="utf-8"))
    gone = [link for link in links if "://" not in link and not (page.parent / link).exists()]
    assert not gone


@pytest.mark.parametrize("page", ["life-of-a-request.md", "design.md"])
def test_every_file_that_is_named_exists(page: str) -> None:
    sources = {f"/{path.relative_to(root).as_posix()}" for root in ROOTS for path in root.rglob("*.py")}
    named = set(re.findall(r"`([\w./]+\.py)`", (REPOSITORY / "docs" / page).read_text(encoding="utf-8")))
    named -= {"lineclear/__init__.py"}  # named because it must not be there
    assert named
    gone = [n for n in named if not any(s.endswith(f"/{n}") for s in sources) and not (REPOSITORY / n).exists()]
    assert not gone


def test_flags_of_ours_beside_those_of_other_servers_exist() -> None:
    page = (REPOSITORY / "docs/coming-from.md").read_text(encoding="utf-8")
    rows = [line.split("|") for line in page.splitlines() if line.startswith("| `")]
    ours = {flag for row in rows for flag in re.findall(r"--[a-z-]+[a-z]", row[2])}
    fields = [*SchedulerSettings.model_fields, *WorkerSettings.model_fields]
    known = {f"--{no}{name.replace('_', '-')}" for name in fields for no in ("", "no-")}
    assert len(ours) > 10
    assert not ours - known
    there = {flag for row in rows for flag in re.findall(r"--[a-z-]+[a-z]", row[1])}
    assert not [f for f, o in FLAG_ALIASES.items() if f in there and o not in ours and f"--no-{o[2:]}" not in ours]


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", README, re.DOTALL)


def commands() -> list[str]:
    text = "".join(blocks("bash")).replace("\\\n", " ")
    return [line.split("#")[0].strip() for line in text.splitlines() if line.strip()]


def test_the_python_of_the_readme_runs(service: Service, capsys: pytest.CaptureFixture[str]) -> None:
    example, local = blocks("python")
    found: dict[str, object] = {}
    exec(compile(example.replace("127.0.0.1:50051", service.target), "README.md", "exec"), found)
    assert "Usage(" in capsys.readouterr().out
    answers = found["answers"]
    assert isinstance(answers, list)
    assert len(answers) == 2
    exec(compile(local.replace("/path/to/model", str(DEMO_MODEL)), "README.md", "exec"), {})
    assert len(capsys.readouterr().out) > 10


@pytest.mark.parametrize("command", [c for c in commands() if re.match(r"\.venv/bin/lineclear (generate \"|stats)", c)])
def test_commands_of_the_readme_run(command: str, service: Service) -> None:
    program, *words = shlex.split(command)
    lineclear = [str(Path(sys.executable).with_name(Path(program).name)), *words, "--target", service.target]
    done = subprocess.run(lineclear, capture_output=True, text=True, timeout=PATIENCE_SECONDS)
    assert done.returncode == 0, done.stderr
    assert "Paris" in done.stdout or "generate" not in words


def test_the_servers_flags_in_the_readme_are_those_of_the_process_they_are_given_to() -> None:
    found = {"scheduler": set[str](), "worker": set[str]()}
    for command in commands():
        words = command.split()
        if words[0] == ".venv/bin/lineclear-worker":
            found["worker"].update(words)
        elif words[0] == ".venv/bin/lineclear-scheduler" or words[:2] == [".venv/bin/lineclear", "serve"]:
            cut = words.index("--") if "--" in words else len(words)
            found["scheduler"].update(words[:cut])
            found["worker"].update(words[cut + 1 :])
    for process, settings in (("scheduler", SchedulerSettings), ("worker", WorkerSettings)):
        given = {word for word in found[process] if word.startswith("--")}
        assert len(given) >= 2
        assert given <= command_line.flag_names(settings.model_fields), process


def test_every_make_target_of_the_readme_exists() -> None:
    targets = {c.split()[1] for c in commands() if c.startswith("make ")}
    assert targets >= {"demo", "test"}
    makefile = (REPOSITORY / "Makefile").read_text(encoding="utf-8")
    assert not [t for t in targets if not re.search(rf"^{t}:", makefile, re.MULTILINE)]


def test_the_stubs_of_the_readme_are_made(tmp_path: Path) -> None:
    make, protoc = (c for c in commands() if c == "mkdir stubs" or "grpc_tools" in c)
    (tmp_path / "protos").symlink_to(REPOSITORY / "protos")
    script = f"{make} && {protoc.replace('.venv/bin/python', sys.executable)}"
    subprocess.run(script, shell=True, cwd=tmp_path, check=True, timeout=PATIENCE_SECONDS)
    made = {p.name for p in (tmp_path / "stubs/lineclear/v1").iterdir()}
    assert made == {f"{n}_pb2{g}.py" for n in ("inference", "sampling", "admin") for g in ("", "_grpc")}


def test_what_grpcurl_would_be_told_works_with_buf_curl() -> None:
    buf = find_buf()
    grpcurl = next(shlex.split(c) for c in commands() if c.startswith("grpcurl"))
    curl = next(shlex.split(c) for c in commands() if c.startswith("buf curl"))
    assert curl[curl.index("-d") + 1] == grpcurl[grpcurl.index("-d") + 1], "the two examples differ"
    assert curl[-1].removeprefix("http://") == "/".join(grpcurl[-2:])
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{probe.getsockname()[1]}"
    with running(listen=address) as service:
        words = [buf, *curl[1:-1], curl[-1].replace("127.0.0.1:50051", service.target)]
        done = subprocess.run(words, capture_output=True, text=True, timeout=PATIENCE_SECONDS)
    assert done.returncode == 0, done.stderr
    assert "Paris" in done.stdout
    assert "FINISH_REASON_LENGTH" in done.stdout
