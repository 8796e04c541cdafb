"""Mutation operators on the syntax tree of a function, class or module, and `planted`, which plants the result.

An operator names its place by a pattern in Python: a statement or an expression, compared as syntax trees, so that
format and comments do not matter. In a pattern `_` matches any expression, `_1` to `_9` match and capture one, and
`f(...)` matches a call with any arguments. In a replacement `_0` is the whole match. An operator whose pattern does not
match exactly as often as it says is an error, and not a silent pass.
"""

from __future__ import annotations
import __future__

import ast
import copy
import inspect
import re
import sys
import textwrap
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import pairwise
from types import ModuleType
from typing import Any, NamedTuple
from unittest.mock import patch

from lineclear.scheduler.core import policies

Operator = Callable[[ast.AST], None]
"""Changes a tree in place. AssertionError unless its pattern matches as often as it says."""

Bugs = dict[Any, dict[str, Operator]]
"""Bugs by title, by class or module of the product, or by function where several have what the pattern names."""

_WILDCARD = re.compile(r"_\d?")
_OPPOSITE_BOUNDARY = {ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt}


@dataclass(frozen=True)
class Bug:
    """One change of `target`: a module, a class, a function, a method or a property of the product."""

    title: str
    target: Any
    operator: Operator


class Change(NamedTuple):
    """A function of the product, and what takes its place."""

    owners: list[Any]
    """Its class, or the modules that have it."""
    name: str
    original: Any
    mutant: Any


# --- operators ------------------------------------------------------------------------------------------------------


def replace(old: str, new: str, role: str = "", times: int = 1) -> Operator:
    """Replace a statement or expression; with `role`, only where its parent has it as that field ("test", "iter")."""
    pattern, replacement = _parsed(old), _parsed(new)
    if isinstance(pattern, ast.stmt) and isinstance(replacement, ast.expr):
        replacement = ast.Expr(replacement)

    def make(node: ast.AST, captures: dict[int, ast.AST]) -> ast.AST:
        return _filled(replacement, {0: node, **captures})

    return lambda tree: _rewrite(tree, pattern, make, role, times)


def drop(statement: str, times: int = 1, after: str = "") -> Operator:
    """Replace a statement by `pass`; with `after`, only where it follows that statement."""
    (pattern,) = ast.parse(statement).body
    before = ast.parse(after).body[0] if after else None
    return lambda tree: _rewrite(tree, pattern, lambda node, captures: ast.Pass(), times=times, after=before)


def twice(statement: str) -> Operator:
    (pattern,) = ast.parse(statement).body

    def run_twice(node: ast.AST, captures: dict[int, ast.AST]) -> ast.AST:
        assert isinstance(node, ast.stmt)
        return ast.If(ast.Constant(True), [copy.deepcopy(node), copy.deepcopy(node)], [])

    return lambda tree: _rewrite(tree, pattern, run_twice)


def always(condition: str, role: str = "") -> Operator:
    """Take a condition for true."""
    return replace(condition, "True", role)


def never(condition: str, role: str = "") -> Operator:
    """Take a condition for false."""
    return replace(condition, "False", role)


def off_by_one(expression: str, by: int = 1) -> Operator:
    """Add `by` to an expression."""
    return replace(expression, f"_0 + {by}")


def boundary(comparison: str) -> Operator:
    """Include the boundary of a comparison, or exclude it: `<` becomes `<=`, `>=` becomes `>`."""

    def moved(node: ast.AST, captures: dict[int, ast.AST]) -> ast.AST:
        assert isinstance(node, ast.Compare)
        (operator,) = node.ops
        return ast.Compare(node.left, [_OPPOSITE_BOUNDARY[type(operator)]()], node.comparators)

    return lambda tree: _rewrite(tree, _parsed(comparison), moved)


def swap(name: str, other: str) -> Operator:
    """Call another function."""
    return replace(name, other, role="func")


def without(operand: str) -> Operator:
    """Drop an operand of `and`, `or` or `+`."""
    pattern = _parsed(operand)

    class Remover(ast.NodeTransformer):
        count = 0

        def visit_BoolOp(self, node: ast.BoolOp) -> ast.AST:
            self.generic_visit(node)
            values = [value for value in node.values if not _matches(pattern, value, {})]
            self.count += len(node.values) - len(values)
            return values[0] if len(values) == 1 else ast.BoolOp(node.op, values)

        def visit_BinOp(self, node: ast.BinOp) -> ast.AST:
            self.generic_visit(node)
            if isinstance(node.op, ast.Add) and _matches(pattern, node.left, {}):
                self.count += 1
                return node.right
            return node

    def apply(tree: ast.AST) -> None:
        remover = Remover()
        remover.visit(tree)
        _require_matches(remover.count, 1)

    return apply


# --- patterns -------------------------------------------------------------------------------------------------------


def _parsed(code: str) -> ast.AST:
    """Return a statement, or the expression of an expression statement."""
    (node,) = ast.parse(code).body
    return node.value if isinstance(node, ast.Expr) else node


def _wildcard(node: Any) -> str | None:
    return node.id if isinstance(node, ast.Name) and _WILDCARD.fullmatch(node.id) else None


