"""Evidence as it is written: one line of JSON an event, with the time, appended to a file."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any, Self

import orjson


class Journal:
    """Appends to one file. Lines that were written survive their writer's death once it said `flush`."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = path.open("ab")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def write(self, kind: str, **values: Any) -> None:
        """One event; `at` is now, in seconds since the epoch."""
        self._file.write(
            orjson.dumps({"kind": kind, "at": time.time(), **values}, option=orjson.OPT_APPEND_NEWLINE)
        )

    def flush(self) -> None:
        """Hands what was written to the system."""
        self._file.flush()
