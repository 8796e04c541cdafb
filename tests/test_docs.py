"""The pages: generated ones are fresh, links resolve, and the commands and code of the README work."""

from __future__ import annotations

import ast
import json
import os
import re
import runpy
import shlex
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import trustme
from support.npm import find_buf
from support.service import DEMO_MODEL, Service, running
from support.sources import ROOTS
from support.time_limits import PATIENCE_SECONDS

from lineclear.errors import tree
from lineclear.process.flag_aliases import names_of
from lineclear.process.setting_fields import flag_of
from lineclear.scheduler.grpc_api.request_reader import MAX_INCOMPLETE
from lineclear.scheduler.settings import SchedulerSettings
from lineclear.v1 import sampling_pb2
from lineclear.worker.model.verified_families import VERIFIED
from lineclear.worker.settings import WorkerSettings

REPOSITORY = Path(__file__).parents[1]
PAGES = sorted(p for p in REPOSITORY.glob("**/*.md") if not {".venv", "node_modules"} & set(p.parts))
README, QUICK_START, TUTORIALS = (
    (REPOSITORY / page).read_text(encoding="utf-8")
    for page in ("README.md", "docs/quick-start.md", "docs/tutorials.md")
)
SITE = runpy.run_path(str(REPOSITORY / "docs/mkdocs_hooks.py"))


@pytest.fixture(scope="module")
def service() -> Iterator[Service]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{probe.getsockname()[1]}"
    with running(listen=address) as service:
        yield service


def test_generated_pages_are_fresh(tmp_path: Path) -> None:
    command = [sys.executable, REPOSITORY / "docs/generate.py", "--out", tmp_path]
    subprocess.run(command, check=True, timeout=PATIENCE_SECONDS)
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    fresh = {path.relative_to(tmp_path).as_posix(): path.read_text(encoding="utf-8") for path in files}
    assert fresh.keys() >= {"configuration.md", "exit-codes.md", "protocol.md", "reliability.md", "images/speed.svg"}
    stale = [name for name, text in fresh.items() if text != (REPOSITORY / "docs" / name).read_text(encoding="utf-8")]
    assert stale == [], "run: python docs/generate.py"


def anchors(page: Path) -> set[str]:
    """Return the anchors of the headings, as code hosts and the site make them."""
    text = re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    headings = [re.sub(r"[`*]|\]\([^)]*\)", "", line) for line in re.findall(r"^#+ (.+)$", text, re.MULTILINE)]
    return {re.sub(r"[^\w\- ]", "", heading).strip().lower().replace(" ", "-") for heading in headings}


def broken_links(page: Path) -> list[str]:
    broken = []
    for file, anchor in re.findall(r"\]\(([^)#\s]*)(?:#([^)\s]*))?\)", page.read_text(encoding="utf-8")):
        if "://" in file or not (file or anchor):
            continue
        target = page.parent / file if file else page
        if not target.exists():
            broken.append(f"{page.name}: {file}")
        elif anchor and target.suffix == ".md" and anchor not in anchors(target):
            broken.append(f"{page.name}: {file}#{anchor}")
    return broken


def test_links_resolve(tmp_path: Path) -> None:
    assert [link for page in PAGES for link in broken_links(page)] == []
    page = tmp_path / "page.md"
    page.write_text("# A `b` c\n[a](page.md#a-b-c) [b](gone.md#part) [c](https://example.com) [d](#d) [e](#a-b-c)")
    assert broken_links(page) == ["page.md: gone.md", "page.md: #d"]


def test_pages_of_the_site() -> None:
    """Each page is in its navigation and in the index, and its links lead to pages or to files of the repository."""
    names = {page.name for page in (REPOSITORY / "docs").glob("*.md")}
    navigation = set(re.findall(r": ([\w-]+\.md)$", (REPOSITORY / "mkdocs.yml").read_text(), re.MULTILINE))
    assert navigation == names | set(SITE["PAGES"].values())
    index = (REPOSITORY / "docs/index.md").read_text()
    assert [name for name in names - {"index.md"} if f"({name}" not in index] == []


