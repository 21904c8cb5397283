"""Measures the staleness ledger: events per second on SQLite, and its share of the gateway's CPU at many open groups.

First the stored ledger alone, in this process: groups are opened, rewarded and trained as fast as they can be while so many
groups stay open, every event committed with its decisions. Then a gateway of its own with as many open groups, agents whose
episodes make some calls to a fake engine, and a trainer. The share is the number of events that this gateway stored, times the
CPU time of one event as measured before, over the CPU time of the gateway's process: *derived*, not profiled.
"""

from __future__ import annotations

import asyncio
import sqlite3
import sys
import tempfile
import time
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Annotated, Any

import httpx
import typer

from bench.processes import Child, serve_gateway
from bench.report import Steps, finish, machine, number, show
from bench.rules import Weights
from gateway.client import GatewayClient
from gateway.feed.ledger import StoredLedger
from gateway.sections import StalenessSettings, StoreSettings
from gateway.store.database import Database
from scheduler.policies.staleness_events import Consume, Event, Join, Leased, Publish, Reward

_AT_ONCE = 64
_WINDOW = 20
"""Batches among which the gateway's open groups are spread, so that one is trained every few seconds."""
_OPENERS = 4
_LIMITS = httpx.Limits(max_connections=None, keepalive_expiry=2.0)
"""The gateway closes idle connections after 5 s."""


@dataclass(frozen=True, slots=True)
class Plan:
    """The sizes of a run."""

    groups: int
    """Open at once."""
    size: int
    seconds: float
    calls: int
    concurrency: int


@dataclass(slots=True)
class Alone:
    """The ledger without a gateway."""

    events: int = 0
    seconds: float = 0.0
    cpu_s: float = 0.0


class _Load:
    """Groups that come and go, as fast as the ledger lets them."""

    def __init__(self, ledger: StoredLedger, plan: Plan) -> None:
        self._ledger = ledger
        self._plan = plan
        self._names = count()
        self._training = asyncio.Lock()
        self.events = 0

    async def apply(self, *events: Event) -> None:
        for event in events:
            await self._ledger.apply(event)
            self.events += 1

    async def open(self) -> list[str]:
        """A new group; answers its episodes."""
        name = f"g{next(self._names)}"
        members = [f"{name}-{n}" for n in range(self._plan.size)]
        await self.apply(*(Join(name, member, self._plan.size) for member in members))
        return members

    async def finish(self, members: list[str]) -> None:
        """Rewards a group, and trains the batch if that made it whole."""
        await self.apply(*(Reward(member, float(n % 2)) for n, member in enumerate(members)))
        ledger = self._ledger.rule
        async with self._training:
            if ledger.complete(buffer := ledger.next_buffer):
                await self.apply(Leased(buffer), Publish(buffer + 1), Consume(buffer))


