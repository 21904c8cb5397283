"""Checkers and writers of declared types, each compiled once into plain functions.

A value is checked and written at every tag, so what its type demands becomes Python source when the type is declared, as
`dataclasses` do it for `__init__`: one function for each class, tuple and union in it. `Form.text` writes what `json.dumps` would
write. `codec` says which types there are, and has refused every other before they come here.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import json
import types
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from json.encoder import encode_basestring_ascii
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints


@dataclass(frozen=True, slots=True)
class Form:
    """The checker and codec of a declared type."""

    fits: Callable[[Any], bool]
    """Returns True if a value is of the type, all the way down."""
    text: Callable[[Any], str]
    """The JSON text of a value that fits."""


@functools.cache
def form(declared: Any) -> Form:
    """The form of a declared type that `codec.validate` has passed."""
    source = _Source()
    fits, text = source.fits(declared, "v"), source.text(declared, "v")
    source.function("fits", f"return {fits}")
    source.function("text", f"return {text}")
    names = source.run()
    return Form(names["fits"], names["text"])


@functools.cache
def fields(cls: Any) -> dict[str, Any]:
    """The declared type of every field of a dataclass."""
    hints = get_type_hints(cls)
    return {field.name: hints[field.name] for field in dataclasses.fields(cls)}


def is_union(declared: Any) -> bool:
    """True if the annotation is a union."""
    return get_origin(declared) in (Union, types.UnionType)


def is_open(items: Sequence[Any]) -> bool:
    """True if a tuple with these arguments may have any length."""
    return len(items) == 2 and items[1] is ...


class _Source:
    """The source of one form's functions, and what they refer to. An expression mentions its value `v` once."""

    def __init__(self) -> None:
        self._names: dict[str, Any] = {
            "write_str": encode_basestring_ascii,
            "write_int": int.__repr__,
            "TRUE": "true",
            "FALSE": "false",
            "NULL": "null",
            "N": "n",
            "NOT_FINITE": {"nan": "NaN", "inf": "Infinity", "-inf": "-Infinity"},
        }
        self._lines: list[str] = []
        self._tables: list[str] = []
        self._made: dict[tuple[str, Any], str] = {}
        self._count = itertools.count()

    def run(self) -> dict[str, Any]:
        """Compiles everything; answers all names."""
        exec("\n".join([*self._lines, *self._tables]), self._names)
        return self._names

    def function(self, name: str, *body: str) -> None:
        """A function of one value, `v`."""
        self._lines += [f"def {name}(v):", *(f"    {line}" for line in body)]

    # Checking values

    def fits(self, declared: Any, v: str) -> str:
        """An expression."""
        if declared is None or declared is types.NoneType:
            return f"{v} is None"
        if declared is float:
            return f"(type(x := {v}) is float or type(x) is int)"
        if declared in (str, int, bool):
            return f"type({v}) is {declared.__name__}"
        return f"{self._once(self._fits_function, declared)}({v})"

    def _fits_function(self, name: str, declared: Any) -> None:
        origin, args = get_origin(declared), get_args(declared)
        if origin is Literal:
            kinds, values = frozenset(map(type, args)), frozenset((type(arg), arg) for arg in args)
            self.function(
                name, f"return type(v) in {self._name(kinds)} and (type(v), v) in {self._name(values)}"
            )
        elif is_union(declared):
            table = self._table(self._any_fits, args)
            self.function(name, f"f = {table}.get(type(v))", "return f is not None and f(v)")
        elif origin is tuple and is_open(args):
            item = self.fits(args[0], "item")
            loop = ("for item in v:", f"    if not {item}: return False", "return True")
            self.function(name, "if type(v) is not tuple: return False", *loop)
        else:
            self.function(name, f"return {self._all_fit(declared, args)}")

    def _all_fit(self, declared: Any, args: Sequence[Any]) -> str:
        if get_origin(declared) is tuple:
            parts = ["type(v) is tuple", f"len(v) == {len(args)}"]
            parts += [self.fits(of, f"v[{index}]") for index, of in enumerate(args)]
        else:
            parts = [f"type(v) is {self._name(declared)}"]
            parts += [self.fits(of, f"v.{name}") for name, of in fields(declared).items()]
        return " and ".join(parts)

    def _any_fits(self, name: str, arms: Sequence[Any]) -> None:
        self.function(name, f"return {' or '.join(self.fits(arm, 'v') for arm in arms)}")

    # Writing valid values

    def text(self, declared: Any, v: str) -> str:
        """An expression, without quotation marks."""
        if declared is None or declared is types.NoneType:
            return "NULL"
        if declared is bool:
            return f"(TRUE if {v} else FALSE)"
        if declared is float:
            return f"(r if N not in (r := repr({v})) else NOT_FINITE[r])"
        if declared in (str, int):
            return f"write_{declared.__name__}({v})"
        return f"{self._once(self._text_function, declared)}({v})"

    def _text_function(self, name: str, declared: Any) -> None:
        origin, args = get_origin(declared), get_args(declared)
        if origin is Literal:
            told = f"{{{self._name({(type(arg), arg): json.dumps(arg) for arg in args})}[type(v), v]}}"
        elif is_union(declared):
            told = f"{{{self._table(self._first_text, args)}[type(v)](v)}}"
        elif origin is tuple and is_open(args) and args[0] in (int, float):
            self._text_numbers(name)
            return
        elif origin is tuple and is_open(args):
            told = f'[{{",".join([{self.text(args[0], "item")} for item in v])}}]'
        elif origin is tuple:
            items = [self.text(of, f"v[{index}]") for index, of in enumerate(args)]
            told = "[" + ",".join(f"{{{item}}}" for item in items) + "]"
        else:
            members = [f'"type":{_quoted(declared.__name__)}']
            for field, of in fields(declared).items():
                members.append(f"{_quoted(field)}:{{{self.text(of, f'v.{field}')}}}")
            told = "{{" + ",".join(members) + "}}"
        self.function(name, f"return f'{told}'")

    def _text_numbers(self, name: str) -> None:
        """`repr` writes a list of numbers at once, and as JSON does if all of them are finite."""
        self.function(
            name,
            "r = repr([*v]).replace(' ', '')",
            "return r if N not in r else '[' + ','.join([NOT_FINITE.get(w, w) for w in map(repr, v)]) + ']'",
        )

    def _first_text(self, name: str, arms: Sequence[Any]) -> None:
        lines = [f"if {self.fits(arm, 'v')}: return {self.text(arm, 'v')}" for arm in arms[:-1]]
        self.function(name, *lines, f"return {self.text(arms[-1], 'v')}")

    # Names

    def _name(self, thing: Any) -> str:
        name = f"k{next(self._count)}"
        self._names[name] = thing
        return name

    def _once(self, make: Callable[[str, Any], None], declared: Any) -> str:
        """The name of a type's function; a type that contains itself finds it while it is being made."""
        if (make.__name__, declared) not in self._made:
            name = f"{make.__name__}_{next(self._count)}"
            self._made[make.__name__, declared] = name
            make(name, declared)
        return self._made[make.__name__, declared]

    def _table(self, make: Callable[[str, Any], None], arms: Sequence[Any]) -> str:
        """The name of a table from a value's class to the function for those arms of a union that have it."""
        by_class: dict[type, list[Any]] = {}
        for arm in arms:
            for cls in _classes(arm):
                by_class.setdefault(cls, []).append(arm)
        made = {cls: self._once(make, tuple(of)) for cls, of in by_class.items()}
        table = f"table_{next(self._count)}"
        self._tables.append(
            f"{table} = {{{', '.join(f'{self._name(cls)}: {f}' for cls, f in made.items())}}}"
        )
        return table


def _classes(declared: Any) -> tuple[type, ...]:
    """The classes that a value of a type may have."""
    if get_origin(declared) is Literal:
        return tuple(dict.fromkeys(type(arg) for arg in get_args(declared)))
    if is_union(declared):
        return tuple(dict.fromkeys(cls for arm in get_args(declared) for cls in _classes(arm)))
    if declared is float:
        return (float, int)
    if declared is None:
        return (types.NoneType,)
    return (get_origin(declared) or declared,)


def _quoted(name: str) -> str:
    """A JSON string as a part of an f-string's source."""
    return encode_basestring_ascii(name).replace("\\", "\\\\")
