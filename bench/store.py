"""`python -m bench.store`: the store with 1,000,000 turns in it, on both databases: p50 and p99 of the gateway's queries.

Each query runs alone, and while writers commit turns as fast as they can; the writers' commits are measured alone and during the
queries. Filled databases are kept in `--folder` for the next run. SQLite is as the gateway has it (WAL, FULL), and
PostgreSQL is started here, with fsync and synchronous commits.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import random
import secrets
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from sqlalchemy import Connection, func, select

from bench.filling import AGENT, BATCH, EQUAL, MODEL, Filled, fill
from bench.report import Steps, finish, machine, number, percentile, show
from bench.servers import PostgresServer
from examples.service.programs import NotInstalled
from gateway.config import StalenessSettings, StoreSettings
from gateway.store import decisions, episode_pages, episodes, retention, turns
from gateway.store.commits import Rows
from gateway.store.connections import connect
from gateway.store.database import Database
from gateway.store.episode_pages import EpisodeFilter
from gateway.store.models import EpisodeRow, NodeRow
from gateway.store.schema import bring_up_to_date
from gateway.training_feed.decision_log import Entry
from gateway.training_feed.groups import GroupReader
from headgate.types import Node

Query = Callable[[Connection], Any]
_READER = GroupReader(MODEL, StalenessSettings())
_WRITERS = 32
_WARM = 5
KINDS = ("sqlite", "postgresql")


def _list(_filled: Filled, _random: random.Random, **wanted: Any) -> Query:
    return lambda c: episode_pages.list_episodes(c, EpisodeFilter(**wanted))


def _page(filled: Filled, dice: random.Random, **wanted: Any) -> Query:
    after = 1_700_000_000.0 + dice.random() * filled.groups * 60, "ep-"
    return lambda c: episode_pages.list_episodes(c, EpisodeFilter(**wanted), after=after)


def _group(filled: Filled, dice: random.Random) -> Query:
    return _list(filled, dice, group_id=f"group-{dice.randrange(filled.groups)}")


def _counts(_filled: Filled, _random: random.Random) -> Query:
    return episodes.count_by_state


def _trajectory(filled: Filled, dice: random.Random) -> Query:
    episode = filled.episode(dice.randrange(filled.episodes))
    return lambda c: (episodes.episode(c, episode), turns.nodes(c, MODEL, [episode]))


def _calls(filled: Filled, dice: random.Random) -> Query:
    return partial(turns.calls, episode_id=filled.episode(dice.randrange(filled.episodes)))


def _lease(filled: Filled, dice: random.Random) -> Query:
    """Return a group of a batch, as a trainer fetches it."""
    group = dice.randrange(filled.groups)
    entry = Entry(f"group-{group}", 0, 0, filled.members(group))
    return lambda c: _READER.read(c, [entry])


def _responded(filled: Filled, dice: random.Random) -> Query:
    episode, key = filled.episode(dice.randrange(filled.episodes)), f"{dice.getrandbits(128):032x}"
    return lambda c: turns.calls_with_reply(c, episode, key)


def _replies(_filled: Filled, dice: random.Random) -> Query:
    digests = [EQUAL, *(dice.randbytes(16) for _ in range(7))]
    return lambda c: episodes.replies(c, AGENT, digests)


def _unfinished(_filled: Filled, _random: random.Random) -> Query:
    return lambda c: (episodes.unfinished(c), turns.unfinished_rewards(c))


def _why(filled: Filled, dice: random.Random) -> Query:
    return partial(decisions.of_episode, episode_id=filled.episode(dice.randrange(filled.episodes)))


def _trained(filled: Filled, dice: random.Random) -> Query:
    batch = dice.randrange(max(filled.groups // BATCH, 1))
    return lambda c: decisions.trained(c, MODEL, batch, batch + 1)


def _last_group(filled: Filled, dice: random.Random) -> Query:
    return lambda c: episodes.last_group(c, f"group-{dice.randrange(filled.groups)}", MODEL)


def _old(_filled: Filled, _random: random.Random) -> Query:
    ages = retention.Ages(2e9, 2e9, 2e9)
    return lambda c: retention.sweep(c, ages, None, dry=True)


QUERIES: dict[str, Callable[[Filled, random.Random], Query]] = {
    "list": _list,
    "list_page": _page,
    "list_open": partial(_list, state="open"),
    "list_eval_page": partial(_page, mode="eval"),
    "list_agent": partial(_list, agent=AGENT),
    "list_task": partial(_list, task_id="task-1"),
    "list_model": partial(_page, models=(MODEL, "other")),
    "list_group": _group,
    "counts": _counts,
    "trajectory": _trajectory,
    "calls": _calls,
    "lease_group": _lease,
    "retry": _responded,
    "conversation": _replies,
    "unfinished": _unfinished,
    "why": _why,
    "trained_batch": _trained,
    "last_group": _last_group,
    "prune_page": _old,
}
"""The gateway's queries, with other values each time. `unfinished` runs once, at the start."""


