"""The feed for a trainer that is not asynchronous: batches one after the other, and a version of each (docs/topics/feed.md).

It is a thin layer over `GatewayClient`, which runs in an event loop in a thread of its own, so that leases are renewed during a
long step. Owns the thread, and the lease of the batch that is trained. Invariants: a batch is given to one trainer, until its
version is live; a batch of which a version is live is never given again, even if the trainer was killed before it noticed.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar

import pyarrow as pa

from headgate.arrow import groups_to_arrow
from headgate.client.admin import GatewayClient
from headgate.client.refusal import GatewayRefused
from headgate.client.retry import GatewayUnreachable, RetryPolicy
from headgate.client.rows import Paths, Row, rows_of
from headgate.client.versions import State, write_version
from headgate.client.waits import Waits
from headgate.probes import choose
from headgate.types import Group, Lease, Probe
from headgate.weights import folders

T = TypeVar("T")
Score = Callable[[list[list[int]]], Sequence[Sequence[float]]]

_POLL_S = 20.0
"""Seconds that one request waits at the gateway."""
_CANDIDATES = 16
"""Sequences of a batch among which those of the probe are chosen."""
_LENGTH = 64
"""Tokens of such a sequence."""


class LeaseLost(Exception):
    """The gateway no longer grants the lease: the batch will be leased again, to this trainer or to another one."""


class VersionRefused(Exception):
    """No engine loaded the version: the one before is served on. `record` is the gateway's, with the reports of its engines."""

    def __init__(self, record: dict[str, Any]) -> None:
        super().__init__(f"version {record['version']} is not live: {record['why']}")
        self.record = record


class Feed:
    """The batches of one trained model behind one gateway, for one trainer.

    Every method blocks. It raises `GatewayRefused` for a response that waiting does not change, and `GatewayUnreachable` after
    `unreachable_s` without one.
    """

    def __init__(
        self,
        url: str,
        key: str | None = None,
        *,
        score: Score,
        model: str | None = None,
        consumer: str = "trainer",
        unreachable_s: float = 600.0,
        notify: Callable[[str], None] | None = None,
    ) -> None:
        """`score`: returns the log-probabilities (nats, temperature 1) of every token but the first of each sequence, by the
        trainer's weights at the time of the call. `consumer`: the same name after a restart, so that an unfinished batch is
        leased again immediately. `notify`: called with what is waited for.
        """
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="headgate-feed", daemon=True)
        self._thread.start()
        self.score = score
        self._consumer = consumer
        self._retry = RetryPolicy(url, unreachable_s, Waits(notify))
        self.model = model
        self.client = GatewayClient(url, key)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the connections and end the thread."""
        self.run(self.client.close())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def run(self, request: Coroutine[Any, Any, T]) -> T:
        """Return the result of any request of `client`, such as `feed.run(feed.client.open_episode("task-1"))`."""
        future = asyncio.run_coroutine_threadsafe(request, self._loop)
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise

    def live(self) -> tuple[int, Path]:
        """Return the version that engines run, and its folder: what a trainer loads when it starts.

        Wait for the end of an update that runs.
        """
        return self.run(self._live())

    def batch(self) -> Batch:
        """Lease the next batch, and wait until it is complete.

        The trainer's weights must be those of `live`: they score the sequences of the next version's probe.
        """
        lease, parent = self.run(self._lease())
        renewal = self.run(self._keep(lease))
        try:
            groups = self.run(self._groups(lease))
            sequences = _ends(groups)
            before = self.score(sequences)
        except BaseException:
            self.run(renewal.stop())
            raise
        return Batch(self, lease, renewal, groups, parent, sequences, before)

    async def _live(self) -> tuple[int, Path]:
        status = await self.status()
        if (newest := status["newest_version"]) > status["version"]:
            record = await self.request("check versions", partial(self.client.weights, newest, self.model))
            if record["state"] == "updating":  # also where a gateway was restarted in the middle
                await self.publish(newest, record["path"])
                status = await self.status()
        return status["version"], Path(status["weights"])

    async def status(self) -> dict[str, Any]:
        return await self.request("check versions", partial(self.client.status, self.model))

    async def _lease(self) -> tuple[Lease, int]:
        """Lease the next batch that is in no version yet; return the lease and the live version."""
        while True:
            version, path = await self._live()
            lease = await self.request("lease", partial(self.client.lease, self._consumer, self.model))
            if version <= lease.batch:
                return lease, version
            # The trainer of this version was killed before it acknowledged the batch.
            await self.request("ack", partial(self.client.ack, lease, str(path), self.model))

    async def _groups(self, lease: Lease) -> tuple[Group, ...]:
        groups: list[Group] = []
        cursor = 0
        while True:
            call = partial(self.client.leased_groups, lease, cursor, _POLL_S, self.model)
            leased = await self.request("groups", call, slow_s=2 * _POLL_S)
            groups += leased.groups
            cursor = leased.cursor
            if leased.complete:
                return tuple(groups)

    async def _keep(self, lease: Lease) -> _Renewal:
        return _Renewal(partial(self.renew, lease), lease.deadline_s / 3)

    async def renew(self, lease: Lease) -> None:
        await self.request("renew the lease", partial(self.client.renew, lease, self.model))

    async def publish(self, version: int, path: str) -> dict[str, Any]:
        """Publish a written version, and return the gateway's record once its update has ended."""
        call = partial(self.client.publish, version, path, _POLL_S, self.model)
        while (record := await self.request("publish", call, slow_s=2 * _POLL_S))["state"] == "updating":
            pass
        return record

    async def request(self, step: str, call: Callable[[], Coroutine[Any, Any, T]], slow_s: float = 10.0) -> T:
        """Repeat a request while the gateway does not respond, or is busy."""
        return await self._retry.call(step, call, slow_s=slow_s)


