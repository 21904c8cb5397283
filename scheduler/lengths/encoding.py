"""A call as numbers: what its prompt says, and what calls like it were.

Everything is about logarithms of lengths, for lengths differ by factors. A history is the mean by which calls with the same key
were longer than calls of the same turn are; with few of them it is drawn towards 0 (n values count n / (n + 1)). Tokens and pairs
of tokens of the prompt are hashed to words. Each word has a history of its own: what the words of a prompt say together is in a
few columns, so that little need be fitted to know it. Beside them stands how often words are there, hashed once more.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from scheduler.lengths.base import Features
from scheduler.lengths.memory import Mean, Means

Row = NDArray[np.float32]
Words = NDArray[np.uint32]

TURNS = 8
"""The turns from here on are one."""
_KEEP, _KEEP_TURN = 0.97, 0.999
_FIRST, _LAST = 64, 192
"""Tokens of a long prompt that are looked at."""
_WORD_BITS = 16
_COLUMN_BITS = 7
_MOST = 200.0
"""Values of a word that count; older ones fade."""
_DRAWN = 8.0
"""With n values a word's mean counts n / (n + 8)."""
_MIX = np.uint32(2_654_435_761)
_NEXT = np.uint32(31)


class Encoder:
    """Makes rows of `width` columns, and remembers the histories."""

    width = 6 + 2 * 4 + 4 + 2**_COLUMN_BITS
    """Scalars; the histories, with how much is known; what the words say; the words."""

    def __init__(self, memory: int) -> None:
        """`memory`: keys of each kind that are remembered."""
        self._turns = [Mean() for _ in range(TURNS)]
        self._histories = [Means(memory, _KEEP) for _ in range(4)]
        """Of the task, of its turn, of the group (samples of one prompt, by the newest weights), of the episode."""
        self._totals, self._counts = np.zeros(2**_WORD_BITS), np.zeros(2**_WORD_BITS)
        """Of the words."""

    def __len__(self) -> int:
        """Keys that are remembered."""
        return sum(len(history) for history in self._histories)

    def row(self, features: Features) -> Row:
        """Shape (width,)."""
        past: list[float] = []
        for history, key in zip(self._histories, _keys(features), strict=True):
            mean = history.get(key)
            past += (mean.total / (mean.count + 1), mean.count) if mean else (0.0, 0.0)
        words = _words(features.prompt)
        columns = np.bincount(words >> np.uint32(_WORD_BITS - _COLUMN_BITS), minlength=2**_COLUMN_BITS)
        known = _scalars(features), [sum(past[::2])], past, self._told(np.unique(words)), columns
        return np.concatenate(known).astype(np.float32)

    def add(self, features: Features, length: int) -> None:
        """A call was so long."""
        value, turn = math.log1p(length), self._turns[_turn(features)]
        turn.add(value, _KEEP_TURN)
        more = value - turn.value
        for history, key in zip(self._histories, _keys(features), strict=True):
            history.add(key, more)
        words = np.unique(_words(features.prompt))
        keep = np.where(self._counts[words] < _MOST, 1.0, 1 - 1 / _MOST)
        self._totals[words] = self._totals[words] * keep + more
        self._counts[words] = self._counts[words] * keep + 1

    def _told(self, words: Words) -> tuple[float, float, float, float]:
        """Of the means of the words: their mean, the 90th and the 10th percentile, and the mean in which far ones count more."""
        if not len(words):
            return 0.0, 0.0, 0.0, 0.0
        means = np.sort(self._totals[words] / (self._counts[words] + _DRAWN))
        tenth, far = len(means) // 10, np.abs(means)
        return means.mean(), means[-1 - tenth], means[tenth], means @ far / max(far.sum(), 1e-6)


def _words(prompt: Any) -> Words:
    """The tokens and the pairs of tokens of a prompt, hashed to `_WORD_BITS`."""
    ids = np.asarray(prompt)
    if len(ids) > _FIRST + _LAST:
        ids = np.concatenate((ids[:_FIRST], ids[-_LAST:]))
    ids = ids.astype(np.uint32)
    return np.concatenate((ids, ids[:-1] * _NEXT + ids[1:])) * _MIX >> np.uint32(32 - _WORD_BITS)


def _scalars(features: Features) -> list[float]:
    sizes = len(features.prompt), features.messages, features.tools, features.most
    return [*(math.log1p(size) for size in sizes), float(_turn(features))]


def _turn(features: Features) -> int:
    return min(features.turn, TURNS - 1)


def _keys(features: Features) -> tuple[object, ...]:
    return features.task, (features.task, features.turn), features.group, features.episode