async def _measure(database: Database, filled: Filled, samples: int) -> dict[str, dict[str, float | None]]:
    """Return p50 and p99 in ms, by query."""
    dice, found = random.Random(0), {}
    for name, make in QUERIES.items():
        times = []
        for index in range(samples + _WARM):
            query = make(filled, dice)
            began = time.perf_counter()
            await database.read(query)
            if index >= _WARM:
                times.append((time.perf_counter() - began) * 1e3)
        found[name] = {"p50_ms": percentile(times, 50), "p99_ms": percentile(times, 99)}
    return found


def _turn(episode: str, first: int) -> tuple[list[Node], dict[str, Any]]:
    """Return a turn as the recorder commits it."""
    ids, none = np.arange(32, dtype=np.int32), np.zeros(0, np.float32)
    empty, call_id = np.zeros(0, np.int32), f"chatcmpl-{secrets.token_hex(12)}"
    zeros = np.zeros(32, np.uint8)
    given = Node(first, first - 1, 0, False, ids, none, empty, zeros[:0], 1.0, "", "")
    sampled = Node(
        first + 1,
        first,
        32,
        True,
        ids,
        np.zeros(32, np.float32),
        np.ones(32, np.int32),
        zeros,
        1.0,
        "",
        call_id,
    )
    call = {
        "id": call_id, "episode_id": episode, "model": MODEL, "node": first + 1, "request_key": secrets.token_hex(32),
        "api": "chat", "stream": True, "requested": {"temperature": 1.0}, "used": {"temperature": 1.0},
        "logprobs_mode": "processed_logprobs", "engine": "engine-0", "finish_reason": "stop", "prompt_tokens": 56,
        "completion_tokens": 32, "pauses": 0, "digest": secrets.token_bytes(16), "received_at": time.time(),
        "first_token_s": 0.1, "seconds": 1.0,
    }  # fmt: skip
    return [given, sampled], call


class _Writers:
    """Concurrent streams of turns; each commits its next turn as soon as the last one is committed."""

    def __init__(self, database: Database, filled: Filled) -> None:
        self._database = database
        self.first = 0
        self.episodes = [e for g in range(filled.groups) if filled.is_open(g) for e in filled.members(g)]
        self.times: list[float] = []

    async def write(self, index: int) -> None:
        """Write one stream of turns, until it is cancelled."""
        episode, first = self.episodes[index], self.first
        while True:
            nodes, call = _turn(episode, first)
            began = time.perf_counter()
            await self._database.submit(Rows(turns.insert_turns, (nodes, call)))
            self.times.append((time.perf_counter() - began) * 1e3)
            first += 2


@contextlib.asynccontextmanager
async def _writing(database: Database, filled: Filled) -> Any:
    writers = _Writers(database, filled)
    newest = select(func.max(NodeRow.index)).where(NodeRow.episode_id.in_(writers.episodes))
    writers.first = await database.read(lambda c: int(c.scalar(newest) or 0)) + 1
    number = min(_WRITERS, len(writers.episodes))
    tasks = [asyncio.create_task(writers.write(n), name=f"writer-{n}") for n in range(number)]
    try:
        yield writers
    finally:
        for task in tasks:
            task.cancel()
        for outcome in await asyncio.gather(*tasks, return_exceptions=True):
            if isinstance(outcome, Exception):
                raise outcome
        await database.settled()  # who was cancelled had submitted a turn


def _commits(times: list[float], seconds: float) -> dict[str, float | None]:
    return {
        "p50_ms": percentile(times, 50), "p99_ms": percentile(times, 99), "per_s": len(times) / seconds,
    }  # fmt: skip


async def _run(
    url: str, filled: Filled, samples: int, seconds: float, begin: Callable[[str], None]
) -> dict[str, Any]:
    database = await Database.open(StoreSettings(url=url))
    try:
        begin("queries alone")
        alone = await _measure(database, filled, samples)
        begin("turns alone")
        async with _writing(database, filled) as writers:
            await asyncio.sleep(seconds)
        commits = _commits(writers.times, seconds)
        begin("queries during turns")
        began = time.perf_counter()
        async with _writing(database, filled) as writers:
            contended = await _measure(database, filled, samples)
        contended_commits = _commits(writers.times, time.perf_counter() - began)
    finally:
        await database.close()
    return {
        "alone": alone,
        "during_writes": contended,
        "commits": commits,
        "commits_during_queries": contended_commits,
    }


