"""A trainer in a process of its own that kills itself with SIGKILL at a named point, as nothing in the trainer can.

The process is forked from one that has imported everything, so that a start costs no seconds. `POINTS` names where a process may
die: at the first time that a function is called or has returned, or while its request is on the way.
"""

from __future__ import annotations

import asyncio
import importlib
import inspect
import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from tests.harness.forks import fork

UNDERWAY_S = 0.02


@dataclass(frozen=True)
class Point:
    """The owner's attribute at which a process dies; `of` limits it to a directory that is written or removed."""

    owner: str
    attribute: str
    when: Literal["before", "underway", "after"]
    of: str = ""
    background: bool = False
    """Only once a checkpoint is being written in the background, which then never ends."""
    overlapped: bool = False
    """Only in publishing the version of a step of this process, which waits there until the step's batch is acknowledged."""


POINTS = {
    "lease held": Point("trainer.loop.feed:Feed", "lease", "after"),
    "some groups accumulated": Point("trainer.rank_trainer:RankTrainer", "add_groups", "after"),
    "gradient whole": Point("trainer.rank_trainer:RankTrainer", "step", "before"),
    "stepped": Point("trainer.rank_trainer:RankTrainer", "step", "after"),
    "checkpoint not renamed": Point(
        "headgate.weights.folders:AtomicDirectory", "__exit__", "before", "checkpoints"
    ),
    "checkpoint written": Point(
        "headgate.weights.folders:AtomicDirectory", "__exit__", "after", "checkpoints"
    ),
    "checkpoint half removed": Point("headgate.weights.folders:shutil", "rmtree", "before", "checkpoints"),
    "weights not renamed": Point("headgate.weights.folders:AtomicDirectory", "__exit__", "before", "weights"),
    "weights written": Point("headgate.weights.folders:AtomicDirectory", "__exit__", "after", "weights"),
    "weights half removed": Point("headgate.weights.folders:shutil", "rmtree", "before", "weights"),
    "publishing": Point("headgate.client:GatewayClient", "publish", "underway"),
    "published": Point("trainer.loop.feed:Feed", "publish", "after"),
    "acknowledging": Point("headgate.client:GatewayClient", "ack", "underway"),
    "acknowledged": Point("trainer.loop.feed:Feed", "ack", "after"),
}
OFFLOAD = {
    "on the way out": Point("trainer.model.offload:Disk", "write", "after"),
    "all copied": Point("trainer.model.offload:Disk", "rewind", "before"),
    "offloaded": Point("trainer.rank_trainer:RankTrainer", "offload", "after"),
    "offloaded, and leased": Point("trainer.loop.feed:Feed", "lease", "after"),
    "on the way back": Point("trainer.model.offload:Disk", "read", "after"),
    "back": Point("trainer.rank_trainer:RankTrainer", "onload", "after"),
}
"""Points that a process passes whose weights are on disk while it waits."""
OVERLAPPED = {
    "acknowledged, and not written": Point(
        "trainer.publish.filesystem:WeightsDirectory", "write", "before", overlapped=True
    ),
    "written, and not announced": Point("trainer.loop.feed:Feed", "publish", "before", overlapped=True),
    "announced, and not live": Point("headgate.client:GatewayClient", "publish", "underway", overlapped=True),
}
"""Points of a version whose batch is acknowledged before."""
REPLAY = {
    "replaying": Point("trainer.rank_trainer:RankTrainer", "train", "before"),
    "replayed": Point("trainer.rank_trainer:RankTrainer", "train", "after"),
}
"""Points that a process passes only if there are versions after its checkpoint."""


BESIDE = {
    f"{name} during a checkpoint": replace(POINTS[name], background=True)
    for name in ("published", "acknowledged", "some groups accumulated", "stepped")
}
"""Points that a process passes while a checkpoint is being written."""
RANKS = {
    "writing shards": Point("trainer.state.checkpoint:shards", "write", "before"),
    "gathered": Point("trainer.rank_trainer:RankTrainer", "gather_weights", "after"),
}
"""Points that every rank passes, in addition to those of the trainer in `POINTS`."""
IDLE = {
    0: Point("trainer.loop.run:rank_rpc", "heartbeat", "after"),
    1: Point("trainer.rank_trainer:RankTrainer", "begin_batch", "after"),
}
"""The point after which each rank waits while there is no batch: the first heartbeat, and the beginning of a batch."""


