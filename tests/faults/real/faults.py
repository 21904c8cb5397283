"""Faults: drawn from the seed, done to a running system, logged as they happen.

Owns the schedule and nothing else. Every fault ends by itself. A fault whose victim is dead at its time is done as soon as it can
be; one that cannot be done at all is a problem of the run.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from random import Random
from typing import TYPE_CHECKING, Any

from tests.faults.evidence import Journal

if TYPE_CHECKING:
    from tests.faults.real.plan import Plan
    from tests.faults.real.processes import Process
    from tests.faults.real.proxy import Link
from tests.faults.real.system import System

_AGAIN_S = 0.5
_PATIENCE_S = 180.0
"""The longest that a fault may wait for its victim, and last."""
Fault = Callable[["System", Random], Awaitable[dict[str, Any] | None]]
"""Do it, and return to which victim and how, or None if it cannot be done now."""


async def _kill_gateway(system: System, random: Random) -> dict[str, Any] | None:
    victim = random.choice(system.gateways)
    return await _killed(system, victim, random.uniform(0, 2))


async def _kill_coordinator(system: System, random: Random) -> dict[str, Any] | None:
    victim = await system.coordinator()
    return await _killed(system, victim, random.uniform(0, 3))


async def _kill_in_update(system: System, random: Random) -> dict[str, Any] | None:
    """Kill the coordinator or an engine during a weight update."""
    version = await system.updating(10.0)
    if version is None:
        return None
    await asyncio.sleep(random.uniform(0, 0.4))
    victim = await system.coordinator() if random.random() < 0.7 else random.choice(system.engines)
    found = await _killed(system, victim, random.uniform(0, 2))
    return found and {**found, "version": version}


async def _kill_engine(system: System, random: Random) -> dict[str, Any] | None:
    return await _killed(system, random.choice(system.engines), random.uniform(0, 2))


async def _kill_trainer(system: System, random: Random) -> dict[str, Any] | None:
    return await _killed(system, system.trainer, random.uniform(0, 2))


async def _kill_server(system: System, random: Random) -> dict[str, Any] | None:
    """Kill the trainer's server of versions, also in the middle of a transfer."""
    assert system.server is not None
    return await _killed(system, system.server, random.uniform(0, 2))


async def _killed(system: System, victim: Process, down_s: float) -> dict[str, Any] | None:
    since = time.time()
    if not await victim.kill(down_s):
        return None
    found = {"who": victim.name, "since": since, "seconds": down_s}
    if victim in system.gateways and await system.ready_again(victim, 90.0):
        found["ready_s"] = time.time() - since
    return found


async def _pause_gateway(system: System, random: Random) -> dict[str, Any]:
    """Pause a gateway for longer than its lease: another one coordinates when it continues."""
    victim = await system.coordinator() if random.random() < 0.7 else random.choice(system.gateways)
    seconds = system.plan.lease_s * random.uniform(1.2, 3)
    await victim.pause(seconds)
    return {"who": victim.name, "seconds": seconds}


async def _stop_redis(system: System, random: Random) -> dict[str, Any] | None:
    assert system.redis is not None
    return await _killed(system, system.redis, random.uniform(0.2, 6))


async def _flush_redis(system: System, _: Random) -> dict[str, Any] | None:
    return {"who": "redis"} if await system.flush_redis() else None


async def _stop_postgres(system: System, random: Random) -> dict[str, Any] | None:
    seconds, how = random.uniform(0.2, system.plan.postgres_down_s), random.choice(("immediate", "kill"))
    if not await system.stop_postgres(how, seconds):
        return None
    return {"who": "postgres", "how": how, "seconds": seconds}


async def _drop(system: System, random: Random) -> dict[str, Any] | None:
    return _dropped(random.choice(system.inner_links))


async def _drop_clients(system: System, _: Random) -> dict[str, Any] | None:
    return _dropped(system.front)


def _dropped(link: Link) -> dict[str, Any] | None:
    connections = link.drop()
    return {"who": link.name, "connections": connections} if connections else None


