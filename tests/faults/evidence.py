"""Write, read and decode a run's evidence: transcripts, engines' logs, the trainer's checkpoints, faults, the database.

Imports nothing of headgate. A run's evidence is one folder:

    plan.json               the plan
    agents/*.jsonl          each agent's transcript            engines/*.jsonl   the samples of each logging engine
    trainer/checkpoints/    the batches in the weights         trainer.jsonl     the trainer's actions
    faults.jsonl            every fault                        database.json     the tables, as rows
"""

from __future__ import annotations

import base64
import json
import re
import sqlite3
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

import numpy as np
import orjson

Row = dict[str, Any]

TABLES = {
    "episodes": ("id", "group_id", "mode", "state", "reason", "reward"),
    "nodes": (
        *("episode_id", "model", "index", "parent", "at", "sampled", "ids", "logprobs", "spans", "flags"),
        *("mask_reason", "call_id"),
    ),
    "calls": ("id", "episode_id", "model", "node", "engine", "finish_reason", "prompt_tokens"),
    "decisions": ("seq", "group_id", "episode_id", "kind", "reason", "batch"),
    "leases": ("fence", "batch", "state"),
    "node_routes": ("episode_id", "model", "index", "layers", "top_k", "dtype", "data"),
    "versions": ("version", "state"),
}
_BYTES = {"ids", "logprobs", "flags", "data"}
_JSON = {"spans"}
_VERSION = re.compile(r"v(\d+)$")


class Journal:
    """Append events to one file, a line of JSON each. Flushed lines survive the writer's death."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = path.open("ab")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def write(self, kind: str, **values: Any) -> None:
        """Append one event; `at` is now, in seconds since the epoch."""
        event = {"kind": kind, "at": time.time(), **values}
        self._file.write(orjson.dumps(event, option=orjson.OPT_APPEND_NEWLINE))

    def flush(self) -> None:
        """Pass the written lines to the operating system."""
        self._file.flush()


@dataclass(slots=True)
class Run:
    """One run of a request in an engine."""

    request: str
    prompt: list[int]
    sampled: list[int] = field(default_factory=list)


@dataclass(slots=True)
class Evidence:
    """All evidence of a run."""

    plan: Row
    agents: list[Row] = field(default_factory=list)
    """Every event of every transcript."""
    runs: list[Run] = field(default_factory=list)
    marks: dict[int, tuple[int, int]] = field(default_factory=dict)
    """The token of each mark, and the version that sampled it."""
    remarked: int = 0
    """The number of marks that occur twice: then the evidence itself is wrong."""
    checkpoints: dict[int, list[str]] = field(default_factory=dict)
    """The groups of each batch in the trainer's weights."""
    trainer: list[Row] = field(default_factory=list)
    faults: list[Row] = field(default_factory=list)
    tables: dict[str, list[Row]] = field(default_factory=dict)


def read(folder: Path) -> Evidence:
    """Read the evidence in a folder."""
    evidence = Evidence(json.loads((folder / "plan.json").read_text()))
    for file in sorted((folder / "agents").glob("*.jsonl")):
        evidence.agents += lines(file)
    for file in sorted((folder / "engines").glob("*.jsonl")):
        _read_engine(evidence, lines(file))
    if evidence.plan.get("transport") == "lora":
        _resolve_adapters(evidence)
    for file in (folder / "trainer" / "checkpoints").glob("[0-9]*.json"):
        value = json.loads(file.read_text())
        evidence.checkpoints[value["batch"]] = [group["group"] for group in value["groups"]]
    evidence.trainer = list(lines(folder / "trainer.jsonl"))
    evidence.faults = list(lines(folder / "faults.jsonl"))
    evidence.tables = load_tables(folder / "database.json")
    return evidence


def lines(file: Path) -> Iterator[Any]:
    """Yield the events of a journal, except for a last line that is cut off."""
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


def _resolve_adapters(evidence: Evidence) -> None:
    """Read the version of each token from its block: adapters run concurrently, so the newest one need not have sampled it."""
    block, blocks = evidence.plan["block"], evidence.plan["blocks"]
    for mark, (token, newest) in evidence.marks.items():
        if token < block * blocks:
            evidence.marks[mark] = token, newest - (newest - token // block) % blocks


# The database


def read_database(url: str) -> dict[str, list[Row]]:
    """Read the tables of a database, `postgresql://...` or `sqlite:///...`."""
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
    """Write tables as JSON."""
    file.write_text(json.dumps(tables, default=lambda value: base64.b64encode(value).decode()))


def load_tables(file: Path) -> dict[str, list[Row]]:
    """Read the tables that `save_tables` wrote."""
    tables: dict[str, list[Row]] = json.loads(file.read_text())
    for row in (row for rows in tables.values() for row in rows):
        for column in _BYTES & row.keys():
            row[column] = base64.b64decode(row[column])
    return tables


# Tokens


def _alphabet() -> list[str]:
    """Return the characters of the byte-level alphabet in the order of their ids."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    rest = [byte for byte in range(256) if byte not in printable]
    shown = {byte: chr(byte) for byte in printable} | {byte: chr(256 + i) for i, byte in enumerate(rest)}
    return [chr(byte) for byte, _ in sorted(shown.items(), key=lambda item: item[1])]


_CHARACTERS = _alphabet()


def text_of(ids: list[int]) -> str:
    """Return tokens of one byte each as characters, and any other token as a NUL."""
    return "".join(_CHARACTERS[token] if token < len(_CHARACTERS) else "\0" for token in ids)


def ids_of(row: Row) -> list[int]:
    """Return the token ids of a node."""
    return np.frombuffer(row["ids"], "<i4").tolist()


def prompt_of(tree: dict[int, Row], row: Row) -> list[int] | None:
    """Return the tokens before a node, or None if some of them are not stored."""
    parts = []
    while row["parent"] >= 0:
        if row["parent"] not in tree:
            return None
        at, row = row["at"], tree[row["parent"]]
        parts.append(ids_of(row)[:at])
    return [token for part in reversed(parts) for token in part]


def reply_of(run: Run) -> str:
    """Return the part of a reply that a run carries: the tokens sampled before it, and its own."""
    text = text_of(run.prompt)
    return text[text.rfind("\n") + 1 :] + text_of(run.sampled)


def intervals_of(spans: list[list[int]]) -> list[tuple[int, int]]:
    """Return the oldest and the newest version of every token."""
    return [(span[0], span[-1] if len(span) > 2 else span[0]) for span in spans for _ in range(span[1])]
