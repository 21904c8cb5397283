"""This process's membership in its cluster: coordinator, follower, or neither yet.

Owns the loop that changes the role. A process becomes the coordinator at most once: when it finds a successor it ends (`lost`),
and its supervisor restarts it.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager, aclosing
from typing import Literal

from gateway.bus.base import Bus
from gateway.cluster import snapshot
from gateway.cluster.election import Election
from gateway.cluster.follower import Follower
from headgate.errors import Fenced, Unavailable

log = logging.getLogger(__name__)
_RESIGN_S = 8.0
"""Seconds for the last write of a coordinator: without it, the next one waits for the lease's end."""

RoleName = Literal["alone", "starting", "follower", "coordinator"]
Lead = Callable[[int], AbstractAsyncContextManager[None]]
"""Makes this process the coordinator, under its fence, until it is left."""


class SingleProcess:
    """A process without a cluster, which is always the coordinator."""

    role: RoleName = "alone"
    url = ""

    async def coordinator(self) -> str | None:
        return None

    def check(self) -> None:
        """Do nothing: this process has its role."""

    async def check_coordinator(self) -> None:
        """Return immediately: no other process could be the coordinator."""

    async def close(self) -> None:
        """Do nothing: there is no successor."""


class Membership:
    """One process of a cluster."""

    def __init__(self, election: Election, follower: Follower, bus: Bus, wait_s: float) -> None:
        """Use `wait_s` as the time that a request waits for a coordinator."""
        self._bus = bus
        self._listener: asyncio.Task[None] | None = None
        self.role: RoleName = "starting"
        self.fence = 0
        """The fence of this process, while it is the coordinator."""
        self.url = ""
        """The coordinator's URL, while this process is a follower."""
        self._election = election
        self._follower = follower
        self._wait_s = wait_s
        self._changed = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    def start(self, lead: Lead, lost: Callable[[BaseException], None]) -> None:
        """Start. `lost` is called with the error after which the process cannot continue."""

        def ended(task: asyncio.Task[None]) -> None:
            if task.cancelled() or (error := task.exception()) is None:
                return
            if isinstance(error, Fenced):
                log.warning("this process leaves the cluster: %s", error)
            else:
                log.critical("this process leaves the cluster: %s", error, exc_info=error)
            lost(error)

        self._listener = asyncio.create_task(self._listen(), name="membership-news")
        self._listener.add_done_callback(ended)
        self._task = asyncio.create_task(self._run(lead), name="membership")
        self._task.add_done_callback(ended)

    async def close(self) -> None:
        """Leave the cluster; if this process is the coordinator, another one can succeed it immediately. May be called again."""
        tasks = {task for task in (self._task, self._listener) if task is not None}
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)

    async def _listen(self) -> None:
        async with aclosing(self._bus.listen(snapshot.TOPIC)) as news:
            async for _ in news:
                self._election.coordinator_changed()

    async def coordinator(self) -> str | None:
        """Return the coordinator's URL; None: it is this process. Raise Unavailable if there is none in time."""
        try:
            async with asyncio.timeout(self._wait_s):
                while not (
                    self.role == "coordinator" or (self.role == "follower" and self._follower.linked.is_set())
                ):
                    await self._changed.wait()
        except TimeoutError as error:
            message = f"step 'find the coordinator' took more than {self._wait_s:g} s"
            raise Unavailable(message, retry_after=2.0, code="no_coordinator") from error
        return None if self.role == "coordinator" else self.url

    def check(self) -> None:
        """Raise Unavailable while this process has no role."""
        if self.role == "starting" or (self.role == "follower" and not self._follower.linked.is_set()):
            raise Unavailable("this process has no coordinator now", retry_after=1.0, code="no_coordinator")

    async def check_coordinator(self) -> None:
        """Raise Fenced if this process is no longer the coordinator, Unavailable if that is not known."""
        await self._election.check_coordinator(self.fence)

    async def _run(self, lead: Lead) -> None:
        while True:
            found = await self._election.decide()
            if isinstance(found, int):
                return await self._coordinate(lead, found)
            self.url = found.url
            self._set("follower")
            following = asyncio.create_task(self._follower.follow(found.url), name="follow")
            linked = asyncio.create_task(self._announce(), name="follow-linked")
            watching = asyncio.create_task(self._election.changed(found.fence), name="watch-the-coordinator")
            try:
                await asyncio.wait({following, watching}, return_when=asyncio.FIRST_COMPLETED)
            finally:
                for task in (following, linked, watching):
                    task.cancel()
                await asyncio.gather(following, linked, watching, return_exceptions=True)
                self._set("starting")
            await asyncio.sleep(0.1)

    async def _announce(self) -> None:
        await self._follower.linked.wait()
        self._set("follower")

    async def _coordinate(self, lead: Lead, fence: int) -> None:
        log.warning("this process is the coordinator now (fence %d)", fence)
        self.fence = fence
        holding = asyncio.create_task(self._election.hold(fence), name="hold-the-lease")
        leading = asyncio.create_task(self._open(lead, fence), name="lead")
        try:
            await asyncio.wait({holding, leading}, return_when=asyncio.FIRST_COMPLETED)
            for task in (holding, leading):
                if task.done():
                    task.result()
        finally:
            for task in (holding, leading):
                task.cancel()
            await asyncio.gather(holding, leading, return_exceptions=True)
            self._set("starting")
            try:
                async with asyncio.timeout(_RESIGN_S):
                    await self._election.resign(fence)
                await snapshot.wake(self._bus)
            except (Unavailable, TimeoutError) as error:
                log.warning("the next coordinator has to wait for the lease's end: %s", error)

    async def _open(self, lead: Lead, fence: int) -> None:
        async with lead(fence):
            self._set("coordinator")
            await snapshot.wake(self._bus)
            await asyncio.Event().wait()

    def _set(self, role: RoleName) -> None:
        self.role = role
        self._changed.set()
        self._changed = asyncio.Event()