async def measure_alone(plan: Plan, folder: Path) -> Alone:
    """Events through the stored ledger, with `plan.groups` groups open all the time."""
    database = await Database.open(StoreSettings(url=f"sqlite:///{folder}/alone.db"))
    settings = StalenessSettings(eta=1, batch=plan.groups // 2)
    load = _Load(await StoredLedger.load(database, settings, "bench"), plan)
    open_groups = [await load.open() for _ in range(plan.groups)]
    turn = asyncio.Lock()

    async def worker(until: float) -> None:
        while time.perf_counter() < until:
            members = open_groups.pop(0)
            await load.finish(members)
            async with turn:  # a batch that is being trained has no place for a new group yet
                while not load._ledger.rule.free_slots():
                    await asyncio.sleep(0)
                    if not open_groups:
                        return
                    await load.finish(open_groups.pop(0))
                open_groups.append(await load.open())

    before, cpu, started = load.events, time.process_time(), time.perf_counter()
    until = started + plan.seconds
    async with asyncio.TaskGroup() as group:
        for n in range(min(_AT_ONCE, plan.groups // 2)):
            group.create_task(worker(until), name=f"worker-{n}")
    result = Alone(load.events - before, time.perf_counter() - started, time.process_time() - cpu)
    await database.close()
    return result


async def measure_gateway(plan: Plan, folder: Path, steps: Steps) -> dict[str, Any]:
    """A gateway with `plan.groups` open groups; its CPU time and the events that it stored, in `plan.seconds`."""
    weights = Weights(folder / "weights")
    tables = (
        "[engine]\nlaunch = 'fake'\n"
        f"[staleness]\neta = {_WINDOW - 1}\nbatch = {max(1, plan.groups // _WINDOW)}\nmin_members = 1\n"
        "[episodes]\nidle_s = 3600.0\n"
    )
    async with serve_gateway(weights.first, tables, folder) as gateway:
        steps.begin(f"a gateway: opening {plan.groups} groups")
        async with (
            GatewayClient(gateway.url) as client,
            httpx.AsyncClient(timeout=120.0, limits=_LIMITS) as http,
        ):
            return await _Agents(plan, gateway, client, http, weights).run(
                steps, next(folder.glob("gateway-*.db"))
            )


class _Agents:
    """Keeps the groups open, and in each of them one episode after another at work."""

    def __init__(
        self, plan: Plan, gateway: Child, client: GatewayClient, http: httpx.AsyncClient, weights: Weights
    ) -> None:
        self._plan = plan
        self._gateway = gateway
        self._client = client
        self._http = http
        self._weights = weights
        self._names = count()

    async def run(self, steps: Steps, database: Path) -> dict[str, Any]:
        waiting: asyncio.Queue[list[tuple[str, str]]] = asyncio.Queue()
        limit = asyncio.Semaphore(self._plan.concurrency)

        async def opened() -> None:
            async with limit:
                waiting.put_nowait(await self._open())

        await asyncio.gather(*(opened() for _ in range(self._plan.groups)))
        steps.begin("a gateway: at work")
        tasks = [
            asyncio.create_task(self._work(waiting), name=f"agent-{n}") for n in range(self._plan.concurrency)
        ]
        tasks += [asyncio.create_task(self._refill(waiting), name=f"opener-{n}") for n in range(_OPENERS)]
        tasks.append(asyncio.create_task(self._train(), name="trainer"))
        before, cpu, started = _events(database), self._gateway.cpu_s(), time.perf_counter()
        done, _ = await asyncio.wait(tasks, timeout=self._plan.seconds, return_when=asyncio.FIRST_EXCEPTION)
        seconds = time.perf_counter() - started
        result = {
            "events": _events(database) - before,
            "cpu_s": self._gateway.cpu_s() - cpu,
            "seconds": seconds,
        }
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
        for task in done:
            task.result()
        return result

    async def _open(self) -> list[tuple[str, str]]:
        """A whole group; answers (episode, key) of its members."""
        name, size = f"g{next(self._names)}", self._plan.size
        members = [await self._client.open_episode(name, name, size, wait_s=60.0) for _ in range(size)]
        return [(member.episode_id, member.api_key) for member in members]

    async def _work(self, waiting: asyncio.Queue[list[tuple[str, str]]]) -> None:
        while True:
            for number_, (episode, key) in enumerate(await waiting.get()):
                for call in range(self._plan.calls):
                    await self._ask(key, f"call {call}")
                await self._client.reward(episode, float(number_ % 2))

    async def _refill(self, waiting: asyncio.Queue[list[tuple[str, str]]]) -> None:
        """A new group for every one that was trained: an opening waits until the ledger has a slot."""
        while True:
            waiting.put_nowait(await self._open())

    async def _ask(self, key: str, text: str) -> None:
        body = {"model": "bench", "messages": [{"role": "user", "content": text}], "max_tokens": 32}
        headers = {"authorization": f"Bearer {key}"}
        url = f"{self._gateway.url}/v1/chat/completions"
        (await self._http.post(url, json=body, headers=headers)).raise_for_status()

    async def _train(self) -> None:
        for version in count(1):
            lease = await self._client.lease("bench")
            cursor, complete = 0, False
            while not complete:
                fetched = await self._client.leased_groups(lease, cursor, wait_s=20.0)
                cursor, complete = fetched.cursor, fetched.complete
            await self._client.publish(version, str(self._weights.version(version)), wait_s=60.0)
            await self._client.ack(lease, "none")


def _events(database: Path) -> int:
    with sqlite3.connect(database) as connection:
        return int(connection.execute("SELECT count(*) FROM ledger_events").fetchone()[0])


def main(
    groups: Annotated[int, typer.Option(min=4, help="Groups that are open at once.")] = 1000,
    size: Annotated[int, typer.Option(min=1, help="Episodes in a group.")] = 4,
    seconds: Annotated[float, typer.Option(min=1.0, help="Of each of the two measurements.")] = 20.0,
    calls: Annotated[int, typer.Option(min=0, help="Calls of an episode, of 32 tokens each.")] = 3,
    concurrency: Annotated[int, typer.Option(min=1, help="Agents at work at once.")] = 32,
    out: Annotated[Path, typer.Option(help="Where the JSON report goes.")] = Path("runs/bench/ledger.json"),
) -> None:
    """Measure what the staleness ledger costs: events/s on SQLite, and its share of the gateway's CPU.

    Example: python -m bench.ledger --groups 200 --seconds 5
    """
    import uvloop

    plan, before = Plan(groups, size, seconds, calls, concurrency), machine()
    with Steps(3) as steps, tempfile.TemporaryDirectory(prefix="headgate-bench-") as folder:
        steps.begin("the ledger alone")
        alone = uvloop.run(measure_alone(plan, Path(folder)))
        gateway = uvloop.run(measure_gateway(plan, Path(folder), steps))
    cpu_ms = 1000 * alone.cpu_s / alone.events
    result = {
        "open_groups": groups,
        "alone_events": alone.events,
        "alone_events_per_s": alone.events / alone.seconds,
        "cpu_ms_per_event": cpu_ms,
        "gateway_events_per_s": gateway["events"] / gateway["seconds"],
        "gateway_cpu_cores": gateway["cpu_s"] / gateway["seconds"],
        "share_of_gateway_cpu": gateway["events"] * cpu_ms / 1000 / gateway["cpu_s"],
    }
    show(
        f"The staleness ledger on SQLite, {groups} open groups",
        ["figure", "value"],
        [[name.replace("_", " "), number(value)] for name, value in result.items()],
        "alone: in this process, as fast as it goes; gateway: with agents and a trainer; the share is derived",
    )
    report = {
        "bench": "ledger",
        "command": " ".join(["python -m bench.ledger", *sys.argv[1:]]),
        "machine": {**before, "load_average_after": machine()["load_average"]},
        **result,
    }
    finish(report, out)


if __name__ == "__main__":
    typer.run(main)
