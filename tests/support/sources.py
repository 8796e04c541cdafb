"""The source roots, and the imports and calls of a source file. Only the syntax is read; nothing is imported."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]
_NAMES = ("protos", "common", "scheduler_svc", "gpu_worker", "client", "tools", "embedded")
ROOTS = tuple(REPOSITORY / name for name in _NAMES)


def imports(source: str) -> Iterator[tuple[str, int]]:
    """Yield (module, line) for each absolute import, also those in functions and under TYPE_CHECKING."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from ((alias.name, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            yield node.module, node.lineno


def dotted(node: ast.AST) -> str:
    """Return "a.b.c" for the expression a.b.c, or ".c" if it starts with another kind of expression."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute):
        return f"{dotted(node.value)}.{node.attr}"
    return ""
