"""The gateway as the loop uses it: the lease of the batch that is trained, and requests that wait for an unavailable gateway.

Owns the lease. Invariants: a batch is requested only under its newest lease; if the lease has lapsed, the same
batch is leased again and the cursor continues, so that no group is received twice and none is missed.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, TypeVar

import httpx

from headgate.client import GatewayClient, GatewayRefused
from headgate.client.failures import in_a_line
from headgate.types import (
    Group,
    Lease,
    LeasedGroups,
)
from trainer.errors import LeaseLost, StepTimeout, TrainerError

T = TypeVar("T")

CONSUMER = "trainer"
"""The same name after a restart, so that the gateway grants an unfinished lease again immediately."""
POLL_S = 20.0
"""Seconds that one request waits at the gateway for groups or for an update."""
RECALL_POLL_S = 1.0
"""Seconds that one request waits for groups while nodes are lent and groups wait to be computed; then the nodes are requested."""
RETRY_S = 0.5
_NOT_FOUND = 404
_REPORT_AFTER_S = 2.0
"""A gateway that is unavailable for longer is reported to the user, once for each request."""


@contextmanager
def naming_step(step: str) -> Iterator[None]:
    """Raise TrainerError, which names the step, if the gateway refuses a request in the block."""
    try:
        yield
    except GatewayRefused as refusal:
        raise TrainerError(f"step '{step}' was refused by the gateway: {refusal}") from refusal


class Feed:
    """One trained model behind one gateway.

    Every method raises StepTimeout once the gateway is unavailable for `timeout_s`, and GatewayRefused for a response that
    waiting does not change.
    """

    def __init__(
        self,
        client: GatewayClient,
        model: str | None,
        timeout_s: float,
        notify: Callable[[str], None] = print,
    ) -> None:
        """`notify` reports to the user why the trainer waits."""
        self.current_lease: Lease
        self._notify = notify
        self._client = client
        self._model = model
        self._timeout_s = timeout_s
        self._leasing = asyncio.Lock()
        self._nodes: set[str] = set()
        """The nodes that the gateway has known. A gateway that was restarted knows them again once they are registered again."""

    # Versions

    async def status(self) -> dict[str, Any]:
        """Return the newest version and the ledger's state."""
        return await self._request("check versions", lambda: self._client.status(self._model))

    async def last_failure(self, model: str, reason: str) -> str:
        """Return the error of the newest training episode that ended for a reason, and where to read more."""
        filters: dict[str, str | int] = {"mode": "train", "model": model, "reason": reason, "limit": 1}
        rows = await self._request("read failed episodes", lambda: self._client.episodes(**filters))
        if not rows:
            return "`gateway episodes list` shows the episodes that are left"
        error = in_a_line(rows[0]["error"] or "") or reason
        return f"`gateway episodes why {rows[0]['id']}` shows all of the last error: {error}"

    async def acknowledged(self, batch: int) -> bool:
        """Return true if the gateway has advanced to a later batch."""
        return bool((await self.status())["consumed"] > batch)

    async def parent(self, version: int) -> int | None:
        """Return the version from which a published one was made."""
        record = await self._request("check versions", lambda: self._client.weights(version, self._model))
        parent: int | None = record["parent"]
        return parent

    async def publish(
        self, version: int, path: str, source: str | None, new_line: bool = False
    ) -> dict[str, Any]:
        """Publish a version, or request its state again; return the record after `POLL_S` if its update has not ended.

        `source`: the server from which the gateway fetches it, instead of `path`. `new_line`: numbers between it and its parent
        were given up, with their batches.
        """
        location = {"path": path} if source is None else {"url": source}
        call = partial(
            self._client.publish,
            version,
            wait_s=POLL_S,
            model=self._model,
            skip_batches=new_line,
            **location,
        )
        return await self._request("publish", call)

    # Batches

    async def lease(self) -> Lease:
        """Lease the next batch, once no other consumer has it."""
        self.current_lease = await self._lease()
        return self.current_lease

    async def groups(self, cursor: int, wait_s: float = POLL_S) -> LeasedGroups:
        """Return the groups of the leased batch after `cursor`; wait up to `wait_s` for one. Raise LeaseLost."""
        return await self._leased(
            "stream",
            partial(self._client.leased_groups, cursor=cursor, wait_s=wait_s, model=self._model),
        )

    async def renew(self) -> None:
        """Renew the lease until cancelled. Raise LeaseLost."""
        while True:
            await asyncio.sleep(self.current_lease.deadline_s / 3)
            await self._leased("renew the lease", partial(self._client.renew, model=self._model))

    async def ack(self, checkpoint: str) -> None:
        """Acknowledge that the leased batch was trained. Raise LeaseLost."""
        batch = self.current_lease.batch
        try:
            await self._leased("ack", lambda lease: self._client.ack(lease, checkpoint, self._model))
        except LeaseLost:
            # The response to an ack may be lost after the gateway has advanced to the next batch.
            if not await self.acknowledged(batch):
                raise

    async def nack(self, reason: str) -> None:
        """Return the leased batch untrained. Raise LeaseLost."""
        await self._leased("give back", partial(self._client.nack, reason=reason, model=self._model))

    async def record(self, batch: int) -> tuple[Group, ...]:
        """Return the groups of a batch that was trained, in their original order. Raise LeaseLost if they are unavailable.

        A batch without acknowledgment is leased for that, and is acknowledged or trained like any other later.
        """
        if await self.acknowledged(batch):
            return await self._request("replay", lambda: self._client.batch_groups(batch, self._model))
        await self.lease()
        fetched = await self.groups(0)
        if self.current_lease.batch != batch or not fetched.complete:
            raise LeaseLost(f"the gateway has no record of batch {batch}")
        return fetched.groups

    async def image(self, name: str) -> bytes | None:
        """Return an image's bytes by its hash; None if it is no longer stored."""
        try:
            return await self._request("fetch images", lambda: self._client.image(name))
        except GatewayRefused as refusal:
            if refusal.status != _NOT_FOUND:
                raise
            return None

    # Nodes

    async def claim(self, node: str) -> float:
        """Wait until a node is this trainer's, and return the seconds after which the claim ends unless it is renewed."""
        deadline = time.monotonic() + self._timeout_s
        while True:
            claimed = await self._of_node(
                "claim", node, lambda: self._client.claim(node, POLL_S, self._model)
            )
            if claimed["role"] == "train":
                return float(claimed["claim_s"])
            if time.monotonic() > deadline:
                raise StepTimeout(
                    "claim", self._timeout_s, f"node {node} is {claimed['role']}: {claimed['reason']}"
                )

    async def release(
        self, node: str, compute_s: float, load_s: float = 0.0, overhead_s: float = 0.0
    ) -> None:
        """Release a node while this trainer waits.

        `compute_s`: seconds of computation on the groups of the last batch. `load_s`: until its weights were back. `overhead_s`:
        the rest of the work on that batch.
        """
        await self._of_node(
            "release", node, lambda: self._client.release(node, self._model, compute_s, load_s, overhead_s)
        )

    async def recalled(self, node: str) -> bool:
        """Return true if the node is not lent, and will not be until the batch is complete."""
        return bool((await self._of_node("stream", node, lambda: self._client.node(node)))["claimable"])

    async def _of_node(self, step: str, node: str, call: Callable[[], Awaitable[T]]) -> T:
        """Make a request about a node; wait for one that the gateway knows no more."""
        response = await self._request(step, call, retry=(_NOT_FOUND,) if node in self._nodes else ())
        self._nodes.add(node)
        return response

    # Requests to the gateway

    async def _lease(self) -> Lease:
        request = partial(self._client.lease, CONSUMER, self._model)
        return await self._request("lease", request, retry=(409, 425, 429))

    async def _leased(self, step: str, call: Callable[[Lease], Awaitable[T]]) -> T:
        """Make a request with the lease, and once more with a new lease of the same batch if that one has lapsed."""
        lease = self.current_lease
        try:
            return await self._request(step, lambda: call(lease))
        except GatewayRefused as refusal:
            if refusal.status not in (404, 409):
                raise
            await self._replace_lease(lease, refusal)
            return await self._request(step, lambda: call(self.current_lease))

    async def _replace_lease(self, old: Lease, refusal: GatewayRefused) -> None:
        async with self._leasing:
            if self.current_lease is not old:
                return
            lease = await self._lease()
            if lease.batch != old.batch:
                raise LeaseLost(f"the lease of batch {old.batch} ended: {refusal}")
            self.current_lease = lease

    async def _request(self, step: str, call: Callable[[], Awaitable[T]], retry: tuple[int, ...] = ()) -> T:
        """Repeat `call` while the gateway is unavailable, or refuses with a status of `retry`, until `timeout_s`."""
        began, reported = time.monotonic(), False
        while True:
            try:
                return await call()
            except httpx.TransportError as error:
                reason, pause = f"{type(error).__name__}: {error}", RETRY_S
            except GatewayRefused as refusal:
                if refusal.status not in (*retry, 502, 503, 504) or refusal.lasts:
                    raise
                reason, pause = str(refusal), refusal.retry_after or RETRY_S
            waited = time.monotonic() - began
            if waited + pause > self._timeout_s:
                raise StepTimeout(step, self._timeout_s, reason)
            if waited > _REPORT_AFTER_S and not reported:
                reported = True
                self._notify(f"step '{step}' waits for the gateway, up to {self._timeout_s:g} s: {reason}")
            await asyncio.sleep(pause)
