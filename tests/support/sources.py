"""Source files as data: what they import, and which forbidden things they do. The rooms are tests/test_layers.py's.

Only the syntax is read; nothing is imported.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

REPOSITORY = Path(__file__).resolve().parents[2]
ROOTS = tuple(REPOSITORY / name for name in ("protos", "common", "scheduler_svc", "gpu_worker", "client"))

BANNED_MODULES = frozenset({"pickle", "cPickle", "marshal", "shelve", "dill", "cloudpickle", "joblib"})
"""They run code from data."""

# An attribute counts whatever it hangs on: `socket.recv_pyobj`, `os.fork`.
BANNED_ATTRIBUTES = frozenset({"recv_pyobj", "send_pyobj", "fork", "forkpty"})
BANNED_CALLS = frozenset({"eval", "exec", "__import__"})
# The wall clock jumps; a duration or a deadline measured with it is wrong twice a year.
BANNED_DOTTED = frozenset({"torch.load", "yaml.load", "time.time", "time.time_ns"})


class Import(NamedTuple):
    """One imported module, absolute. For `from a.b import c` both a.b and a.b.c are named: c may be a module."""

    names: tuple[str, ...]
    line: int


def module_name(path: Path, root: Path) -> str:
    """lineclear.wire.codec for <root>/lineclear/wire/codec.py."""
    parts = path.relative_to(root).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imports(source: str, module: str, is_package: bool) -> Iterator[Import]:
    """Every import anywhere in the source: in functions, under TYPE_CHECKING, and import_module("literal")."""
    package = module.split(".") if is_package else module.split(".")[:-1]
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield Import((alias.name,), node.lineno)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            origin = ".".join([*base, *(node.module or "").split(".")]).strip(".")
            for alias in node.names:
                yield Import((origin, f"{origin}.{alias.name}"), node.lineno)
        elif isinstance(node, ast.Call) and dotted(node.func).split(".")[-1] == "import_module":
            literal = node.args[0] if node.args else None
            if isinstance(literal, ast.Constant) and isinstance(literal.value, str):
                yield Import((literal.value,), node.lineno)


def dotted(node: ast.AST) -> str:
    """a.b.c for the expression a.b.c; the known tail of it where the head is something else."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute):
        return f"{dotted(node.value)}.{node.attr}"
    return ""


def breaches(source: str) -> list[str]:
    """Forbidden things a source does, each as "line: what"; empty when it does none."""
    return [f"{node.lineno}: {what}" for node in ast.walk(ast.parse(source)) for what in _breach(node)]  # type: ignore[attr-defined]


def _breach(node: ast.AST) -> Iterator[str]:
    match node:
        case ast.Import(names=names):
            yield from (f"import {n.name}" for n in names if n.name.split(".")[0] in BANNED_MODULES)
        case ast.ImportFrom(module=str(module), names=names, level=0):
            if module.split(".")[0] in BANNED_MODULES:
                yield f"import {module}"
            yield from (f"{module}.{n.name}" for n in names if f"{module}.{n.name}" in BANNED_DOTTED)
            yield from (f"{module}.{n.name}" for n in names if n.name in BANNED_ATTRIBUTES)
        case ast.Attribute(attr=attr):
            if attr in BANNED_ATTRIBUTES or dotted(node) in BANNED_DOTTED:
                yield dotted(node)
        case ast.FunctionDef(name="__reduce__" | "__reduce_ex__" | "__setstate__"):
            yield f"def {node.name}"
        case ast.Call(func=func, args=args, keywords=keywords):
            if isinstance(func, ast.Name) and func.id in BANNED_CALLS:
                yield f"{func.id}()"
            if dotted(func).split(".")[-1] in ("get_context", "set_start_method"):
                # A forked child inherits locks that other threads hold: gRPC and CUDA both hang in it.
                yield from ("start method fork" for a in args if isinstance(a, ast.Constant) and a.value == "fork")
            for keyword in keywords:
                if keyword.arg in ("shell", "trust_remote_code") and _is_true(keyword.value):
                    yield f"{keyword.arg}=True"


def _is_true(node: ast.AST) -> bool:
    return isinstance(node, ast.Constant) and bool(node.value)
