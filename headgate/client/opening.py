"""Open the episodes of a run: one request after another until the gateway has a slot, or refuses.

Owns a request from its first try until the episode's id is known. Invariants: a request is repeated under one Idempotency-Key, so
that it opens one episode; an episode that was opened although its run has ended is handed to `leave`.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from headgate.client.admin import GatewayClient, GatewayRefused
from headgate.client.agents import Task
from headgate.client.retry import RetryPolicy, Stopped
from headgate.client.waits import Waits
from headgate.processes.slow import SILENT_S
from headgate.types import (
    AS_REQUESTED,
    EpisodeMode,
    EpisodeOpened,
    EpisodeSampling,
)

STOP_GRACE_S = 5.0
_FIRST_WAIT_S = 2.0
"""The time that the first request to open an episode waits in the gateway: a longer wait is reported with its reason."""
_STEP = "open an episode"


@dataclass(frozen=True, slots=True)
class Kind:
    """How the episodes of a run are opened: see `EpisodeRunner`."""

    group_size: int = 1
    mode: EpisodeMode = "train"
    model: str | None = None
    sampling: EpisodeSampling = AS_REQUESTED
    describe: bool = False
    open_wait_s: float = 30.0


class Opening:
    """Opens episodes of one kind, at most `most` at a time, first come, first served."""

    def __init__(
        self,
        client: GatewayClient,
        kind: Kind,
        retry: RetryPolicy,
        waits: Waits,
        leave: Callable[[str], Awaitable[None]],
        most: int,
    ) -> None:
        """`leave` abandons an episode of a run that has ended."""
        self._client = client
        self._kind = kind
        self._retry = retry
        self._waits = waits
        self._leave = leave
        self._free = asyncio.Semaphore(most)

    async def open(self, task: Task, group_id: str, stop: asyncio.Event) -> EpisodeOpened:
        """Open an episode. Raise Stopped, GatewayRefused and GatewayUnreachable."""
        async with self._free:
            return await self._open(task, group_id, stop)

    async def _open(self, task: Task, group_id: str, stop: asyncio.Event) -> EpisodeOpened:
        key = secrets.token_hex(16)
        request = _Request(self._client, self._kind, task, group_id, key)

        async def on_refusal(refused: GatewayRefused) -> None:
            request.wait_s = self._kind.open_wait_s
            self._waits.set(key, await self._client.not_ready() or refused.message)

        work = self._retry.call(_STEP, request, stop, on_refusal, SILENT_S + self._kind.open_wait_s)
        opening = asyncio.create_task(work, name=f"open-{group_id}")
        stopping = asyncio.create_task(stop.wait(), name=f"stop-{group_id}")
        try:
            await asyncio.wait({opening, stopping}, return_when=asyncio.FIRST_COMPLETED)
            if not opening.done():  # a member of a started group needs no slot and is admitted immediately
                await asyncio.wait({opening}, timeout=STOP_GRACE_S)
            if not opening.done():
                raise Stopped
            return opening.result()
        except asyncio.CancelledError:
            await self._leave_once_open(opening)
            raise
        finally:
            stopping.cancel()
            opening.cancel()
            self._waits.set(key, "")

    async def _leave_once_open(self, opening: asyncio.Future[EpisodeOpened]) -> None:
        """Abandon an episode that the gateway may be opening."""
        await asyncio.wait({opening}, timeout=STOP_GRACE_S)
        if opening.done() and not opening.cancelled() and opening.exception() is None:
            await self._leave(opening.result().episode_id)


@dataclass(slots=True)
class _Request:
    """One request, which can be repeated."""

    client: GatewayClient
    kind: Kind
    task: Task
    group_id: str
    key: str
    wait_s: float = _FIRST_WAIT_S

    def __call__(self) -> Awaitable[EpisodeOpened]:
        return self.client.open_episode(
            self.task.task_id,
            self.group_id,
            self.kind.group_size,
            self.kind.mode,
            metadata=self.task.data if self.kind.describe else None,
            wait_s=min(self.wait_s, self.kind.open_wait_s),
            model=self.kind.model,
            idempotency_key=self.key,
            sampling=self.kind.sampling,
        )
