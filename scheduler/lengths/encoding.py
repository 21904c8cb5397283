"""A call as numbers: what its prompt says, and what calls like it were.

Everything is about logarithms of lengths, for lengths differ by factors. A history is the mean by which calls with the same key
were longer than calls of the same turn are; with few of them it is drawn towards 0 (n values count n / (n + 1)). What the prompt
says counts the less the more is known of the task: those columns are multiplied by 1 / (n + 1). So one linear model does both,
for tasks that it knows and for new ones.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from scheduler.lengths.base import Features
from scheduler.lengths.memory import Mean, Means

Row = NDArray[np.float64]

TURNS = 8
"""The turns from here on are one."""
_SCALARS = 5 + TURNS
_HISTORIES = 4
"""Of the task, of its turn, of the group (samples of one prompt, by the newest weights), of the episode."""
_KEEP, _KEEP_TURN = 0.97, 0.999
_FIRST, _LAST = 64, 192
"""Tokens of a long prompt that are looked at."""
_WORDS = 2.0
"""The length of the vector of words: how much of a prior they are."""
_REPEATED = 4.0
"""More often than so a word counts no more."""
_MIX = np.uint32(2_654_435_761)
_NEXT = np.uint32(31)


class Encoder:
    """Makes rows of `width` columns, and remembers the histories."""

    def __init__(self, memory: int, bits: int) -> None:
        """`memory`: keys of each kind that are remembered; `bits`: tokens and pairs are hashed to 2**bits columns."""
        self._bits = bits
        self._turns = [Mean() for _ in range(TURNS)]
        self._histories = [Means(memory, _KEEP) for _ in range(_HISTORIES)]
        self.width = 2 * (_SCALARS + _HISTORIES) + 2**bits

    def __len__(self) -> int:
        """Keys that are remembered."""
        return sum(len(history) for history in self._histories)

    def row(self, features: Features) -> Row:
        """Shape (width,): scalars, histories, both again by how little is known of the task, words by the same."""
        known, past = 0.0, np.zeros(_HISTORIES)
        for i, (history, key) in enumerate(zip(self._histories, _keys(features), strict=True)):
            if (mean := history.get(key)) is not None:
                past[i] = mean.total / (mean.count + 1)
                known = mean.count if i == 0 else known
        new = 1 / (known + 1)
        scalars = _scalars(features)
        return np.concatenate((scalars, past, new * scalars, new * past, new * self._words(features.prompt)))

    def add(self, features: Features, length: int) -> None:
        """A call was so long."""
        value, turn = math.log1p(length), self._turns[_turn(features)]
        turn.add(value, _KEEP_TURN)
        for history, key in zip(self._histories, _keys(features), strict=True):
            history.add(key, value - turn.value)

    def _words(self, prompt: Any) -> Row:
        """How often each token and each pair of tokens is in the prompt, hashed; of length `_WORDS`."""
        ids = np.asarray(prompt)
        if len(ids) > _FIRST + _LAST:
            ids = np.concatenate((ids[:_FIRST], ids[-_LAST:]))
        ids = ids.astype(np.uint32)
        hashed = np.concatenate((ids, ids[:-1] * _NEXT + ids[1:])) * _MIX >> np.uint32(32 - self._bits)
        counts = np.minimum(np.bincount(hashed, minlength=2**self._bits), _REPEATED)
        return counts * (_WORDS / max(math.sqrt(counts @ counts), 1.0))


def _scalars(features: Features) -> Row:
    """Shape (_SCALARS,), each about 1 in size."""
    row = np.zeros(_SCALARS)
    row[0] = 1.0
    row[1] = math.log1p(len(features.prompt)) - 5
    row[2] = math.log1p(features.messages) - 1
    row[3] = math.log1p(features.tools)
    row[4] = math.log1p(features.most) / 8 - 1
    row[5 + _turn(features)] = 1.0
    return row


def _turn(features: Features) -> int:
    return min(features.turn, TURNS - 1)


def _keys(features: Features) -> tuple[object, ...]:
    return features.task, (features.task, features.turn), features.group, features.episode
