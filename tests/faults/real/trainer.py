"""A light stand-in for `trainer run`: `python -m tests.faults.real.trainer PLAN.json`.

It leases batches over the real HTTP API, publishes real weights and acknowledges, in the order of the real one: checkpoint, then
publish, then ack. After a restart it reads its checkpoints alone; each names its batch and every group up to it, in place of
weights. SIGKILL may hit it anywhere.

Engines that are killed at the wrong moments make one of its versions look bad, for good (docs/decisions/0016): it publishes the
same checkpoint under the next number, as a child of the last good version.
"""

from __future__ import annotations

import asyncio
import json
import logging
import sys
import time
from collections.abc import Awaitable, Callable, Collection
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import httpx

from headgate.client import GatewayClient, GatewayRefused
from headgate.types import Lease
from tests.faults.evidence import Journal
from tests.faults.weights import write_version
from tests.harness.transports import Way

T = TypeVar("T")
_POLL_S = 5.0
_PAUSE_S = 0.3
_PUBLISH_S = 240.0


class Trainer:
    """One life of the trainer."""

    def __init__(self, plan: dict[str, Any], client: GatewayClient, journal: Journal) -> None:
        self._plan = plan
        self._way = Way(plan.get("transport", "filesystem"), plan.get("server", ""))
        self._client = client
        self._journal = journal
        self._checkpoints = Path(plan["trainer"]) / "checkpoints"
        self._checkpoints.mkdir(parents=True, exist_ok=True)
        numbers = [int(file.stem) for file in self._checkpoints.glob("*.json")]
        self.version = max(numbers, default=0)
        """The number of batches in the newest checkpoint."""

    async def train(self) -> None:
        """Train until it is killed."""
        self._log("started", version=self.version)
        while True:
            lease = await self._retry(
                "lease", lambda: self._client.lease("trainer"), transient=(409, 425, 429)
            )
            if lease.batch > self.version:
                self._log("ahead", batch=lease.batch, version=self.version)
                await asyncio.sleep(1.0)
                continue
            try:
                await self._renewed(lease)
            except GatewayRefused as refusal:
                if refusal.status not in (404, 409):
                    self._log("refused", status=refusal.status, error=str(refusal))
                await asyncio.sleep(_PAUSE_S)  # the lease has ended: request another

    async def _renewed(self, lease: Lease) -> None:
        work = asyncio.create_task(self._work(lease), name="work")
        renewal = asyncio.create_task(self._renew(lease), name="renew")
        try:
            await asyncio.wait({work, renewal}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in (work, renewal):
                task.cancel()
            done = await asyncio.gather(work, renewal, return_exceptions=True)
        for result in done:
            if isinstance(result, Exception):
                raise result

    async def _renew(self, lease: Lease) -> None:
        while True:
            await asyncio.sleep(lease.deadline_s / 4)
            await self._retry("renew", lambda: self._client.renew(lease))

    async def _work(self, lease: Lease) -> None:
        if lease.batch == self.version:
            groups = await self._stream(lease)
            await asyncio.sleep(self._plan["train_s"])
            self._checkpoint(lease.batch, groups)
        await self._publish()
        await self._retry("ack", lambda: self._client.ack(lease, str(self._checkpoints)))
        self._log("acked", batch=lease.batch, fence=lease.fence)

    async def _stream(self, lease: Lease) -> list[dict[str, Any]]:
        cursor, groups = 0, []
        while True:
            got = await self._retry("stream", partial(self._client.leased_groups, lease, cursor, _POLL_S))
            cursor = got.cursor
            for group in got.groups:
                tokens = sum(len(node.ids) for e in group.episodes for node in e.nodes if node.sampled)
                episodes = [episode.episode_id for episode in group.episodes]
                groups.append({"group": group.group_id, "episodes": episodes, "tokens": tokens})
            if got.complete:
                return groups

    def _checkpoint(self, batch: int, groups: list[dict[str, Any]]) -> None:
        self.version = batch + 1
        draft = self._checkpoints / f".{self.version}"
        draft.write_text(json.dumps({"batch": batch, "groups": groups, "at": time.time()}))
        draft.rename(self._checkpoints / f"{self.version}.json")
        self._log("checkpoint", version=self.version, batch=batch, groups=[g["group"] for g in groups])

    async def _publish(self) -> None:
        """Publish the newest checkpoint until a version of it is live."""
        while True:
            status = await self._retry("status", self._client.status)
            bad = {entry["version"] for entry in status["bad_versions"]}
            number, parent = number_of(self.version, bad), number_of(self.version - 1, bad)
            sources, weights = Path(self._plan["sources"]), Path(self._plan["weights"])
            path = write_version(sources, weights, number, parent, self._way.transport)
            if await self._is_live(number, path):
                return

    async def _is_live(self, number: int, path: Path) -> bool:
        """Publish a version and wait until it is live; return False if it is found to be bad."""
        deadline = time.monotonic() + _PUBLISH_S
        self._log("publishing", version=number)
        while True:
            record = await self._retry(
                "publish", lambda: self._client.publish(number, wait_s=_POLL_S, **self._way.place(path))
            )
            if record["state"] == "live":
                self._log("live", version=number)
                return True
            if record["bad"]:
                self._log("bad", version=number, why=record["why"])
                return False
            if record["state"] == "failed":
                self._log("failed", version=number, record=json.dumps(record)[:2000])
                await asyncio.sleep(1.0)
            if time.monotonic() > deadline:
                self._log("stuck", version=number, record=json.dumps(record)[:2000])
                deadline = time.monotonic() + _PUBLISH_S

    async def _retry(self, what: str, call: Callable[[], Awaitable[T]], transient: tuple[int, ...] = ()) -> T:
        """Repeat a request until its response is one that waiting does not change."""
        while True:
            try:
                return await call()
            except (httpx.HTTPError, ValueError, OSError) as error:
                reason = f"{type(error).__name__}: {error}"
            except GatewayRefused as refusal:
                if refusal.status not in (*transient, 500, 502, 503, 504):
                    self._log("answer", what=what, error=str(refusal)[:500])
                    raise
                reason = str(refusal)
            self._log("again", what=what, error=reason[:300])
            await asyncio.sleep(_PAUSE_S)

    def _log(self, kind: str, **values: Any) -> None:
        self._journal.write(kind, **values)
        self._journal.flush()


def number_of(batches: int, bad: Collection[int]) -> int:
    """Return the version of the weights after N batches: each has the next number, and bad versions used some up."""
    number = batches
    for version in sorted(bad):
        number += version <= number
    return number


async def _main(plan: dict[str, Any]) -> None:
    with Journal(Path(plan["evidence"]) / "trainer.jsonl") as journal:
        async with GatewayClient(plan["url"], plan["admin_key"], timeout_s=20.0) as client:
            await Trainer(plan, client, journal).train()


if __name__ == "__main__":
    logging.getLogger("httpx").setLevel(logging.ERROR)
    asyncio.run(_main(json.loads(Path(sys.argv[1]).read_text())))
