"""Resolves keys in a follower: requests episodes from the coordinator, and remembers them.

Calls under agents' keys (`[agents]`) open episodes, which only the coordinator can do, so they are forwarded to it
(`forward.py`). Invariant: as in `gateway.episodes.callers`, a key reaches its own episode and no other one.
"""

from __future__ import annotations

from typing import Protocol

from gateway.episodes.callers import Caller
from gateway.episodes.open_episode import OpenEpisode
from headgate.errors import NotAuthenticated, NotFound
from headgate.keys import key_hash, split_attempt


class OpenEpisodes(Protocol):
    """Requests open episodes from the coordinator, as `Follower` does."""

    async def keyed(self, key_hash: str, wait_s: float) -> OpenEpisode: ...

    async def named(self, episode_id: str, wait_s: float) -> OpenEpisode: ...


class RemoteCallers:
    """The owners of episodes' keys. See `gateway.episodes.callers.Directory`."""

    def __init__(self, directory: OpenEpisodes, wait_s: float) -> None:
        self._directory = directory
        self._wait_s = wait_s

    async def identify(self, key: str, named: str) -> Caller:
        """Identify a caller as `Callers.identify` does; raise Unavailable also while there is no coordinator."""
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

    async def still_open(self, episode: OpenEpisode, attempt: int) -> OpenEpisode:
        live = await self._directory.named(episode.id, self._wait_s)
        if attempt:
            live.check_attempt(attempt)
        return live
