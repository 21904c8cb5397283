"""Measures what it costs that people watch: streams of events, the events themselves, and the page in a browser.

1. `watchers_cpu_share`: the share of one core that a gateway's process spends on watchers. Events are written into its database
   from outside, so many a second, all the time; in every other window nobody watches, and in the others
   `--watchers` streams are open. The difference of CPU seconds counts. Each watcher must get each event, once and in order.
2. What the events of an episode add to the transactions that open and close it: transactions with and without events take turns.
3. The page: its size, a long list, an episode of many tokens (`bench.console_pages`).
"""

from __future__ import annotations

import asyncio
import itertools
import statistics
import tempfile
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import typer
from sqlalchemy import Connection, Engine

from bench.console_pages import ROUNDS, measure_pages, needed
from bench.model import save_model
from bench.processes import Child, serve_gateway
from bench.report import Steps, finish, machine, number, show
from bench.servers import postgres_server
from gateway.sections import StoreSettings
from gateway.store import episodes, events
from gateway.store.commits import Committer, Write
from gateway.store.connections import begin_writing, connect
from gateway.store.decisions import Decision, insert_decisions
from gateway.store.events import Event
from gateway.store.records import NewEpisode
from gateway.store.schema import bring_up_to_date

GOAL = 0.02
_CONNECTED_AT_ONCE = 20
_WRITES_PER_S = 20
_ASKED = b"GET /admin/v1/events?after=%d HTTP/1.1\r\nhost: 127.0.0.1\r\n\r\n"


@dataclass(frozen=True, slots=True)
class Plan:
    """The size of it."""

    watchers: int
    rate: int
    """Events a second."""
    seconds: float
    """The length of a window."""
    pairs: int
    """Windows of each kind."""
    episodes: int
    """Episodes that are stored with events, and as many without."""
    listed: int
    """Episodes of the list in the browser."""
    tokens: int
    """Sampled tokens of the episode in the browser."""


class _Watcher:
    """A stream, read from a bare socket: what is measured is the gateway, not a client."""

    def __init__(self) -> None:
        self.size = 0
        self._parts: list[bytes] = []

    async def read(self, port: int, after: int) -> None:
        """Reads until it is cancelled."""
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        try:
            writer.write(_ASKED % after)
            while some := await reader.read(1 << 16):
                self.size += len(some)
                self._parts.append(some)
        finally:
            writer.close()

    def ids(self) -> list[int]:
        """The ids of the events that came whole."""
        whole = b"".join(self._parts).rpartition(b"\n\n")[0]
        return [int(part.split(b",", 1)[0]) for part in whole.split(b'data: {"id":')[1:]]


def _event(index: int) -> Event:
    data = {"task_id": f"sums-{index}", "mode": "train", "version": 3, "reason": "rewarded", "reward": 0.5}
    components = {"tests": 0.25, "format": 0.25}
    return Event(
        "episode.closed", "bench", f"ep-{index:032x}", f"sums-{index}", {**data, "components": components}
    )


def _write(engine: Engine, count: int, first: int) -> int:
    with engine.begin() as connection:
        begin_writing(connection)
        events.insert_events(connection, [_event(first + n) for n in range(count)])
        return events.newest(connection)


