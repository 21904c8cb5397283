"""The command line of the demos' `tasks` modules: writes the tasks of a split as JSON lines."""

from __future__ import annotations

import argparse
import itertools
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any


def write_tasks(description: str, tasks: Callable[[Any, int], Iterator[dict[str, Any]]]) -> None:
    """Write as many tasks of `tasks(split, seed)` as the command line asks for; an error if there are fewer."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--split", choices=["train", "heldout"], required=True)
    parser.add_argument("--count", type=int, required=True)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    chosen = list(itertools.islice(tasks(arguments.split, arguments.seed), arguments.count))
    if len(chosen) < arguments.count:
        parser.error(f"there are only {len(chosen)} {arguments.split} questions")
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    arguments.out.write_text("".join(json.dumps(task) + "\n" for task in chosen))
    print(f"{arguments.count} {arguments.split} tasks in {arguments.out}")
