"""The loop: lease, assemble, forward and backward, step, checkpoint, publish, ack; each a function of that name.

A trainer at version v trains buffer v and so makes version v + 1. What survives a crash is the checkpoint, and the order of the
steps makes every crash recoverable: the checkpoint is written before the version is published, and the version is published
before the lease is acknowledged. So on a new start at version c, a lease of a buffer below c is one whose effect the checkpoint
already holds: it is published, if the gateway does not know it, and acknowledged, without training.

A number names one set of weights for ever. A trainer that comes back with an older checkpoint than the newest number therefore
begins a new line: the checkpoint's weights are published anew under the next free number, with the checkpoint's own version as
their parent, before anything is trained. That orphans the versions between, and the gateway says what becomes of their samples.

Owns the child processes (`cluster`), the lease while it is worked on, and the learner. Everything that blocks runs in a thread,
so that the lease is renewed meanwhile.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import AsyncExitStack
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import httpx

from gateway.client import GatewayClient, GatewayRefused
from gateway.types import Group, Lease
from trainer.cluster import Watched, gateway_process, rollout_process, watch
from trainer.errors import (
    GatewayAhead,
    LeaseLost,
    PublishFailed,
    StepTimeout,
    TrainerError,
)
from trainer.learner import Batch, Learner
from trainer.metrics import Metrics
from trainer.settings import Settings
from trainer.weights.filesystem import WeightsDirectory

T = TypeVar("T")

CONSUMER = "trainer"
"""The same name after a restart, so that the gateway gives an unfinished lease back to it at once."""
POLL_S = 20.0
"""How long one request waits at the gateway for groups or for an update."""
RETRY_S = 0.5


async def run(settings: Settings) -> None:
    """Trains until version `[run] steps` is published and acknowledged. Raises TrainerError or ChildDied."""
    async with AsyncExitStack() as stack:
        learner = await asyncio.to_thread(Learner.open, settings)
        metrics = stack.enter_context(Metrics(settings.run.dir, settings.run.steps))
        url, gateway = await gateway_process(stack, settings.gateway, settings.run.dir)
        client = await stack.enter_async_context(GatewayClient(url, settings.gateway.key))
        trainer = Trainer(settings, learner, client, metrics)
        await trainer.check_versions()
        rollout = await rollout_process(stack, settings, url)
        await watch(trainer.train(), gateway, rollout)


class Trainer:
    """One run of the loop against one gateway."""

    def __init__(self, settings: Settings, learner: Learner, client: GatewayClient, metrics: Metrics) -> None:
        self.settings = settings
        self.learner = learner
        self.metrics = metrics
        self.weights = WeightsDirectory(settings.run.dir.resolve() / "weights", settings.model.path)
        self._client = client
        self._model = settings.gateway.model
        self._lease: Lease
        self._leasing = asyncio.Lock()

    async def check_versions(self) -> None:
        """Begins a new line if newer numbers than the checkpoint's were used. Raises GatewayAhead if there is no checkpoint."""
        status = await self._status("check versions")
        used = max(status["newest_version"], self.weights.newest())
        if used <= self.learner.version:
            return
        if self.learner.steps == 0 and self.learner.version == 0:
            raise GatewayAhead(
                f"version {used} was published already, but there is no checkpoint under "
                f"{self.learner.checkpoints}: bring one back, or give the gateway and the trainer a new run"
            )
        self.learner.renumber(used + 1)
        self.metrics.say(
            f"version {used} was published, but the newest checkpoint is of version {self.learner.parent}: going on from its"
            f" weights as version {self.learner.version}"
        )
        await self.checkpoint()
        await self.publish()

    async def train(self) -> None:
        """Leases and trains until the run is over."""
        while True:
            self.metrics.waiting(self.learner.version, self.learner.steps)
            over = self.learner.steps >= self.settings.run.steps
            if over and await self._acknowledged(self.learner.version - 1):
                return
            started = time.monotonic()
            self._lease = await self.lease()
            renewal = Watched("renewal of the lease", self._renew())
            await watch(self._work(self._lease, started), renewal)

    async def _status(self, step: str) -> dict[str, Any]:
        return await self._ask(step, lambda: self._client.status(self._model))

    async def _acknowledged(self, buffer: int) -> bool:
        return bool((await self._status("check versions"))["consumed"] >= buffer + 1)

    async def _work(self, lease: Lease, started: float) -> None:
        version = self.learner.version
        if lease.buffer > version:
            raise GatewayAhead(
                f"the gateway leases buffer {lease.buffer}, but the trainer is at version {version}"
            )
        if lease.buffer < version:
            await self.publish()
            await self.ack(self.learner.checkpoints / f"v{version:06d}")
            return
        times: dict[str, float] = {}
        batch = await _timed(times, "assemble", self.assemble())
        measured = await _timed(times, "train", self.forward_backward(batch))
        measured |= await _timed(times, "step", self.step(batch))
        checkpoint = await _timed(times, "checkpoint", self.checkpoint())
        await _timed(times, "publish", self.publish())
        await _timed(times, "ack", self.ack(checkpoint))
        self.metrics.trained(batch, version, measured, times, time.monotonic() - started)

    # The steps

    async def lease(self) -> Lease:
        """The lease of the next buffer, once nobody else holds it."""
        return await self._ask(
            "lease", lambda: self._client.lease(CONSUMER, self._model), retry=(409, 425, 429)
        )

    async def assemble(self) -> Batch:
        """The buffer's groups, fetched as they become ready, as advantages and rows."""
        groups: list[Group] = []
        cursor, limit = 0, self.settings.run.batch_wait_s
        deadline = time.monotonic() + limit
        while True:
            fetched = await self._leased(
                "assemble",
                partial(self._client.leased_groups, cursor=cursor, wait_s=POLL_S, model=self._model),
            )
            groups += fetched.groups
            cursor = fetched.cursor
            self.metrics.collected(len(groups), self._lease.size)
            if fetched.complete:
                return await asyncio.to_thread(self.learner.assemble, groups)
            if time.monotonic() > deadline:
                raise StepTimeout("assemble", limit, f"{len(groups)} of {self._lease.size} groups came")

    async def forward_backward(self, batch: Batch) -> dict[str, float]:
        """Leaves the gradient of the batch in the model; answers metrics."""
        return await asyncio.to_thread(self.learner.accumulate, batch)

    async def step(self, batch: Batch) -> dict[str, float]:
        """The optimizer step, which makes the next version."""
        return await asyncio.to_thread(self.learner.step, batch)

    async def checkpoint(self) -> Path:
        """Writes the checkpoint from which this step need never be repeated."""
        return await asyncio.to_thread(self.learner.save_checkpoint)

    async def publish(self) -> None:
        """Hands the current version over, unless the gateway has it, and waits until the engines run it."""
        version, limit = self.learner.version, self.settings.weights.publish_s
        path = self.weights.path(version)
        if not path.exists():
            path = await asyncio.to_thread(
                self.weights.write, version, self.learner.parent, self.learner.model, self.learner.probe
            )
        deadline = time.monotonic() + limit
        record: dict[str, Any] = {"state": "updating"}
        while record["state"] == "updating":
            if time.monotonic() > deadline:
                raise StepTimeout("publish", limit, f"version {version} is still updating")
            # Publishing the same version again is safe, and goes on where a gateway was restarted in the middle.
            record = await self._ask(
                "publish", lambda: self._client.publish(version, str(path), POLL_S, self._model)
            )
        if record["state"] == "failed":
            raise PublishFailed(f"version {version}: {record}")
        keep = self.settings.weights.keep
        await asyncio.to_thread(self.weights.prune, keep, version, self.learner.parent)

    async def ack(self, checkpoint: Path) -> None:
        """Says that `checkpoint` holds the buffer's effect."""
        buffer = self._lease.buffer
        try:
            await self._leased("ack", lambda lease: self._client.ack(lease, str(checkpoint), self._model))
        except LeaseLost:
            # An ack whose answer was lost on the way has moved the gateway on to the next buffer.
            if not await self._acknowledged(buffer):
                raise

    # How the gateway is asked

    async def _renew(self) -> None:
        while True:
            await asyncio.sleep(self._lease.deadline_s / 3)
            await self._leased("renew the lease", partial(self._client.renew, model=self._model))

    async def _leased(self, step: str, call: Callable[[Lease], Awaitable[T]]) -> T:
        """`call` with the lease, and once more with a new lease of the same buffer, for a gateway that was restarted forgets."""
        lease = self._lease
        try:
            return await self._ask(step, lambda: call(lease))
        except GatewayRefused as refusal:
            if refusal.status not in (404, 409):
                raise
            await self._lease_again(lease, refusal)
            return await self._ask(step, lambda: call(self._lease))

    async def _lease_again(self, old: Lease, refusal: GatewayRefused) -> None:
        async with self._leasing:
            if self._lease is not old:
                return
            fresh = await self.lease()
            if fresh.buffer != old.buffer:
                raise LeaseLost(f"the lease of buffer {old.buffer} is gone: {refusal}")
            self._lease = fresh

    async def _ask(self, step: str, call: Callable[[], Awaitable[T]], retry: tuple[int, ...] = ()) -> T:
        """`call`, again and again while the gateway is away (or refuses with a status of `retry`) until `answer_s`."""
        limit = self.settings.gateway.answer_s
        deadline = time.monotonic() + limit
        while True:
            try:
                return await call()
            except httpx.TransportError as error:
                reason, pause = f"{type(error).__name__}: {error}", RETRY_S
            except GatewayRefused as refusal:
                if refusal.status not in (*retry, 502, 503, 504):
                    raise
                reason, pause = str(refusal), refusal.retry_after or RETRY_S
            if time.monotonic() + pause > deadline:
                raise StepTimeout(step, limit, reason)
            await asyncio.sleep(pause)


async def _timed(times: dict[str, float], step: str, work: Coroutine[Any, Any, T]) -> T:
    started = time.monotonic()
    try:
        return await work
    except GatewayRefused as refusal:
        raise TrainerError(f"step '{step}' was refused by the gateway: {refusal}") from refusal
    finally:
        times[step] = time.monotonic() - started
