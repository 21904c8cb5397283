"""Types, bounds and values in words, for the pages of settings and of commands."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import SecretStr
from pydantic.fields import FieldInfo

from reference.markdown import code

_NAMES = {
    str: "string",
    int: "integer",
    float: "number",
    bool: "boolean",
    Path: "path",
    SecretStr: "secret",
    Any: "any",
}
_SIGNS = {"ge": "at least {}", "gt": "above {}", "le": "at most {}", "lt": "below {}"}
_LENGTHS = {"min_length": "at least {}", "max_length": "at most {}"}


def kind_of(annotation: Any) -> str:
    """Return a type in words."""
    origin, inner = get_origin(annotation), get_args(annotation)
    if origin is Literal:
        return " or ".join(code(toml(value)) for value in inner)
    if origin is Annotated:
        return ", ".join([kind_of(inner[0]), *bounds_of(_metadata(annotation), inner[0])])
    if origin in (Union, UnionType):
        return " or ".join(kind_of(each) for each in inner if each is not NoneType)
    if origin is tuple and (len(inner) == 1 or inner[-1] is not Ellipsis):
        return f"list of {len(inner)}: {'; '.join(dict.fromkeys(map(kind_of, inner)))}"
    if origin in (tuple, list):
        return f"list of: {kind_of(inner[0])}"
    if origin is dict:
        return f"table of: {kind_of(inner[1])}"
    return _NAMES.get(annotation, "string")


def _metadata(annotation: Any) -> list[Any]:
    return [
        one
        for each in annotation.__metadata__
        for one in (each.metadata if isinstance(each, FieldInfo) else [each])
    ]


def bounds_of(metadata: Sequence[Any], annotation: Any) -> Iterator[str]:
    """Yield the bounds that pydantic checks, in words."""
    found = {
        name: value for one in metadata for name in _SIGNS if (value := getattr(one, name, None)) is not None
    }
    if {"ge", "le"} <= found.keys():
        yield f"{_number(found.pop('ge'))} to {_number(found.pop('le'))}"
    for name, value in found.items():
        yield _SIGNS[name].format(_number(value), _unit(annotation))


def _unit(annotation: Any) -> str:
    inner = (annotation, *get_args(annotation))
    return (
        "characters"
        if get_origin(annotation) is not tuple and {str, SecretStr} & set(map(_plain, inner))
        else "entries"
    )


def _plain(annotation: Any) -> Any:
    return annotation if isinstance(annotation, type) else None


def _number(value: float) -> str:
    return f"{value:,}" if isinstance(value, int) and abs(value) < 10**12 else f"{value:g}"


def toml(value: Any) -> str:
    """Return a value as the file would have it."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str | Path):
        return f'"{value}"'
    if isinstance(value, tuple | list):
        return f"[{', '.join(toml(each) for each in value)}]"
    return str(value)
