"""Reads a run's evidence: transcripts, engines' logs, the trainer's checkpoints, faults, the database.

Imports nothing of headgate. A run's evidence is one folder:

    plan.json               what was planned
    agents/*.jsonl          each agent's transcript            engines/*.jsonl   what each logging engine sampled
    trainer/checkpoints/    what the trainer's weights hold    trainer.jsonl     when it did what
    faults.jsonl            every fault                        database.json     the tables, as rows
"""

from __future__ import annotations

import base64
import json
import re
import sqlite3
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

Row = dict[str, Any]

TABLES = {
    "episodes": ("id", "group_id", "mode", "state", "reason", "reward"),
    "nodes": (
        *("episode_id", "model", "index", "parent", "at", "sampled", "ids", "logprobs", "spans", "flags"),
        *("mask_reason", "call_id"),
    ),
    "calls": ("id", "episode_id", "model", "node", "engine", "finish_reason", "prompt_tokens"),
    "decisions": ("seq", "group_id", "episode_id", "kind", "reason", "buffer"),
    "leases": ("fence", "buffer", "state"),
    "versions": ("version", "state"),
}
_BYTES = {"ids", "logprobs", "flags"}
_JSON = {"spans"}
_VERSION = re.compile(r"v(\d+)$")


@dataclass(slots=True)
class Run:
    """One stay of a request in an engine."""

    request: str
    prompt: list[int]
    sampled: list[int] = field(default_factory=list)


@dataclass(slots=True)
class Evidence:
    """All of it."""

    plan: Row
    agents: list[Row] = field(default_factory=list)
    """Every event of every transcript."""
    runs: list[Run] = field(default_factory=list)
    marks: dict[int, tuple[int, int]] = field(default_factory=dict)
    """The token of each mark, and the version that sampled it."""
    remarked: int = 0
    """Marks that were given twice: then the evidence itself is wrong."""
    checkpoints: dict[int, list[str]] = field(default_factory=dict)
    """The groups of each batch that the trainer's weights hold."""
    trainer: list[Row] = field(default_factory=list)
    faults: list[Row] = field(default_factory=list)
    tables: dict[str, list[Row]] = field(default_factory=dict)


def read(folder: Path) -> Evidence:
    """The evidence in a folder."""
    evidence = Evidence(json.loads((folder / "plan.json").read_text()))
    for file in sorted((folder / "agents").glob("*.jsonl")):
        evidence.agents += lines(file)
    for file in sorted((folder / "engines").glob("*.jsonl")):
        _read_engine(evidence, lines(file))
    if evidence.plan.get("transport") == "lora":
        _tell_adapters_apart(evidence)
    for file in (folder / "trainer" / "checkpoints").glob("[0-9]*.json"):
        value = json.loads(file.read_text())
        evidence.checkpoints[value["buffer"]] = [group["group"] for group in value["groups"]]
    evidence.trainer = list(lines(folder / "trainer.jsonl"))
    evidence.faults = list(lines(folder / "faults.jsonl"))
    evidence.tables = load_tables(folder / "database.json")
    return evidence


def lines(file: Path) -> Iterator[Any]:
    """The events of a journal; a last line that its writer's death cut off is none."""
    if not file.exists():
        return
    with file.open("rb") as opened:
        for line in opened:
            if line.endswith(b"\n"):
                yield json.loads(line)


def _read_engine(evidence: Evidence, events: Iterable[Any]) -> None:
    version, open_runs = 0, dict[str, Run]()
    for event in events:
        if isinstance(event, list):
            mark, token, request = event
            evidence.remarked += mark in evidence.marks
            evidence.marks[mark] = (token, version)
            open_runs[request].sampled.append(token)
        elif "ask" in event:
            open_runs[event["ask"]] = run = Run(event["ask"], event["prompt"])
            evidence.runs.append(run)
        else:
            found = _VERSION.search(event["load"])
            version = int(found[1]) if found else 0


def _tell_adapters_apart(evidence: Evidence) -> None:
    """Adapters run side by side: a token says its block, and so which of the newest versions sampled it."""
    block, blocks = evidence.plan["block"], evidence.plan["blocks"]
    for mark, (token, newest) in evidence.marks.items():
        if token < block * blocks:
            evidence.marks[mark] = token, newest - (newest - token // block) % blocks


# The database


def read_database(url: str) -> dict[str, list[Row]]:
    """The tables of a database, `postgresql://...` or `sqlite:///...`."""
    if url.startswith("sqlite:///"):
        connection: Any = sqlite3.connect(url.removeprefix("sqlite:///"))
    else:
        import psycopg

        connection = psycopg.connect(url)
    try:
        return {name: _rows(connection, name, columns) for name, columns in TABLES.items()}
    finally:
        connection.close()


def _rows(connection: Any, table: str, columns: tuple[str, ...]) -> list[Row]:
    named = ", ".join(f'"{column}"' for column in columns)
    cursor = connection.cursor()
    cursor.execute(f"SELECT {named} FROM {table}")
    return [
        {column: _value(column, value) for column, value in zip(columns, row, strict=True)}
        for row in cursor.fetchall()
    ]


def _value(column: str, value: Any) -> Any:
    if column in _BYTES:
        return bytes(value)
    return json.loads(value) if column in _JSON and isinstance(value, str) else value


def save_tables(tables: dict[str, list[Row]], file: Path) -> None:
    """Writes tables as JSON."""
    file.write_text(json.dumps(tables, default=lambda value: base64.b64encode(value).decode()))


def load_tables(file: Path) -> dict[str, list[Row]]:
    """The inverse of `save_tables`."""
    tables: dict[str, list[Row]] = json.loads(file.read_text())
    for row in tables["nodes"]:
        for column in _BYTES:
            row[column] = base64.b64decode(row[column])
    return tables
