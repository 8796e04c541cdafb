"""Who may import whom, and what nobody may do: the import rules of the design as a table.

A room is a set of modules with one job. The walk reads every import in the sources, also those inside functions and
under TYPE_CHECKING. What the wheel carries is tests/test_wheel.py's.
"""

from __future__ import annotations

import ast
import sys
from pathlib import Path
from typing import NamedTuple

import pytest
from support.sources import REPOSITORY, ROOTS, breaches, dotted, imports, module_name


class Room(NamedTuple):
    """`modules` (a name covers its submodules) may import the standard library, each other, and what is listed."""

    modules: tuple[str, ...]
    may_import: tuple[str, ...] = ()


SOURCES = [(root, path) for root in ROOTS for path in sorted((root / "lineclear").rglob("*.py"))]
MODULES = {module_name(path, root): path for root, path in SOURCES}
OURS = [p for folder in ("demo", "bench") for p in sorted((REPOSITORY / folder).rglob("*.py"))]

PROTOBUF = "google.protobuf"
SETTINGS = ("pydantic", "pydantic_settings", "lineclear.process.settings_base")
CONTRACT = ("lineclear.wire", "lineclear.errors", "lineclear.grpc_status", "lineclear.v1")
HOUSEKEEPING = (
    *(
        "lineclear.process.socket_dir",
        "lineclear.process.parent_death",
        "lineclear.process.logging_setup",
        "lineclear.process.command_line",
    ),
    *("lineclear.process.core_dumps", "lineclear.process.standby", "lineclear.exit_codes"),
)


def within(module: str, prefix: str) -> bool:
    return module == prefix or module.startswith(prefix + ".")


def target(names: tuple[str, ...]) -> str:
    """The longest reading of an import (see sources.Import) that is one of our modules is the one that is loaded."""
    return max((n for n in names if n in MODULES), key=len, default=names[0])


def reach(start: str, package: str) -> tuple[str, ...]:
    """`start` and all it imports, directly or not, within `package`."""
    found, todo = set(), [start]
    while todo:
        module = todo.pop()
        if module not in found and module in MODULES:
            found.add(module)
            path = MODULES[module]
            links = imports(path.read_text(), module, path.name == "__init__.py")
            todo += [t for link in links if within(t := target(link.names), package) and t != package]
    return tuple(sorted(found))


# What the core imports is core, so a clock cannot hide in a helper.
CORE = reach("lineclear.scheduler.core.scheduler", "lineclear.scheduler")

