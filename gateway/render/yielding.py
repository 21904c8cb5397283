"""Large JSON values that other threads need not wait for while they are written.

Python's JSON writer is one call in C, and for megabytes nothing else runs until it returns. It asks containers that are no plain
`dict` and `list` for what they hold, and before their answer, which is Python code, the interpreter lets other threads run. So
whoever writes such a value, be it a template or a library, need not know of it.
"""

from __future__ import annotations

from collections.abc import ItemsView, Iterator
from typing import Any

LARGE = 250_000
"""Characters of JSON that take some milliseconds to write."""


def yielding(value: Any) -> Any:
    """Returns an equal JSON value whose objects and arrays let other threads run while they are written."""
    if isinstance(value, dict):
        return _Object({key: yielding(item) for key, item in value.items()})
    if isinstance(value, list):
        return _Array([yielding(item) for item in value])
    return value


class _Object(dict[str, Any]):
    __slots__ = ()

    def items(self) -> ItemsView[str, Any]:  # type: ignore[override]
        return super().items()


class _Array(list[Any]):
    __slots__ = ()

    def __iter__(self) -> Iterator[Any]:
        return super().__iter__()
