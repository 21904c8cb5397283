"""The page of `headgate.client`, from the signatures and docstrings of what it exports."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from dataclasses import is_dataclass
from typing import Any

import headgate.client
from reference.markdown import prose

_LINE = 100
_DEFAULT = 30
"""Characters of a default; a longer one is not shown."""
_STARS: dict[Any, str] = {inspect.Parameter.VAR_POSITIONAL: "*", inspect.Parameter.VAR_KEYWORD: "**"}


def page() -> str:
    """Return every exported name, with its public methods or fields."""
    parts = [
        "# Python client\n",
        "`headgate.client` drives agents and calls the admin API from your own program. [Your agent](../guide/agents/index.md)"
        " has an example.\n",
        f"{prose(inspect.getdoc(headgate.client) or '')}\n",
    ]
    for name in headgate.client.__all__:
        parts += _section(name, getattr(headgate.client, name))
    return "\n".join(parts)


def _section(name: str, value: Any) -> Iterator[str]:
    about = f"{prose(inspect.getdoc(value) or '')}\n"
    if inspect.isclass(value) and issubclass(value, Exception):
        yield from (f"## `{name}`\n", about)
        return
    called = vars(value).get("__call__", value)  # what a Protocol is called with, not how one is made
    yield from (f"## `{name}`\n", _signature(name, called), about)
    if inspect.isclass(value) and not is_dataclass(value):
        for method, function in inspect.getmembers(value, inspect.isfunction):
            if not method.startswith("_") and (text := inspect.getdoc(function)):
                yield from (f"### `{name}.{method}`\n", _signature(method, function), f"{prose(text)}\n")


def _signature(name: str, value: Any) -> str:
    """Return a signature as code, a parameter to a line where it is long."""
    signature = inspect.signature(value)
    parameters = [_parameter(one) for one in signature.parameters.values() if one.name != "self"]
    returned = "" if inspect.isclass(value) else f" -> {signature.return_annotation}"
    text = f"{name}({', '.join(parameters)}){returned}"
    if len(text) > _LINE:
        text = f"{name}(\n" + "".join(f"    {one},\n" for one in parameters) + f"){returned}"
    return f"```python\n{text}\n```\n"


def _parameter(one: inspect.Parameter) -> str:
    star = _STARS.get(one.kind, "")
    default = "" if one.default is one.empty else f" = {one.default!r}"
    return f"{star}{one.name}: {one.annotation}" + (default if len(default) < _DEFAULT else " = ...")
