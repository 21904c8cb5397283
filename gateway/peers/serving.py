"""Tells which processes serve each episode.

A process that alone serves an episode knows all of its turns without a look into the store. Only episodes that were opened under
this coordinator are known, because earlier ones may have been served by anybody. Invariant: a process counts as alone until
another one asks; whoever answers that one tells the first beforehand, and from then on neither is alone.
"""

from __future__ import annotations

from typing import Final

_SEVERAL: Final = ""
"""In place of a process's name."""


class Serving:
    """The processes that asked about the open episodes."""

    def __init__(self) -> None:
        self._by: dict[str, str | None] = {}
        """The only process so far, by episode; None: nobody."""

    def opened(self, episode_id: str) -> None:
        """An episode was opened, and no process has served it."""
        self._by[episode_id] = None

    def ended(self, episode_id: str) -> None:
        """An episode takes no more calls."""
        self._by.pop(episode_id, None)

    def join(self, episode_id: str, process: str) -> tuple[bool, str]:
        """A process begins to serve an episode: (True if it is alone, the process that is alone no more or "")."""
        before = self._by.get(episode_id, _SEVERAL)
        if before in (None, process):
            self._by[episode_id] = process
            return True, ""
        if before:
            self._by[episode_id] = _SEVERAL
        return False, before or ""
