"""Tasks whose prompts are alike, and how long their calls were.

Prompts are compared by the tokens that they share, rare ones above all: a token that `n` of `N` prompts have counts log(N / n)
squared. How alike another prompt is, is the share of this prompt's tokens that it has, so counted. That tells much of a new task
from few other tasks: a regression on the tokens themselves needs many. A task counts once, however often it was sampled.
"""

from __future__ import annotations

from collections import OrderedDict

import numpy as np
from numpy.typing import NDArray

BITS = 12
"""Tokens are hashed to so many bits."""
_MOST = 1024
"""Tasks whose prompts are kept: those that came last."""
_POWERS = 2, 4, 8
"""Candidate exponents by which similar prompts count more than others; each is twice the one before."""
_AT = 0.1
"""The similarity at which a single known prompt counts as much as the prior."""


class Alike:
    """The prompts of tasks, one each, and how much longer their calls were than others."""

    width = 2 * len(_POWERS) + 1

    def __init__(self, memory: int) -> None:
        """`memory`: tasks that are remembered, `_MOST` at most."""
        self._most = min(memory, _MOST)
        self._slots: OrderedDict[str, int] = OrderedDict()
        self._has = np.zeros((2**BITS, self._most), bool)
        """Marks tokens (rows) that occur in a task's prompt (columns)."""
        self._count = np.zeros(2**BITS, np.float32)
        """The number of prompts that hold each token."""
        self._known, self._more, self._size = (np.zeros(self._most, np.float32) for _ in range(3))
        """Rows by task: 1 if one of its calls is over; how much longer its calls were than others; the length of its prompt."""

    def __len__(self) -> int:
        """Tasks that are remembered."""
        return len(self._slots)

    def told(self, task: str, tokens: NDArray[np.uint32], size: float) -> list[float]:
        """Returns, for similar tasks: by how much their calls were longer, and this prompt is; the similarity of the
        best one. `tokens`: the prompt's tokens, hashed, each once; `size`: the logarithm of its length. Keeps the
        prompt of a new task."""
        rare = np.log((len(self._slots) + 2) / (self._count[tokens] + 1)) ** 2
        alike = rare @ self._has[tokens].astype(np.float32) * self._known / max(float(rare.sum()), 1e-6)
        alike[self._slot(task, tokens, size)] = 0
        found, weights, more = [float(alike.max())], alike, size - self._size
        for power in _POWERS:
            weights = weights * weights  # `weights**2` takes ten times as long
            beside = float(weights.sum()) + _AT**power
            found += [float(weights @ self._more) / beside, float(weights @ more) / beside]
        return found

    def learn(self, task: str, more: float) -> None:
        """Learns how much longer than others the calls of a task are, on average."""
        if (slot := self._slots.get(task)) is not None:
            self._known[slot], self._more[slot] = 1, more

    def _slot(self, task: str, tokens: NDArray[np.uint32], size: float) -> int:
        """The column of a task; of a new one it may be that of the task that came longest ago."""
        if (slot := self._slots.get(task)) is None:
            slot = len(self._slots)
            if slot == self._most:
                _, slot = self._slots.popitem(last=False)
                self._count -= self._has[:, slot]
                self._has[:, slot] = False
            self._has[tokens, slot] = True
            self._count[tokens] += 1
            self._known[slot], self._more[slot], self._size[slot] = 0, 0, size
        self._slots[task] = slot
        self._slots.move_to_end(task)
        return slot
