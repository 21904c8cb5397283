"""The versions of one model: publishes them, keeps their states, and knows which are ancestors of the newest.

Invariants: a version number is used once; a version is live once every remaining engine runs it and has passed its probe; a bad
version stays bad, and no engine loads it again. The control program (`host`) decides the steps of the engines; this module
records the outcome.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from sqlalchemy import Connection

from gateway.config import EngineSettings
from gateway.control.canaries import Canaries
from gateway.control.host import ControlHost
from gateway.control.version_records import VersionRecords
from gateway.generation.slot import Slot
from gateway.store import ledger as statements
from gateway.store.database import Database, Write
from gateway.training_feed.ledger import StoredLedger
from gateway.updates.distribution import Distribution
from gateway.updates.weights_check import Weights, known_weights, read_weights, require_probe
from headgate.errors import Conflict, EngineError, Fenced, Unprocessable, UnusableVersion
from headgate.weights.manifest import MANIFEST
from scheduler.policies.canary import Decision
from scheduler.policies.lineage import orphans
from scheduler.policies.staleness_events import Publish
from scheduler.program.events import Canary, UpdateResult

_SETTLED = ("open", "asleep")
log = logging.getLogger(__name__)


def _nothing(_connection: Connection) -> None:
    """Store nothing."""


class Versions(VersionRecords):
    """The versions of a model; one that is not trained (`ledger` is None) keeps its first."""

    def __init__(
        self,
        model: str,
        path: Path,
        database: Database,
        host: ControlHost,
        ledger: StoredLedger | None,
        distribution: Distribution,
        canaries: Canaries,
        *,
        probed: bool = True,
    ) -> None:
        """`canaries`: tries each version first. `probed`: every version but the first needs a probe."""
        super().__init__(model, path, database)
        self._base = path
        """The first version's checkpoint, which defines the tensors."""
        self.bad_ones: set[int] = set()
        """The versions that no engine may run."""
        self._host = host
        self._engines = host.models[model]
        self._ledger = ledger
        self._distribution = distribution
        self.canaries = canaries
        self._probed = probed
        self._publishing = asyncio.Lock()
        self._offers: dict[tuple[int, Path], asyncio.Task[None]] = {}
        self._updates: dict[int, asyncio.Task[None]] = {}
        self._late_ends: dict[int, asyncio.Task[None]] = {}
        host.set_update_listener(model, self)

    async def start(self, settings: EngineSettings, *, wait: bool, on_nodes: Iterable[Slot] = ()) -> None:
        """Start the engines with the newest live version. `wait`: until all are open or asleep; raise EngineError if one cannot
        be. `on_nodes`: the engines that live on nodes, in addition to the others.

        Takes over the engines that this process knows already because it was a follower.
        """
        await self._load_newest()
        self._engines.steps.register_version(self.current)
        self._host.begin(self.model, self.current.version)
        known = self._taken_over()
        for i, url in enumerate(settings.places):
            name = f"{self.model}-{i}"
            slot = known.pop(name) if name in known else Slot(name, url)
            slot.adopt(mirror=settings.mirrors[i] if settings.mirrors else "")
            self._host.add(self.model, slot)
        for slot in on_nodes:
            before = known.pop(slot.name, slot)
            before.adopt(node=slot.node, mirror=slot.mirror, zone=slot.zone)
            self._host.add(self.model, before)
        for slot in known.values():
            self._host.add(self.model, slot)
        if wait:
            await self._opened()
            await self._continue_trial()

    async def _continue_trial(self) -> None:
        """Continue the trial that ran when the gateway stopped, without its trainer."""
        row = await self._database.read(lambda c: statements.newest_version(c, self.model))
        if row is None or row["state"] != "updating" or not await self.canaries.resume(row["version"]):
            return
        try:
            rank = self._distribution.max_lora_rank
            weights = await asyncio.to_thread(known_weights, Path(row["path"]), row["version"], rank)
        except UnusableVersion as error:
            log.error(
                "version %d of %s was on trial and cannot be loaded: %s", row["version"], self.model, error
            )
            self.canaries.end(promoted=False)
            return
        self._begin_update(weights)

    async def version(self, number: int) -> dict[str, Any]:
        """One version's record, as of `VersionRecords`; `on_trial`: a share of the conversations tries it."""
        why = self.canaries.why(number)
        return await super().version(number) | ({"on_trial": True, "why": why} if why else {})

    def _taken_over(self) -> dict[str, Slot]:
        """Return the engines of the last coordinator that outlived it, with what this process has running in them."""
        pool = self._engines.pool
        for slot in [slot for slot in pool.slots.values() if slot.owned]:
            slot.fail("it ended with its coordinator")
            del pool.slots[slot.name]
        return dict(pool.slots)

    async def _opened(self) -> None:
        """Wait until no engine is about to be opened. Raise EngineError if one of them was given up."""
        slots = self._engines.pool.slots.values()
        await self._engines.pool.wait_until(
            lambda: all(s.state in _SETTLED or s.given_up for s in slots), None
        )
        for slot in slots:
            if slot.given_up:
                raise EngineError(f"{slot.name} cannot be used: {slot.reason}")

    async def _load_newest(self) -> None:
        row = await self._database.read(lambda c: statements.newest_version(c, self.model, "live"))
        if row is None:
            first = {"model": self.model, "version": 0, "parent": None, "path": self.current.path}
            await self._database.submit(lambda c: statements.insert_version(c, {**first, "state": "live"}))
        else:
            self.current = Weights(row["version"], row["path"], row["parent"])
        if (Path(self.current.path) / MANIFEST).exists():
            path, rank = Path(self.current.path), self._distribution.max_lora_rank
            self.current = await asyncio.to_thread(known_weights, path, self.current.version, rank)
            if self._probed and self.current.version:
                require_probe(self.current)
        elif self.current.version:
            # A coordinator on another machine may lack the files; engines that have the version keep it.
            log.warning("%s is not here: engines are not checked against it", self.current.path)
        parents = await self._database.read(lambda c: statements.parents(c, self.model))
        self.orphans = orphans(parents, self.current.version)
        self.bad_ones = set(await self.bad())

    async def trials(self) -> dict[str, Any]:
        return await self.canaries.describe()

    def untrained(self, *, orphans_too: bool) -> frozenset[int]:
        """Return the versions whose tokens are not trained: bad ones, such as those that were returned after a trial, and
        orphans."""
        return (self.orphans if orphans_too else frozenset()) | self.bad_ones

    async def close(self) -> None:
        """End updates that still run; a version that was not live by then is published again by its trainer."""
        tasks = [*self._offers.values(), *self._updates.values(), *self._late_ends.values()]
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)

    async def publish(
        self,
        version: int,
        path: Path | None,
        wait_s: float,
        source: str = "",
        *,
        skip_batches: bool = False,
    ) -> dict[str, Any]:
        """Check version `version` in `path`, and update the engines to it; wait up to `wait_s` for the end of the update.

        `source`: in place of `path`, the server to fetch it from. `skip_batches`: pass over the batches of numbers that were
        never published.

        The same version may be published again from the same path: the record is returned, or the update is tried again if no
        engine runs the version. A bad version is not tried again. Raise Unprocessable for unusable weights, Conflict for a
        number that was used otherwise, WeightsUnavailable if the source does not respond.
        """
        if self._ledger is None:
            raise Conflict(
                f"the model {self.model!r} is frozen ([models.{self.model}] train = false)",
                code="model_frozen",
            )
        path = path or self._distribution.path(version)
        if not await self._is_known(version, path):
            await self._offered(version, path, source, skip_batches)
        if (running := self._updates.get(version)) and wait_s > 0:
            await asyncio.wait({running}, timeout=wait_s)
        return await self.version(version)

    async def _is_known(self, version: int, path: Path) -> bool:
        """Return true if a version was published from this path and neither its check nor its update is to be done again."""
        row = await self._database.read(lambda c: statements.version(c, self.model, version))
        if row is None or row["path"] != str(path.resolve()):
            return False
        return row["state"] == "live" or bool(row["bad"]) or version in self._updates

    async def _offered(self, version: int, path: Path, source: str, skip_batches: bool) -> None:
        """Verify a version and begin its update. Requests for the same one share this, and it continues if one is cancelled."""
        task = self._offers.get((version, path))
        if task is None:
            task = asyncio.create_task(
                self._offer(version, path, source, skip_batches), name=f"{self.model}-check-of-{version}"
            )
            task.add_done_callback(partial(self._on_offered, (version, path)))
            self._offers[version, path] = task
        await asyncio.shield(task)

    async def _offer(self, version: int, path: Path, source: str, skip_batches: bool) -> None:
        if source:
            await self._distribution.bring(version, source)
        rank = self._distribution.max_lora_rank
        read = await asyncio.to_thread(read_weights, path, version, self._base, rank)
        if self._probed:
            require_probe(read)
        weights = replace(read, source=source)
        async with self._publishing:
            await self._begin(weights, skip_batches)

    def _on_offered(self, key: tuple[int, Path], task: asyncio.Task[None]) -> None:
        del self._offers[key]
        if not task.cancelled():
            task.exception()  # asyncio warns of one that was not retrieved, and all who waited may have left

    async def _begin(self, weights: Weights, skip_batches: bool) -> None:
        """Record the version and start its update, unless it has one."""
        version = weights.version
        row = await self._database.read(lambda c: statements.version(c, self.model, version))
        newest = await self._database.read(lambda c: statements.newest_version(c, self.model))
        if row is not None and row["path"] != weights.path:
            message = f"version {version} was published from {row['path']}"
            raise Conflict(message, code="version_used", param="version")
        if row is None and newest is not None and version <= newest["version"]:
            message = f"version {version} is not newer than {newest['version']}"
            raise Conflict(message, code="version_not_newer", param="version")
        if row is None:
            if not skip_batches:
                await self._check_next(version)
            await self._insert(weights)
        over = row is not None and (row["state"] == "live" or row["bad"])
        if not over and version not in self._updates:
            self._begin_update(weights)

    def _begin_update(self, weights: Weights) -> None:
        version = weights.version
        task = asyncio.create_task(self._update(weights), name=f"{self.model}-update-to-{version}")
        task.add_done_callback(partial(self._on_done, self._updates, version))
        self._updates[version] = task

    async def _check_next(self, version: int) -> None:
        """Raise Conflict if batches would be lost: those of versions before this one that were never published."""
        assert self._ledger is not None
        known = await self._database.read(lambda c: statements.parents(c, self.model))
        next_batch = self._ledger.rule.next_batch
        missing = [number for number in range(next_batch + 1, version) if number not in known]
        if missing:
            which = str(missing[0]) if len(missing) == 1 else f"{missing[0]} to {missing[-1]}"
            message = (
                f"version {version} would pass over the batches of versions that were never published ({which}): batch b makes"
                f" version b + 1, and the next batch is {next_batch}; publish version {missing[0]}, or send `skip_batches`: true"
            )
            raise Conflict(message, code="version_skips_batches", param="version")

    async def _insert(self, weights: Weights) -> None:
        parent = weights.parent
        if parent is not None and parent != self.current.version:
            known = await self._database.read(lambda c: statements.parents(c, self.model, "live"))
            if parent not in known:
                message = f"the parent of version {weights.version} is {parent}, which was never live here"
                raise Unprocessable(message, code="unknown_parent", param="path")
        values = {
            "model": self.model,
            "version": weights.version,
            "parent": parent,
            "path": weights.path,
            "state": "updating",
        }
        await self._database.submit(lambda c: statements.insert_version(c, values))

    async def _update(self, weights: Weights) -> None:
        number = weights.version
        self._engines.steps.register_version(weights)
        await self._distribution.spread(weights, self._engines.pool.slots.values())
        live, tries = self.current.version, self.canaries
        canary = await tries.engines(number, live) if tries.on else None
        ended = await self._host.publish(self.model, number, canary)
        reports = self._engines.steps.reports(number)
        report = [r.to_json() for r in reports]
        if canary is not None:
            await self._try(weights, ended, canary, report)
        elif ended.live:
            await self._set_live(weights, report)
        else:
            await self._record_failure(number, report, ended.bad)
        if self.current.version != number:
            return
        self.updates += 1
        self.streams_across_updates += sum(r.streams for r in reports)
        await self._distribution.prune(number, weights.parent)

    async def _record_failure(
        self, number: int, report: list[dict[str, Any]], bad: str, also: Write = _nothing
    ) -> None:
        if bad:
            log.error("version %d of %s is bad: %s", number, self.model, bad)
        else:
            log.error("version %d of %s is not live: %s", number, self.model, self._engines.pool.states())
        await self._set_failed(number, report, bad, also)

    async def _try(
        self, weights: Weights, ended: UpdateResult, canary: Canary, report: list[dict[str, Any]]
    ) -> None:
        """Try a version on a share of the conversations; one that is returned is bad."""
        number, promoted = weights.version, False
        if not ended.live:
            resumed = bool(ended.bad and self.canaries.why(number))
            also = self.canaries.ending(number, Decision("returned", ended.bad)) if resumed else _nothing
            await self._record_failure(number, report, ended.bad, also)
        else:
            decision = await self.canaries.run(number, canary)
            promoted, stored = decision.outcome == "promoted", self.canaries.ending(number, decision)
            if promoted:
                await self._set_live(weights, report, stored)
            else:
                why = f"it was returned after a trial: {decision.why}"
                await self._set_failed(number, report, why, stored)
            self._host.end_trial(self.model, number, promoted=promoted)
        self.canaries.end(promoted=promoted)

    def ended_late(self, ended: UpdateResult) -> None:
        """Record that a version which had failed is live after all, or bad: an engine that was given up has returned."""
        number = ended.version
        if number not in self._late_ends:
            task = asyncio.create_task(self._end_late(ended), name=f"{self.model}-ends-{number}")
            self._late_ends[number] = task
            task.add_done_callback(partial(self._on_done, self._late_ends, number))

    async def _end_late(self, ended: UpdateResult) -> None:
        number = ended.version
        if running := self._updates.get(number):
            await asyncio.wait({running})
        row = await self.version(number)
        if row["state"] != "failed":
            return
        if ended.bad:
            log.error("version %d of %s is bad: %s", number, self.model, ended.bad)
            await self._set_failed(number, row["report"], ended.bad)
        elif weights := self._engines.steps.weights(number):
            log.warning("version %d of %s is live after all", number, self.model)
            await self._set_live(weights, row["report"])

    def _on_done(self, tasks: dict[int, asyncio.Task[None]], number: int, task: asyncio.Task[None]) -> None:
        """Log a task that failed. Its version is unchanged, and is tried again when its trainer publishes it again."""
        tasks.pop(number, None)
        if task.cancelled() or (error := task.exception()) is None:
            return
        if isinstance(error, Fenced):
            log.warning("version %d of %s was left to the new coordinator: %s", number, self.model, error)
        else:
            log.error("%s failed: %s", task.get_name(), error, exc_info=error)

    async def _set_failed(
        self, number: int, report: list[dict[str, Any]], bad: str, also: Write = _nothing
    ) -> None:
        """`also`: is stored in the same transaction."""

        def write(connection: Connection) -> None:
            statements.set_version(connection, self.model, number, "failed", report, bad)
            also(connection)

        if bad:
            self.bad_ones.add(number)
        await self._database.submit(write)

    async def _set_live(self, weights: Weights, report: list[dict[str, Any]], also: Write = _nothing) -> None:
        """`also`: as for `_set_failed`."""
        number = weights.version
        parents = await self._database.read(lambda c: statements.parents(c, self.model))
        lost = orphans({**parents, number: weights.parent}, number)

        def write(connection: Connection) -> None:
            statements.set_version(connection, self.model, number, "live", report)
            also(connection)

        assert self._ledger is not None
        self.current, self.orphans = weights, lost
        await self._ledger.apply(Publish(number), write)