def test_links_of_the_site(monkeypatch: pytest.MonkeyPatch) -> None:
    text = "[a](../deploy/README.md#b) ![c](images/c.png) [d](client.md) [e](../tests/e.py) [f](#f) [g](https://g)"
    pages = "[a](deploy.md#b) ![c](images/c.png) [d](client.md) {} [f](#f) [g](https://g)"
    monkeypatch.delenv("LINECLEAR_REPOSITORY_URL", raising=False)
    assert SITE["rewrite"](text, "docs/page.md") == pages.format("e")
    monkeypatch.setenv("LINECLEAR_REPOSITORY_URL", "https://h/main/")
    assert SITE["rewrite"](text, "docs/page.md") == pages.format("[e](https://h/main/tests/e.py)")
    assert SITE["rewrite"]("[a](../docs/client.md)", "deploy/README.md") == "[a](client.md)"
    assert SITE["rewrite"]("[a](../README.md#two-commands)", "docs/page.md") == "[a](overview.md#two-commands)"


def logged_events(root: Path) -> Iterator[str]:
    for path in root.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and re.fullmatch(
                r"log\.(debug|info|warning|error)|write", ast.unparse(node.func)
            ):
                match node.args:
                    case [ast.Constant(value=str(event))]:
                        yield event


def test_log_events_are_listed() -> None:
    """docs/log-events.md has a row for each event, with the processes that log it."""
    page = (REPOSITORY / "docs/log-events.md").read_text(encoding="utf-8")
    listed = dict(re.findall(r"^\| `(\w+)` \| [\w, ]+ \| ([\w, ]+) \|", page, re.M))
    for root, process in (("scheduler_svc", "scheduler"), ("gpu_worker", "worker")):
        logged = set(logged_events(REPOSITORY / root))
        assert sorted(logged) == sorted(event for event, processes in listed.items() if process in processes)


def test_named_files_exist() -> None:
    sources = {f"/{path.relative_to(root).as_posix()}" for root in ROOTS for path in root.rglob("*.py")}
    for page in ("CONTRIBUTING.md", "docs/architecture.md", "docs/request-lifecycle.md"):
        named = set(re.findall(r"`([\w./]+\.py)`", (REPOSITORY / page).read_text(encoding="utf-8")))
        named -= {"lineclear/__init__.py", "attention/NAME.py"}
        assert named
        gone = [n for n in named if not any(s.endswith(f"/{n}") for s in sources) and not (REPOSITORY / n).exists()]
        assert gone == [], page


def one_line(page: str) -> str:
    return " ".join((REPOSITORY / page).read_text(encoding="utf-8").split())


def test_figures_of_the_pages_match_settings() -> None:
    """As in "`max_sessions_per_connection` sessions (64)"."""
    words = {"1 MiB": float(1 << 20), "an hour": 3600.0}
    settings = SchedulerSettings()
    defaults = {**settings.model_dump(), "max_message_bytes": settings.max_request_bytes}
    pages = ("README.md", "docs/reliability.md", "docs/security.md", "docs/protocol.md")
    found = [m for page in pages for m in re.findall(r"`([a-z_]+)`(?: \w+)? \(([^);]+)", one_line(page))]
    named = {name: words[value] if value in words else float(value) for name, value in found if name in defaults}
    assert len(named) >= 3
    assert named == {name: defaults[name] for name in named}
    security = one_line("docs/security.md")
    spare = settings.max_streams - settings.max_queue_size - settings.max_batch_size
    assert f"{spare} more calls than can wait and run ({settings.max_streams:,})" in security
    most = 2 * MAX_INCOMPLETE * 2 * settings.max_request_bytes + settings.max_streams * (64 << 10)
    assert f"takes at most {-(-most // (1 << 20))} MiB of a connection" in security
    assert f"The tests hold {len(VERIFIED)} model families to that." in one_line("README.md")


def test_migration_flags_exist() -> None:
    page = (REPOSITORY / "docs/migrating.md").read_text(encoding="utf-8")
    rows = [line.split("|") for line in page.splitlines() if line.startswith("| `")]
    ours = {flag for row in rows for flag in re.findall(r"--[a-z-]+[a-z]", row[2])}
    fields = [*SchedulerSettings.model_fields, *WorkerSettings.model_fields]
    known = {f"--{no}{name.replace('_', '-')}" for name in fields for no in ("", "no-")}
    assert len(ours) > 10
    assert not ours - known
    there = {flag for row in rows for flag in re.findall(r"--[a-z-]+[a-z]", row[1])}
    accepted = {flag_of(alias): flag_of(name) for name in fields for alias in names_of(name)[1:]}
    assert len(there & accepted.keys()) > 10
    assert not [f for f in there & accepted.keys() if not {accepted[f], f"--no-{accepted[f][2:]}"} & ours]


