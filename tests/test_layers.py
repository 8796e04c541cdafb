"""Rules that import-linter and ruff cannot express: imports and calls of the core, and code from data.

The layers are contracts in pyproject.toml, [tool.importlinter]. Banned modules and functions are ruff's banned-api.
"""

from __future__ import annotations

import ast
import json
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import grimp
import pytest
from support.sources import REPOSITORY, ROOTS, dotted
from support.time_limits import PATIENCE_SECONDS

# The same calls give the same plans. A new entry needs a reason why that stays so.
CORE_IMPORTS = frozenset(
    {
        *("__future__", "abc", "collections", "contextlib", "dataclasses", "enum", "types", "typing"),
        *("array", "bisect", "functools", "hashlib", "heapq", "itertools", "math", "operator", "struct"),
        *("lineclear.errors", "lineclear.wire.messages"),
    }
)
CORE_BANNED_CALLS = frozenset({"hash", "print", "open", "input"})
"""hash() of a str differs between processes."""

SCHEDULER = "scheduler_svc/lineclear/scheduler"
VIOLATIONS = {
    "No import circle": (f"{SCHEDULER}/core/sequence", "from lineclear.scheduler.core import scheduler"),
    "Packages: processes and client, then what they share": (f"{SCHEDULER}/app", "import lineclear.client"),
    "Scheduler: app, gRPC, requests, engine, core": (
        f"{SCHEDULER}/core/policies",
        "from lineclear.scheduler import engine",
    ),
    "Worker: app, runner, model, attention, kernels": (
        "gpu_worker/lineclear/worker/device/huge_pages",
        "from lineclear.worker import app",
    ),
    "Client and CLI use the public schema only": (
        "client/lineclear/client/grpc_channel",
        "from lineclear.wire.messages import Row",
    ),
    "The embedded scheduler is the core and the standard library": (
        "embedded/lineclear/embedded/options",
        "import lineclear.scheduler.settings",
    ),
    "The client needs no command line library": ("client/lineclear/client/grpc_channel", "import typer"),
    "The core has no clock, randomness, I/O, thread or library": ("protos/lineclear/errors", "import time"),
    "Requests, engine, recorder and text have no gRPC": (f"{SCHEDULER}/requests/output_stream", "import grpc.aio"),
    "Services import nothing of the engine but its statistics": (
        f"{SCHEDULER}/grpc_api/server",
        "from lineclear.scheduler.engine.engine import Engine",
    ),
    "The scheduler needs no device library": (
        f"{SCHEDULER}/requests/output_stream",
        "def f():\n    from torch import nn",
    ),
    "The worker needs no gRPC": ("common/lineclear/wire/codec", "import grpc"),
    "The worker's threads need no torch": (
        "gpu_worker/lineclear/worker/loop/step_loop",
        "from lineclear.worker.runner import model_runner",
    ),
    "Only the two links and the step loop use ZeroMQ": (f"{SCHEDULER}/engine/engine", "import zmq"),
    "Messages, errors and limits have no dependencies": ("protos/lineclear/errors", "import grpc"),
}
"""For each contract a module and a line in it that breaks the contract."""

LINT_COPY = """
import json, pathlib, sys
copy, roots, violations = sys.argv[1], sys.argv[2].split(), json.loads(sys.argv[3])
others = [path for path in sys.path if pathlib.Path(path).name not in roots]  # an environment may name another checkout
sys.path[:] = [f"{copy}/{root}" for root in roots] + others
from importlinter.cli import lint_imports
for contract, (module, line) in violations.items():
    path = pathlib.Path(copy, module + ".py")
    text = path.read_text()
    path.write_text(text + line)
    print(f"{contract!r} is checked")
    lint_imports(no_cache=True)
    path.write_text(text)
"""


