"""Closes episodes: stops their calls, has a missing reward computed, and commits the end.

Owns the episodes whose run is over until their end is committed, and for each a task that does the work of each phase
(`closing_state`) and repeats it if it fails. A caller that stops waiting does not stop the task. Invariants: an episode ends
once, in one transaction with its effect on the ledger; one that is being graded keeps its slot; an episode counts as rewarded
only if the policy had a part in it (`worth`) and the ledger takes the reward, because that decides what a trainer gets.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Collection, Coroutine, Mapping
from typing import Any

from gateway.config import RewardSettings
from gateway.episodes.closing_state import ClosingState, Outcome, Phase
from gateway.episodes.open_episode import OpenEpisode, closed, graded
from gateway.episodes.worth import without_calls
from gateway.generation.peers import NoPeers, Peers
from gateway.grading.base import GradingFailed
from gateway.grading.grading import Grading
from gateway.store import episodes as statements
from gateway.store import turns
from gateway.store.database import Database, Write
from gateway.store.sampled import Sampled, sampled
from gateway.training_feed.ledger import StoredLedger
from gateway.trajectories.recorder import Recorder
from headgate.errors import Conflict, Unavailable, shortened
from scheduler.policies.staleness_events import Drop, Finish, Refuse, Reward

log = logging.getLogger(__name__)

NOT_JUDGED = "not_judged"
"""The reason of episodes about which no grader has an opinion."""
_PAUSE_S = 1.0
"""Seconds before failed work is repeated, if the failure names no time."""


class Closing:
    """Every episode whose run is over; `ledgers`: of each trained model, `recorders`: of every model; `redact`
    returns a text as it may be stored."""

    def __init__(
        self,
        database: Database,
        ledgers: Mapping[str, StoredLedger],
        recorders: Collection[Recorder],
        grading: Grading,
        peers: Peers | None = None,
        rewards: RewardSettings | None = None,
        redact: Callable[[str], str] = str,
    ) -> None:
        self._redact = redact
        self._rewards = rewards or RewardSettings()
        self._peers = peers or NoPeers()
        self.unclosed: dict[str, OpenEpisode] = {}
        self._database = database
        self._ledgers = ledgers
        self._recorders = recorders
        self._grading = grading
        self._tasks: set[asyncio.Task[None]] = set()
        self._waiting: dict[str, asyncio.Future[None]] = {}
        """The requests that wait for an end: its commit, the start of grading or a failure ends them, whichever is first."""

    async def close(self) -> None:
        """Stop what is underway. Episodes that are being graded are graded again after the next start."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def grades(self, live: OpenEpisode) -> bool:
        """Return true if a grader would compute the episode's reward."""
        return self._grading.grades(live.model)

    def begin(self, live: OpenEpisode, outcome: Outcome | None) -> asyncio.Future[None]:
        """Begin to end an open episode. The result is set once that is committed; without an outcome: once it is committed that
        it is being graded, or closed.

        An exception is what went wrong; the end is tried again nevertheless.
        """
        live.ending = live.ending.end(outcome)
        waiting = self._waiting[live.id] = asyncio.get_running_loop().create_future()
        self._lead(live)
        return waiting

    def resume(self, live: OpenEpisode) -> None:
        """Compute the reward of an episode whose grading is committed to have begun."""
        live.ending = ClosingState(Phase.GRADING)
        self._lead(live)

    def abort(self, live: OpenEpisode, reason: str) -> None:
        """Abort an episode that the ledger gave up, whatever it is doing."""
        was_open, live.ending = live.ending.phase is Phase.OPEN, live.ending.abort(reason)
        if was_open:
            self._lead(live)
        elif live.grading is not None:
            live.grading.cancel()

    def stop_stray(self, live: OpenEpisode) -> None:
        """Stop the calls of an episode that was closed while this process had no link to the coordinator."""
        self._start(
            self._stop_here(live, closed(live.id, "it was closed in the meantime")), f"stop-{live.id}"
        )

    # The phases of an end

    def _lead(self, live: OpenEpisode) -> None:
        """Begin to lead an episode to its end: first in memory, so that no second end begins while this one is committed."""
        self.unclosed[live.id] = live
        self._start(self._to_the_end(live), f"end-{live.id}")

    async def _to_the_end(self, live: OpenEpisode) -> None:
        try:
            while live.ending.phase is not Phase.CLOSED:
                await self._step(live)
        finally:
            self.unclosed.pop(live.id, None)
            live.ended.set()
            self._notify(live, None)

    async def _step(self, live: OpenEpisode) -> None:
        """Do the work of a phase and take the next step, unless an abort has changed the phase in the meantime."""
        phase = live.ending.phase
        if phase is Phase.GRADING:
            self._notify(live, None)
        try:
            done = await self._work(live, live.ending)
        except Exception as error:
            self._notify(live, error)
            pause_s = (isinstance(error, Unavailable) and error.retry_after) or _PAUSE_S
            log.error(
                "episode %s could not be closed; it stays %s, and is tried again in %g s: %s",
                live.id,
                phase.value,
                pause_s,
                error,
            )
            await asyncio.sleep(pause_s)
        else:
            if live.ending.phase is phase:
                live.ending = done(live.ending)

    async def _work(self, live: OpenEpisode, ending: ClosingState) -> Callable[[ClosingState], ClosingState]:
        """Do the work of a phase, and return the step that follows."""
        outcome = ending.outcome
        match ending.phase:
            case Phase.STOPPING:
                await self.stop_calls(live, closed(live.id, outcome.reason) if outcome else graded(live.id))
                if not ending.rewards:
                    return ClosingState.stopped
                unused = without_calls(live.mode, live.model, await self.sampled(live))
                return lambda ending: ending.stopped(unused)
            case Phase.FINISHING:
                return await self._stored(
                    live, Finish(live.id), lambda c: statements.begin_grading(c, live.id)
                )
            case Phase.GRADING:
                return await self._graded(live)
        assert ending.phase is Phase.CLOSING and outcome is not None
        values = {**outcome.values, "reason": outcome.reason, "state": "closed"}
        if error := values.get("error"):
            values["error"] = error = self._redact(error)
        return await self._stored(
            live,
            None if ending.given_up else await self._event(live, outcome),
            lambda c: statements.close_episode(c, live.id, values),
            {"error": error} if error else None,
        )

    async def _event(self, live: OpenEpisode, outcome: Outcome) -> Drop | Reward:
        if outcome.reward is None:
            return Drop(live.id, outcome.reason)
        return Reward(live.id, outcome.reward, (await self.sampled(live)).trainable > 0)

    async def sampled(self, live: OpenEpisode) -> Sampled:
        """Return what an episode sampled whose calls have all ended."""
        if live.sampled is None:
            live.sampled = await self._database.read(lambda c: sampled(c, live.model, live.id))
        return live.sampled

    async def _stored(
        self,
        live: OpenEpisode,
        event: Finish | Reward | Drop | None,
        write: Write,
        details: dict[str, Any] | None = None,
    ) -> Callable[[ClosingState], ClosingState]:
        """Commit a phase together with its effect on the ledger, if it has one; return the step that follows."""
        if live.mode == "eval" or event is None:
            await self._database.submit(write)
            return ClosingState.stored
        try:
            commands = await self._ledgers[live.model].apply(event, write, details)
        except ValueError as error:
            log.warning("the ledger refused the end of an episode: %s", error)
            return ClosingState.refused
        refused = any(isinstance(command, Refuse) for command in commands)
        return ClosingState.refused if refused else ClosingState.stored

    async def _graded(self, live: OpenEpisode) -> Callable[[ClosingState], ClosingState]:
        grading = live.grading = asyncio.create_task(self._grade(live), name=f"grade-{live.id}")
        try:
            await asyncio.wait({grading})
        finally:
            live.grading = None
            grading.cancel()
        return lambda ending: ending.graded(grading.result())

    async def _grade(self, live: OpenEpisode) -> Outcome:
        try:
            grade = await self._grading.grade(live.id, live.model)
        except GradingFailed as error:
            failure = str(error)
        except Exception as error:
            log.exception("grading episode %s", live.id)
            failure = repr(error)
        else:
            if grade.calls:  # before the end is stored: to grade again after a crash replaces them
                await self._database.submit(lambda c: turns.set_rewards(c, live.id, grade.calls))
                live.call_rewards |= grade.calls
            if grade.reward is None and not live.has_reward:
                return Outcome(NOT_JUDGED, {})
            earned = (grade.reward or 0.0) - sum(grade.calls.values())
            outcome = live.rewarded(
                (live.posted or 0.0) if grade.reward is None else earned, grade.components
            )
            if not (refusal := self._rewards.refusal(outcome.values["reward"])):
                return outcome
            failure = f"the sum of the grade and of the rewards posted on calls: {refusal}"
        log.error("episode %s is dropped: its grading failed; see its `why`", live.id)
        return Outcome("grading_failed", {"error": shortened(failure)})

    def _notify(self, live: OpenEpisode, error: Exception | None) -> None:
        """Complete the request that ended the episode."""
        waiting = self._waiting.pop(live.id, None)
        if waiting is None or waiting.done():
            return
        if error is None:
            waiting.set_result(None)
        else:
            waiting.set_exception(error)
            waiting.exception()  # retrieve the error: the request may have stopped waiting

    async def stop_calls(self, live: OpenEpisode, reason: Conflict) -> None:
        """Stop what runs in an episode, in whatever process; when this returns, what was sampled is recorded."""
        elsewhere = self._peers.end_episode(live.id, reason)
        await self._stop_here(live, reason)
        await elsewhere

    async def _stop_here(self, live: OpenEpisode, reason: Conflict) -> None:
        await live.calls.stop(reason)
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