# The most specific entry that names a module is its room.
ROOMS = {
    "schema": Room(("lineclear.v1",), ("grpc", PROTOBUF)),
    "errors": Room(("lineclear.errors",)),
    "limits": Room(("lineclear.api_limits",)),
    "extras": Room(("lineclear.extras",)),
    "model folder": Room(("lineclear.model_files", "lineclear.model_files.directory_check")),
    "fingerprint": Room(("lineclear.model_files.fingerprint",)),
    "plan types": Room(("lineclear.wire", "lineclear.wire.messages")),
    "codec": Room(("lineclear.wire.codec", "lineclear.wire.v1"), (PROTOBUF, "lineclear.wire.messages")),
    "status": Room(("lineclear.grpc_status",), (PROTOBUF, "lineclear.errors", "lineclear.wire.v1")),
    "housekeeping": Room(("lineclear.process", *HOUSEKEEPING), ("structlog",)),
    "options": Room(
        ("lineclear.process.settings_base",), ("pydantic", "pydantic_settings", "lineclear.process.command_line")
    ),
    "core": Room(CORE, ("lineclear.errors", "lineclear.wire.messages")),
    # The engine's thread and the sockets know neither gRPC nor text.
    "engine": Room(
        ("lineclear.scheduler.engine",),
        ("structlog", *SETTINGS, "lineclear.scheduler", *CONTRACT, *HOUSEKEEPING),
    ),
    "scheduler link": Room(
        ("lineclear.scheduler.engine.worker_link",),
        ("zmq", "structlog", "lineclear.scheduler", *CONTRACT, *HOUSEKEEPING),
    ),
    "recording": Room(
        ("lineclear.scheduler.flight_recorder",), ("structlog", "lineclear.scheduler.core", *CONTRACT, *HOUSEKEEPING)
    ),
    "text": Room(
        ("lineclear.scheduler.text",),
        (
            *("tokenizers", "jinja2", "structlog", *SETTINGS, "lineclear.errors", "lineclear.api_limits"),
            "lineclear.model_files.fingerprint",
            *("lineclear.scheduler.settings", "lineclear.scheduler.model_dir", "lineclear.process.settings_base"),
        ),
    ),
    "security": Room(
        ("lineclear.scheduler.security",), ("grpc", "structlog", "lineclear.scheduler.settings", *CONTRACT)
    ),
    # Free of gRPC: what the services do with a request and its answer.
    "requests": Room(
        ("lineclear.scheduler.requests",),
        (
            *(PROTOBUF, "structlog", "lineclear.api_limits", "lineclear.model_files.fingerprint"),
            *("lineclear.scheduler.security", "lineclear.scheduler.core", "lineclear.scheduler.text"),
            *("lineclear.scheduler.settings", "lineclear.scheduler.engine.engine_stats"),
            *CONTRACT,
        ),
    ),
    "services": Room(
        ("lineclear.scheduler.grpc_api",),
        (
            *("grpc", "grpc_channelz", "grpc_health", "grpc_reflection", PROTOBUF, "structlog", "lineclear.api_limits"),
            *("prometheus_client", "lineclear.scheduler.requests", "lineclear.scheduler.metrics"),
            *("lineclear.scheduler.security", "lineclear.scheduler.core", "lineclear.scheduler.text"),
            *("lineclear.scheduler.addresses", "lineclear.scheduler.address_check", "lineclear.scheduler.settings"),
            "lineclear.scheduler.engine.engine_stats",
            *CONTRACT,
        ),
    ),
    "scheduler shell": Room(
        ("lineclear.scheduler",),
        (
            *(
                "grpc",
                "grpc_channelz",
                "grpc_health",
                "grpc_reflection",
                PROTOBUF,
                "uvloop",
                "prometheus_client",
                "structlog",
                "tokenizers",
                "jinja2",
            ),
            "lineclear.extras",
            "lineclear.model_files.directory_check",
            *(
                *SETTINGS,
                "lineclear.scheduler",
                "lineclear.api_limits",
                "lineclear.model_files.fingerprint",
                *CONTRACT,
                *HOUSEKEEPING,
            ),
        ),
    ),
    "worker link": Room(("lineclear.worker.scheduler_link",), ("zmq", "structlog", "lineclear.wire", *HOUSEKEEPING)),
    # The threads know the runner by its protocol alone, so that they run against a toy one without torch.
    "worker threads": Room(
        tuple(f"lineclear.worker.{name}" for name in ("result_collector", "heartbeat", "runner_interface")),
        ("structlog", "lineclear.worker.scheduler_link", "lineclear.wire", *HOUSEKEEPING),
    ),
    # Owns the sockets' context; what is done with a socket is in the link.
    "worker loop": Room(
        ("lineclear.worker.step_loop",),
        (
            *("zmq", "structlog", "lineclear.wire", *HOUSEKEEPING),
            *(
                f"lineclear.worker.{name}"
                for name in ("scheduler_link", "result_collector", "heartbeat", "runner_interface")
            ),
        ),
    ),
    "worker": Room(
        ("lineclear.worker",),
        (
            *("torch", "triton", "transformers", "huggingface_hub", "safetensors", "numpy", "structlog", *SETTINGS),
            "lineclear.extras",
            "lineclear.model_files.directory_check",
            *(
                "lineclear.worker",
                "lineclear.wire",
                "lineclear.errors",
                "lineclear.model_files.fingerprint",
                *HOUSEKEEPING,
            ),
        ),
    ),
    "client": Room(
        ("lineclear.client",),
        (
            *("grpc", PROTOBUF, "lineclear.v1", "lineclear.errors", "lineclear.api_limits", "lineclear.grpc_status"),
            *("lineclear.client.progress", "lineclear.extras"),
        ),
    ),
    # Uses rich where it is installed.
    "progress bar": Room(("lineclear.client.progress",), ("rich",)),
    "command line": Room(
        ("lineclear.cli",),
        (
            *("grpc", PROTOBUF, "typer", "rich", "lineclear.client", "lineclear.v1", "lineclear.errors"),
            *("lineclear.extras", "lineclear.grpc_status", "lineclear.exit_codes"),
        ),
    ),
}

# The core is a function of its calls: no clock, no chance, no I/O, no threads. A new entry here needs a reason why the
# same calls still give the same plans.
CORE_STDLIB = frozenset(
    {
        *("__future__", "abc", "collections", "contextlib", "dataclasses", "enum", "types", "typing"),
        *("array", "bisect", "functools", "hashlib", "heapq", "itertools", "math", "operator"),
    }
)
# hash() of a str differs between processes.
CORE_BANNED_CALLS = frozenset({"hash", "print", "open", "input"})


def room_of(module: str) -> str | None:
    """The room of a module: the longest prefix in the table decides."""
    entries = [(len(prefix), name) for name, room in ROOMS.items() for prefix in room.modules if within(module, prefix)]
    return max(entries)[1] if entries else None


def is_allowed(module: str, room: Room, names: tuple[str, ...]) -> bool:
    """May a module of `room` import this? `names` are the readings of one import, see sources.Import."""
    top = names[0].split(".")[0]
    if top in sys.stdlib_module_names:
        return top in CORE_STDLIB if room is ROOMS["core"] else True
    if top != "lineclear":
        return any(within(names[0], allowed) for allowed in room.may_import)
    module = target(names)
    if any(within(module, prefix) for prefix in room.may_import):
        return True
    return ROOMS.get(room_of(module) or "") is room


def test_the_table_covers_every_module() -> None:
    assert len(MODULES) > 20
    assert [m for m in MODULES if room_of(m) is None] == []


