"""Who is calling: which episode a request belongs to.

Owns nothing; `episodes` has the episodes. A key opens one episode; a request may name it besides (in the URL or by a header),
but an episode's key reaches its own episode alone: any other does not exist for it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from gateway.control.episodes import Episodes
from gateway.control.live import LiveEpisode
from gateway.errors import NotFound

Message = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Caller:
    """Who holds a key."""

    key: str
    model: str
    """The model that its requests are about, unless they name another."""
    episode: LiveEpisode | None
    """None: the conversation tells (`Callers.episode`)."""


class Callers:
    """Everyone who may call a model."""

    def __init__(self, episodes: Episodes) -> None:
        self._episodes = episodes

    async def identify(self, key: str, named: str) -> Caller:
        """The holder of a key, and the episode that the request names, if it names one.

        Raises NotAuthenticated, NotFound if the named episode is not the key's, or Conflict if its run is over.
        """
        episode = await self._episodes.authenticate(key)
        if named and named != episode.id:
            raise NotFound(f"no episode {named!r}", code="no_episode")
        return Caller(key, episode.model, episode)

    async def episode(
        self, caller: Caller, messages: Sequence[Message], tools: Sequence[dict[str, Any]]
    ) -> LiveEpisode:
        """The episode that a conversation belongs to; looks again, as it may have been closed meanwhile."""
        assert caller.episode is not None
        return await self._episodes.authenticate(caller.key)