async def _cut(system: System, random: Random) -> dict[str, Any]:
    link, seconds = random.choice(system.inner_links), random.uniform(0.5, 5)
    await link.cut(seconds)
    return {"who": link.name, "seconds": seconds}


async def _delay(system: System, random: Random) -> dict[str, Any]:
    link, seconds = random.choice(system.inner_links), random.uniform(1, 6)
    delay_s = random.choice((0.02, 0.1, 0.5, seconds))
    await link.slow(seconds, delay_s)
    return {"who": link.name, "seconds": seconds, "delay_s": delay_s}


@dataclass(frozen=True, slots=True)
class Kind:
    """A kind of fault: how often compared with the others, and the part of the system that it needs."""

    name: str
    weight: float
    do: Fault
    needs: str = ""


KINDS = (
    Kind("kill_gateway", 2, _kill_gateway),
    Kind("kill_coordinator", 2, _kill_coordinator),
    Kind("kill_in_update", 2, _kill_in_update),
    Kind("kill_engine", 2, _kill_engine),
    Kind("kill_trainer", 2, _kill_trainer),
    Kind("kill_server", 2, _kill_server, "server"),
    Kind("pause_gateway", 1.5, _pause_gateway, "cluster"),
    Kind("stop_redis", 1, _stop_redis, "redis"),
    Kind("flush_redis", 1, _flush_redis, "redis"),
    Kind("stop_postgres", 1.5, _stop_postgres, "postgres"),
    Kind("drop_connections", 2, _drop),
    Kind("drop_clients", 1, _drop_clients),
    Kind("cut_link", 2, _cut),
    Kind("delay_link", 2, _delay),
)


def schedule(plan: Plan) -> list[tuple[float, Kind, Random]]:
    """Return each fault's time (seconds from the start), kind, and random numbers. Every kind occurs once first."""
    random = Random(f"{plan.seed} faults")
    kinds = [kind for kind in KINDS if not kind.needs or kind.needs in plan.present]
    kinds = [kind for kind in kinds if not plan.kinds or kind.name in plan.kinds]
    first = list(kinds)
    random.shuffle(first)
    planned: list[tuple[float, Kind, Random]] = []
    at = random.uniform(0.3, 1.0) * plan.every_s
    while kinds and at < plan.seconds:
        kind = first.pop() if first else random.choices(kinds, [k.weight for k in kinds])[0]
        planned.append((at, kind, Random(f"{plan.seed} fault {len(planned)}")))
        at += random.uniform(0.4, 1.6) * plan.every_s
    return planned


async def inflict(system: System, journal: Journal, planned: list[tuple[float, Kind, Random]]) -> list[str]:
    """Do the faults; return when every one has ended, with those that could not be done."""
    loop = asyncio.get_running_loop()
    started = loop.time()
    running = []
    async with asyncio.TaskGroup() as group:
        for at, kind, random in planned:
            await asyncio.sleep(max(0.0, started + at - loop.time()))
            task = group.create_task(_inflict(system, journal, kind, random), name=f"fault-{kind.name}")
            running.append(task)
        await asyncio.sleep(max(0.0, started + system.plan.seconds - loop.time()))
    return [problem for task in running if (problem := task.result())]


async def _inflict(system: System, journal: Journal, kind: Kind, random: Random) -> str:
    """Do a fault as soon as it can be done; return why it could not."""
    journal.write("begin", fault=kind.name)
    journal.flush()
    report, why = None, f"its victim was dead for {_PATIENCE_S:g} s"
    try:
        async with asyncio.timeout(_PATIENCE_S) as limit:
            while (report := await kind.do(system, random)) is None:
                await asyncio.sleep(_AGAIN_S)
    except Exception as error:
        if not limit.expired():
            why = repr(error)
    journal.write("end" if report else "not_done", fault=kind.name, **(report or {"error": why}))
    journal.flush()
    system.log(f"{kind.name}: {report or f'not done: {why}'}")
    return "" if report else f"the fault {kind.name} could not be done: {why}"
