"""Column types that keep every value, and order values alike, on both databases.

- Text is compared and ordered by its code points: SQLite does, and PostgreSQL does under the collation "C". PostgreSQL's text has
  no NUL, and neither takes half of a surrogate pair, but JSON and so agents can send both: they are escaped in PostgreSQL, and
  halves of pairs in SQLite too. Lengths are bounded by the API, not by PostgreSQL.
- JSON is text, which both databases keep as it came. What orjson cannot write (integers beyond 64 bits, halves of pairs) Python's
  own encoder does; a blank before the text marks it for Python's own decoder.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from typing import Any, TypeVar

import orjson
from sqlalchemy import Boolean, ColumnElement, Dialect, Index, String, Text, TypeDecorator, and_, text
from sqlalchemy.ext.compiler import compiles
from sqlalchemy.sql.functions import FunctionElement
from sqlalchemy.types import TypeEngine

T = TypeVar("T")
_ESCAPE = "\ufdd0"
"""A noncharacter: Unicode keeps it free for such uses. Four hexadecimal digits follow it."""
_UNKEPT = {
    "postgresql": re.compile("[\0\ud800-\udfff\ufdd0]"),
    "sqlite": re.compile("[\ud800-\udfff\ufdd0]"),
}
_ESCAPED = re.compile(f"{_ESCAPE}([0-9a-f]{{4}})")
_LAST = "\U0010ffff"
_AT_ONCE = 10_000
"""Values in one `IN (...)`: PostgreSQL's protocol has room for 65,535 parameters."""


class AnyText(TypeDecorator[str]):
    """Text of any characters; `length` is what the API allows, for SQLite's declaration."""

    impl = Text
    cache_ok = True

    def __init__(self, length: int | None = None) -> None:
        super().__init__()
        self.length = length

    def load_dialect_impl(self, dialect: Dialect) -> TypeEngine[Any]:
        """Return the type that the migrations declare."""
        if dialect.name == "postgresql":
            return dialect.type_descriptor(String(collation="C"))
        return dialect.type_descriptor(Text() if self.length is None else String(self.length))

    def process_bind_param(self, value: str | None, dialect: Dialect) -> str | None:
        """Convert a value to the database's form."""
        if value is None or (value.isascii() and "\0" not in value):
            return value
        return _UNKEPT[dialect.name].sub(lambda match: f"{_ESCAPE}{ord(match[0]):04x}", value)

    def process_result_value(self, value: str | None, dialect: Dialect) -> str | None:
        """Convert a value back."""
        if value is None or _ESCAPE not in value:
            return value
        return _ESCAPED.sub(lambda match: chr(int(match[1], 16)), value)


def partial_index(name: str, *columns: str, where: str) -> Index:
    """Return an index of the rows for which `where` is true. It serves only queries with the same words."""
    return Index(name, *columns, postgresql_where=text(where), sqlite_where=text(where))


def begins_with(column: ColumnElement[str], prefix: str) -> ColumnElement[bool]:
    """Return a condition that a text begins with another, as a range that an index serves."""
    return and_(column >= prefix, column < prefix + _LAST)


class contains(FunctionElement[bool]):
    """An SQL expression: whether a text contains another one, compared by code point (SQLite's LIKE ignores case)."""

    type = Boolean()
    inherit_cache = True


@compiles(contains, "sqlite")
def _contains_in_sqlite(element: contains, compiler: Any, **options: Any) -> str:
    return f"(instr({compiler.process(element.clauses, **options)}) > 0)"


@compiles(contains, "postgresql")
def _contains_in_postgresql(element: contains, compiler: Any, **options: Any) -> str:
    return f"(strpos({compiler.process(element.clauses, **options)}) > 0)"


def portions(values: Sequence[T]) -> Iterator[Sequence[T]]:
    """Yield parts of a list that are short enough for one `IN (...)`."""
    for start in range(0, len(values), _AT_ONCE):
        yield values[start : start + _AT_ONCE]


def to_json(value: Any) -> str:
    """Write JSON as the databases keep it."""
    try:
        return orjson.dumps(value, option=orjson.OPT_NON_STR_KEYS).decode()
    except TypeError:
        return " " + json.dumps(value, allow_nan=False)


def from_json(text: str | bytes) -> Any:
    """Return the inverse of `to_json`."""
    return json.loads(text) if text[:1] in (" ", b" ") else orjson.loads(text)