class _Renewal:
    """Renews a lease until it is stopped, or refused. Owns the task."""

    def __init__(self, renew: Callable[[], Coroutine[Any, Any, None]], every_s: float) -> None:
        self._renew = renew
        self._every_s = every_s
        self._task = asyncio.get_running_loop().create_task(self._run(), name="renewal of the lease")

    async def _run(self) -> None:
        # `Batch.publish` renews before it publishes, and raises what is the matter.
        with suppress(GatewayRefused, GatewayUnreachable):
            while True:
                await asyncio.sleep(self._every_s)
                await self._renew()

    async def stop(self) -> None:
        """Let the lease lapse unless it is ended otherwise."""
        self._task.cancel()
        await asyncio.wait({self._task})


class Batch:
    """A leased batch: all of its groups, until it is published or given back.

    Use it with `with`: a block that ends without `publish` or `ack` gives the batch back, and it is leased again.
    """

    def __init__(
        self,
        feed: Feed,
        lease: Lease,
        renewal: _Renewal,
        groups: tuple[Group, ...],
        parent: int,
        sequences: list[list[int]],
        before: Sequence[Sequence[float]],
    ) -> None:
        self.number = lease.batch
        self.groups = groups
        """The token trees, as values of `headgate.types`."""
        self.parent = parent
        """The live version, with whose weights the batch is trained."""
        self._feed = feed
        self._lease = lease
        self._renewal = renewal
        self._sequences, self._before = sequences, before
        self._ended = False

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        if not self._ended:
            self.nack(f"{kind.__name__}: {error}" if kind else "it was not trained")

    def rows(self, paths: Paths = "all") -> list[Row]:
        """Return the batch as rows of NumPy arrays (`rows_of`)."""
        return list(rows_of(self.groups, paths))

    def arrow(self) -> pa.Table:
        """Return the batch as an Arrow table of `headgate.arrow.FEED_SCHEMA`."""
        return groups_to_arrow(self.groups)

    def publish(
        self,
        weights: State | Path,
        directory: Path,
        unchanged: Sequence[str] = (),
        keep: int | None = None,
    ) -> dict[str, Any]:
        """Publish the version that the batch made, wait until engines run it, and end the lease; return the gateway's record.

        `weights`: all tensors by name, or a folder that `save_pretrained` wrote; `directory`: where versions are written, of
        which the newest `keep` are kept (None: all). Their parent is the live version. Raise LeaseLost before anything is
        published if the batch may be another trainer's now, and VersionRefused if the engines serve the version before.
        """
        self._check()
        version = max(self.number, self._feed.run(self._feed.status())["newest_version"]) + 1
        base = self._feed.live()[1]
        path = write_version(directory, version, weights, self._probe(), self.parent, base, unchanged)
        try:
            record = self._feed.run(self._feed.publish(version, str(path.resolve())))
        except GatewayRefused:  # nothing of it is recorded, and the number is free
            folders.remove(path)
            raise
        if record["state"] != "live":
            raise VersionRefused(record)
        self.ack(str(path))
        if keep is not None:
            folders.prune(directory, keep, version, self.parent)
        return record

    def ack(self, checkpoint: str) -> None:
        """End the lease of a batch that was trained. Only for a trainer that publishes otherwise than by `publish`."""
        call = partial(self._feed.client.ack, self._lease, checkpoint, self._feed.model)
        self._end(self._feed.request("ack", call))

    def nack(self, reason: str) -> None:
        """Give the batch back untrained: the next lease is of the same batch, unless a later version was published."""
        call = partial(self._feed.client.nack, self._lease, reason, self._feed.model)
        self._end(self._feed.request("give back", call))

    def _end(self, request: Coroutine[Any, Any, None]) -> None:
        self._ended = True
        self._feed.run(self._renewal.stop())
        self._feed.run(request)

    def _check(self) -> None:
        try:
            self._feed.run(self._feed.renew(self._lease))
        except GatewayRefused as refusal:
            raise LeaseLost(f"batch {self.number}: {refusal}") from refusal

    def _probe(self) -> Probe:
        """Return the sequences on which the weights changed most since the batch was leased."""
        chosen = choose(self._sequences, self._feed.score(self._sequences), self._before)
        alone = [self._feed.score([list(sequence)])[0] for sequence in chosen.sequences]
        gaps = [
            abs(float(a) - b)
            for row, new in zip(alone, chosen.new_logprobs, strict=True)
            for a, b in zip(row, new, strict=True)
        ]
        return replace(chosen, noise=sum(gaps) / len(gaps))


def _ends(groups: tuple[Group, ...]) -> list[list[int]]:
    """Return ends of a batch's rows, all different and spread over the batch."""
    ends = dict.fromkeys(tuple(row.ids[-_LENGTH:].tolist()) for row in rows_of(groups) if len(row) > 1)
    return [list(end) for end in list(ends)[:: max(1, len(ends) // _CANDIDATES)]][:_CANDIDATES]
