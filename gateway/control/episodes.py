"""Episodes: opened, rewarded, abandoned, timed out.

Owns every open episode in memory; the store has them all. Invariants: an episode is closed once, in one transaction with its
effect on the ledger; a closed episode starts no call, and calls that still run in it are stopped.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import secrets
import time
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from typing import Any

from sqlalchemy import Connection

from gateway.errors import Busy, Conflict, NotAuthenticated, NotFound, jittered
from gateway.feed.ledger import StoredLedger
from gateway.rollout.completion import Completion
from gateway.rollout.upstream import UpstreamCall
from gateway.settings import Settings
from gateway.store import episodes as statements
from gateway.store.database import Database, Write
from gateway.trajectories.recorder import Recorder
from gateway.types import EpisodeMode, EpisodeOpened
from scheduler.policies.staleness_events import CloseGroup, Drop, Join, Refuse, Reward

log = logging.getLogger(__name__)

_REFUSALS = {
    "group_full": "all members of group {} have joined",
    "group_finished": "group {} is finished",
    "group_closed": "group {} is closed",
    "size_differs": "group {} was begun with another group_size",
}


@dataclass(slots=True, eq=False)
class LiveEpisode:
    """An open episode."""

    id: str
    task_id: str
    group_id: str
    mode: EpisodeMode
    model: str
    """The trained model whose ledger the episode is in."""
    opened_at: float
    seen_at: float
    key_hash: str = ""
    """Empty until the key was seen, for an episode that was open before the gateway's start."""
    calls: set[Completion | UpstreamCall] = field(default_factory=set)


@dataclass(slots=True)
class _Waiting:
    """A group whose members wait for a slot."""

    woken: asyncio.Event = field(default_factory=asyncio.Event)
    members: int = 0


