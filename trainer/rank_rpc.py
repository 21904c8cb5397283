"""Remote calls from rank 0 to the other ranks: what rank 0 does with its trainer, all others do with theirs.

Only rank 0 leases, publishes and acknowledges. A method with `@on_all_ranks` runs on every rank with the same arguments; each
rank has its own batch. While rank 0 has nothing to call, it sends heartbeats: a rank that receives nothing for `[parallel]
timeout_s`, or does not respond for as long, is lost to the others.
"""

from __future__ import annotations

import asyncio
import enum
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any, Protocol, TypeVar

from trainer.data.batch import Batch
from trainer.errors import RankLost, TrainerError
from trainer.model.parallel import Ranks

T = TypeVar("T")


class RankMember(Protocol):
    """An object with methods that run on all ranks."""

    ranks: Ranks
    in_rank_call: bool
    """True within such a method: what it calls is part of it."""
    rank_call_lock: threading.Lock
    """Held during a call, because there is one at a time."""


class _Token(enum.Enum):
    BATCH = enum.auto()
    """Stands for the receiving rank's own batch."""
    HEARTBEAT = enum.auto()


def on_all_ranks(method: Callable[..., T]) -> Callable[..., T]:
    """Make a method of rank 0 run on every rank. The method raises RankLost, which names it."""

    @wraps(method)
    def call(self: RankMember, *arguments: Any) -> T:
        if self.ranks.size == 1 or self.in_rank_call:
            return method(self, *arguments)
        with self.rank_call_lock, self.ranks.within(method.__name__):
            sent = tuple(_Token.BATCH if isinstance(each, Batch) else each for each in arguments)
            self.ranks.command((method.__name__, sent))
            with _within_rank_call(self):
                return method(self, *arguments)

    return call


@contextmanager
def _within_rank_call(member: RankMember) -> Iterator[None]:
    member.in_rank_call = True
    try:
        yield
    finally:
        member.in_rank_call = False


def serve_commands(member: RankMember) -> None:
    """Execute the commands of rank 0 until it ends the run. Raise RankLost."""
    batch: Batch | None = None
    while (command := _receive(member.ranks)) is not None:
        if command is _Token.HEARTBEAT:
            continue
        name, sent = command
        arguments = tuple(batch if each is _Token.BATCH else each for each in sent)
        try:
            with member.ranks.within(name), _within_rank_call(member):
                result = getattr(member, name)(*arguments)
        except RankLost:
            raise
        except TrainerError:
            # Rank 0 raised the same error, and decides what follows.
            continue
        if isinstance(result, Batch):
            batch = result


def _receive(ranks: Ranks) -> Any:
    with ranks.within("waiting for a command of rank 0"):
        return ranks.command()


async def send_heartbeats(member: RankMember) -> None:
    """Check the other ranks until one is lost. Raise RankLost."""
    while True:
        await asyncio.sleep(member.ranks.heartbeat_interval_s)
        await asyncio.to_thread(heartbeat, member)


def heartbeat(member: RankMember) -> None:
    """Check that all ranks respond, unless a call is running, which checks that itself. Raise RankLost."""
    if not member.rank_call_lock.acquire(blocking=False):
        return
    try:
        with member.ranks.within("heartbeat"):
            member.ranks.command(_Token.HEARTBEAT)
    finally:
        member.rank_call_lock.release()


def shutdown_ranks(member: RankMember) -> None:
    """End the run on the other ranks, and close the process group. Raise RankLost."""
    if member.ranks.size > 1:
        with member.rank_call_lock, member.ranks.within("end"):
            member.ranks.command(None)
    member.ranks.close()