@contextlib.contextmanager
def _store(kind: str, folder: Path, filled: Filled, steps: Steps) -> Iterator[str]:
    """Yield the URL of a filled store; filled now, if no earlier run has done it."""
    if kind == "sqlite":
        path = folder / f"store-{filled.turns}.db"
        url = f"sqlite:///{path}"
        if not path.exists():
            partial_path = path.with_suffix(".part")
            partial_path.unlink(missing_ok=True)
            _fill(f"sqlite:///{partial_path}", filled, steps)
            partial_path.rename(path)
        yield url
        return
    place = folder / f"postgres-{filled.turns}"
    options = {"shared_buffers": "512MB", "max_wal_size": "4GB"}
    if not (place / "filled").exists():
        with _running(PostgresServer(place, durable=False, **options)) as server:
            _fill(server.url(), filled, steps)
            server.execute("VACUUM ANALYZE")
        (place / "filled").touch()
    with _running(PostgresServer(place, durable=True, **options)) as server:
        yield server.url()


@contextlib.contextmanager
def _running(server: PostgresServer) -> Iterator[PostgresServer]:
    if not server.initialized:
        server.initialize()
    server.start()
    try:
        yield server
    finally:
        server.stop()


def _fill(url: str, filled: Filled, steps: Steps) -> None:
    engine = connect(url, 1)
    bring_up_to_date(engine, StoreSettings(url=url))
    logged = time.monotonic()

    def advance(filled_turns: int) -> None:
        nonlocal logged
        if time.monotonic() - logged > 5.0:
            logged = time.monotonic()
            steps.log(f"{filled_turns:,} of {filled.turns:,} turns")

    fill(engine, filled, advance)
    engine.dispose()


def _stored(url: str) -> int:
    engine = connect(url, 1)
    with engine.connect() as connection:
        count = connection.scalar(select(func.count()).select_from(EpisodeRow))
    engine.dispose()
    return int(count or 0)


def _table(results: dict[str, Any]) -> None:
    kinds = list(results)
    header = ["p99 (p50) in ms", *(f"{kind}{when}" for kind in kinds for when in ("", ", during turns"))]

    def cell(values: dict[str, float | None]) -> str:
        return f"{number(values['p99_ms'])} ({number(values['p50_ms'])})"

    rows = [
        [name, *(cell(results[kind][when][name]) for kind in kinds for when in ("alone", "during_writes"))]
        for name in QUERIES
    ]
    when = ("commits", "commits_during_queries")
    rows.append(["commit of a turn", *(cell(results[kind][name]) for kind in kinds for name in when)])
    rows.append(["turns/s", *(number(results[kind][name]["per_s"]) for kind in kinds for name in when)])
    show("the store, filled", header, rows, f"{_WRITERS} streams of turns")


def main() -> None:
    """Run the bench and print its report."""
    parser = argparse.ArgumentParser(prog="bench.store", description=__doc__)
    parser.add_argument("--turns", type=int, default=1_000_000)
    parser.add_argument("--samples", type=int, default=200, help="of each query")
    parser.add_argument("--seconds", type=float, default=10.0, help="of committing turns alone")
    parser.add_argument("--databases", default=",".join(KINDS))
    parser.add_argument("--folder", type=Path, default=Path("runs/bench-store"))
    parser.add_argument("--out", type=Path, default=Path("runs/bench/store.json"))
    given = parser.parse_args()
    kinds = given.databases.split(",")
    if wrong := sorted(set(kinds) - set(KINDS)):
        parser.error(f"--databases: {', '.join(wrong)} is none of {', '.join(KINDS)}")
    if given.turns < 1000:
        parser.error("--turns: at least 1000")
    given.folder.mkdir(parents=True, exist_ok=True)
    filled, results, before = Filled(given.turns), {}, machine()
    try:
        with Steps(4 * len(kinds)) as steps:
            for kind in kinds:
                began = time.monotonic()
                steps.begin(f"{kind}: {given.turns:,} turns")
                (given.folder / f"postgres-{given.turns}").mkdir(exist_ok=True)
                with _store(kind, given.folder.resolve(), filled, steps) as url:
                    filled_s = time.monotonic() - began
                    assert _stored(url) == filled.episodes
                    begin = partial(_begin, steps, kind)
                    results[kind] = asyncio.run(_run(url, filled, given.samples, given.seconds, begin))
                results[kind]["filled_s"] = filled_s
    except NotInstalled as error:
        sys.exit(str(error))
    _table(results)
    report: dict[str, Any] = {"bench": "store", "turns": given.turns, "machine": before}
    for kind, result in results.items():
        report[f"{kind}_worst_p99_ms"] = max(values["p99_ms"] for values in result["alone"].values())
        report[f"{kind}_worst_p99_during_writes_ms"] = max(
            values["p99_ms"] for values in result["during_writes"].values()
        )
        report[f"{kind}_p99_ms"] = {name: values["p99_ms"] for name, values in result["alone"].items()}
    finish({**report, "results": results}, given.out)


def _begin(steps: Steps, kind: str, what: str) -> None:
    steps.begin(f"{kind}: {what}")


if __name__ == "__main__":
    main()