class Episodes:
    """Every open episode."""

    def __init__(
        self,
        settings: Settings,
        database: Database,
        ledgers: Mapping[str, StoredLedger],
        recorders: Collection[Recorder],
    ) -> None:
        """`ledgers`: of each trained model; `recorders`: of every model."""
        self._settings = settings
        self._database = database
        self._ledgers = ledgers
        self._recorders = recorders
        self._live: dict[str, LiveEpisode] = {}
        self._by_key: dict[str, LiveEpisode] = {}
        self._lonely: dict[tuple[str, str], float] = {}
        """Groups (with their model) without a running member, and since when."""
        self._aborts: set[asyncio.Task[None]] = set()
        self._waiting: dict[str, dict[str, _Waiting]] = {model: {} for model in ledgers}
        """Of each model, the groups that wait for a slot, first come, first served."""
        for model, ledger in ledgers.items():
            ledger.on_abort = self._abort
            ledger.on_change = partial(self._wake, model)

    async def load(self) -> None:
        """Takes over the episodes that were open when the gateway stopped; their deadlines start anew."""
        now = time.monotonic()
        for row in await self._database.read(statements.open_episodes):
            self._live[row["id"]] = LiveEpisode(
                row["id"], row["task_id"], row["group_id"], row["mode"], row["model"], now, now
            )

    @property
    def open_count(self) -> int:
        """How many episodes are open."""
        return len(self._live)

    async def open(
        self,
        task_id: str,
        group_id: str | None,
        group_size: int,
        mode: EpisodeMode,
        details: dict[str, Any],
        wait_s: float,
        model: str,
    ) -> EpisodeOpened:
        """Opens an episode of a trained model once its ledger has a slot.

        Raises Busy after `wait_s`, Conflict if the group takes no more.
        """
        episode_id = f"ep-{secrets.token_hex(10)}"
        group_id = group_id or f"{task_id}-{secrets.token_hex(6)}"
        key = f"hg-{secrets.token_urlsafe(24)}"
        row: dict[str, Any] = {
            "id": episode_id,
            "key_hash": _hash(key),
            "task_id": task_id,
            "group_id": group_id,
            "mode": mode,
            "model": model,
            "details": details,
            "state": "open",
            "reason": "",
            "created_at": time.time(),
        }
        if mode == "eval":
            row["version"] = self._ledgers[model].ledger.version
            await self._database.submit(lambda c: statements.insert_episode(c, row))
        else:
            await self._join(Join(group_id, episode_id, group_size), row, wait_s)
        now = time.monotonic()
        live = LiveEpisode(episode_id, task_id, group_id, mode, model, now, now, row["key_hash"])
        self._live[episode_id] = self._by_key[live.key_hash] = live
        for recorder in self._recorders:
            recorder.begin(episode_id)
        return EpisodeOpened(episode_id, key, f"{self._settings.server.url}/v1", row["version"])

    async def _join(self, event: Join, row: dict[str, Any], wait_s: float) -> None:
        until = time.monotonic() + min(wait_s, self._settings.episodes.max_wait_s)
        ledger = self._ledgers[row["model"]]
        while True:
            row["version"] = ledger.ledger.version
            commands = await ledger.apply(event, lambda c: statements.insert_episode(c, row))
            if not isinstance(commands[0], Refuse):
                return
            if commands[0].reason != "no_slot":
                message = _REFUSALS[commands[0].reason].format(event.group_id)
                raise Conflict(message, code=commands[0].reason)
            left = until - time.monotonic()
            if left <= 0:
                raise Busy(
                    "no slot is free within the staleness bound", retry_after=jittered(2.0), code="no_slot"
                )
            await self._wait_for_slot(self._waiting[row["model"]], event.group_id, left)

    @staticmethod
    async def _wait_for_slot(queue: dict[str, _Waiting], group_id: str, timeout_s: float) -> None:
        """Until a slot may be the group's, or the time is up. All members of a group are woken together."""
        waiting = queue.setdefault(group_id, _Waiting())
        waiting.members += 1
        try:
            async with asyncio.timeout(timeout_s):
                await waiting.woken.wait()
        except TimeoutError:
            return
        finally:
            waiting.members -= 1
            if not waiting.members and queue.get(group_id) is waiting:
                del queue[group_id]

    def _wake(self, model: str) -> None:
        """Wakes as many groups as there are slots, and no more: every one would ask the ledger again."""
        queue = self._waiting[model]
        for group_id in list(islice(queue, self._ledgers[model].ledger.free_slots())):
            queue.pop(group_id).woken.set()

    async def authenticate(self, key: str) -> LiveEpisode:
        """The open episode of a key. Raises NotAuthenticated, or Conflict if the episode is closed."""
        key_hash = _hash(key)
        if live := self._by_key.get(key_hash):
            live.seen_at = time.monotonic()
            return live
        row = await self._database.read(lambda c: statements.open_by_key(c, key_hash))
        if row is None:
            message = "no episode has this key; POST /admin/v1/episodes opens one and answers its key"
            raise NotAuthenticated(message, code="invalid_api_key")
        live = self._live.get(row["id"])
        if live is None:
            raise _closed(row["id"], row["reason"])
        live.key_hash, self._by_key[key_hash] = key_hash, live
        live.seen_at = time.monotonic()
        return live

    async def reward(
        self, episode_id: str, reward: float, components: dict[str, float] | None, final: bool
    ) -> None:
        """Stores a reward; a final one closes the episode. Raises NotFound or Conflict.

        The same final reward again is the same request sent twice, and is answered as the first was.
        """
        if final and await self._was_rewarded(episode_id, reward):
            return
        live = await self._open(episode_id)
        live.seen_at = time.monotonic()
        if not final:
            await self._database.submit(lambda c: statements.set_reward(c, episode_id, reward, components))
            return
        values = {"reason": "rewarded", "reward": reward, "components": components}
        await self._close(live, values, Reward(episode_id))

    async def _was_rewarded(self, episode_id: str, reward: float) -> bool:
        if episode_id in self._live:
            return False
        row = await self._database.read(lambda c: statements.episode(c, episode_id))
        return row is not None and row["reason"] == "rewarded" and row["reward"] == reward

    async def abandon(self, episode_id: str, reason: str) -> None:
        """Closes an episode without a reward. Raises NotFound or Conflict."""
        await self._close(await self._open(episode_id), {"reason": reason}, Drop(episode_id, reason))

    async def sweep(self) -> None:
        """Closes what missed its deadline: idle or endless episodes, and groups whose members never came."""
        limits, now = self._settings.episodes, time.monotonic()
        for live in list(self._live.values()):
            if live.calls:
                live.seen_at = now
            idle, total = now - live.seen_at > limits.idle_s, now - live.opened_at > limits.total_s
            if idle or total:
                reason = "idle_deadline" if idle else "total_deadline"
                log.warning("episode %s is closed: %s", live.id, reason)
                await self._close(live, {"reason": reason}, Drop(live.id, reason))
        await self._close_lonely_groups(now)

    async def _close_lonely_groups(self, now: float) -> None:
        """A group whose driver died waits for members that nobody will open."""
        running = {live.group_id for live in self._live.values()}
        waiting = {
            (model, group.group_id)
            for model, ledger in self._ledgers.items()
            for group in ledger.ledger.groups()
            if group.state == "reserved" and group.group_id not in running
        }
        self._lonely = {key: self._lonely.get(key, now) for key in waiting}
        for (model, group_id), since in self._lonely.items():
            if now - since > self._settings.episodes.idle_s:
                await self._ledgers[model].apply(CloseGroup(group_id, "members_missing"))

    async def _open(self, episode_id: str) -> LiveEpisode:
        if live := self._live.get(episode_id):
            return live
        row = await self._database.read(lambda c: statements.episode(c, episode_id))
        if row is None:
            raise NotFound(f"no episode {episode_id!r}", code="no_episode")
        raise _closed(episode_id, row["reason"])

    async def _close(self, live: LiveEpisode, values: dict[str, Any], event: Reward | Drop) -> None:
        """Memory first, so that no second close can begin while this one is being committed."""
        self._forget(live)
        values = {**values, "state": "closed", "closed_at": time.time()}

        def write(connection: Connection) -> None:
            statements.close_episode(connection, live.id, values)

        await self._stop_calls(live, values["reason"])
        if live.mode == "eval" or not await self._applied(live.model, event, write):
            await self._database.submit(write)
        self._forget_trees(live)

    async def _applied(self, model: str, event: Reward | Drop, write: Write) -> bool:
        """False: the ledger has given the group up already, so the event says nothing to it."""
        try:
            commands = await self._ledgers[model].apply(event, write)
        except ValueError as error:
            log.warning("the ledger knows nothing of an episode that ends: %s", error)
            return False
        return not any(isinstance(command, Refuse) for command in commands)

    def _abort(self, episode_id: str, reason: str) -> None:
        """The ledger gave the episode's group up."""
        live = self._live.get(episode_id)
        if live is None:
            return
        self._forget(live)
        task = asyncio.create_task(self._finish_abort(live, reason), name=f"abort-{episode_id}")
        self._aborts.add(task)
        task.add_done_callback(self._aborts.discard)

    async def _finish_abort(self, live: LiveEpisode, reason: str) -> None:
        await self._stop_calls(live, reason)
        values = {"reason": reason, "state": "closed", "closed_at": time.time()}
        await self._database.submit(lambda c: statements.close_episode(c, live.id, values))
        self._forget_trees(live)

    async def _stop_calls(self, live: LiveEpisode, reason: str) -> None:
        await asyncio.gather(*(call.stop(_closed(live.id, reason)) for call in live.calls))

    def _forget_trees(self, live: LiveEpisode) -> None:
        for recorder in self._recorders:
            recorder.forget(live.id)

    def _forget(self, live: LiveEpisode) -> None:
        self._live.pop(live.id, None)
        self._by_key.pop(live.key_hash, None)


def _closed(episode_id: str, reason: str) -> Conflict:
    return Conflict(f"episode {episode_id} is closed ({reason})", code="episode_closed")


def _hash(key: str) -> str:
    """Keys are long and random, so a plain digest hides them well enough."""
    return hashlib.sha256(key.encode()).hexdigest()