def blocks(language: str, text: str = README) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", text, re.DOTALL)


def commands(text: str = README) -> list[str]:
    lines = "".join(blocks("bash", text)).replace("\\\n", " ").splitlines()
    return [line.split("#")[0].strip() for line in lines if line.strip()]


def test_readme_python_runs(service: Service, capsys: pytest.CaptureFixture[str]) -> None:
    example, local = blocks("python")
    found: dict[str, object] = {}
    exec(compile(example.replace("127.0.0.1:50051", service.target), "README.md", "exec"), found)
    assert "Usage(" in capsys.readouterr().out
    answers = found["answers"]
    assert isinstance(answers, list)
    assert len(answers) == 2
    exec(compile(local.replace("/path/to/model", str(DEMO_MODEL)), "README.md", "exec"), {})
    assert len(capsys.readouterr().out) > 10


def test_client_page_python_runs(
    service: Service, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    page = (REPOSITORY / "docs" / "client.md").read_text(encoding="utf-8")
    examples = re.findall(r"^```python\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
    assert len(examples) >= 10
    monkeypatch.setenv("LINECLEAR_TARGET", service.target)
    monkeypatch.chdir(tmp_path)
    trustme.CA().cert_pem.write_to_path("ca.pem")
    Path("token").write_text("secret")
    for example in examples:
        exec(compile(example.replace("127.0.0.1:50051", service.target), "client.md", "exec"), {})
    printed = capsys.readouterr().out
    assert "['sampling.top_p']" in printed
    assert "failed" not in printed


def test_structured_output_page_runs(service: Service, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = (REPOSITORY / "docs" / "structured-output.md").read_text(encoding="utf-8")
    (example,) = re.findall(r"^```python\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
    code = compile(example.replace("127.0.0.1:50051", service.target), "page", "exec", dont_inherit=True)
    exec(code, {"__name__": "__main__"})
    *_, choice, year, total = capsys.readouterr().out.splitlines()
    assert choice in ("yes", "no")
    assert re.fullmatch("(19|20)[0-9]{2}", year)
    assert re.fullmatch(r"[0-9]{1,3}(\+[0-9]{1,3})+", total)
    (tmp_path / "schema.json").write_text(
        '{"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"]}'
    )
    for command in re.findall(r"^lineclear (generate .*)$", page, re.MULTILINE):
        words = shlex.split(command)
        lineclear = [str(Path(sys.executable).with_name("lineclear")), *words, "--target", service.target]
        done = subprocess.run(lineclear, capture_output=True, text=True, timeout=PATIENCE_SECONDS, cwd=tmp_path)
        assert done.returncode == 0, done.stderr
        answer = done.stdout.strip()
        assert answer in ("yes", "no") or re.fullmatch('(19|20)[0-9]{2}|{"a":[12].*', answer)


def test_client_page_names_every_error() -> None:
    page = (REPOSITORY / "docs" / "client.md").read_text(encoding="utf-8")
    table = page.partition("| errors | what to do |")[2].partition("\n\n")[0]
    named = re.findall(r"`([A-Z]\w+)`", table)
    assert set(named) >= {error.__name__ for error in tree()} - {"LineclearError"}


RUN = re.compile(r"\.venv/bin/lineclear (generate \"[^|]*$|stats|model)")


@pytest.mark.parametrize("command", dict.fromkeys(filter(RUN.match, commands(README + QUICK_START + TUTORIALS))))
def test_commands_of_the_pages_run(command: str, service: Service) -> None:
    program, *words = shlex.split(command)
    lineclear = [str(Path(sys.executable).with_name(Path(program).name)), *words, "--target", service.target]
    done = subprocess.run(lineclear, capture_output=True, text=True, timeout=PATIENCE_SECONDS)
    assert done.returncode == 0, done.stderr
    assert "Paris" in done.stdout or "generate" not in words


def test_the_quick_start_kills_the_worker_within_the_answer(
    service: Service, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However long the command needs to start."""
    (line,) = [command for command in commands(QUICK_START) if "pkill" in command]
    program, worker = Path(sys.executable).with_name("lineclear"), service.worker_pid
    for name, script in {"lineclear": f'sleep 2; exec {program} "$@"', "pkill": f"kill -9 {worker}"}.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{script}\n")
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setenv("LINECLEAR_TARGET", service.target)
    before = service.client.stats().counters.recomputed_tokens
    script = line.replace(".venv/bin/", "")
    subprocess.run(["bash", "-ec", script], check=True, timeout=PATIENCE_SECONDS, stdout=subprocess.DEVNULL)
    assert service.worker_pid != worker
    assert service.client.stats().counters.recomputed_tokens > before


@pytest.mark.parametrize(("heading", "out"), [("A file of prompts", "results.jsonl"), ("Embeddings", "vectors.jsonl")])
def test_tutorials_run(
    heading: str, out: str, service: Service, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LINECLEAR_TARGET", service.target)
    section = TUTORIALS.partition(f"\n## {heading}\n")[2].partition("\n## ")[0]
    lineclear = str(Path(sys.executable).with_name("lineclear"))
    script = "\n".join(commands(section)).replace(".venv/bin/lineclear", lineclear)
    subprocess.run(["bash", "-ec", script], check=True, timeout=PATIENCE_SECONDS, cwd=tmp_path)
    assert [json.loads(line)["index"] for line in (tmp_path / out).read_text().splitlines()] == [0, 1]
    for example in blocks("python", section):
        exec(compile(example.replace("127.0.0.1:50051", service.target), "tutorials.md", "exec"), {})


def test_flags_belong_to_their_process() -> None:
    found = {"scheduler": set[str](), "worker": set[str]()}
    for command in commands(README + QUICK_START + TUTORIALS):
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
        assert given <= set(map(flag_of, settings.model_fields)), process


def test_readme_make_targets_exist() -> None:
    targets = {c.split()[1] for c in commands() if c.startswith("make ")}
    assert targets >= {"demo", "test"}
    makefile = (REPOSITORY / "Makefile").read_text(encoding="utf-8")
    assert not [t for t in targets if not re.search(rf"^{t}:", makefile, re.MULTILINE)]


def test_readme_stubs_are_generated(tmp_path: Path) -> None:
    make, protoc = (c for c in commands() if c == "mkdir stubs" or "grpc_tools" in c)
    for root in ("protos", "third_party"):
        (tmp_path / root).symlink_to(REPOSITORY / root)
    script = f"{make} && {protoc.replace('.venv/bin/python', sys.executable)}"
    subprocess.run(script, shell=True, cwd=tmp_path, check=True, timeout=PATIENCE_SECONDS)
    made = {p.name for p in (tmp_path / "stubs/lineclear/v1").iterdir()}
    assert made == {f"{n}_pb2{g}.py" for n in ("inference", "sampling", "admin", "steps") for g in ("", "_grpc")}


def test_readme_grpcurl_example_works(service: Service) -> None:
    buf = find_buf()
    grpcurl = next(shlex.split(c) for c in commands() if c.startswith("grpcurl"))
    curl = next(shlex.split(c) for c in commands() if c.startswith("buf curl"))
    assert curl[curl.index("-d") + 1] == grpcurl[grpcurl.index("-d") + 1], "the two examples differ"
    assert curl[-1].removeprefix("http://") == "/".join(grpcurl[-2:])
    words = [buf, *curl[1:-1], curl[-1].replace("127.0.0.1:50051", service.target)]
    done = subprocess.run(words, capture_output=True, text=True, timeout=PATIENCE_SECONDS)
    assert done.returncode == 0, done.stderr
    assert "Paris" in done.stdout
    assert "FINISH_REASON_LENGTH" in done.stdout


def test_sampling_page_has_every_parameter() -> None:
    page = (REPOSITORY / "docs/sampling.md").read_text(encoding="utf-8")
    rows = [line.split("|")[1] for line in page.splitlines() if line.startswith("| `")]
    named = {name.split(".")[-1] for row in rows for name in re.findall(r"`([a-z_.]+)`", row)}
    schema = {*sampling_pb2.SamplingParams.DESCRIPTOR.fields_by_name}
    schema |= {*sampling_pb2.StopConditions.DESCRIPTOR.fields_by_name}
    assert schema - named == set()
    tests = set(re.findall(r"`([a-z0-9_]+/[a-z0-9_]+\.py)`", page)) - {
        "sampling/logit_changes.py",
        "sampling/truncation.py",
    }
    assert len(tests) > 8
    assert [test for test in tests if not (REPOSITORY / "tests" / test).exists()] == []
