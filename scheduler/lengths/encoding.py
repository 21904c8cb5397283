"""The numbers by which a call is predicted: from its prompt, and from earlier calls.

All values are logarithms of lengths, since lengths differ by factors. A history is the mean by which calls with the same key were
longer than calls of the same turn. With few calls it is shrunk toward the expectation without them. Tokens and pairs of tokens
of the prompt are hashed to words, and each word has a history. A few columns summarize the words of a prompt, so that few calls
suffice to fit them. Further columns count the words, hashed once more, and have the lengths of tasks with similar prompts.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from scheduler.lengths.base import Features
from scheduler.lengths.running_means import Mean, Means
from scheduler.lengths.similar_prompts import BITS, SimilarPrompts

Row = NDArray[np.float32]
Vector = NDArray[np.float64]
Words = NDArray[np.uint32]

TURNS = 8
"""Later turns count as the last of these."""
_KEEP, _KEEP_TURN = 0.97, 0.999
_FIRST, _LAST = 64, 192
"""Tokens of a long prompt that are read."""
_WORD_BITS = 16
_COLUMN_BITS = 7
_MOST = 200.0
"""Values of a word that count; the weight of older ones decays."""
_WORD_PRIOR = 8.0
"""The weight of a word's prior, in values: with n values its mean counts n / (n + 8)."""
_PRIOR = 0.3
"""The weight of the expectation without a history, in values of a history."""
_MIX = np.uint32(2_654_435_761)
_NEXT = np.uint32(31)


@dataclass(frozen=True, slots=True, eq=False)
class Encoded:
    """A call, encoded when it starts."""

    task: str
    turn: float
    """The mean of the calls of its turn; the other values are differences from it."""
    prompt: Vector
    """The features without histories, shape (`Encoder.prompt`,)."""
    past: tuple[tuple[float, float], ...]
    """Totals and counts of the histories, from the most general to the most specific."""
    row: Row
    """All features, shape (`Encoder.width`,)."""

    def shrunk(self, more: float) -> list[float]:
        """Return the expectation of each history, shrunk toward the one before it; `more` is that of the prompt."""
        expected = []
        for total, count in self.past:
            more = (total + _PRIOR * more) / (count + _PRIOR)
            expected.append(more)
        return expected


class Encoder:
    """Encodes calls, and keeps the histories."""

    prompt = 4 + SimilarPrompts.width + TURNS
    width = prompt - TURNS + 3 + 2 * 4 + 4 + 2**_COLUMN_BITS
    """The prompt's features; the turn, with its mean; the histories, with their weights; the words."""

    def __init__(self, memory: int) -> None:
        """`memory`: keys of each kind that are remembered."""
        self._turns = [Mean() for _ in range(TURNS)]
        self._histories = [Means(memory, _KEEP) for _ in range(4)]
        """The histories of the task, of its turn, of the group (samples of one prompt, by the newest weights), and of
        the episode."""
        self._totals, self._counts = np.zeros(2**_WORD_BITS), np.zeros(2**_WORD_BITS)
        """Sums and counts of each word."""
        self._similar = SimilarPrompts(memory)

    def __len__(self) -> int:
        """Return the number of keys that are remembered."""
        return sum(len(history) for history in self._histories) + len(self._similar)

    def encode(self, features: Features) -> Encoded:
        """Encode a new call."""
        means = [history.get(key) for history, key in zip(self._histories, _keys(features), strict=True)]
        past = tuple((mean.total, mean.count) if mean else (0.0, 0.0) for mean in means)
        tokens, pairs = _words(features.prompt)
        known = np.unique(tokens >> np.uint32(_WORD_BITS - BITS))
        size = math.log1p(len(features.prompt))
        prompt = [*_scalars(features), *self._similar.features(features.task, known, size)]
        words = np.concatenate((tokens, pairs))
        turn = self._turns[_turn(features)].value
        histories = [value for total, count in past for value in (total / (count + 1), count)]
        row = (
            *(
                prompt,
                (_turn(features), turn, sum(histories[::2])),
                histories,
                self._summary(np.unique(words)),
            ),
            np.bincount(words >> np.uint32(_WORD_BITS - _COLUMN_BITS), minlength=2**_COLUMN_BITS),
        )
        turns = np.eye(TURNS)[_turn(features)]
        return Encoded(
            *(features.task, turn, np.concatenate((prompt, turns)), past),
            np.concatenate(row).astype(np.float32),
        )

    def add(self, features: Features, length: int) -> None:
        """Add the length of a finished call."""
        value, turn = math.log1p(length), self._turns[_turn(features)]
        turn.add(value, _KEEP_TURN)
        more = value - turn.value
        means = [h.add(key, more) for h, key in zip(self._histories, _keys(features), strict=True)]
        self._similar.learn(features.task, means[0].value)
        words = np.unique(np.concatenate(_words(features.prompt)))
        keep = np.where(self._counts[words] < _MOST, 1.0, 1 - 1 / _MOST)
        self._totals[words] = self._totals[words] * keep + more
        self._counts[words] = self._counts[words] * keep + 1

    def _summary(self, words: Words) -> tuple[float, float, float, float]:
        """Return the mean of the words' means, their 90th and 10th percentile, and their mean weighted by distance from 0."""
        if not len(words):
            return 0.0, 0.0, 0.0, 0.0
        means = np.sort(self._totals[words] / (self._counts[words] + _WORD_PRIOR))
        tenth, far = len(means) // 10, np.abs(means)
        return means.mean(), means[-1 - tenth], means[tenth], means @ far / max(far.sum(), 1e-6)


def _words(prompt: Any) -> tuple[Words, Words]:
    """Return the tokens and the pairs of tokens of a prompt, hashed to `_WORD_BITS`."""
    ids = np.asarray(prompt)
    if len(ids) > _FIRST + _LAST:
        ids = np.concatenate((ids[:_FIRST], ids[-_LAST:]))
    ids, shift = ids.astype(np.uint32), np.uint32(32 - _WORD_BITS)
    return ids * _MIX >> shift, (ids[:-1] * _NEXT + ids[1:]) * _MIX >> shift


def _scalars(features: Features) -> list[float]:
    sizes = len(features.prompt), features.messages, features.tools, features.most
    return [math.log1p(size) for size in sizes]


def _turn(features: Features) -> int:
    return min(features.turn, TURNS - 1)


def _keys(features: Features) -> tuple[object, ...]:
    return features.task, (features.task, features.turn), features.group, features.episode
