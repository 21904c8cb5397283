"""Recorded runs as a workload: a Parquet file of `gateway export`, or JSON lines.

A line of JSON is a group: {"episodes": [[{"prompt": 120, "sampled": 300, "wait_s": 1.5}, ...], ...]}. In an export, an episode's
turns are the sampled nodes of its token tree in their order, each after what the nodes before it added; it has no waits.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from lab.simulate.errors import ScenarioError
from lab.simulate.workload import Task, Turn


def read(path: Path) -> list[Task]:
    """Return the groups of a file. Raise ScenarioError that names it."""
    try:
        return _exported(path) if path.suffix == ".parquet" else _lines(path)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ScenarioError(f"recorded workload {path}: {error!r}") from error


def _lines(path: Path) -> list[Task]:
    tasks = [
        _task(json.loads(line)["episodes"]) for line in path.read_text(encoding="utf-8").splitlines() if line
    ]
    return [task for task in tasks if task.episodes]


def _task(episodes: list[list[dict[str, Any]]]) -> Task:
    found = tuple(
        tuple(
            Turn(int(t["prompt"]), int(t["sampled"]), float(t.get("wait_s", 0.0)))
            for t in turns
            if t["sampled"] > 0
        )
        for turns in episodes
    )
    return Task(tuple(turns for turns in found if turns))


def _exported(path: Path) -> list[Task]:
    import pyarrow.parquet as pq

    rows = pq.read_table(path, columns=["group_id", "episode_id", "ids", "sampled"]).to_pylist()
    groups: dict[str, dict[str, list[Turn]]] = {}
    added = 0
    last = None
    for row in rows:
        if row["episode_id"] != last:
            last, added = row["episode_id"], 0
        turns = groups.setdefault(row["group_id"], {}).setdefault(row["episode_id"], [])
        if row["sampled"]:
            turns.append(Turn(max(added, 1), len(row["ids"])))
            added = 0
        else:
            added += len(row["ids"])
    tasks = [
        Task(tuple(tuple(turns) for turns in episodes.values() if turns)) for episodes in groups.values()
    ]
    return [task for task in tasks if task.episodes]
