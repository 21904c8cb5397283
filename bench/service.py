"""`python -m bench.service`: the gateway as a service against the gateway alone, the cost of durability, and seconds to recover.

One engine (the mock), one load client, and a gateway of each kind, all of which run while one after the other is measured, round
after round, so that the noise of the machine hits all of them. `no wait`: nothing waits for a disk (SQLite in files that are in
memory, PostgreSQL with fsync off). Two processes get the streams of one between them, and then as many each. Then a service of
two processes with two fake engines loses one part after the other, each to SIGKILL; Redis and PostgreSQL are started again at
once. It has recovered when each of four clients has a reply that it asked for after the kill. Machines with few CPUs share them
among all of this: read ratios.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import httpx

from bench.figures import figures, ratio
from bench.load import Shape, measure
from bench.model import save_model
from bench.processes import Child, run_mock, run_server, session_cpu_s
from bench.report import Steps, finish, machine, number, show
from bench.servers import PostgresServer, RedisServer, postgres_server, redis_server
from bench.targets import GatewayTarget, Prompts, open_episodes
from examples.service.programs import NotInstalled
from processes.ports import free_port

_PROBERS = 4
_LIMIT_S = 120.0
_SHOWN = ("requests_per_s", "chunks_per_s", "first_ms_p99", "request_ms_p99", "cpu_ms_per_request")
KILLS = ("gateway", "coordinator", "engine", "redis", "postgresql")


@dataclass(frozen=True, slots=True)
class Kind:
    """A gateway to be measured."""

    name: str
    store: str
    bus: str = "memory://"
    workers: int = 1

    @property
    def loads(self) -> dict[str, int]:
        """The row of each load, and its streams, in times of those of one process: several get these, and then as many each."""
        return {self.name: 1} | ({f"{self.name}, streams for each": self.workers} if self.workers > 1 else {})


@asynccontextmanager
async def _gateway(kind: Kind, model: Path, engine: str, work: Path) -> AsyncIterator[Child]:
    port = free_port()
    config = work / f"{kind.name.replace(' ', '-')}.toml"
    config.write_text(
        f"[server]\nport = {port}\n[models.bench]\npath = '{model}'\nmax_model_len = 2048\n[engine]\n{engine}\n"
        f"[store]\nurl = '{kind.store}'\n[bus]\nurl = '{kind.bus}'\nprefix = 'bench-{port}'\n"
        f"[cluster]\nlease_s = 2.0\n[control]\nrecording = '{work}/control-{port}.jsonl'\n"
    )
    argv = [sys.executable, "-m", "gateway.cli", "serve", "--config", str(config)]
    argv += ["--workers", str(kind.workers)] if kind.workers > 1 else []
    async with run_server("gateway", argv, port, "/admin/v1/status", work) as child:
        yield child


async def _throughput(
    kinds: list[Kind], model: Path, work: Path, given: argparse.Namespace, steps: Steps
) -> dict[str, dict[str, float | None]]:
    """The median of the rounds, by kind."""
    prompts = Prompts.load(model)
    loads = [(kind, row, times) for kind in kinds for row, times in kind.loads.items()]
    rounds: dict[str, list[dict[str, float | None]]] = {row: [] for _, row, _ in loads}
    async with AsyncExitStack() as stack:
        engine = await stack.enter_async_context(run_mock(work, "--chunk-ms", "5"))
        children = {}
        for kind in kinds:
            steps.begin(f"{kind.name}: start")
            external = f"launch = 'external'\nurl = '{engine.url}'"
            child = await stack.enter_async_context(_gateway(kind, model, external, work))
            children[kind.name] = child
            await measure(await GatewayTarget.open(child.port, prompts), Shape(4, 8, True), 0.5, {})
        for index in range(given.rounds):
            for kind, row, times in loads if index % 2 == 0 else loads[::-1]:
                steps.begin(f"{row}: round {index + 1}")
                clocks = {"gateway": partial(_cpu_s, children[kind.name])}
                # new ones, as an episode stays where its agent's connection is, and each round has new connections
                target = await GatewayTarget.open(children[kind.name].port, prompts)
                window = await measure(target, Shape(given.streams * times, 64, True), given.seconds, clocks)
                found = figures(window) | {"failed": float(sum(window.failures.values()))}
                found["cpu_ms_per_request"] = ratio(window.cpu_s["gateway"] * 1e3, window.requests)
                rounds[row].append(found)
    return {row: {key: _median(some, key) for key in some[0]} for row, some in rounds.items()}


def _median(rounds: list[dict[str, float | None]], key: str) -> float | None:
    known = [value for found in rounds if (value := found[key]) is not None]
    return statistics.median(known) if known else None


class _Probe:
    """Asks again and again, with a new connection each time, so that it may land in any process."""

    def __init__(self, port: int, keys: list[str]) -> None:
        self._url = f"http://127.0.0.1:{port}/v1/chat/completions"
        self._keys = keys

    async def recovered(self, kill: Callable[[], Awaitable[None]]) -> float:
        """Seconds from the kill until every client has had a reply that it asked for afterwards."""
        began = time.perf_counter()
        await kill()
        async with asyncio.timeout(_LIMIT_S):
            await asyncio.gather(*(self._until_answered(key) for key in self._keys))
        return time.perf_counter() - began

    async def _until_answered(self, key: str) -> None:
        body = {"model": "bench", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 4}
        while True:
            try:
                async with httpx.AsyncClient(timeout=20.0) as http:
                    headers = {"authorization": f"Bearer {key}"}
                    if (await http.post(self._url, json=body, headers=headers)).status_code == 200:
                        return
            except httpx.TransportError:
                pass
            await asyncio.sleep(0.05)


async def _recovery(
    postgres: PostgresServer, redis: RedisServer, model: Path, work: Path, repeats: int, steps: Steps
) -> dict[str, list[float]]:
    """Seconds, by what was killed."""
    kind = Kind("recovery", postgres.url(postgres.new_database()), redis.url, 2)
    database = kind.store.rpartition("/")[2]
    found: dict[str, list[float]] = {name: [] for name in KILLS}
    async with _gateway(kind, model, "launch = 'fake'\ncount = 2", work) as child:
        probe = _Probe(child.port, await open_episodes(child.port, _PROBERS))

        def coordinator() -> int:
            (row,) = postgres.execute("SELECT holder FROM coordinator", database)
            return next(int(part) for part in str(row[0]).split("-") if part in map(str, _workers(child)))

        async def kill(name: str) -> None:
            if name == "redis":
                await asyncio.to_thread(redis.stop)
                await asyncio.to_thread(redis.start)
            elif name == "postgresql":
                await asyncio.to_thread(postgres.stop, "kill")
                await asyncio.to_thread(postgres.start)
            elif name == "engine":
                os.kill(min(_running(child, "gateway.engines.fake")), signal.SIGKILL)
            else:
                pid = victim
                os.kill(pid, signal.SIGKILL)

        for _ in range(repeats):
            for name in KILLS:
                steps.begin(f"kill: {name}")
                await _settled(child)
                decides = await asyncio.to_thread(coordinator)
                others = [pid for pid in _workers(child) if pid != decides]
                victim = decides if name == "coordinator" else others[0]
                found[name].append(await probe.recovered(lambda name=name: kill(name)))  # type: ignore[misc]
    return found


async def _settled(child: Child) -> None:
    """Both processes and both engines are there, and answer."""
    deadline = time.monotonic() + _LIMIT_S
    while len(_workers(child)) < 2 or len(_running(child, "gateway.engines.fake")) < 2:
        if time.monotonic() > deadline:
            raise TimeoutError("the service did not come back")
        await asyncio.sleep(0.1)
    await asyncio.sleep(8.0)  # until everybody is linked again


def _cpu_s(child: Child) -> float:
    """CPU-seconds of a gateway, all of its processes together."""
    return child.cpu_s() + sum(map(session_cpu_s, _workers(child)))


def _workers(child: Child) -> list[int]:
    return [pid for pid in _running(child, "gateway.cli") if pid != child.pid]


def _running(child: Child, text: str) -> list[int]:
    """The descendants of the supervisor with a text in their command line."""
    found, look = [], [child.pid]
    while look:
        pid = look.pop()
        try:
            tasks = list(Path(f"/proc/{pid}/task").iterdir())
            look += [int(p) for task in tasks for p in (task / "children").read_text().split()]
            if text in Path(f"/proc/{pid}/cmdline").read_text():
                found.append(pid)
        except OSError:
            continue
    return sorted(found)


def _cost(results: dict[str, dict[str, float | None]], durable: str, free: str) -> float | None:
    """Returns the percentage of requests per second that durability costs."""
    with_it, without = results[durable]["requests_per_s"], results[free]["requests_per_s"]
    return None if not with_it or not without else (1 - with_it / without) * 100


def _workers_ratio(results: dict[str, dict[str, float | None]], *rows: str) -> float | None:
    """Returns how many times the requests of one process two would answer, with a core for each: counted by their CPU alone.

    `rows`: that of one process, and that of two.
    """
    one, two = (results[row]["cpu_ms_per_request"] for row in rows)
    return None if not one or not two else 2 * one / two


async def _bench(given: argparse.Namespace, model: Path, work: Path) -> dict[str, Any]:
    memory = given.memory if given.memory.is_dir() else work
    kills = given.repeats * len(KILLS)
    with (
        tempfile.TemporaryDirectory(dir=memory) as quick,
        postgres_server(durable=True) as postgres,
        postgres_server() as careless,
        redis_server() as redis,
    ):
        one = Kind("postgresql + redis", postgres.url(postgres.new_database()), redis.url)
        two = Kind("postgresql + redis, 2", postgres.url(postgres.new_database()), redis.url, 2)
        kinds = [
            Kind("sqlite", f"sqlite:///{work}/durable.db"),
            Kind("sqlite, no wait", f"sqlite:///{quick}/quick.db"),
            Kind("postgresql, no wait", careless.url(careless.new_database())),
            Kind("postgresql", postgres.url(postgres.new_database())),
            one,
            two,
        ]
        loads = sum(len(kind.loads) for kind in kinds)
        with Steps(len(kinds) + loads * given.rounds + kills) as steps:
            results = await _throughput(kinds, model, work, given, steps)
            recovery = await _recovery(postgres, redis, model, work, given.repeats, steps) if kills else {}
    shared, each = two.loads
    return {
        "results": results,
        "cost_of_durability_percent": {
            "sqlite": _cost(results, "sqlite", "sqlite, no wait"),
            "postgresql": _cost(results, "postgresql", "postgresql, no wait"),
        },
        "workers_2_ratio": _workers_ratio(results, one.name, each),
        "workers_2_ratio_shared_streams": _workers_ratio(results, one.name, shared),
        "recovery_s": recovery,
    }


def main() -> None:
    """Runs the bench and prints its report."""
    parser = argparse.ArgumentParser(prog="bench.service", description=__doc__)
    parser.add_argument("--streams", type=int, default=32)
    parser.add_argument("--seconds", type=float, default=6.0, help="of each round")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--repeats", type=int, default=3, help="of each kill; 0: none")
    parser.add_argument("--memory", type=Path, default=Path("/dev/shm"), help="a folder that is no disk")
    parser.add_argument("--out", type=Path, default=Path("runs/bench/service.json"))
    given = parser.parse_args()
    before = machine()
    try:
        with tempfile.TemporaryDirectory(prefix="headgate-service-") as folder:
            save_model(Path(folder) / "model")
            found = asyncio.run(_bench(given, Path(folder) / "model", Path(folder)))
    except NotInstalled as error:
        sys.exit(str(error))
    rows = [[name, *(number(values.get(key)) for key in _SHOWN)] for name, values in found["results"].items()]
    show(f"{given.streams} streams of 64 tokens", ["gateway", *_SHOWN], rows)
    rows = [[name, *(number(value) for value in values)] for name, values in found["recovery_s"].items()]
    show("seconds from the kill to a reply", ["killed", *(f"{n + 1}" for n in range(given.repeats))], rows)
    failed = sum(values.get("failed") or 0 for values in found["results"].values())
    finish({"bench": "service", "machine": before, "failed_requests": failed, **found}, given.out)


if __name__ == "__main__":
    main()
