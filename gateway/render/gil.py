"""Large JSON values that let other threads run while they are serialized.

Python's JSON writer is one call in C; for megabytes nothing else runs until it returns. It calls back into Python for containers
that are not plain `dict` or `list`, and at such a call the interpreter lets other threads run. So these containers need no
cooperation from the template or library that serializes them.
"""

from __future__ import annotations

from collections.abc import ItemsView, Iterator
from typing import Any

LARGE = 250_000
"""Characters of JSON that take some milliseconds to write."""


def release_gil(value: Any) -> Any:
    """Return an equal JSON value whose objects and arrays let other threads run while they are written."""
    if isinstance(value, dict):
        return _Object({key: release_gil(item) for key, item in value.items()})
    if isinstance(value, list):
        return _Array([release_gil(item) for item in value])
    return value


class _Object(dict[str, Any]):
    __slots__ = ()

    def items(self) -> ItemsView[str, Any]:  # type: ignore[override]
        return super().items()


class _Array(list[Any]):
    __slots__ = ()

    def __iter__(self) -> Iterator[Any]:
        return super().__iter__()
