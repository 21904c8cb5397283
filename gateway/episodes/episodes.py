"""Episodes: opened, rewarded, graded, abandoned, timed out.

Owns every open episode in memory; the store has all of them. An episode is open, or its run is over and its reward is being
computed (state `grading`), or it is closed. Invariants: an episode's run ends once (`closing`); then it starts no call, and its
running calls are stopped. Its final reward, the same in ledger, store and feed, is the posted or computed one plus the rewards of
its calls.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections.abc import Callable, Collection, Mapping
from functools import partial
from typing import Any

from gateway.config.settings import Settings
from gateway.episodes.admission import Admission
from gateway.episodes.closing import Closing
from gateway.episodes.closing_state import Outcome
from gateway.episodes.deadlines import EpisodeDeadlines, GroupDeadlines
from gateway.episodes.demotion import Demotion
from gateway.episodes.episode_rows import check_same, new_episode, new_row, stored_episode
from gateway.episodes.open_episode import CALLS, OpenEpisode, closed, crashed, graded
from gateway.episodes.worth import RewardOutcome, reward_outcome
from gateway.generation.peers import NoPeers, Peers
from gateway.grading.grading import Grading
from gateway.render.redaction import Redactor
from gateway.store import episodes as statements
from gateway.store import tallies, turns
from gateway.store.database import Database
from gateway.store.records import EpisodeOutcome, EpisodeRecord, NewEpisode
from gateway.store.sampled import sampled
from gateway.tenancy.limits import EpisodeQuota
from gateway.training_feed.ledger import LedgerListener, StoredLedger
from gateway.trajectories.recorder import Recorder
from headgate.end_reasons import DRIVER_ENDED
from headgate.errors import BadRequest, Conflict, NotAuthenticated, NotFound, Unavailable, shortened
from headgate.keys import key_hash, split_attempt
from headgate.types import EpisodeOpened, EpisodeRequest
from scheduler.policies.overdue import SlowEpisode
from scheduler.policies.staleness_events import Join

log = logging.getLogger(__name__)


class Episodes(LedgerListener):
    """Every open episode."""

    def __init__(
        self,
        settings: Settings,
        database: Database,
        ledgers: Mapping[str, StoredLedger],
        recorders: Collection[Recorder],
        grading: Grading,
        peers: Peers | None = None,
        engine_version: Callable[[str], int | None] = lambda _model: None,
        redactor: Redactor | None = None,
    ) -> None:
        """`ledgers`: of each trained model; `recorders`: of every model; `peers`: the other gateway processes;
        `engine_version`: see `Admission`; `redactor`: what keeps secrets from the store."""
        self._redactor = redactor or Redactor()
        self._settings = settings
        self._database = database
        self._ledgers = ledgers
        self._recorders = recorders
        self._admission = Admission(database, ledgers, engine_version)
        self._peers = peers or NoPeers()
        self._closing = Closing(
            database, ledgers, recorders, grading, self._peers, settings.rewards, self._redactor.text
        )
        self._demotion = Demotion(settings, database, ledgers)
        self._deadlines = EpisodeDeadlines(settings)
        self._group_deadlines = GroupDeadlines(settings, ledgers)
        self._quota = EpisodeQuota(settings)
        self._live: dict[str, OpenEpisode] = {}
        self._by_key: dict[str, OpenEpisode] = {}
        self._opening: dict[str, asyncio.Future[None]] = {}
        """Episodes that a repeatable request opened, by the hash of its key."""
        for ledger in ledgers.values():
            ledger.subscribe(self)

    async def load(self) -> None:
        """Take over the episodes that were not closed when the gateway stopped.

        The deadlines of open ones start again, and so does the grading of the others.
        """
        now = time.monotonic()
        await self._database.submit(tallies.recount)
        rewards = await self._database.read(turns.unfinished_rewards)
        for row in await self._database.read(statements.unfinished):
            live = stored_episode(row, rewards.get(row["id"], {}), now)
            if row["state"] == "open":
                self._live[live.id] = live
            else:
                self._closing.resume(live)

    async def close(self) -> None:
        """Stop the gradings that are underway; they begin again with the next start."""
        await self._admission.close()
        await self._closing.close()

    def adopt(self, followed: Collection[OpenEpisode]) -> None:
        """Move calls that this process began under another coordinator to the same episodes."""
        for before in followed:
            if live := self._live.get(before.id):
                live.adopt(before)
            else:
                self._closing.stop_stray(before)

    def live(self) -> list[OpenEpisode]:
        """Every open episode."""
        return list(self._live.values())

    def slow(self, model: str) -> list[SlowEpisode]:
        """Return a model's training episodes that have used up half of their time."""
        return self._deadlines.slow(self._live.values(), model, time.monotonic())

    @property
    def open_count(self) -> int:
        """The number of open episodes."""
        return len(self._live)

    async def open(self, request: EpisodeRequest, wait_s: float, key: str = "") -> EpisodeOpened:
        """Open an episode of a trained model once its ledger has a slot. `key`: its key, if not a random one.

        Raise Busy after `wait_s`, Conflict if the group takes no more members.
        """
        self._database.check()
        key = "" if request.opening else key or f"hg-{secrets.token_urlsafe(24)}"
        row = new_row(request, key, self._redactor)
        with self._quota.reserve(request.model, (live.model for live in self._live.values())):
            if request.mode == "eval":
                await self._admission.insert(row, partial(self._begin, row, request))
            else:
                join = Join(row["group_id"], row["id"], request.group_size)
                await self._admission.join(join, row, wait_s, partial(self._begin, row, request))
        return self._opened(row, key)

    def _begin(self, row: NewEpisode, request: EpisodeRequest, given_up: str) -> None:
        """Handle an episode that is stored as open. `given_up`: why the ledger gave it up since it joined; empty: it did not."""
        live = new_episode(row, request, time.monotonic())
        self._live[live.id] = self._by_key[live.key_hash] = live
        self._peers.open_episode(live.id)
        for recorder in self._recorders:
            recorder.begin(live.id)
        if given_up:
            self.episode_aborted(live.id, given_up)

    async def open_once(self, key: str, request: EpisodeRequest, wait_s: float) -> EpisodeOpened:
        """Open an episode under a key that is derived from the request (`key_of`), so that a repeated request gets the same
        episode.

        That may be closed by now. Raise Conflict if the key opened an episode of another task, group, mode, model or agent.
        """
        hashed = key_hash(key)
        while True:
            while underway := self._opening.get(hashed):
                await asyncio.wait({underway})
            row = await self._database.read(lambda c: statements.open_by_key(c, hashed))
            if row is not None:
                check_same(row, request)
                return self._opened(row, key)
            if hashed not in self._opening:  # another request may have opened it in the meantime
                break
        done = self._opening[hashed] = asyncio.get_running_loop().create_future()
        try:
            return await self.open(request, wait_s, key)
        finally:
            del self._opening[hashed]
            done.set_result(None)

    def _opened(self, row: Mapping[str, Any], key: str) -> EpisodeOpened:
        return EpisodeOpened(row["id"], key, f"{self._settings.server.url}/v1", row["version"])

    def waiting(self, model: str) -> dict[str, int]:
        """Return the number of episodes of each group that wait for a slot, first come first."""
        return self._admission.waiting(model)

    async def authenticate(self, key: str) -> OpenEpisode:
        """Return the open episode of a key. Raise NotAuthenticated, or Conflict if the episode's run, or the attempt, is over."""
        key, attempt = split_attempt(key)
        live = await self.keyed(key_hash(key))
        live.check_attempt(attempt)
        return live

    async def keyed(self, hashed: str) -> OpenEpisode:
        """Return the same, by the key's hash."""
        if live := self._by_key.get(hashed):
            live.touch()
            return live
        row = await self._database.read(lambda c: statements.open_by_key(c, hashed))
        if row is None:
            message = "no episode has this key; POST /admin/v1/episodes opens one and returns its key"
            raise NotAuthenticated(message, code="invalid_api_key")
        live = await self._open(row["id"])
        live.set_key(hashed)
        self._by_key[hashed] = live
        live.touch()
        return live

    def touch(self, episode_id: str, ago_s: float) -> None:
        """Another process served a call of an open episode so long ago."""
        if live := self._live.get(episode_id):
            live.touch(ago_s)

    async def named(self, episode_id: str) -> OpenEpisode:
        """Return an open episode by its id. Raise NotFound; Conflict if its run is over; Unavailable if another process has
        it."""
        live = await self._open(episode_id)
        live.touch()
        return live

    async def agent_of(self, episode_id: str) -> str:
        """Return the agent whose key reaches an episode, open or not; empty: none. Raise NotFound."""
        if live := self._live.get(episode_id):
            return live.agent
        return (await self._row(episode_id))["agent"]

    def of_agent(self, agent: str) -> list[OpenEpisode]:
        """Return the open episodes that an agent's key reaches, the oldest first."""
        return [live for live in self._live.values() if live.agent == agent]

    async def reward(
        self, episode_id: str, reward: float, components: dict[str, float] | None, final: bool
    ) -> RewardOutcome | None:
        """Store a reward; a final one closes the episode, with the rewards of its calls added. Raise NotFound or Conflict.

        Return what became of a final reward, None for another one. The same final reward again counts as a repeated request and
        gets the same response.
        """
        if final and await self._was_rewarded(episode_id, reward):
            return await self._reward_outcome(episode_id)
        live = await self._open(episode_id)
        self._check_reward(reward, reward + sum(live.call_rewards.values()))
        live.touch()
        if final:
            await self._end(live, live.rewarded(reward, components))
            return await self._reward_outcome(episode_id)
        stored = self._database.submit(lambda c: statements.set_reward(c, episode_id, reward, components))
        live.post(reward, components)
        await stored
        return None

    async def reward_call(self, episode_id: str, call_id: str, reward: float) -> None:
        """Store the reward of a call of an open episode, in place of the one before. Raise NotFound or Conflict."""
        await self._open(episode_id)
        if not await self._database.read(lambda c: turns.has_call(c, episode_id, call_id)):
            raise NotFound(f"episode {episode_id!r} has no recorded call {call_id!r}", code="no_call")
        live = await self._open(episode_id)  # it may have been closed while we waited
        others = sum({**live.call_rewards, call_id: reward}.values())
        self._check_reward(reward, (live.posted or 0.0) + others)
        live.touch()
        stored = self._database.submit(lambda c: turns.set_reward(c, episode_id, call_id, reward))
        live.call_rewards[call_id] = reward
        await stored

    async def restart(self, episode_id: str) -> int:
        """Restart an open episode after its agent crashed: nothing so far is trained or rewarded, and keys of earlier attempts
        are refused. Return the number of the attempt that begins.

        Raise NotFound, or Conflict if the episode's run is over.
        """
        live = await self._open(episode_id)
        reason = crashed(episode_id)
        await self._closing.stop_calls(live, reason)
        attempt = await self._database.submit(lambda c: turns.forsake(c, episode_id))
        if not attempt:
            raise closed(episode_id, "it was closed in the meantime")
        live.forsake(attempt)
        live.touch()
        # A request of the old attempt may have begun in another process until this was committed.
        await self._peers.end_episode(episode_id, reason)
        return attempt

    async def finish(self, episode_id: str, wait_s: float) -> EpisodeOutcome:
        """End an episode's run: graders compute its reward, while it keeps its slot. Waits up to `wait_s` for that.

        Returns its state, and once it is closed the reason, reward and components. If its model has no grader, the reward is what
        was posted so far. Finishing again is not an error. Raise NotFound, or Conflict if nothing rewards the episode.
        """
        if live := self._live.get(episode_id):
            await self._finish(live)
        elif (live := self._closing.unclosed.get(episode_id)) is None:
            return await self._outcome(episode_id)
        try:
            async with asyncio.timeout(wait_s if live.state == "grading" else None):
                await live.ended.wait()
        except TimeoutError:
            return {"state": "grading", "reason": "", "reward": None, "components": None, "error": ""}
        return await self._outcome(episode_id)

    async def abandon(self, episode_id: str, reason: str, error: str = "") -> None:
        """Close an episode without a reward; `error`: its agent's last error output. Raise NotFound or Conflict."""
        live = await self._open(episode_id)
        if reason in DRIVER_ENDED:
            self._group_deadlines.leave(live.model, live.group_id)
        await self._end(live, Outcome(reason, {"error": shortened(error)}))

    async def sweep(self) -> None:
        """End what missed its deadline: idle or endless episodes, groups whose members never came, batches that are stuck."""
        now = time.monotonic()
        ends = []
        for live in list(self._live.values()):
            if live.calls:
                live.touch()
            if reason := self._deadlines.missed_deadline(live, now):
                ends.append(self._overrun(live, reason))
        # Together: each waits for a commit, and users may end conversations faster than that.
        if ends:
            await asyncio.wait(ends)
            for end in ends:
                end.result()
        self._deadlines.retain(self._live.values())
        unfinished = [*self._live.values(), *self._closing.unclosed.values()]
        running = {(live.model, live.group_id) for live in unfinished if live.mode == "train"}
        await self._group_deadlines.sweep(now, running)

    def _overrun(self, live: OpenEpisode, reason: str) -> asyncio.Future[None]:
        """End an episode whose deadline has passed. For one that a call opened, silence is the regular end."""
        outcome: Outcome | None = Outcome(reason, {})
        if live.opening and reason == "idle_deadline" and (self._closing.grades(live) or live.has_reward):
            outcome = self._regular_outcome(live)
        return self._begin_end(live, outcome)

    def _check_reward(self, reward: float, total: float) -> None:
        """Raise BadRequest for a reward that is out of bounds, or that makes the sum with all that was posted so."""
        if refusal := self._settings.rewards.refusal(reward):
            raise BadRequest(refusal, code="invalid_value", param="reward")
        if refusal := self._settings.rewards.refusal(total):
            message = f"the sum of the rewards posted on the episode and on its calls: {refusal}"
            raise BadRequest(message, code="invalid_value", param="reward")

    async def _was_rewarded(self, episode_id: str, reward: float) -> bool:
        if over := self._closing.unclosed.get(episode_id):
            if over.state == "grading":
                return False
            await over.ended.wait()
        elif episode_id in self._live:
            return False
        row = await self._database.read(lambda c: statements.episode(c, episode_id))
        if row is None or row["reason"] != "rewarded":
            return False
        return bool(row["reward"] == reward + (row["components"] or {}).get(CALLS, 0.0))

    async def _finish(self, live: OpenEpisode) -> None:
        if not (self._closing.grades(live) or live.has_reward):
            raise Conflict(
                f"nothing rewards episode {live.id}: no [graders] are configured for the model {live.model!r}, and no reward was"
                f" posted; POST /admin/v1/episodes/{live.id}/reward posts one",
                code="no_reward",
            )
        await self._end(live, self._regular_outcome(live))

    def _regular_outcome(self, live: OpenEpisode) -> Outcome | None:
        """Return the outcome of what was posted; None if graders compute it."""
        return None if self._closing.grades(live) else live.rewarded(live.posted or 0.0, live.components)

    async def _outcome(self, episode_id: str) -> EpisodeOutcome:
        row = await self._row(episode_id)
        return {
            "state": row["state"],
            "reason": row["reason"],
            "reward": row["reward"],
            "components": row["components"],
            "error": row["error"],
        }

    async def _reward_outcome(self, episode_id: str) -> RewardOutcome:
        """Return what became of the reward of a closed episode."""
        row = await self._row(episode_id)
        found = await self._database.read(lambda c: sampled(c, row["model"], episode_id))
        return reward_outcome(row, found)

    async def _row(self, episode_id: str) -> EpisodeRecord:
        row = await self._database.read(lambda c: statements.episode(c, episode_id))
        if row is None:
            raise NotFound(f"no episode {episode_id!r}", code="no_episode")
        return row

    async def _open(self, episode_id: str) -> OpenEpisode:
        if live := self._live.get(episode_id):
            return live
        if over := self._closing.unclosed.get(episode_id):
            if over.state == "grading":
                raise graded(episode_id)
            await over.ended.wait()
        outcome = await self._outcome(episode_id)
        if outcome["state"] != "closed":
            message = f"episode {episode_id} is not this process's: another gateway process has become the coordinator"
            raise Unavailable(message, retry_after=1.0, code="fenced")
        raise closed(episode_id, outcome["reason"])

    async def _end(self, live: OpenEpisode, outcome: Outcome | None) -> None:
        await asyncio.shield(self._begin_end(live, outcome))

    def _begin_end(self, live: OpenEpisode, outcome: Outcome | None) -> asyncio.Future[None]:
        """Begin to end an open episode; without an outcome, it is graded. Return what `Closing.begin` returns."""
        self._database.check()  # check before the episode is forgotten
        if outcome is None or outcome.reward is not None:
            self._deadlines.record(live, time.monotonic())
        self._forget(live)
        return self._closing.begin(live, outcome)

    async def leave_untrained(self, live: OpenEpisode, reason: str) -> None:
        """Let the run of an open training episode go on as evaluation. Do nothing for other episodes."""
        await self._demotion.demote(live, reason)

    def episode_aborted(self, episode_id: str, reason: str) -> None:
        """End an episode whose group the ledger has given up; a conversation of a live agent goes on as evaluation."""
        live = self._live.get(episode_id) or self._closing.unclosed.get(episode_id)
        if live is None:
            self._admission.abort(episode_id, reason)
        elif not self._demotion.demote_aborted(live, reason):
            self._forget(live)
            self._closing.abort(live, reason)

    def _forget(self, live: OpenEpisode) -> None:
        self._live.pop(live.id, None)
        self._by_key.pop(live.key_hash, None)
