"""One crossing of a lake: gymnasium's FrozenLake, described in words. The rewards are the environment's own."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import gymnasium

MOVES = {"left": (0, -1), "down": (1, 0), "right": (0, 1), "up": (-1, 0)}
"""Directions in the order of the environment's actions, each as a change of row and column."""
_ACTIONS = {name: number for number, name in enumerate(MOVES)}
_TILES = {"S": "ice", "F": "ice", "H": "hole", "G": "goal"}


class Crossing:
    """An episode of FrozenLake-v1 on one map, without slipping."""

    def __init__(self, lake: Sequence[str]) -> None:
        self._lake = lake
        self._environment: Any = gymnasium.make("FrozenLake-v1", desc=list(lake), is_slippery=False)
        self._tile: int = self._environment.reset()[0]
        self.reward = 0.0
        """1 once the goal is reached."""
        self.over = False
        """True at the goal and in a hole."""

    def move(self, direction: str) -> str:
        """Go one tile, and return the new view. Raise KeyError if `direction` is unknown."""
        self._tile, reward, self.over, _, _ = self._environment.step(_ACTIONS[direction])
        self.reward += float(reward)
        return self.view()

    def view(self) -> str:
        """Return the four tiles around, such as "left: edge, down: ice, right: hole, up: edge"."""
        row, column = divmod(self._tile, len(self._lake))
        return ", ".join(f"{name}: {self._at(row + r, column + c)}" for name, (r, c) in MOVES.items())

    def _at(self, row: int, column: int) -> str:
        size = len(self._lake)
        return _TILES[self._lake[row][column]] if 0 <= row < size and 0 <= column < size else "edge"
