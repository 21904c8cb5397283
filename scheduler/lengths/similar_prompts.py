"""Lengths of the calls of tasks with similar prompts.

The similarity of another prompt is the share of this prompt's tokens that it has. A token that `n` of `N` prompts have has the
weight log(N / n) squared, so rare tokens count most. This predicts a new task from few other tasks, where a regression on the
tokens themselves needs many. A task counts once, however often it was sampled.
"""

from __future__ import annotations

from collections import OrderedDict

import numpy as np
from numpy.typing import NDArray

BITS = 12
"""Bits of a hashed token."""
_MOST = 1024
"""Prompts that are kept: those of the newest tasks."""
_POWERS = 2, 4, 8
"""Exponents of the similarity, each twice the one before: the higher, the more the most similar prompts count."""
_AT = 0.1
"""The similarity at which a single known prompt counts as much as the prior."""


class SimilarPrompts:
    """The prompt of each task, and how much longer its calls were than others."""

    width = 2 * len(_POWERS) + 1

    def __init__(self, memory: int) -> None:
        """`memory`: tasks that are remembered, at most `_MOST`."""
        self._most = min(memory, _MOST)
        self._slots: OrderedDict[str, int] = OrderedDict()
        self._has = np.zeros((2**BITS, self._most), bool)
        """Marks tokens (rows) that occur in a task's prompt (columns)."""
        self._count = np.zeros(2**BITS, np.float32)
        """The number of prompts that hold each token."""
        self._known, self._more, self._size = (np.zeros(self._most, np.float32) for _ in range(3))
        """By task: 1 if one of its calls has finished; how much longer its calls were than others; the length of its prompt."""

    def __len__(self) -> int:
        """Return the number of tasks that are remembered."""
        return len(self._slots)

    def features(self, task: str, tokens: NDArray[np.uint32], size: float) -> list[float]:
        """Return the greatest similarity, and for each power how much longer the calls of similar tasks were and this prompt is.

        `tokens`: the prompt's tokens, hashed, without repetitions. `size`: the logarithm of its length. The prompt of a new task
        is kept.
        """
        rare = np.log((len(self._slots) + 2) / (self._count[tokens] + 1)) ** 2
        similarity = rare @ self._has[tokens].astype(np.float32) * self._known / max(float(rare.sum()), 1e-6)
        similarity[self._slot(task, tokens, size)] = 0
        features, weights, more = [float(similarity.max())], similarity, size - self._size
        for power in _POWERS:
            weights = weights * weights  # `weights**2` takes ten times as long
            total = float(weights.sum()) + _AT**power
            features += [float(weights @ self._more) / total, float(weights @ more) / total]
        return features

    def learn(self, task: str, more: float) -> None:
        """Store how much longer than others the calls of a task are, on average."""
        if (slot := self._slots.get(task)) is not None:
            self._known[slot], self._more[slot] = 1, more

    def _slot(self, task: str, tokens: NDArray[np.uint32], size: float) -> int:
        """Return the column of a task. A new task gets a free one, or that of the task unused for longest."""
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
