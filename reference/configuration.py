"""The pages of the configuration files: a table for each section, from the settings' types, bounds, defaults and docstrings."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from reference.markdown import cell, code, prose, table
from reference.values import bounds_of, kind_of, toml


def page(
    title: str, introduction: str, root: type[BaseModel], others: dict[str, dict[str, type[BaseModel]]]
) -> str:
    """Return a file's page. `others`: by the name of a table, the classes that one of its keys chooses from, by that key's
    value."""
    parts = [f"# {title}\n", f"{introduction}\n"]
    for path, kind in _sections(root):
        found = others.get(path)
        for name, one in found.items() if found else [("", kind)]:
            parts.append(f"## `[{path}]`{f' with `{name}`' if name else ''}\n")
            parts.append(
                f"{prose(_about(one, path) if not name else sys.modules[one.__module__].__doc__ or '')}\n"
            )
            if rows := list(_rows(one)):
                parts.append(table(("key", "value", "default", "meaning"), rows))
    return "\n".join(parts)


def _sections(root: type[BaseModel]) -> Iterator[tuple[str, type[BaseModel]]]:
    """Yield every table of a file once, those nearest to the root first: its path in the file, and its class."""
    listed: set[type[BaseModel]] = set()
    waiting: list[tuple[str, type[BaseModel]]] = [("", root)]
    for at, kind in waiting:
        for name, field in kind.model_fields.items():
            for inner, step in _tables(field.annotation, field.alias or name):
                if inner not in listed:
                    listed.add(inner)
                    waiting.append((f"{at}.{step}" if at else step, inner))
    yield from waiting[1:]


def _tables(annotation: Any, name: str) -> list[tuple[type[BaseModel], str]]:
    """Return the tables that a key holds, and how they are named."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [(annotation, name)]
    inner = get_args(annotation)
    if get_origin(annotation) is dict:
        return _tables(inner[1], f"{name}.NAME")
    if get_origin(annotation) in (tuple, list):
        return _tables(inner[0], f"[{name}]")
    return [found for each in inner for found in _tables(each, name)]


def meaning_of(kind: type[BaseModel], name: str) -> str:
    """Return the docstring of a key, or the one of the class that a class narrows the key of."""
    bases = [base for base in kind.__mro__ if issubclass(base, BaseModel) and name in base.model_fields]
    return next((text for base in bases if (text := base.model_fields[name].description)), "")


def _about(kind: type[BaseModel], path: str) -> str:
    """Return a table's docstring, without the name that is the heading."""
    text = (kind.__doc__ or "").removeprefix(f"`[{path}]`: ")
    return text[:1].upper() + text[1:]


def _rows(kind: type[BaseModel]) -> Iterator[tuple[str, str, str, str]]:
    for name, field in kind.model_fields.items():
        if not _tables(field.annotation, name):
            value = ", ".join([kind_of(field.annotation), *bounds_of(field.metadata, field.annotation)])
            yield code(field.alias or name), value, _default(field), cell(meaning_of(kind, name))


def _default(field: FieldInfo) -> str:
    if field.is_required():
        return "needed"
    value = field.get_default(call_default_factory=True)
    return "" if value is None else code(toml(value))
