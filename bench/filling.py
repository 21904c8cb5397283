"""A store as a long run leaves it behind, made in bulk: seeded, with blobs that are smaller than real ones.

Episodes of `TURNS` turns, in groups of `GROUP`, in batches of `BATCH` groups: most are trained, some dropped, some evaluations, a
few are still open. A part of them was opened by an agent's calls, and all of these begin with one conversation.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from random import Random
from typing import Any, cast

from sqlalchemy import Connection, Engine, Table

from gateway.store import tallies
from gateway.store.models import (
    CallRow,
    DecisionRow,
    EpisodeRow,
    LeaseRow,
    LedgerEventRow,
    NodeRow,
    ResponseRow,
)

TURNS, GROUP, BATCH = 10, 8, 16
MODEL, AGENT = "bench", "agent"
EQUAL = b"\1" * 16
"""The digest with which the first reply of every agent's conversation ends."""
_BEGAN = 1_700_000_000.0
_OPEN = 4
"""Groups that are not over."""
_PROMPT, _REPLY = 24, 32
_TABLES = [
    cast(Table, row.__table__)
    for row in (EpisodeRow, CallRow, NodeRow, ResponseRow, DecisionRow, LedgerEventRow, LeaseRow)
]
_AT_ONCE = 2_000
_Row = tuple[Any, ...]