def start(
    config: Path, log: Path, point: Point | None, environ: Mapping[str, str] | None = None
) -> multiprocessing.process.BaseProcess:
    """`trainer run CONFIG`, its output at the end of `log`. Blocks until the process runs."""
    return fork(_main, config, point, environ or {}, log=log)


def _main(config: Path, point: Point | None, environ: Mapping[str, str]) -> None:
    os.environ.update(environ)
    print(f"-- {point}")
    from trainer.cli import app

    if point is not None:
        arm(point)
    app(["run", str(config)])


def arm(point: Point) -> None:
    """Make this process die at a point."""
    module, _, name = point.owner.partition(":")
    owner = getattr(importlib.import_module(module), name)
    inner = getattr(owner, point.attribute)
    wrap = _async if inspect.iscoroutinefunction(inner) else _plain
    if point.overlapped:
        wrap = _async_overlapped if wrap is _async else _plain_overlapped
    armed = _writing() if point.background else _acknowledged() if point.overlapped else _ever()
    setattr(owner, point.attribute, wrap(inner, point, armed))


def _ever() -> threading.Event:
    event = threading.Event()
    event.set()
    return event


def _writing() -> threading.Event:
    """Set once a thread writes a checkpoint, which it never ends to do; the next one waits for that."""
    from trainer.model import shards
    from trainer.rank_trainer import RankTrainer

    inner, begin, begun = shards.write, RankTrainer.begin_checkpoint, threading.Event()

    def begin_checkpoint(trainer: RankTrainer) -> None:
        begin(trainer)
        begun.wait()

    def write(*arguments: Any) -> Any:
        written = inner(*arguments)
        if threading.current_thread().name.startswith("checkpoint"):
            begun.set()
            threading.Event().wait()
        return written

    shards.write, RankTrainer.begin_checkpoint = write, begin_checkpoint  # type: ignore[method-assign]
    return begun


_stepped = threading.Event()


def _acknowledged() -> threading.Event:
    """Set once the batch of this process's first step is acknowledged; those of a replay are not its own."""
    from trainer.loop.checkpoints import Checkpoints
    from trainer.loop.feed import Feed

    after_step, ack, acknowledged = Checkpoints.after_step, Feed.ack, threading.Event()

    async def stepped(checkpoints: Checkpoints) -> None:
        _stepped.set()
        await after_step(checkpoints)

    async def acked(feed: Feed, checkpoint: str) -> None:
        await ack(feed, checkpoint)
        if _stepped.is_set():
            acknowledged.set()

    Checkpoints.after_step, Feed.ack = stepped, acked  # type: ignore[method-assign]
    return acknowledged


def _plain_overlapped(
    inner: Callable[..., Any], _: Point, acknowledged: threading.Event
) -> Callable[..., Any]:
    def wrapped(*arguments: Any, **named: Any) -> Any:
        if not _stepped.is_set():
            return inner(*arguments, **named)
        acknowledged.wait()
        die()

    return wrapped


def _async_overlapped(
    inner: Callable[..., Any], point: Point, acknowledged: threading.Event
) -> Callable[..., Any]:
    async def wrapped(*arguments: Any, **named: Any) -> Any:
        if not _stepped.is_set():
            return await inner(*arguments, **named)
        await asyncio.to_thread(acknowledged.wait)
        if point.when == "underway":
            await asyncio.wait({asyncio.ensure_future(inner(*arguments, **named))}, timeout=UNDERWAY_S)
        die()

    return wrapped


def _plain(inner: Callable[..., Any], point: Point, armed: threading.Event) -> Callable[..., Any]:
    def wrapped(first: Any, *arguments: Any, **named: Any) -> Any:
        path = getattr(first, "target", first)
        if not armed.is_set() or (point.of and path.parent.name != point.of):
            return inner(first, *arguments, **named)
        if point.when == "before":
            die()
        inner(first, *arguments, **named)
        die()

    return wrapped


def _async(inner: Callable[..., Any], point: Point, armed: threading.Event) -> Callable[..., Any]:
    async def wrapped(*arguments: Any, **named: Any) -> Any:
        if not armed.is_set():
            return await inner(*arguments, **named)
        running = asyncio.ensure_future(inner(*arguments, **named))
        await (asyncio.sleep(UNDERWAY_S) if point.when == "underway" else running)
        die()

    return wrapped


def die() -> None:
    """End this process."""
    os.kill(os.getpid(), signal.SIGKILL)
