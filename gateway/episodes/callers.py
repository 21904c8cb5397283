"""Finds the caller of a request and the episode that it belongs to.

Owns only the agents' keys; `episodes` has the episodes. Invariants: a key reaches its own episodes only, and others do not exist
for it, however a request names them (URL, header, or a response that it continues); an episode's key reaches that episode; an
agent's key (`[agents]`) reaches the episodes that its calls opened and those that were opened for it; a request that names no
episode belongs to the one whose conversation it continues, or opens one.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol
from weakref import WeakValueDictionary

from gateway.config.settings import Settings
from gateway.episodes.auto_open import AutoOpen, Opening
from gateway.episodes.conversations import UNKNOWN, Conversations
from gateway.episodes.episodes import Episodes
from gateway.episodes.open_episode import OpenEpisode
from gateway.generation.request_key import RequestKey
from headgate.errors import NotAuthenticated, NotFound
from headgate.keys import Keyring

Message = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Caller:
    """The holder of a key."""

    key: str = field(repr=False)
    """The key of an episode, or of an agent."""
    model: str
    """The model that its requests are about, unless they name another."""
    episode: OpenEpisode | None
    """None: found by the conversation (`Callers.episode`)."""
    agent: str = ""
    attempt: int = 0
    """The attempt that the key is of; 0: an agent's key is of none."""


class Directory(Protocol):
    """Resolves keys to open episodes, in every gateway process."""

    async def identify(self, key: str, named: str) -> Caller:
        """Return the owner of a key, in the episode that the request names, if any."""
        ...

    async def reach(self, caller: Caller, episode_id: str) -> OpenEpisode: ...

    async def still_open(self, episode: OpenEpisode, attempt: int) -> OpenEpisode:
        """Return the episode again. Raise Conflict if its run is over, or the attempt is; 0: any attempt."""
        ...


class AgentCalls(Protocol):
    """Finds and opens the episodes of agents' keys, in the coordinator alone: other processes forward such requests to it."""

    async def episode(
        self,
        caller: Caller,
        messages: Sequence[Message],
        tools: Sequence[dict[str, Any]],
        sent: RequestKey | None = None,
        model: str = "",
        consent: bool | None = None,
    ) -> OpenEpisode: ...

    async def standalone(self, caller: Caller) -> OpenEpisode: ...

    async def failed(self, episode: OpenEpisode) -> None: ...

    def refused(self, caller: Caller, sent: RequestKey) -> None: ...