def _matches(pattern: Any, node: Any, captures: dict[int, ast.AST]) -> bool:
    if isinstance(pattern, list):
        return (
            isinstance(node, list)
            and len(pattern) == len(node)
            and all(_matches(p, n, captures) for p, n in zip(pattern, node, strict=True))
        )
    if not isinstance(pattern, ast.AST):
        return bool(pattern == node)
    if (name := _wildcard(pattern)) is not None:
        if name != "_":
            captures[int(name[1:])] = node
        return isinstance(node, ast.expr)
    if type(pattern) is not type(node):
        return False
    fields = [field for field in pattern._fields if field not in ("ctx", "type_comment", "kind")]
    if isinstance(pattern, ast.Call) and [ast.unparse(argument) for argument in pattern.args] == ["..."]:
        fields = ["func"]
    return all(_matches(getattr(pattern, field), getattr(node, field), captures) for field in fields)


def _rewrite(
    tree: ast.AST,
    pattern: ast.AST,
    make: Callable[[ast.AST, dict[int, ast.AST]], ast.AST],
    role: str = "",
    times: int = 1,
    after: ast.AST | None = None,
) -> None:
    """Replace every match of `pattern` in `tree`, outermost first."""
    count = 0

    def visit(node: ast.AST) -> None:
        for field, value in ast.iter_fields(node):
            if isinstance(value, list):
                value[:] = [changed(item, field, before) for before, item in pairwise([None, *value])]
            elif isinstance(value, ast.AST):
                setattr(node, field, changed(value, field, None))

    def changed(node: Any, field: str, before: Any) -> Any:
        nonlocal count
        captures: dict[int, ast.AST] = {}
        if isinstance(node, ast.AST):
            is_place = role in ("", field) and (after is None or _matches(after, before, {}))
            if is_place and _matches(pattern, node, captures):
                count += 1
                return make(node, captures)
            visit(node)
        return node

    visit(tree)
    _require_matches(count, times)


def _require_matches(count: int, times: int) -> None:
    assert count == times, f"{count} matches of the pattern and not {times}"


def _filled(replacement: ast.AST, captures: dict[int, ast.AST]) -> ast.AST:
    class Filler(ast.NodeTransformer):
        def visit_Name(self, node: ast.Name) -> ast.AST:
            name = _wildcard(node)
            return node if name is None else copy.deepcopy(captures[int(name[1:])])

    filled: ast.AST = Filler().visit(copy.deepcopy(replacement))
    return filled


# --- planting -------------------------------------------------------------------------------------------------------


def mutate(bug: Bug) -> list[Change]:
    """Return the functions that the bug changes. AssertionError where the operator does not find its place."""
    target = bug.target.fget if isinstance(bug.target, property) else bug.target
    module = target if inspect.ismodule(target) else sys.modules[target.__module__]
    scope = "" if inspect.ismodule(target) else target.__qualname__.rpartition(".")[0]
    tree = ast.parse(textwrap.dedent(inspect.getsource(target)))
    before = {path: ast.unparse(node) for path, node in _functions(tree, scope)}
    bug.operator(tree)
    changed = [(path, node) for path, node in _functions(tree, scope) if ast.unparse(node) != before[path]]
    assert changed, f"all functions are as before: {bug.title}"
    return [_change(bug.title, module, path, node) for path, node in changed]


def _functions(tree: ast.Module | ast.ClassDef, scope: str) -> Iterator[tuple[str, ast.FunctionDef]]:
    """Yield the functions and methods of `tree` with their qualified names."""
    for node in tree.body:
        match node:
            case ast.FunctionDef():
                yield f"{scope}.{node.name}".lstrip("."), node
            case ast.ClassDef():
                yield from _functions(node, f"{scope}.{node.name}".lstrip("."))
            case _:
                pass


def _change(title: str, module: ModuleType, path: str, node: ast.FunctionDef) -> Change:
    node.decorator_list = []
    code = ast.fix_missing_locations(ast.Module([node], []))
    scope: dict[str, Any] = {}
    flags = __future__.annotations.compiler_flag
    exec(compile(code, f"<planted: {title}>", "exec", flags, dont_inherit=True), vars(module), scope)
    *classes, name = path.split(".")
    owner: Any = module
    for each in classes:
        owner = vars(owner)[each]
    original, mutant = vars(owner)[name], scope[name]
    if isinstance(original, property | staticmethod | classmethod):
        mutant = type(original)(mutant)
    return Change([owner] if classes else _modules_with(name, original), name, original, mutant)


def _modules_with(name: str, function: Any) -> list[Any]:
    """Return the module of a function and those of the product that import it by name."""
    modules = [module for key, module in sys.modules.items() if key.startswith("lineclear.")]
    return [module for module in modules if vars(module).get(name) is function]


@contextmanager
def planted(bug: Bug) -> Iterator[None]:
    """Run the block with the bug in the product."""
    changes = mutate(bug)
    with ExitStack() as undo:
        for change in changes:
            for owner in change.owners:
                undo.enter_context(patch.object(owner, change.name, change.mutant))
            for key, policy in list(policies.PREEMPTION_POLICIES.items()):
                if policy is change.original:
                    undo.enter_context(patch.dict(policies.PREEMPTION_POLICIES, {key: change.mutant}))
        yield
