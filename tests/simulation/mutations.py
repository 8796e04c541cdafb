"""Mutation operators on the syntax tree of one function, and `planted`, which puts the result in the function's place.

An operator names its target by a pattern in Python: a statement or an expression, compared as syntax trees, so that
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
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from lineclear.scheduler.core import policies

Operator = Callable[[ast.FunctionDef], None]
"""Changes a function in place. AssertionError unless its pattern matches as often as it says."""

Bugs = dict[Any, dict[str, Operator]]
"""By function of the product: its bugs by title."""

_WILDCARD = re.compile(r"_\d?")
_OPPOSITE_BOUNDARY = {ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt}


@dataclass(frozen=True)
class Bug:
    """One change of `function`: a function, a method or a property of the product."""

    title: str
    function: Any
    operator: Operator


# --- operators ------------------------------------------------------------------------------------------------------


def replace(old: str, new: str, role: str = "", times: int = 1) -> Operator:
    """Replace a statement or expression; with `role`, only where its parent has it as that field ("test", "iter")."""
    pattern, replacement = _parsed(old), _parsed(new)
    if isinstance(pattern, ast.stmt) and isinstance(replacement, ast.expr):
        replacement = ast.Expr(replacement)

    def make(node: ast.AST, captures: dict[int, ast.AST]) -> ast.AST:
        return _filled(replacement, {0: node, **captures})

    return lambda function: _rewrite(function, pattern, make, role, times)


def drop(statement: str, times: int = 1) -> Operator:
    """Replace a statement by `pass`."""
    (pattern,) = ast.parse(statement).body
    return lambda function: _rewrite(function, pattern, lambda node, captures: ast.Pass(), times=times)


def twice(statement: str) -> Operator:
    """Run a statement twice."""
    (pattern,) = ast.parse(statement).body

    def run_twice(node: ast.AST, captures: dict[int, ast.AST]) -> ast.AST:
        assert isinstance(node, ast.stmt)
        return ast.If(ast.Constant(True), [copy.deepcopy(node), copy.deepcopy(node)], [])

    return lambda function: _rewrite(function, pattern, run_twice)


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

    return lambda function: _rewrite(function, _parsed(comparison), moved)


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

    def apply(function: ast.FunctionDef) -> None:
        remover = Remover()
        remover.visit(function)
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
    function: ast.FunctionDef,
    pattern: ast.AST,
    make: Callable[[ast.AST, dict[int, ast.AST]], ast.AST],
    role: str = "",
    times: int = 1,
) -> None:
    """Replace every match of `pattern` below `function`, outermost first."""
    count = 0

    def visit(node: ast.AST) -> None:
        for field, value in ast.iter_fields(node):
            if isinstance(value, list):
                value[:] = [changed(item, field) for item in value]
            elif isinstance(value, ast.AST):
                setattr(node, field, changed(value, field))

    def changed(node: Any, field: str) -> Any:
        nonlocal count
        captures: dict[int, ast.AST] = {}
        if isinstance(node, ast.AST):
            if role in ("", field) and _matches(pattern, node, captures):
                count += 1
                return make(node, captures)
            visit(node)
        return node

    visit(function)
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


def mutate(bug: Bug) -> Any:
    """Return the function with the bug in it. AssertionError where the operator does not find its target."""
    function = bug.function.fget if isinstance(bug.function, property) else bug.function
    (tree,) = ast.parse(textwrap.dedent(inspect.getsource(function))).body
    assert isinstance(tree, ast.FunctionDef)
    tree.decorator_list = []
    before = ast.unparse(tree)
    bug.operator(tree)
    assert ast.unparse(tree) != before, f"the function is as before: {bug.title}"
    module = ast.fix_missing_locations(ast.Module([tree], []))
    scope: dict[str, Any] = {}
    flags = __future__.annotations.compiler_flag
    exec(compile(module, f"<planted: {bug.title}>", "exec", flags, dont_inherit=True), function.__globals__, scope)
    changed = scope[tree.name]
    return property(changed) if isinstance(bug.function, property) else changed


@contextmanager
def planted(bug: Bug) -> Iterator[None]:
    """Run the block with the bug in the product."""
    original, mutant = bug.function, mutate(bug)
    function = original.fget if isinstance(original, property) else original
    *classes, name = function.__qualname__.split(".")
    owners = [_class_of(function, classes)] if classes else _modules_with(name, original)
    entries = [key for key, policy in policies.PREEMPTION_POLICIES.items() if policy is original]
    _put(owners, name, mutant)
    policies.PREEMPTION_POLICIES.update(dict.fromkeys(entries, mutant))
    try:
        yield
    finally:
        _put(owners, name, original)
        policies.PREEMPTION_POLICIES.update(dict.fromkeys(entries, original))


def _class_of(function: Any, names: list[str]) -> Any:
    owner: Any = sys.modules[function.__module__]
    for name in names:
        owner = getattr(owner, name)
    return owner


def _modules_with(name: str, function: Any) -> list[Any]:
    """Return the module of a function and those of the product that import it by name."""
    modules = [module for key, module in sys.modules.items() if key.startswith("lineclear.")]
    return [module for module in modules if vars(module).get(name) is function]


def _put(owners: list[Any], name: str, value: Any) -> None:
    for owner in owners:
        setattr(owner, name, value)
