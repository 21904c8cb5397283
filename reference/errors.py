"""The page of error codes, from the places in the gateway's source that raise them.

An error is a call of a class of `headgate.errors` (or of a function that makes one) with `code="..."`; its message is the first
argument, or what was assigned to the name that stands there. f-strings are shown with `...` for what is filled in.
"""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from headgate import errors
from reference.markdown import cell, code, prose, table

_FILLED = "..."
Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True, slots=True)
class Raised:
    """One place that raises an error with a code."""

    code: str
    status: int
    message: str


def page(*packages: Path) -> str:
    """Return every code of these packages, with the status of its response and the messages that have it."""
    found: dict[tuple[str, int], set[str]] = defaultdict(set)
    for path in sorted(path for package in packages for path in package.rglob("*.py")):
        module = ast.parse(path.read_text())
        for raised in _raised(module, _tables(module)):
            found[raised.code, raised.status].add(raised.message)
    rows = [
        (code(name), str(status), "<br>".join(map(cell, sorted(words - {""}))))
        for (name, status), words in sorted(found.items())
    ]
    kinds = _classes().values()
    classes = sorted({(str(kind.status), code(kind.type), cell(kind.__doc__ or "")) for kind in kinds})
    parts = [
        "# Error codes\n",
        'An error of the OpenAI and the admin API is `{"error": {"message", "type", "param", "code"}}`; the code is for programs,'
        " and stays when the words change. Anthropic's form has no code. A 429 or 503 can be repeated after `Retry-After`; other"
        " requests would be refused again. The metric `headgate_errors_total` counts refusals by status and code.\n",
        "## Classes\n",
        table(("status", "type", "meaning"), classes),
        "## Codes\n",
        prose("`...` stands for what is filled in.") + "\n",
        table(("code", "status", "messages"), rows),
    ]  # fmt: skip
    return "\n".join(parts)


def _classes() -> dict[str, type[errors.GatewayError]]:
    kinds = {name: one for name, one in vars(errors).items() if isinstance(one, type)}
    return {name: one for name, one in kinds.items() if issubclass(one, errors.GatewayError)}


def _tables(module: ast.Module) -> dict[str, ast.Dict]:
    """Return the module's dictionaries, of which some have messages by their codes."""
    found = [
        node for node in module.body if isinstance(node, ast.Assign) and isinstance(node.value, ast.Dict)
    ]
    return {ast.unparse(node.targets[0]): node.value for node in found if isinstance(node.value, ast.Dict)}


def _raised(node: ast.AST, tables: dict[str, ast.Dict], inside: str = "") -> Iterator[Raised]:
    """Yield every error below a node. `inside`: the class around it, which may be an error that names its code itself."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, Function):
            for call in _own_calls(child):
                yield from _of_call(call, child, tables, inside)
        yield from _raised(child, tables, child.name if isinstance(child, ast.ClassDef) else inside)


def _own_calls(function: Function) -> Iterator[ast.Call]:
    """Yield the calls in a function, without those of the functions inside of it, which are looked at by themselves."""
    waiting: list[ast.AST] = [*function.args.defaults, *function.args.kw_defaults, *function.body]  # type: ignore[list-item]
    while waiting:
        node = waiting.pop()
        if isinstance(node, Function):
            continue
        if isinstance(node, ast.Call):
            yield node
        waiting += [child for child in ast.iter_child_nodes(node) if child is not None] if node else []


def _of_call(
    call: ast.Call, function: Function, tables: dict[str, ast.Dict], inside: str
) -> Iterator[Raised]:
    given = next((keyword.value for keyword in call.keywords if keyword.arg == "code"), None)
    if given is None:
        return
    names = _name(call.func), _name(function.returns), inside
    kind = next((_classes()[name] for name in names if name in _classes()), errors.GatewayError)
    message = _words(call.args[0], _assigned(function, call.lineno)) if call.args else ""
    for name in _codes(given, function):
        yield Raised(name, kind.status, message)
    for name, message in _by_code(given, function, tables):
        yield Raised(name, kind.status, message)


def _by_code(given: ast.expr, function: Function, tables: dict[str, ast.Dict]) -> Iterator[tuple[str, str]]:
    """Yield the codes and messages of a table that the function looks its message up in, by the code."""
    for node in ast.walk(function):
        if isinstance(node, ast.Subscript) and ast.unparse(node.slice) == ast.unparse(given):
            table = tables.get(ast.unparse(node.value), ast.Dict([], []))
            for key, value in zip(table.keys, table.values, strict=True):
                yield _words(key or given, {}), re.sub(r"\{\w*\}", _FILLED, _words(value, {}))


def _assigned(function: Function, line: int) -> dict[str, ast.expr]:
    """Return the value of each name at a line, from the last assignment above it."""
    found = [node for node in ast.walk(function) if isinstance(node, ast.Assign) and node.lineno < line]
    found.sort(key=lambda node: node.lineno)
    return {node.targets[0].id: node.value for node in found if isinstance(node.targets[0], ast.Name)}


def _codes(given: ast.expr, function: Function) -> list[str]:
    """Return the codes that an expression may have: a constant, one of two, or a parameter's default."""
    match given:
        case ast.Constant(value=str(value)):
            return [value]
        case ast.IfExp():
            return [*_codes(given.body, function), *_codes(given.orelse, function)]
        case ast.Name():
            defaults = zip(reversed(function.args.args), reversed(function.args.defaults), strict=False)
            return [
                name
                for parameter, default in defaults
                if parameter.arg == given.id
                for name in _codes(default, function)
            ]
    return []


def _name(node: ast.expr | None) -> str:
    match node:
        case ast.Name(id=name):
            return name
        case ast.Attribute(attr=name):
            return name
    return ""


def _words(node: ast.expr, assigned: dict[str, ast.expr]) -> str:
    match node:
        case ast.Constant(value=str(value)):
            return value
        case ast.JoinedStr(values=values):
            return "".join(_words(value, {}) for value in values)
        case ast.Name(id=name) if name in assigned:
            return _words(assigned[name], {})
        case ast.BinOp(left=left, op=ast.Add(), right=right):
            return _words(left, assigned) + _words(right, assigned)
    return _FILLED
