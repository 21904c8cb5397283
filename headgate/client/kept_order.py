"""An order of tasks whose state is in a file, from which a restarted driver continues.

Owns the file: the state as JSON in its first line, and a line for each group that has ended since. A group appends its task's
record alone, however many tasks there are; the file is replaced whole when it has as many lines as tasks, and at the start. A
crash leaves what was there before, and perhaps a last line that is cut, which is left out.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from headgate.client.agents import Task
from headgate.client.order import Lasting

_FEWEST = 1000
"""Lines after which the file is replaced, if there are fewer tasks."""


class KeptOrder:
    """An order of tasks, restored from `path` if that exists, and written whenever a group ends."""

    def __init__(self, order: Lasting, path: Path) -> None:
        """Raise ValueError if the file holds no state."""
        self._order = order
        self._path = path
        try:
            order.restore(_read(path))
        except FileNotFoundError:
            path.parent.mkdir(parents=True, exist_ok=True)
        except (ValueError, TypeError, LookupError) as error:
            raise ValueError(
                f"{path} does not hold the order of tasks: {error}; delete it to start over"
            ) from error
        self._lines = 0
        self._replace()

    def next(self) -> Task:
        return self._order.next()

    def ended(self, task_id: str, teaches: bool | None) -> None:
        self._order.ended(task_id, teaches)
        if self._lines > self._most:
            self._replace()
            return
        with self._path.open("a") as file:
            file.write(json.dumps([task_id, self._order.record(task_id)]) + "\n")
        self._lines += 1

    def _replace(self) -> None:
        state = self._order.state()
        new = self._path.with_name(f"{self._path.name}.new")
        new.write_text(json.dumps(state) + "\n")
        os.replace(new, self._path)
        self._lines, self._most = 1, max(_FEWEST, len(state))


def _read(path: Path) -> dict[str, Any]:
    """Return the state in a file."""
    first, *others = path.read_text().splitlines()
    state: dict[str, Any] = json.loads(first)
    for number, line in enumerate(others, 1):
        try:
            task_id, record = json.loads(line)
        except ValueError:
            if number < len(others):
                raise
            break
        state[task_id] = record
    return state
