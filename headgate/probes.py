"""The probe of a version: a few token sequences that distinguish its weights from its parent's. Pure.

Log-probabilities are in nats, at temperature 1, of every token but the first.
"""

from __future__ import annotations

from collections.abc import Sequence

from headgate.types import Probe

SEQUENCES = 4
_LENGTH = 16
"""Tokens of each default sequence."""
_STRIDE = 7919
"""A prime, so that ids of a large vocabulary differ."""

Sequences = Sequence[Sequence[int]]
Logprobs = Sequence[Sequence[float]]


def default_sequences(vocabulary: int) -> list[tuple[int, ...]]:
    """Return sequences for a version whose batch has no text: ids of the middle of the vocabulary, where special tokens are
    rare."""
    first, count = vocabulary // 4, max(1, vocabulary // 2)
    ids = [first + (_STRIDE * n) % count for n in range(SEQUENCES * _LENGTH)]
    return [tuple(ids[at : at + _LENGTH]) for at in range(0, len(ids), _LENGTH)]


def choose(sequences: Sequences, new: Logprobs, parent: Logprobs) -> Probe:
    """Return the `SEQUENCES` on which two versions differ most (mean absolute difference). Raise ValueError without sequences."""
    if not sequences:
        raise ValueError("a probe needs a sequence")

    def difference(i: int) -> float:
        return sum(abs(a - b) for a, b in zip(new[i], parent[i], strict=True)) / len(new[i])

    best = sorted(range(len(sequences)), key=difference, reverse=True)[:SEQUENCES]
    return Probe(
        tuple(tuple(map(int, sequences[i])) for i in best),
        tuple(tuple(map(float, new[i])) for i in best),
        tuple(tuple(map(float, parent[i])) for i in best),
    )
