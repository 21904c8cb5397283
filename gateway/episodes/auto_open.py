"""Opens episodes for calls under an agent's key, and finds the episode that a repeated call opened.

Owns the openings in progress, and the refusals that a retry may still follow. Two equal calls open two episodes, because each is
a sample of its own. A retry with an idempotency key finds the episode that the key opened. A retry without a key is matched by
the outcome of earlier identical calls, in this order:

1. an episode whose first reply lost its client: the client is back;
2. an equal call that was refused: this is its retry, and it opens an episode;
3. an episode whose first reply was given recently and not continued: its client did not get it;
4. if there are several, none can be chosen: the call opens an episode, with a notice.
"""

from __future__ import annotations

import asyncio
import random
import secrets
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from gateway.config import AgentSettings
from gateway.config.settings import Settings
from gateway.episodes.conversations import messages_before_reply
from gateway.episodes.episodes import Episodes
from gateway.episodes.open_episode import OpenEpisode
from gateway.generation.completion import Completion
from gateway.generation.request_key import RequestKey
from gateway.render.offload import offload
from gateway.store import episodes as statements
from gateway.store.database import Database
from gateway.training_feed.ledger import StoredLedger
from gateway.trajectories.conversation import digests
from headgate.errors import Busy, Conflict, GatewayError, jittered
from headgate.types import EpisodeRequest

_OVER = ("group_full", "group_finished", "group_closed", "size_differs")
_OWED_S = 60.0
"""The time within which a refused call may come back."""
_Request = tuple[str, str]
"""An agent, and the name of its request."""
NO_CONSENT, NOT_DRAWN, NO_SLOT = "no_consent", "not_drawn", "no_slot"
"""Notices of conversations of a training agent that are evaluation."""


@dataclass(frozen=True, slots=True)
class Opening:
    """What an episode is opened for: a call of an agent."""

    sent: RequestKey | None
    """Identifies the request and its retries; None: it has none."""
    trains: bool
    """True if the call is to the agent's own model."""
    consent: bool | None = None
    """Whether the caller agrees to training; None: the request does not state it."""
    notice: str = ""