@asynccontextmanager
async def _told(engine: Engine, rate: int) -> AsyncIterator[None]:
    """Events come, so many a second."""

    async def tell() -> None:
        every = max(1, rate // _WRITES_PER_S)
        loop = asyncio.get_running_loop()
        began, numbers = loop.time(), itertools.count(0, every)
        while True:
            first = next(numbers)
            await asyncio.to_thread(_write, engine, every, first)
            await asyncio.sleep(max(0.0, began + (first + every) / rate - loop.time()))

    telling = asyncio.create_task(tell(), name="tell")
    try:
        yield
    finally:
        telling.cancel()
        await asyncio.wait({telling})


async def _window(gateway: Child, engine: Engine, plan: Plan, watchers: int) -> tuple[float, int, int]:
    """CPU seconds of the gateway in a window, the bytes that a watcher got in it, and the events."""
    watching = [_Watcher() for _ in range(watchers)]
    tasks: list[asyncio.Task[None]] = []
    with engine.connect() as connection:
        after = events.newest(connection)
    for number_, watcher in enumerate(watching):
        tasks.append(asyncio.create_task(watcher.read(gateway.port, after), name=f"watcher-{number_}"))
        if number_ % _CONNECTED_AT_ONCE == 0:
            await asyncio.sleep(0.1)
    await asyncio.sleep(2.0)  # connecting is not watching
    size, began, cpu = sum(w.size for w in watching), time.monotonic(), gateway.cpu_s()
    await asyncio.sleep(plan.seconds)
    spent = (gateway.cpu_s() - cpu) * plan.seconds / (time.monotonic() - began)
    size = sum(w.size for w in watching) - size
    for task in tasks:
        task.cancel()
    outcomes = await asyncio.gather(*tasks, return_exceptions=True)
    if failed := [one for one in outcomes if isinstance(one, Exception)]:
        raise failed[0]
    return spent, size // max(1, watchers), _checked(watching, after)


def _checked(watching: list[_Watcher], after: int) -> int:
    """How many events every watcher got at least. Raises ValueError if one missed any, or got one twice."""
    counts = []
    for watcher in watching:
        ids = watcher.ids()
        if ids != list(range(after + 1, after + 1 + len(ids))):
            raise ValueError(
                f"a watcher missed events, or got them twice or in another order: {after} {ids[:50]}"
            )
        counts.append(len(ids))
    return min(counts, default=0)


async def measure_watchers(plan: Plan, folder: Path, steps: Steps) -> dict[str, Any]:
    """Windows with and without watchers, in turns."""
    model = folder / "model"
    save_model(model)
    alone: list[float] = []
    watched: list[float] = []
    sizes: list[int] = []
    got: list[int] = []
    async with serve_gateway(model, "[engine]\nlaunch = 'fake'\n", folder) as gateway:
        engine = connect(f"sqlite:///{next(folder.glob('gateway-*.db'))}", 1)
        async with _told(engine, plan.rate):
            for pair in range(plan.pairs):
                steps.begin(f"nobody watches ({pair + 1} of {plan.pairs})")
                alone.append((await _window(gateway, engine, plan, 0))[0])
                steps.begin(f"{plan.watchers} watch ({pair + 1} of {plan.pairs})")
                spent, size, count = await _window(gateway, engine, plan, plan.watchers)
                watched.append(spent)
                sizes.append(size)
                got.append(count)
        engine.dispose()
    shares = [(w - a) / plan.seconds for w, a in zip(watched, alone, strict=True)]
    return {
        "watchers_cpu_share": statistics.median(shares),
        "shares": shares,
        "alone_cpu_share": statistics.median(alone) / plan.seconds,
        "watcher_bytes_per_s": statistics.median(sizes) / plan.seconds,
        "events_in_a_window": min(got),
    }


def _episode(index: int) -> tuple[Write, Write]:
    """The two writes of an episode: it is opened and admitted; it is rewarded and closed."""
    name = f"ep-{index:032x}"
    row: NewEpisode = {
        "id": name, "key_hash": name, "task_id": "t", "group_id": f"g{index}", "mode": "train", "model": "m", "details": {},
        "version": 0, "state": "open", "reason": "", "created_at": 1.0, "agent": "", "notice": "", "sampling": None,
    }  # fmt: skip
    closed = {"state": "closed", "reason": "rewarded", "reward": 0.5, "components": {"tests": 0.5}}
    admitted = Decision("admitted", f"g{index}", name, buffer=0, details={"version": 0})
    rewarded = Decision("rewarded", f"g{index}", name, details={"value": 0.5})

    def open_(connection: Connection) -> None:
        episodes.insert_episode(connection, row)
        insert_decisions(connection, "m", [admitted])

    def close(connection: Connection) -> None:
        episodes.close_episode(connection, name, closed)
        insert_decisions(connection, "m", [rewarded])

    return open_, close


def measure_inserts(url: str, count: int, at_once: int) -> dict[str, float]:
    """Milliseconds of the writer per episode, opened and closed in groups of `at_once`, with events and without.

    `statement_ms` is what the statements that insert them take alone.
    """
    engine = connect(url, 1)
    bring_up_to_date(engine, StoreSettings(url=url))
    committer, insert = Committer(engine), events._insert
    inserting = 0.0

    def timed(connection: Connection, events: Sequence[Event]) -> None:
        nonlocal inserting
        began = time.perf_counter()
        insert(connection, events)
        inserting += time.perf_counter() - began

    took: dict[bool, list[float]] = {True: [], False: []}
    try:
        for block in range(2 * count // at_once):
            told = block % 2 == 0
            events._insert = timed if told else _nothing
            some = [_episode(block * at_once + n + at_once * 1_000_000) for n in range(at_once)]
            began = time.perf_counter()
            for writes in zip(*some, strict=True):
                for _, error in committer.commit(writes):
                    if error is not None:
                        raise error
            took[told].append((time.perf_counter() - began) / at_once * 1e3)
    finally:
        events._insert = insert
        committer.close()
        engine.dispose()
    with_, without = statistics.median(took[True]), statistics.median(took[False])
    statement = inserting / (len(took[True]) * at_once) * 1e3
    return {"with_ms": with_, "without_ms": without, "statement_ms": statement}


def _nothing(connection: Connection, events: Sequence[Event]) -> None:
    del connection, events


def _inserts(plan: Plan, folder: Path, steps: Steps) -> dict[str, dict[str, float]]:
    found: dict[str, dict[str, float]] = {}
    with postgres_server(durable=True) as server:
        for at_once in (1, 16):
            steps.begin(f"{plan.episodes} episodes with events and without, {at_once} at once")
            for kind, url in (
                ("sqlite", f"sqlite:///{folder}/inserts-{at_once}.db"),
                ("postgresql", server.url(server.new_database())),
            ):
                found[f"{kind}, {at_once} at once"] = measure_inserts(url, plan.episodes, at_once)
    return found


def _table(report: dict[str, Any]) -> None:
    plan = report["plan"]
    rows = [
        ("share of a core for the watchers", number(report["watchers_cpu_share"]), f"goal < {GOAL}"),
        ("share of a core without them", number(report["alone_cpu_share"]), ""),
        ("bytes a second to a watcher", number(report["watcher_bytes_per_s"]), ""),
    ]
    for name, found in report["inserts"].items():
        rows.append(
            (f"ms per episode, {name}", number(found["with_ms"]), f"{number(found['without_ms'])} without")
        )
    title = f"{plan['watchers']} watchers, {plan['rate']} events a second"
    show(title, ("", "measured", ""), rows)
    pages = [
        ("the page and what it loads, kB gzip", number(report["bundle_kb"]), "goal < 150"),
        (
            f"an episode of {plan['tokens']:,} tokens opens, s",
            number(report["open_10k_tokens_s"]),
            "goal < 1",
        ),
        ("the same in a fresh tab, s", number(report["open_fresh_s"]), ""),
        ("frames/s while its tokens are scrolled", number(report["scroll_fps"]), "goal 50"),
        ("the longest frame of all rounds, ms", number(report["scroll_longest_frame_ms"]), ""),
        (f"a list of {plan['listed']:,} episodes opens, s", number(report["list_100k_s"]), ""),
        ("the same in a fresh tab, s", number(report["list_fresh_s"]), ""),
        ("from its first row to its last, s", number(report["list_end_s"]), ""),
        ("frames/s while it is scrolled", number(report["list_scroll_fps"]), ""),
        ("the longest frame of all rounds, ms", number(report["list_longest_frame_ms"]), ""),
    ]
    show(f"the page in Chromium, medians of {ROUNDS} fresh tabs", ("", "measured", ""), pages)


def main(
    watchers: Annotated[int, typer.Option(min=1, help="Open streams.")] = 200,
    rate: Annotated[int, typer.Option(min=1, help="Events a second.")] = 100,
    seconds: Annotated[float, typer.Option(min=0.5, help="The length of a window.")] = 15.0,
    pairs: Annotated[int, typer.Option(min=1, help="Windows with watchers, and as many without.")] = 3,
    episodes_: Annotated[int, typer.Option("--episodes", min=16, help="Episodes stored each way.")] = 800,
    listed: Annotated[int, typer.Option(min=100, help="Episodes of the list.")] = 100_000,
    tokens: Annotated[int, typer.Option(min=1000, max=30_000, help="Tokens of the long episode.")] = 10_000,
    out: Annotated[Path, typer.Option(help="Where the report is written.")] = Path("runs/bench-console.json"),
) -> None:
    """Measure what streams of events cost the gateway, and how fast the page is."""
    needed()
    plan = Plan(watchers, rate, seconds, pairs, episodes_, listed, tokens)
    with Steps(2 * pairs + 5) as steps, tempfile.TemporaryDirectory() as folder:
        inserts = _inserts(plan, Path(folder), steps)
        found = asyncio.run(measure_watchers(plan, Path(folder), steps))
        pages = asyncio.run(measure_pages(listed, tokens, Path(folder) / "pages", steps))
    told = {**found, **pages, "inserts": inserts}
    report = {"bench": "console", "machine": machine(), "plan": asdict(plan), **told}
    _table(report)
    finish(report, out)


if __name__ == "__main__":
    typer.run(main)
