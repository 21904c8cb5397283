"""A version from a step's end into engines, by each transport, with the product's own code on both sides.

What is counted, from the end of the optimizer's step:

- *first* and *last engine*: until an engine has put every byte in place, each compared with its hash. Before that the trainer
  copies the weights, writes them with their hashes and fsyncs them; the gateway looks at every byte once; and they travel;
- *blocked*: the seconds in which the trainer computes nothing: the copy. It streams the next groups during all else;
- *bytes*: what the machines of all engines read or received together;
- *pause*: the time for which an engine pauses: its own copy of the bytes over those that it had.

Engines are processes that hold the bytes and sample nothing (`bench.holders`); all are on this machine, so that a folder is a
page cache and a network the loopback device.
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.holders import LIMIT_S, Holder
from bench.versions import ADAPTER, NAME, write
from headgate.weights.fan_out import fan_out
from headgate.weights.folders import name_of
from headgate.weights.manifest import MANIFEST, plan_of
from headgate.weights.mirror import Mirror
from headgate.weights.plugin.headgate_transfer.wire import Join, Sender
from headgate.weights.tensors import scan

TRANSPORTS = ("filesystem", "http", "collective", "ipc", "delta", "lora")
_HOST = "127.0.0.1"
_NEXT = 2


@dataclass(frozen=True, slots=True)
class Times:
    """One version by one transport."""

    first: float
    last: float
    blocked: float
    written: float
    """When the version was whole on the disk."""
    checked: float
    """When the gateway had looked at it."""
    bytes: int
    pauses: list[float]


@dataclass(frozen=True, slots=True)
class World:
    """A trainer's two states, and the engines."""

    root: Path
    """The folder of versions; it has version 1."""
    state: dict[str, Any]
    adapter: dict[str, Any]
    engines: Sequence[Holder]


def publish(transport: str, world: World) -> Times:
    """Return a step's version by a transport; all that it leaves on the disk is removed."""
    try:
        if transport in ("http", "delta"):
            return asyncio.run(_over_http(transport, world))
        return _directly(transport, world)
    finally:
        shutil.rmtree(world.root / name_of(_NEXT), ignore_errors=True)
        shutil.rmtree(_copies(world), ignore_errors=True)


def _copies(world: World) -> Path:
    return world.root.parent / "copies"


def _written(transport: str, world: World) -> tuple[float, Path, float]:
    """Write a version; return the time of the step's end, the folder, and the seconds without computing."""
    name, given = (ADAPTER, world.adapter) if transport == "lora" else (NAME, world.state)
    began = time.monotonic()
    snapshot = {key: tensor.clone() for key, tensor in given.items()}
    blocked = time.monotonic() - began
    return began, write(world.root, _NEXT, snapshot, name=name, deltas=transport == "delta"), blocked


def _directly(transport: str, world: World) -> Times:
    """Let engines read the trainer's folder, or send it to them."""
    began, folder, blocked = _written(transport, world)
    name = ADAPTER if transport == "lora" else NAME
    written = time.monotonic() - began
    scan(folder / name)
    checked = time.monotonic() - began
    backend = {"collective": "gloo", "ipc": "ipc"}.get(transport)
    plan = plan_of(json.loads((folder / MANIFEST).read_text())["files"])

    def one(engine: Holder) -> tuple[int, float, float]:
        if backend is None:
            moved = engine.call("bring_folder", folder)
        else:
            sender = Sender(folder, plan, backend, _HOST, 1, LIMIT_S)
            join = Join(_NEXT, backend, _HOST, sender.port, 2, plan, LIMIT_S)
            engine.begin("bring_transfer", join)
            sender.send()
            moved = engine.end()
        pause = engine.call("swap")
        return moved, pause, time.monotonic() - began

    with ThreadPoolExecutor(len(world.engines)) as pool:
        found = list(pool.map(one, world.engines))
    return _times(found, blocked, written, checked)


async def _over_http(transport: str, world: World) -> Times:
    """Fetch to the gateway from the trainer's server, and then to the engines' mirrors from it and from one another."""
    servers = [Holder(), Holder()]
    homes = [world.root, *(_copies(world) / str(number) for number in range(len(world.engines) + 1))]
    try:
        for home in homes[1:]:
            shutil.copytree(world.root, home, copy_function=os.link)
        pairs = zip([*servers, *world.engines], homes, strict=True)
        root, gateway, *urls = [holder.call("serve", home) for holder, home in pairs]
        began, _, blocked = _written(transport, world)
        written = time.monotonic() - began
        async with Mirror(_copies(world) / "client") as client:
            await client.request(gateway, _NEXT, [root])
            await asyncio.to_thread(scan, homes[1] / name_of(_NEXT) / NAME)
            checked = time.monotonic() - began
            ends: list[asyncio.Task[tuple[int, float, float]]] = []

            async def load(number: int) -> tuple[int, float, float]:
                engine, folder = world.engines[number], homes[number + 2] / name_of(_NEXT)
                await asyncio.to_thread(engine.call, "bring_folder", folder)
                pause = await asyncio.to_thread(engine.call, "swap")
                end = time.monotonic() - began
                return await asyncio.to_thread(engine.call, "fetched"), pause, end

            async def fetch(url: str, sources: list[str]) -> None:
                await client.request(url, _NEXT, sources)
                ends.append(asyncio.create_task(load(urls.index(url)), name=f"load-{url}"))

            failed = await fan_out(root, dict.fromkeys(urls, ""), fetch)
            if failed:
                raise RuntimeError(f"mirrors failed: {failed}")
            return _times(await asyncio.gather(*ends), blocked, written, checked)
    finally:
        for server in servers:
            server.close()


def _times(
    found: Sequence[tuple[int, float, float]], blocked: float, written: float, checked: float
) -> Times:
    moved, pauses, ends = zip(*found, strict=True)
    return Times(min(ends), max(ends), blocked, written, checked, sum(moved), list(pauses))
