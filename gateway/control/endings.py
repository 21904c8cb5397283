"""How episodes end: their calls are stopped, a reward is computed if none was posted, and the end is committed.

Owns the episodes whose run is over, until their end is committed, and the tasks that grade them. Invariants: an episode ends
once, in one transaction with its effect on the ledger; one that is being graded keeps its slot; it is rewarded only if the ledger
takes the reward, for what is rewarded is what a trainer gets.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Collection, Coroutine, Mapping
from typing import Any

from sqlalchemy import Connection

from gateway.control.live import LiveEpisode, closed, graded
from gateway.errors import Conflict, Unavailable, shortened
from gateway.feed.ledger import StoredLedger
from gateway.grading.base import GradingFailed
from gateway.grading.grading import Grading
from gateway.rollout.peers import NoPeers, Peers
from gateway.sections import RewardSettings
from gateway.store import episodes as statements
from gateway.store.database import Database, Write
from gateway.trajectories.recorder import Recorder
from scheduler.policies.staleness_events import Drop, Finish, Refuse, Reward

log = logging.getLogger(__name__)

_UNTRAINED = "untrained_late"
"""Of an episode whose group the ledger had given up, but let run on."""


class Endings:
    """Every episode whose run is over; `ledgers`: of each trained model, `recorders`: of every model."""

    def __init__(
        self,
        database: Database,
        ledgers: Mapping[str, StoredLedger],
        recorders: Collection[Recorder],
        grading: Grading,
        peers: Peers | None = None,
        rewards: RewardSettings | None = None,
    ) -> None:
        self._rewards = rewards or RewardSettings()
        self._peers = peers or NoPeers()
        self.over: dict[str, LiveEpisode] = {}
        self._database = database
        self._ledgers = ledgers
        self._recorders = recorders
        self._grading = grading
        self._tasks: set[asyncio.Task[None]] = set()

    async def close(self) -> None:
        """Stops what is underway. Episodes that are being graded are graded again after the next start."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def grades(self, live: LiveEpisode) -> bool:
        """Whether there is something that would compute an episode's reward."""
        return self._grading.grades(live.model)

    async def end(self, live: LiveEpisode, values: dict[str, Any], event: Reward | Drop) -> None:
        """Closes an open episode. `values`: reason and, of a rewarded one, reward and components."""
        live.state = "ending"
        await self._stop(live, closed(live.id, values["reason"]))
        await self._commit(live, values, event)

    async def grade(self, live: LiveEpisode) -> None:
        """Ends an open episode's run; when this returns, it is committed that it is being graded, or closed."""
        live.state = "grading"
        await self._stop(live, graded(live.id))

        def write(connection: Connection) -> None:
            statements.begin_grading(connection, live.id)

        try:
            if live.mode == "eval":
                await self._database.submit(write)
            elif not await self._applied(live.model, Finish(live.id), write):
                live.aborted = live.aborted or _UNTRAINED
        except Exception:
            self._let_go(live)
            raise
        if live.aborted:
            await self._commit(live, {"reason": live.aborted}, None)
        else:
            self.resume(live)

    def resume(self, live: LiveEpisode) -> None:
        """Computes the reward of an episode whose grading is committed to have begun."""
        self.over[live.id], live.state = live, "grading"
        live.grading = self._start(self._graded(live), f"grade-{live.id}")

    def abort(self, live: LiveEpisode, reason: str) -> None:
        """The ledger gave up an episode, whatever it is doing. One that is being committed hears of it from the ledger."""
        live.aborted = reason
        if live.state == "open" or live.grading is not None:
            if live.grading is not None:
                live.grading.cancel()
                live.grading = None
            live.state = "ending"
            self.over[live.id] = live
            self._start(self._aborted(live), f"abort-{live.id}")

    def stop_stray(self, live: LiveEpisode) -> None:
        """Stops what this process has of an episode that was closed while nobody could tell it."""
        self._start(self._stop_here(live, closed(live.id, "it was closed meanwhile")), f"stop-{live.id}")

    async def _aborted(self, live: LiveEpisode) -> None:
        await self._stop(live, closed(live.id, live.aborted))
        await self._commit(live, {"reason": live.aborted}, None)

    async def _graded(self, live: LiveEpisode) -> None:
        failure = ""
        try:
            grade = await self._grading.grade(live.id, live.model)
        except GradingFailed as error:
            failure = str(error)
        except Exception as error:
            log.exception("grading episode %s", live.id)
            failure = repr(error)
        else:
            values = live.rewarded(grade.reward, grade.components)
            if refusal := self._rewards.refusal(values["reward"]):
                failure = f"the sum of the grade and of what was posted on calls: {refusal}"
        live.grading = None  # from here on an abort is the ledger's refusal
        if failure:
            log.error("episode %s is dropped: its grading failed; its `why` says how", live.id)
            await self._insist(live, {"reason": "grading_failed"}, Drop(live.id, "grading_failed"), failure)
        else:
            await self._insist(live, values, Reward(live.id, values["reward"]))

    async def _insist(
        self, live: LiveEpisode, values: dict[str, Any], event: Reward | Drop, error: str = ""
    ) -> None:
        """Nobody else would commit the end of a grading."""
        while True:
            try:
                return await self._commit(live, values, event, error)
            except Unavailable as unavailable:
                log.error("the end of episode %s is not stored yet: %s", live.id, unavailable)
                await asyncio.sleep(unavailable.retry_after or 1.0)

    async def _commit(
        self, live: LiveEpisode, values: dict[str, Any], event: Reward | Drop | None, error: str = ""
    ) -> None:
        values = {**values, "state": "closed"}
        details = None
        if error:
            values["error"] = shortened(error)
            details = {"error": values["error"]}

        def write(connection: Connection) -> None:
            statements.close_episode(connection, live.id, values)

        try:
            if live.mode == "eval" or event is None:
                await self._database.submit(write)
            elif not await self._applied(live.model, event, write, details):
                if isinstance(event, Reward):
                    values["reason"] = live.aborted or _UNTRAINED
                await self._database.submit(write)
        finally:
            self._let_go(live)

    def _let_go(self, live: LiveEpisode) -> None:
        """The store knows how it ended; or, if that could not be committed, a restart takes it over as it was."""
        self.over.pop(live.id, None)
        live.ended.set()

    async def _applied(
        self,
        model: str,
        event: Finish | Reward | Drop,
        write: Write,
        details: dict[str, Any] | None = None,
    ) -> bool:
        """False: the ledger has given the group up already, so the event says nothing to it."""
        try:
            commands = await self._ledgers[model].apply(event, write, details)
        except ValueError as error:
            log.warning("the ledger knows nothing of an episode that ends: %s", error)
            return False
        return not any(isinstance(command, Refuse) for command in commands)

    async def _stop(self, live: LiveEpisode, reason: Conflict) -> None:
        """Memory first, so that no second end can begin while this one is being committed."""
        self.over[live.id] = live
        await self.stop_calls(live, reason)

    async def stop_calls(self, live: LiveEpisode, reason: Conflict) -> None:
        """Stops what runs in an episode, in whatever process; when this returns, what was sampled is recorded."""
        elsewhere = self._peers.end(live.id, reason)
        await self._stop_here(live, reason)
        await elsewhere

    async def _stop_here(self, live: LiveEpisode, reason: Conflict) -> None:
        await asyncio.gather(*(call.stop(reason) for call in live.calls))
        for recorder in self._recorders:
            recorder.forget(live.id)

    def _start(self, work: Coroutine[Any, Any, None], name: str) -> asyncio.Task[None]:
        task = asyncio.create_task(work, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._done)
        return task

    def _done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()):
            log.error("%s failed", task.get_name(), exc_info=error)