def test_the_core_is_the_part_that_decides() -> None:
    names = {module.rpartition(".")[2] for module in CORE}
    assert names >= {"scheduler", "sequence", "block_pool", "policies", "events"}
    assert not names & {"engine", "worker_link", "server", "inference_service", "settings", "output_stream"}


@pytest.mark.parametrize("module", sorted(MODULES))
def test_imports_stay_inside_the_room(module: str) -> None:
    path = MODULES[module]
    name = room_of(module)
    assert name is not None
    found = imports(path.read_text(), module, path.name == "__init__.py")
    strays = [
        f"{path}:{i.line}: {name} imports {i.names[0]}" for i in found if not is_allowed(module, ROOMS[name], i.names)
    ]
    assert strays == []


@pytest.mark.parametrize("path", [p for _, p in SOURCES] + OURS, ids=lambda p: str(p.relative_to(REPOSITORY)))
def test_nothing_forbidden_is_done(path: Path) -> None:
    assert breaches(path.read_text()) == []


@pytest.mark.parametrize("module", CORE)
def test_the_core_calls_nothing_that_differs_between_runs(module: str) -> None:
    path = MODULES[module]
    calls = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Call)]
    assert [f"{path}:{c.lineno}: {dotted(c.func)}()" for c in calls if dotted(c.func) in CORE_BANNED_CALLS] == []


def test_the_namespace_has_no_init_file() -> None:
    """One `lineclear/__init__.py` would hide the other three roots."""
    found = [p for p in REPOSITORY.rglob("lineclear/__init__.py") if ".venv" not in p.parts]
    assert found == []


# --- the walk itself: rules that never fire are no rules ------------------------------------------------------------


@pytest.mark.parametrize(
    ("module", "line"),
    [
        ("lineclear.v1.inference_pb2", "from lineclear.wire import messages"),
        ("lineclear.wire.messages", "import google.protobuf.message"),
        ("lineclear.wire.codec", "import grpc"),
        ("lineclear.errors", "import grpc"),
        ("lineclear.scheduler.core.scheduler", "import time"),
        ("lineclear.scheduler.core.scheduler", "import random"),
        ("lineclear.scheduler.core.scheduler", "import structlog"),
        ("lineclear.scheduler.core.scheduler", "from lineclear.wire import codec"),
        ("lineclear.scheduler.core.policies", "from lineclear.scheduler.engine import engine"),
        ("lineclear.scheduler.engine.engine", "import zmq"),
        ("lineclear.scheduler.engine.engine", "import grpc"),
        ("lineclear.scheduler.engine.worker_monitor", "import zmq"),
        ("lineclear.scheduler.grpc_api.inference_service", "from lineclear.scheduler.engine.engine import Engine"),
        ("lineclear.scheduler.requests.output_stream", "import torch"),
        ("lineclear.scheduler.requests.output_stream", "import zmq"),
        ("lineclear.scheduler.main", "from lineclear.worker import main"),
        ("lineclear.scheduler.main", "import lineclear.client"),
        ("lineclear.worker.step_loop", "import torch"),
        ("lineclear.worker.step_loop", "from lineclear.worker import model_runner"),
        ("lineclear.worker.step_loop", "def f():\n    from torch import nn"),
        ("lineclear.worker.model_runner", "import zmq"),
        ("lineclear.worker.model_runner", "import grpc.aio"),
        ("lineclear.worker.main", "import importlib\nimportlib.import_module('lineclear.scheduler.core.scheduler')"),
        ("lineclear.client", "import structlog"),
        ("lineclear.client", "from lineclear.wire.messages import Row"),
        ("lineclear.client", "import typer"),
        ("lineclear.client", "from lineclear.process import logging_setup"),
        ("lineclear.process.logging_setup", "import grpc"),
        ("lineclear.process.socket_dir", "from lineclear.scheduler.core import scheduler"),
        ("lineclear.client", "import google.rpc.status_pb2"),
    ],
)
def test_a_stray_import_is_seen(module: str, line: str) -> None:
    name = room_of(module)
    assert name is not None
    assert not all(is_allowed(module, ROOMS[name], i.names) for i in imports(line, module, is_package=False))


@pytest.mark.parametrize(
    "line",
    [
        *("import pickle", "from marshal import loads", "import dill as d", "socket.recv_pyobj()", "s.send_pyobj(x)"),
        *("torch.load(p)", "from torch import load", "eval('1')", "exec(code)", "time.time()", "from time import time"),
        *("os.fork()", "from os import fork", "multiprocessing.get_context('fork')", "__import__('x')", "yaml.load(f)"),
        *("f(trust_remote_code=True)", "run('ls', shell=True)", "class A:\n    def __reduce__(self): ..."),
    ],
)
def test_a_forbidden_thing_is_seen(line: str) -> None:
    assert breaches(line) != []


@pytest.mark.parametrize(
    "line", ["model.eval()", "time.monotonic()", "f(trust_remote_code=False)", "yaml.safe_load(f)"]
)
def test_a_harmless_thing_is_not(line: str) -> None:
    assert breaches(line) == []
