"""Records which processes serve each episode.

A process that serves an episode exclusively knows all of its turns without reading the store. Only episodes that were opened
under this coordinator are known, because any process may have served earlier ones. Invariant: a process serves an episode
exclusively until another one requests it; the first is informed before the other gets the episode, and from then on neither does.
"""

from __future__ import annotations

from typing import Final

_SEVERAL: Final = ""
"""In place of a process's name: several processes serve the episode."""


class Serving:
    """The processes that serve the open episodes."""

    def __init__(self) -> None:
        self._by: dict[str, str | None] = {}
        """The only process that serves each episode; None: no process has yet."""

    def opened(self, episode_id: str) -> None:
        """Record that an episode was opened, and no process has served it."""
        self._by[episode_id] = None

    def ended(self, episode_id: str) -> None:
        """Forget an episode that gets no more calls."""
        self._by.pop(episode_id, None)

    def join(self, episode_id: str, process: str) -> tuple[bool, str]:
        """Begin to serve an episode. Return whether the process is the only one, and the process that no longer is or ""."""
        before = self._by.get(episode_id, _SEVERAL)
        if before in (None, process):
            self._by[episode_id] = process
            return True, ""
        if before:
            self._by[episode_id] = _SEVERAL
        return False, before or ""
