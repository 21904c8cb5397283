"""An order of tasks whose state is in a file, so that a driver that is started again goes on with what it knew.

Owns the file; it is replaced whole, so a crash leaves the one before.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

from gateway.client.agents import Task
from gateway.client.order import ByDifficulty


class KeptOrder:
    """`order`, restored from `path` if it is there, and written with every group that ends."""

    def __init__(self, order: ByDifficulty, path: Path) -> None:
        """Raises ValueError if the file holds no state."""
        self._order = order
        self._path = path
        try:
            order.restore(json.loads(path.read_text()))
        except FileNotFoundError:
            path.parent.mkdir(parents=True, exist_ok=True)
        except (ValueError, TypeError) as error:
            raise ValueError(
                f"{path} is no state of an order of tasks: {error}; delete it to begin anew"
            ) from error

    def next(self) -> Task:
        return self._order.next()

    def ended(self, task_id: str, teaches: bool) -> None:
        self._order.ended(task_id, teaches)
        new = self._path.with_name(f"{self._path.name}.new")
        new.write_text(json.dumps(self._order.state()))
        os.replace(new, self._path)