@dataclass(frozen=True, slots=True)
class Filled:
    """The groups and episodes in the ledger."""

    turns: int
    each: int = TURNS
    """Turns of an episode."""

    @property
    def episodes(self) -> int:
        """Their number."""
        return max(self.turns // self.each, 1)

    @property
    def groups(self) -> int:
        """Their number; the last ones are open."""
        return -(-self.episodes // GROUP)

    def episode(self, number: int) -> str:
        """Return an id."""
        return f"ep-{Random(number).getrandbits(80):020x}"

    def members(self, group: int) -> list[str]:
        """Return the episodes of a group."""
        return [self.episode(n) for n in range(group * GROUP, min((group + 1) * GROUP, self.episodes))]

    def is_open(self, group: int) -> bool:
        """Return whether a group is still open."""
        return group >= self.groups - _OPEN

    def fate(self, group: int) -> str:
        """Return `trained`, `dropped`, `eval` or `open`."""
        if self.is_open(group):
            return "open"
        return {7: "dropped", 8: "eval"}.get(group % 10, "trained")

    def agent(self, group: int) -> str:
        """Return the agent that a group's episodes belong to."""
        return AGENT if group % 5 == 0 or self.is_open(group) else ""

    def rows(self, group: int) -> dict[str, list[_Row]]:
        """Return all rows of a group, by table."""
        random = Random(f"group {group}")
        found: dict[str, list[_Row]] = {table.name: [] for table in _TABLES}
        at, fate = _BEGAN + group * 60.0, self.fate(group)
        for place, episode_id in enumerate(self.members(group)):
            found["episodes"].append(self._episode(group, episode_id, at + place, fate, random))
            self._turns(found, group, episode_id, at + place, fate, random)
            if self.agent(group):
                found["answers"] += self._responses(episode_id, at, random)
        self._decisions(found, group, at, fate)
        return found

    def _responses(self, episode_id: str, at: float, random: Random) -> list[_Row]:
        """Return the row of a stored response."""
        name = f"resp-{random.getrandbits(96):024x}"
        return [(name, episode_id, MODEL, "", "[]", "[]", "{}", at, None)]

    def _episode(self, group: int, episode_id: str, at: float, fate: str, random: Random) -> _Row:
        reason = {"open": "", "dropped": "zero_variance"}.get(fate, "rewarded")
        over = fate != "open"
        return (
            episode_id, f"{random.getrandbits(256):064x}", f"task-{group % 1000}", f"group-{group}",
            "eval" if fate == "eval" else "train", MODEL, "{}", group // BATCH, "closed" if over else "open", reason,
            random.random() if over else None, None, at, at + 50.0 if over else None, self.agent(group), "", "", None, 1,
        )  # fmt: skip

    def _turns(
        self, found: dict[str, list[_Row]], group: int, episode_id: str, at: float, fate: str, random: Random
    ) -> None:
        agent, version = self.agent(group), group // BATCH
        for turn in range(self.each):
            call, node = f"chatcmpl-{random.getrandbits(96):024x}", 2 * turn
            digest = EQUAL if agent and not turn else random.randbytes(16)
            found["calls"].append(
                (
                    call, episode_id, MODEL, node + 1, f"{random.getrandbits(256):064x}", "chat", True, _ASKED, _USED,
                    "processed_logprobs", "engine-0", "stop", (turn + 1) * 56, _REPLY, 0, digest, at + turn, 0.1, 1.0,
                    None, None, agent if agent and fate == "open" else None, 0.01,
                )
            )  # fmt: skip
            found["nodes"] += [
                _node(episode_id, node, call, False, _PROMPT, version, random),
                _node(episode_id, node + 1, call, True, _REPLY, version, random),
            ]

    def _decisions(self, found: dict[str, list[_Row]], group: int, at: float, fate: str) -> None:
        if fate == "eval":
            return
        name, batch, members = f"group-{group}", group // BATCH, self.members(group)
        entries: list[tuple[str, str, str, int | None, int | None, dict[str, Any]]] = [
            ("admitted", episode_id, "", batch, None, {"version": batch}) for episode_id in members
        ]
        if fate != "open":
            entries += [("rewarded", episode_id, "", None, None, {"value": 0.5}) for episode_id in members]
        if fate == "dropped":
            entries.append(("dropped", "", "zero_variance", None, None, {}))
        elif fate == "trained":
            kept = {"version": batch, "episodes": members}
            entries += [
                ("occupied", "", "", batch, group % BATCH, {}),
                ("trained", "", "", batch, group % BATCH, kept),
            ]
        first = group * 64 + 1
        found["decisions"] += [
            (first + i, MODEL, at + 55, name, episode_id, kind, reason, to, entry, json.dumps(details))
            for i, (kind, episode_id, reason, to, entry, details) in enumerate(entries)
        ]
        events = [*({"type": "Join", "episode_id": e, "group_id": name} for e in members), {"type": "Bench"}]
        found["ledger_events"] += [
            (first + i, MODEL, at, json.dumps(event), "[]") for i, event in enumerate(events)
        ]
        if group % BATCH == 0 and fate == "trained":
            lease = (
                MODEL,
                batch + 1,
                f"lease-{batch}",
                batch,
                "trainer",
                "acked",
                f"c{batch}",
                "",
                at,
                at,
            )
            found["leases"].append(lease)


_ASKED = json.dumps(
    {"model": "bench", "temperature": 1.0, "max_tokens": 64, "stream": True, "user": "x" * 64}
)
_USED = json.dumps({"temperature": 1.0, "top_p": 1.0, "max_tokens": 64, "stop_token_ids": [1, 2]})


def _node(
    episode_id: str, index: int, call: str, sampled: bool, tokens: int, version: int, random: Random
) -> _Row:
    logprobs = random.randbytes(4 * tokens) if sampled else b""
    spans = f"[[{version},{tokens}]]" if sampled else "[]"
    flags = bytes(tokens) if sampled else b""
    ids = random.randbytes(4 * tokens)
    return (
        episode_id, MODEL, index, index - 1, tokens, sampled, ids, logprobs, spans, flags, 1.0, "",
        call if sampled else "", None, None,
    )  # fmt: skip


def fill(engine: Engine, filled: Filled, advance: Callable[[int], Any] = lambda _turns: None) -> None:
    """Fill empty tables. `advance` gets the number of turns so far."""
    with engine.connect() as connection:
        if engine.dialect.name == "sqlite":
            for pragma in ("synchronous=OFF", "cache_size=-1000000", "foreign_keys=OFF"):
                connection.exec_driver_sql(f"PRAGMA {pragma}")
            connection.commit()
        for rows, turns in _portions(filled):
            for table in _TABLES:
                if rows[table.name]:
                    _insert(connection, table, rows[table.name])
            connection.commit()
            advance(turns)
        tallies.recount(connection)
        if engine.dialect.name == "postgresql":
            for name in ("decisions", "ledger_events"):
                connection.exec_driver_sql(
                    f"SELECT setval(pg_get_serial_sequence('{name}', 'seq'), (SELECT max(seq) FROM {name}))"
                )
        connection.commit()
        connection.exec_driver_sql("ANALYZE")
        connection.commit()
    engine.dispose()  # connections with fast and unsafe settings


def _portions(filled: Filled) -> Iterator[tuple[dict[str, list[_Row]], int]]:
    rows: dict[str, list[_Row]] = {table.name: [] for table in _TABLES}
    calls = 0
    for group in range(filled.groups):
        for name, some in filled.rows(group).items():
            rows[name] += some
        if len(rows["calls"]) >= _AT_ONCE or group == filled.groups - 1:
            calls += len(rows["calls"])
            yield rows, calls
            rows = {table.name: [] for table in _TABLES}


def _insert(connection: Connection, table: Table, rows: list[_Row]) -> None:
    names = [f'"{column.name}"' for column in table.c]
    assert len(rows[0]) == len(names), table.name
    if connection.dialect.name == "sqlite":
        places = ", ".join("?" * len(names))
        statement = f"INSERT INTO {table.name} ({', '.join(names)}) VALUES ({places})"
        connection.exec_driver_sql(statement, rows)
        return
    raw: Any = connection.connection.dbapi_connection
    with raw.cursor() as cursor, cursor.copy(f"COPY {table.name} ({', '.join(names)}) FROM STDIN") as copy:
        for row in rows:
            copy.write_row(row)