def test_each_contract_can_break(tmp_path: Path) -> None:
    for root in ROOTS:
        shutil.copytree(root, tmp_path / root.name, ignore=lambda _, names: [n for n in names if n.endswith(".so")])
    shutil.copy(REPOSITORY / "pyproject.toml", tmp_path)
    names = " ".join(root.name for root in ROOTS)
    command = [sys.executable, "-c", LINT_COPY, tmp_path, names, json.dumps(VIOLATIONS)]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=PATIENCE_SECONDS, check=True)
    kept = []
    for contract in VIOLATIONS:
        report = done.stdout.partition(f"{contract!r} is checked")[2].partition("is checked")[0]
        if f"{contract} BROKEN" not in report:
            kept.append(contract)
    assert kept == []
    contracts = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    assert {contract["name"] for contract in contracts} == VIOLATIONS.keys()


def test_core_imports_what_gives_equal_plans() -> None:
    graph = grimp.build_graph("lineclear", include_external_packages=True, cache_dir=None)
    core = {"lineclear.scheduler.core", *graph.find_descendants("lineclear.scheduler.core")}
    imported = {module for name in core for module in graph.find_modules_directly_imported_by(name)}
    assert imported - core - CORE_IMPORTS == set()


def test_core_calls_nothing_that_differs_between_runs() -> None:
    found = []
    for path in sorted((REPOSITORY / "scheduler_svc/lineclear/scheduler/core").glob("*.py")):
        calls = (node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Call))
        found += [f"{path.name}:{c.lineno}: {dotted(c.func)}()" for c in calls if dotted(c.func) in CORE_BANNED_CALLS]
    assert found == []


SUSPECT = re.compile("_pyobj|__reduce|__setstate__|__import__|trust_remote_code")
"""Occurs in each source of which `forbidden` yields something."""


def forbidden(source: str) -> Iterator[str]:
    """Yield "line: what" for each way to run code from data that ruff has no rule for."""
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.Attribute(attr="recv_pyobj" | "send_pyobj"):
                yield f"{node.lineno}: {node.attr}"
            case ast.FunctionDef(name="__reduce__" | "__reduce_ex__" | "__setstate__"):
                yield f"{node.lineno}: {node.name}"
            case ast.Call(func=ast.Name(id="__import__")):
                yield f"{node.lineno}: __import__"
            case ast.keyword(arg="trust_remote_code", value=ast.Constant(value=True)):
                yield f"{node.lineno}: trust_remote_code"


def test_nothing_runs_code_from_data() -> None:
    paths = [p for root in (*ROOTS, REPOSITORY / "demo", REPOSITORY / "bench") for p in sorted(root.rglob("*.py"))]
    suspects = {p: source for p in paths if SUSPECT.search(source := p.read_text())}
    assert [f"{p}:{what}" for p, source in suspects.items() for what in forbidden(source)] == []


@pytest.mark.parametrize(
    "line",
    [
        *("socket.recv_pyobj()", "s.send_pyobj(x)", "__import__('x')", "f(trust_remote_code=True)"),
        "class A:\n    def __reduce__(self): ...",
    ],
)
def test_code_from_data_is_found(line: str) -> None:
    assert SUSPECT.search(line)
    assert list(forbidden(line))
    assert not list(forbidden("f(trust_remote_code=False)"))


@pytest.mark.parametrize(
    "line",
    [
        *("import pickle", "from marshal import loads", "import dill as d", "import torch\ntorch.load(p)"),
        *("from torch import load", "eval('1')", "exec(code)", "import time\ntime.time()", "from time import time"),
        *("import os\nos.fork()", "from os import fork", "import multiprocessing", "import yaml\nyaml.load(f)"),
        *("import subprocess\nsubprocess.run('ls', shell=True)", "import importlib\nimportlib.import_module('x')"),
    ],
)
def test_ruff_bans(line: str) -> None:
    command = [sys.executable, "-m", "ruff", "check", "--stdin-filename=client/x.py", "--select=TID251,S", "-"]
    done = subprocess.run(
        command, input=line, cwd=REPOSITORY, capture_output=True, text=True, timeout=PATIENCE_SECONDS, check=False
    )
    assert done.returncode == 1, done.stdout + done.stderr


def test_namespace_has_no_init_file() -> None:
    """A `lineclear/__init__.py` in one source root hides the others."""
    assert [root for root in ROOTS if (root / "lineclear/__init__.py").exists()] == []
