"""Resolves keys in a follower: asks the coordinator, and remembers the answers.

Calls under agents' keys (`[agents]`) open episodes, which only the coordinator can do, so they are forwarded to it
(`forward.py`). Invariant: as in `gateway.episodes.callers`, a key reaches its own episode and no other one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from gateway.episodes.callers import Caller
from gateway.episodes.open_episode import OpenEpisode
from gateway.errors import NotAuthenticated, NotFound
from gateway.keys import key_hash, split_attempt
from gateway.rollout.replies import RequestKey


class Directory(Protocol):
    """Finds open episodes by asking the coordinator, as `Follower` does."""

    async def keyed(self, key_hash: str, wait_s: float) -> OpenEpisode: ...

    async def named(self, episode_id: str, wait_s: float) -> OpenEpisode: ...


class RemoteCallers:
    """Everyone who may call a model here. See `gateway.episodes.callers.Callers`."""

    def __init__(self, directory: Directory, wait_s: float) -> None:
        self._directory = directory
        self._wait_s = wait_s

    async def identify(self, key: str, named: str) -> Caller:
        """Identifies a caller as `Callers.identify` does; raises Unavailable also while there is no coordinator."""
        if not key:
            message = "no key was sent: it belongs in `Authorization: Bearer KEY`, or in `x-api-key: KEY`"
            raise NotAuthenticated(message, code="missing_api_key")
        key, attempt = split_attempt(key)
        episode = await self._directory.keyed(key_hash(key), self._wait_s)
        episode.check_attempt(attempt)
        caller = Caller(key, episode.model, episode, attempt=attempt)
        if named:
            await self.reach(caller, named)
        return caller

    async def reach(self, caller: Caller, episode_id: str) -> OpenEpisode:
        if caller.episode is None or caller.episode.id != episode_id:
            raise NotFound(f"no episode {episode_id!r}", code="no_episode")
        return await self.still_open(caller.episode, caller.attempt)

    async def episode(
        self,
        caller: Caller,
        messages: Sequence[dict[str, Any]],
        tools: Sequence[dict[str, Any]],
        sent: RequestKey | None = None,
        model: str = "",
    ) -> OpenEpisode:
        """The episode of the key."""
        return await self.standalone(caller)

    async def still_open(self, episode: OpenEpisode, attempt: int) -> OpenEpisode:
        live = await self._directory.named(episode.id, self._wait_s)
        if attempt:
            live.check_attempt(attempt)
        return live

    async def standalone(self, caller: Caller) -> OpenEpisode:
        assert caller.episode is not None, "agents' keys are forwarded"
        return await self.still_open(caller.episode, caller.attempt)

    def refused(self, caller: Caller, sent: RequestKey) -> None:
        raise AssertionError("agents' keys are forwarded")

    async def failed(self, episode: OpenEpisode) -> None:
        """Does nothing: nothing was opened for the call."""