class AutoOpen:
    """The way in for calls of agents; `ledgers`: of each trained model."""

    def __init__(
        self,
        settings: Settings,
        database: Database,
        episodes: Episodes,
        ledgers: Mapping[str, StoredLedger],
        key: bytes = b"",
    ) -> None:
        """`key`: that of the hashes of conversations."""
        self._key = key
        self._settings = settings
        self._database = database
        self._episodes = episodes
        self._ledgers = ledgers
        self.waiting = 0
        """Retries of calls that are still opening their episodes."""
        self._underway: dict[_Request, set[asyncio.Future[None]]] = {}
        self._owed: dict[_Request, list[float]] = {}
        """The times until which refused calls are expected back."""

    async def retried(self, agent: str, sent: RequestKey) -> tuple[OpenEpisode | None, str]:
        """Return the episode that a retry opened before; without one a notice, which may be empty, for the one that it opens."""
        place = agent, sent.name
        while True:
            found = [live for live in self._episodes.of_agent(agent) if live.opening == sent.name]
            if sent.exact and found:
                return found[-1], ""
            if lost := [live for live in found if _lost_its_client(live)]:
                return lost[0], ""
            if self._is_owed(place):
                return None, ""
            if place not in self._underway:
                break
            self.waiting += 1
            try:
                await asyncio.wait(self._underway[place])
            finally:
                self.waiting -= 1
        now, grace_s = time.monotonic(), self._settings.calls.grace_s
        of_late = [
            live
            for live in found
            if not live.continued and (live.calls or now - live.last_used_at <= grace_s)
        ]
        if len(of_late) == 1:
            return of_late[0], ""
        return None, "ambiguous_retry" if of_late else ""

    async def open(
        self,
        agent: str,
        messages: Sequence[dict[str, Any]],
        opening: Opening,
    ) -> OpenEpisode:
        """Open an episode for a call.

        Raise Busy if the agent has too many episodes, or, unless it is `live`, if there is no slot for a training episode in
        time.
        """
        sent = opening.sent
        place = agent, sent.name if sent is not None else secrets.token_hex(16)
        done = asyncio.get_running_loop().create_future()
        self._underway.setdefault(place, set()).add(done)
        try:
            return await self._open(place, messages, opening)
        except Busy:
            self._owe(place)
            raise
        finally:
            done.set_result(None)
            self._underway[place].discard(done)
            if not self._underway[place]:
                del self._underway[place]

    async def failed(self, episode: OpenEpisode) -> None:
        """Close the episode that was opened for a refused call only, and free its slot."""
        if not episode.opening or episode.calls or episode.state != "open":
            return
        if await self._database.read(lambda c: statements.has_calls(c, episode.id)):
            return
        if not episode.calls and episode.state == "open":
            self._owe((episode.agent, episode.opening))
            # The episode is over, or will be: its client learns of it from its call
            with suppress(GatewayError):
                await self._episodes.abandon(episode.id, "nothing_sampled")

    def refused(self, agent: str, sent: RequestKey) -> None:
        """Record a call that was refused before its caller was looked up: its retry opens an episode and joins no other."""
        if not sent.retry:
            self._owe((agent, sent.name))

    async def _open(
        self, place: _Request, messages: Sequence[dict[str, Any]], opening: Opening
    ) -> OpenEpisode:
        agent, request = place
        begins = messages_before_reply(messages)
        task = (await offload(begins, lambda: digests(begins, [], self._key)[-1])).hex()
        given, model = self._settings.agents[agent], self._settings.model_of(agent)
        underway = sum(len(some) for (name, _), some in self._underway.items() if name == agent)
        if sum(bool(live.opening) for live in self._episodes.of_agent(agent)) + underway > given.max_episodes:
            message = (
                f"the agent {agent!r} has {given.max_episodes} episodes open ([agents.{agent}] max_episodes)"
            )
            raise Busy(message, retry_after=jittered(2.0), code="too_many_episodes")
        notice = opening.notice
        if opening.trains and given.mode == "train":
            untrained = _refusal_to_train(given, opening.consent)
            try:
                if not untrained:
                    return await self._join(place, task, given, model, notice)
            except Busy as error:
                if not given.live or error.code != NO_SLOT:
                    raise
            notice = untrained or NO_SLOT
        episode_request = EpisodeRequest(
            task, None, 1, "eval", model, agent=agent, opening=request, notice=notice
        )
        opened = await self._episodes.open(episode_request, 0.0)
        return await self._episodes.named(opened.episode_id)

    async def _join(
        self, place: _Request, task: str, given: AgentSettings, model: str, notice: str
    ) -> OpenEpisode:
        """Open a member of the task's group that is not full yet, or of a new one."""
        agent, request = place
        assert given.group_size is not None
        until = time.monotonic() + (0.0 if given.live else given.max_wait_s)
        prefix = f"{agent}-{task}-"
        number = await self._group(prefix, model, given.group_size)
        while True:
            episode_request = EpisodeRequest(
                task_id=task,
                group_id=f"{prefix}{number:08d}",
                group_size=given.group_size,
                mode="train",
                model=model,
                agent=agent,
                opening=request,
                notice=notice,
            )
            try:
                opened = await self._episodes.open(episode_request, max(0.0, until - time.monotonic()))
            except Conflict as error:
                if error.code not in _OVER:
                    raise
                number += 1
            else:
                return await self._episodes.named(opened.episode_id)

    async def _group(self, prefix: str, model: str, size: int) -> int:
        """Return the number of the group to try: the last one while it takes members, else the next."""
        last = await self._database.read(lambda c: statements.last_group(c, prefix, model))
        if last is None:
            return 1
        spare = self._settings.staleness_of(model).spare_members
        takes = any(
            group.group_id == last and group.join_refusal(size, spare) is None
            for group in self._ledgers[model].rule.groups()
        )
        return int(last.removeprefix(prefix)) + (not takes)

    def _owe(self, place: _Request) -> None:
        now = time.monotonic()
        left = {key: [t for t in times if t > now] for key, times in self._owed.items()}
        self._owed = {key: times for key, times in left.items() if times}
        self._owed.setdefault(place, []).append(now + _OWED_S)

    def _is_owed(self, place: _Request) -> bool:
        """Return true if an equal call was refused recently and is expected back; count this request as its return."""
        times = [t for t in self._owed.pop(place, []) if t > time.monotonic()]
        if len(times) > 1:
            self._owed[place] = times[1:]
        return bool(times)


def _refusal_to_train(given: AgentSettings, consent: bool | None) -> str:
    """Return the notice of a conversation that must not be trained; empty if it may be."""
    if consent is False or (consent is None and given.consent == "required"):
        return NO_CONSENT
    return "" if random.random() < given.share else NOT_DRAWN


def _lost_its_client(live: OpenEpisode) -> bool:
    """Return true if the reply to the opening call is complete, and no client reads it."""
    return any(
        isinstance(call, Completion)
        and call.details.request_key.startswith(live.opening)
        and call.reply.orphaned
        and call.joinable
        for call in live.calls
    )
