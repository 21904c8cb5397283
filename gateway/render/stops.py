"""Stop strings as one automaton (Aho and Corasick): text is read once, a character at a time, however many strings there are.

A value that all replies to a request share; each reply keeps its own place in it, a number that is 0 where no string has begun.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from typing import Any


class StopStrings:
    """The strings that end a reply."""

    __slots__ = ("_ends", "_fallback", "_next", "depth", "may_begin")

    def __init__(self, strings: Iterable[str]) -> None:
        self._next: list[dict[str, int]] = [{}]
        """The state that each next character leads to, by state."""
        self._ends = [""]
        """The longest string that ends in each state; empty if none does."""
        self._fallback = [0]
        """The state of the longest proper suffix, by state."""
        self.depth = [0]
        """The number of characters that may still become a string, by state."""
        for string in strings:
            self._add(string)
        self._link()
        firsts = "".join(map(re.escape, self._next[0]))
        self.may_begin: Callable[[str], Any] | None = re.compile(f"[{firsts}]").search if firsts else None
        """Finds a character with which a string begins; None: there are no strings."""

    def read(self, place: int, text: str) -> tuple[int, int, str]:
        """Go on from a place with more text.

        Return the new place, and the string that was found (empty: none) with where it begins: relative to the text, negative
        if that was before it. Of several the one that begins first, and of these the shortest.
        """
        begins, found = len(text), ""
        for at, character in enumerate(text, 1):
            place = self._step(place, character)
            if (end := self._ends[place]) and at - len(end) < begins:
                begins, found = at - len(end), end
        return place, begins, found

    def _step(self, place: int, character: str) -> int:
        known = self._next
        while place and character not in known[place]:
            place = self._fallback[place]
        return known[place].get(character, 0)

    def _add(self, string: str) -> None:
        place = 0
        for character in string:
            following = self._next[place].get(character)
            if following is None:
                following = self._next[place][character] = len(self._next)
                self._next.append({})
                self._ends.append("")
                self._fallback.append(0)
                self.depth.append(self.depth[place] + 1)
            place = following
        self._ends[place] = string

    def _link(self) -> None:
        """Set what each place falls back to, the shallow ones first."""
        places = list(self._next[0].values())
        for place in places:
            for character, following in self._next[place].items():
                back = self._step(self._fallback[place], character)
                self._fallback[following] = back
                self._ends[following] = self._ends[following] or self._ends[back]
                places.append(following)
