"""The values that go through ports and actions, and their form in JSON, which msgspec writes and reads.

A declared type is str, int, float, bool, None, a Literal of those, a frozen dataclass whose fields are such types, a tuple of
them, or a union of which at most one member is a dataclass and at most one a tuple. A dataclass becomes an object of its
fields, a tuple a list; the declared type states how to read it back. The class of a value is checked when the value is set, and
its parts when they are read from a recording. Floats are finite: NaN and the infinities would be written as null.
"""

from __future__ import annotations

import dataclasses
import json
import types
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

import msgspec

_PLAIN = (str, int, float, bool, types.NoneType)
_encode = msgspec.json.Encoder().encode


class Form:
    """The class check and the writer of a declared type. Raise TypeError if its values could not be recorded."""

    def __init__(self, declared: Any) -> None:
        describe(declared)
        msgspec.json.Decoder(declared)  # refuses ambiguous unions
        self._classes = frozenset(_classes(declared))
        self.name = json.dumps(_name(declared))
        """The name, in JSON, of the class of a value or of the items of a tuple."""

    def fits(self, value: Any) -> bool:
        """Return whether the class of a value is one that the type allows."""
        return type(value) in self._classes

    def text(self, value: Any) -> str:
        """Return the JSON text of a value that fits."""
        try:
            return _encode(value).decode()
        except UnicodeEncodeError:  # half of a surrogate pair, as in a file's name that is not UTF-8
            return json.dumps(msgspec.to_builtins(value), separators=(",", ":"))


def from_json(value: Any, declared: Any) -> Any:
    """Return the value of a declared type from its form in JSON. Raise TypeError if it is not such a form."""
    try:
        return msgspec.convert(value, declared)
    except msgspec.ValidationError as error:
        raise TypeError(str(error)) from error


def describe(declared: Any) -> str:
    """Return the type with the fields of its dataclasses, as a text that changes if and only if the form in JSON does.

    Raise TypeError if values of this type could not be recorded.
    """
    return _describe(declared, ())


def _describe(declared: Any, inside: tuple[Any, ...]) -> str:
    origin, args = get_origin(declared), get_args(declared)
    if origin is Literal and all(type(arg) in _PLAIN for arg in args):
        return "|".join(repr(arg) for arg in args)
    if origin in (Union, types.UnionType):
        return "|".join(_describe(arg, inside) for arg in args)
    if origin is tuple:
        return f"({','.join('...' if arg is ... else _describe(arg, inside) for arg in args)})"
    if declared is None or declared in _PLAIN:
        return "None" if declared in (None, types.NoneType) else str(declared.__name__)
    if isinstance(declared, type) and dataclasses.is_dataclass(declared):
        return _describe_class(declared, inside)
    raise TypeError(
        f"{declared} cannot be recorded: it is not a frozen dataclass, tuple, Literal, str, int, float, bool or None"
    )


def _describe_class(cls: Any, inside: tuple[Any, ...]) -> str:
    if cls in inside:
        return str(cls.__name__)
    if not cls.__dataclass_params__.frozen:
        raise TypeError(f"{cls.__name__} cannot be recorded: it is not frozen")
    hints = get_type_hints(cls)
    fields = (
        f"{field.name}:{_describe(hints[field.name], (*inside, cls))}" for field in dataclasses.fields(cls)
    )
    return f"{cls.__name__}({','.join(fields)})"


def _classes(declared: Any) -> tuple[type, ...]:
    """Return the classes that a value of a type may have. A float may be an int, as in Python's typing."""
    if get_origin(declared) is Literal:
        return tuple(type(arg) for arg in get_args(declared))
    if get_origin(declared) in (Union, types.UnionType):
        return tuple(cls for arg in get_args(declared) for cls in _classes(arg))
    if declared is float:
        return (float, int)
    if declared is None:
        return (types.NoneType,)
    return (get_origin(declared) or declared,)


def _name(declared: Any) -> str:
    item = get_args(declared)[0] if get_origin(declared) is tuple else declared
    return item.__name__ if isinstance(item, type) else str(item)