class Callers:
    """Everyone who may call a model: a `Directory` and `AgentCalls`."""

    def __init__(
        self, settings: Settings, episodes: Episodes, conversations: Conversations, openings: AutoOpen
    ) -> None:
        self._settings = settings
        self._episodes = episodes
        self._conversations = conversations
        self._auto_open = openings
        self._keys = agent_keys(settings)
        self._admin_keys = _admin_keys(settings)
        self._locks: WeakValueDictionary[tuple[str, str], asyncio.Lock] = WeakValueDictionary()

    @property
    def waiting(self) -> int:
        """The number of retries that wait for the call that they repeat, which is still opening its episode."""
        return self._auto_open.waiting

    async def identify(self, key: str, named: str) -> Caller:
        """Return the owner of a key, and the episode that the request names, if any.

        Raise NotAuthenticated, NotFound if the named episode is not the key's, or Conflict if its run is over.
        """
        if not key:
            message = "no key was sent: it belongs in `Authorization: Bearer KEY`, or in `x-api-key: KEY`"
            raise NotAuthenticated(message, code="missing_api_key")
        if agent := self._keys.find(key):
            caller = Caller(key, self._settings.model_of(agent), None, agent)
            if not named:
                return caller
            episode = await self.reach(caller, named)
            return Caller(key, episode.model, episode, agent)
        if whose := self._admin_keys.find(key):
            message = (
                f"this is {whose}, which opens episodes: agents use the key of their episode (`api_key` in the response to"
                " POST /admin/v1/episodes; OPENAI_API_KEY of an agent that `gateway episodes run` starts)"
            )
            raise NotAuthenticated(message, code="invalid_api_key")
        episode = await self._episodes.authenticate(key)
        caller = Caller(key, episode.model, episode, attempt=episode.attempt)
        if named:
            await self.reach(caller, named)
        return caller

    async def reach(self, caller: Caller, episode_id: str) -> OpenEpisode:
        """Return an open episode of the caller's by its id. Raise NotFound, or Conflict if its run is over."""
        if caller.agent:
            reached = await self._episodes.agent_of(episode_id) == caller.agent
        else:
            reached = caller.episode is not None and caller.episode.id == episode_id
        if not reached:
            raise NotFound(f"no episode {episode_id!r}", code="no_episode")
        return await self._episodes.named(episode_id)

    async def episode(
        self,
        caller: Caller,
        messages: Sequence[Message],
        tools: Sequence[dict[str, Any]],
        sent: RequestKey | None = None,
        model: str = "",
        consent: bool | None = None,
    ) -> OpenEpisode:
        """Return the episode of a conversation under an agent's key; open one if there is none.

        `sent`: identifies the request and its retries, in any episode. `model`: the requested model, if not the caller's.
        `consent`: whether the caller agrees to training, if the request states it. Raise what `AutoOpen.open` raises.
        """
        opening = Opening(sent, trains=model in ("", caller.model), consent=consent)
        # One at a time: the second request finds the episode that the first one opens
        if sent is not None and sent.exact:
            async with self._locks.setdefault((caller.agent, sent.name), asyncio.Lock()):
                return await self._found_or_opened(caller, messages, tools, opening)
        return await self._found_or_opened(caller, messages, tools, opening)

    async def still_open(self, episode: OpenEpisode, attempt: int) -> OpenEpisode:
        """Return the episode again. Raise Conflict if its run is over, or the attempt is; 0: any attempt."""
        live = await self._episodes.named(episode.id)
        if attempt:
            live.check_attempt(attempt)
        return live

    async def standalone(self, caller: Caller) -> OpenEpisode:
        """Open an episode of its own, which is not trained, for a call under an agent's key to an upstream model."""
        return await self._auto_open.open(caller.agent, [], Opening(None, trains=False))

    async def failed(self, episode: OpenEpisode) -> None:
        """Close the episode that was opened for a refused call only."""
        await self._auto_open.failed(episode)

    def refused(self, caller: Caller, sent: RequestKey) -> None:
        """Record that a call under an agent's key was refused before its episode was known; its client will retry it."""
        self._auto_open.refused(caller.agent, sent)

    async def _found_or_opened(
        self,
        caller: Caller,
        messages: Sequence[Message],
        tools: Sequence[dict[str, Any]],
        opening: Opening,
    ) -> OpenEpisode:
        notice = ""
        if opening.sent is not None and opening.sent.retry:
            episode, notice = await self._auto_open.retried(caller.agent, opening.sent)
            if episode is not None:
                episode.touch()
                return episode
        match = await self._conversations.find(caller.agent, messages, tools)
        found = [live for live in self._episodes.of_agent(caller.agent) if live.id in match.episodes]
        if len(found) == 1:
            found[0].continue_conversation()
            return found[0]
        if match.episodes and not found:  # all matching episodes are being closed
            match = UNKNOWN
        return await self._auto_open.open(
            caller.agent, messages, replace(opening, notice=match.notice or notice)
        )


def agent_keys(settings: Settings) -> Keyring[str]:
    """Return the keys of `[agents]`, and whose they are."""
    return Keyring((agent.key.get_secret_value(), name) for name, agent in settings.agents.items())


def _admin_keys(settings: Settings) -> Keyring[str]:
    """Return the keys of the admin API, with what each is."""
    root = settings.admin.key
    keys = [(root.get_secret_value(), "the key of the admin API")] if root is not None else []
    projects = settings.projects.items()
    return Keyring(
        [*keys, *((p.key.get_secret_value(), f"the key of the project {n!r}") for n, p in projects)]
    )
