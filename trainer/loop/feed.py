"""The gateway as the loop sees it: the lease of the buffer that is trained, and requests that outlast a gateway's absence.

Owns the lease. Invariants: a buffer is asked for under its newest lease alone; a lease that a restarted gateway forgot is taken
anew as long as it is of the same buffer, and the cursor goes on, so that no group comes twice and none is left out.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, TypeVar

import httpx

from gateway.client import GatewayClient, GatewayRefused
from gateway.client.failures import in_a_line
from gateway.types import Group, Lease, LeasedGroups
from trainer.errors import LeaseLost, StepTimeout, TrainerError

T = TypeVar("T")

CONSUMER = "trainer"
"""The same name after a restart, so that the gateway gives an unfinished lease back to it at once."""
POLL_S = 20.0
"""How long one request waits at the gateway for groups or for an update."""
LOOK_S = 1.0
"""How long one waits for groups while nodes are lent and there are groups to compute on: then it is asked for the nodes again."""
RETRY_S = 0.5
_NOT_FOUND = 404
_SILENT_S = 2.0
"""A gateway that does not answer for so long is said to the user, once for each request."""


@contextmanager
def naming(step: str) -> Iterator[None]:
    """A refusal in the block says in which step it came. Raises TrainerError."""
    try:
        yield
    except GatewayRefused as refusal:
        raise TrainerError(f"step '{step}' was refused by the gateway: {refusal}") from refusal


class Feed:
    """One trained model behind one gateway, which may be away for `answer_s`; then, every method raises StepTimeout.

    Every method raises GatewayRefused for an answer that waiting does not change.
    """

    def __init__(
        self, client: GatewayClient, model: str | None, answer_s: float, say: Callable[[str], None] = print
    ) -> None:
        """`say` tells the user why nothing happens."""
        self.held: Lease
        self._say = say
        self._client = client
        self._model = model
        self._answer_s = answer_s
        self._leasing = asyncio.Lock()

    # Versions

    async def status(self) -> dict[str, Any]:
        """The newest version and the ledger's state."""
        return await self._ask("check versions", lambda: self._client.status(self._model))

    async def last_failure(self, model: str, reason: str) -> str:
        """Return what the agent of the newest training episode that ended for a reason reported, and where to read more."""
        wanted: dict[str, str | int] = {"mode": "train", "model": model, "reason": reason, "limit": 1}
        rows = await self._ask("look at failed episodes", lambda: self._client.episodes(**wanted))
        if not rows:
            return "`gateway episodes list` shows the episodes that are left"
        said = in_a_line(rows[0]["error"] or "") or reason
        return f"`gateway episodes why {rows[0]['id']}` shows all of the last error: {said}"

    async def acknowledged(self, buffer: int) -> bool:
        """True if the gateway has gone on to a later buffer."""
        return bool((await self.status())["consumed"] > buffer)

    async def parent(self, version: int) -> int | None:
        """The version of which a published one was made."""
        record = await self._ask("check versions", lambda: self._client.weights(version, self._model))
        parent: int | None = record["parent"]
        return parent

    async def publish(self, version: int, path: str, source: str | None) -> dict[str, Any]:
        """Hands a version over, or asks again what became of it; answers after `POLL_S` if its update has not ended.

        `source`: the server at which the gateway finds it in place of `path`.
        """
        place = {"path": path} if source is None else {"url": source}
        call = partial(self._client.publish, version, wait_s=POLL_S, model=self._model, **place)
        return await self._ask("publish", call)

    # Batches

    async def lease(self) -> Lease:
        """Takes the next buffer, once nobody else holds it."""
        self.held = await self._lease()
        return self.held

    async def groups(self, cursor: int, wait_s: float | None = None) -> LeasedGroups:
        """The groups of the leased buffer after `cursor`; waits up to `wait_s` (`POLL_S`) for one. Raises LeaseLost."""
        wait_s = POLL_S if wait_s is None else wait_s
        return await self._leased(
            "stream",
            partial(self._client.leased_groups, cursor=cursor, wait_s=wait_s, model=self._model),
        )

    async def renew(self) -> None:
        """Renews the lease for ever. Raises LeaseLost."""
        while True:
            await asyncio.sleep(self.held.deadline_s / 3)
            await self._leased("renew the lease", partial(self._client.renew, model=self._model))

    async def ack(self, checkpoint: str) -> None:
        """The leased buffer was trained. Raises LeaseLost."""
        buffer = self.held.buffer
        try:
            await self._leased("ack", lambda lease: self._client.ack(lease, checkpoint, self._model))
        except LeaseLost:
            # The answer to an ack may be lost after the gateway has gone on to the next buffer.
            if not await self.acknowledged(buffer):
                raise

    async def nack(self, reason: str) -> None:
        """Gives the leased buffer back, which was not trained. Raises LeaseLost."""
        await self._leased("give back", partial(self._client.nack, reason=reason, model=self._model))

    async def record(self, buffer: int) -> tuple[Group, ...]:
        """The groups of a buffer that was trained, in the order in which they came. Raises LeaseLost if they cannot be had.

        A buffer whose acknowledgement is missing is leased for it, and is acknowledged or trained like any other later on.
        """
        if await self.acknowledged(buffer):
            return await self._ask("replay", lambda: self._client.batch_groups(buffer, self._model))
        await self.lease()
        fetched = await self.groups(0)
        if self.held.buffer != buffer or not fetched.complete:
            raise LeaseLost(f"the gateway has no record of buffer {buffer}")
        return fetched.groups

    async def image(self, name: str) -> bytes | None:
        """An image's file, by its hash; None if it is not stored any more."""
        try:
            return await self._ask("fetch images", lambda: self._client.image(name))
        except GatewayRefused as refusal:
            if refusal.status != _NOT_FOUND:
                raise
            return None

    # Nodes

    async def claim(self, node: str) -> float:
        """Waits until a node is this trainer's; answers for how many seconds it may then say nothing."""
        deadline = time.monotonic() + self._answer_s
        while True:
            answer = await self._ask("claim", lambda: self._client.claim(node, POLL_S, self._model))
            if answer["role"] == "train":
                return float(answer["claim_s"])
            if time.monotonic() > deadline:
                raise StepTimeout(
                    "claim", self._answer_s, f"node {node} is {answer['role']}: {answer['reason']}"
                )

    async def release(self, node: str, busy_s: float, load_s: float = 0.0, rest_s: float = 0.0) -> None:
        """This trainer waits, and has no use for its node; it computed for `busy_s` on the groups of its last batch, once its
        weights were back after `load_s`, and was busy for `rest_s` with the rest of it."""
        await self._ask("release", lambda: self._client.release(node, self._model, busy_s, load_s, rest_s))

    async def called_back(self, node: str) -> bool:
        """True if the node is not lent, and will not be until the batch is complete."""
        return bool((await self._ask("stream", lambda: self._client.node(node)))["near"])

    # Requests to the gateway

    async def _lease(self) -> Lease:
        request = partial(self._client.lease, CONSUMER, self._model)
        return await self._ask("lease", request, retry=(409, 425, 429))

    async def _leased(self, step: str, call: Callable[[Lease], Awaitable[T]]) -> T:
        """`call` with the lease, and once more with a new lease of the same buffer, for a gateway that was restarted forgets."""
        lease = self.held
        try:
            return await self._ask(step, lambda: call(lease))
        except GatewayRefused as refusal:
            if refusal.status not in (404, 409):
                raise
            await self._lease_again(lease, refusal)
            return await self._ask(step, lambda: call(self.held))

    async def _lease_again(self, old: Lease, refusal: GatewayRefused) -> None:
        async with self._leasing:
            if self.held is not old:
                return
            fresh = await self._lease()
            if fresh.buffer != old.buffer:
                raise LeaseLost(f"the lease of buffer {old.buffer} is gone: {refusal}")
            self.held = fresh

    async def _ask(self, step: str, call: Callable[[], Awaitable[T]], retry: tuple[int, ...] = ()) -> T:
        """`call`, again and again while the gateway is away (or refuses with a status of `retry`) until `answer_s`."""
        began, said = time.monotonic(), False
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
            if waited + pause > self._answer_s:
                raise StepTimeout(step, self._answer_s, reason)
            if waited > _SILENT_S and not said:
                said = True
                self._say(f"step '{step}' waits for the gateway, up to {self._answer_s:g} s: {reason}")
            await asyncio.sleep(pause)
