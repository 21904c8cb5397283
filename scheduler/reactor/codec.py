"""The values that go through ports and actions, and their form in JSON.

A declared type is str, int, float, bool, None, a Literal of those, a frozen dataclass whose fields are such types, a tuple of
them, or a union. A dataclass becomes an object with its class name as `type`, a tuple a list; the declared type says how to
read it back. Types are exact: a bool is no int, a subclass is not its base (it would come back as the base). One exception, as
in Python's typing: a float may be an int, and stays one. NaN and the infinities are written as Python's json writes them.
"""

from __future__ import annotations

import dataclasses
import json
import types
from typing import Any, Literal, get_args, get_origin

from scheduler.reactor.forms import fields, form, is_open, is_union

_PLAIN = (str, int, float, bool, types.NoneType)


def canonical(value: Any) -> str:
    """One text for one JSON value: two values are the same bit for bit if their texts are."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"))


def to_json(value: Any, declared: Any) -> Any:
    """The JSON form of a value that `check` has passed."""
    return json.loads(form(declared).text(value))


def from_json(value: Any, declared: Any) -> Any:
    """The inverse of `to_json`. Raises TypeError if `value` is not the form of a `declared`."""
    if is_union(declared):
        return _one_of(value, declared)
    if get_origin(declared) is tuple and isinstance(value, list):
        items = _items(declared, len(value))
        if items is not None:
            return tuple(from_json(item, of) for item, of in zip(value, items, strict=True))
    if dataclasses.is_dataclass(declared) and isinstance(declared, type):
        hints = fields(declared)
        if (
            isinstance(value, dict)
            and value.keys() == {"type", *hints}
            and value["type"] == declared.__name__
        ):
            return declared(**{name: from_json(value[name], of) for name, of in hints.items()})
        raise TypeError(f"no {describe(declared)}: {value!r}")
    check(value, declared)
    return value


def check(value: Any, declared: Any) -> None:
    """Raises TypeError unless `value` is a `declared`, all the way down."""
    if not form(declared).fits(value):
        raise TypeError(f"expected {_name(declared)}, got {value!r}")


def validate(declared: Any) -> None:
    """Raises TypeError if values of this type could not be recorded."""
    describe(declared)


def describe(declared: Any) -> str:
    """The type with the fields of its dataclasses, as a text that changes if and only if the form in JSON does."""
    return _describe(declared, ())


def _describe(declared: Any, inside: tuple[Any, ...]) -> str:
    origin, args = get_origin(declared), get_args(declared)
    if origin is Literal and all(type(arg) in _PLAIN for arg in args):
        return "|".join(repr(arg) for arg in args)
    if is_union(declared):
        names = [arg.__name__ for arg in args if dataclasses.is_dataclass(arg) and isinstance(arg, type)]
        if len(set(names)) < len(names):
            raise TypeError(f"two classes of one name in {declared}")
        return "|".join(_describe(arg, inside) for arg in args)
    if origin is tuple:
        return f"({','.join('...' if arg is ... else _describe(arg, inside) for arg in args)})"
    if declared is None or declared in _PLAIN:
        return "None" if declared in (None, types.NoneType) else str(declared.__name__)
    if isinstance(declared, type) and dataclasses.is_dataclass(declared):
        return _describe_class(declared, inside)
    raise TypeError(
        f"{declared} cannot be recorded: it is no frozen dataclass, tuple, Literal, str, int, float, bool or None"
    )


def _describe_class(cls: Any, inside: tuple[Any, ...]) -> str:
    if cls in inside:
        return str(cls.__name__)
    if not cls.__dataclass_params__.frozen:
        raise TypeError(f"{cls.__name__} cannot be recorded: it is not frozen")
    if not all(field.init for field in dataclasses.fields(cls)) or "type" in fields(cls):
        raise TypeError(
            f"{cls.__name__} cannot be recorded: a field is named `type`, or is not set by __init__"
        )
    told = (f"{name}:{_describe(of, (*inside, cls))}" for name, of in fields(cls).items())
    return f"{cls.__name__}({','.join(told)})"


def _items(declared: Any, length: int) -> tuple[Any, ...] | None:
    """The types of the items of a tuple of this length, or None if it cannot have it."""
    args = get_args(declared)
    if is_open(args):
        return (args[0],) * length
    return args if len(args) == length else None


def _one_of(value: Any, union: Any) -> Any:
    for declared in get_args(union):
        try:
            return from_json(value, declared)
        except TypeError:
            continue
    raise TypeError(f"no {_name(union)}: {value!r}")


def _name(declared: Any) -> str:
    plain = isinstance(declared, type) and get_origin(declared) is None
    return declared.__name__ if plain else str(declared)
