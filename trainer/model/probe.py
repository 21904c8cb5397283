"""The probe of a version: a few token sequences that distinguish its weights from its parent's.

Pure except for the model's passes. Log-probabilities are float32, in nats, at temperature 1.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace

from headgate.types import Probe
from trainer.data.packing import lay_out
from trainer.data.tree import row_of_tokens
from trainer.model.policy import Policy

SEQUENCES = 4
_LENGTH = 16
"""Tokens of each default sequence."""
_STRIDE = 7919
"""A prime, so that ids of a large vocabulary differ."""

Sequences = Sequence[tuple[int, ...]]
Logprobs = Sequence[tuple[float, ...]]


def logprobs(policy: Policy, sequences: Sequences, *, merged: bool = True) -> list[tuple[float, ...]]:
    """Return the log-probabilities of every token but the first of each sequence, by the weights that engines load.

    `merged`: adapters are published merged into the weights.
    """
    if not sequences:
        return []
    micro = lay_out(
        [row_of_tokens(sequence) for sequence in sequences], share_prefixes=policy.shares_prefixes
    )
    with policy.computing("merged") if merged else nullcontext():
        values = policy.logprobs(micro).cpu().split([len(sequence) - 1 for sequence in sequences])
    return [tuple(row.tolist()) for row in values]


def default_sequences(vocabulary: int) -> list[tuple[int, ...]]:
    """Return sequences for a version whose batch has no text: ids of the middle of the vocabulary, where special tokens are
    rare."""
    first, count = vocabulary // 4, max(1, vocabulary // 2)
    ids = [first + (_STRIDE * n) % count for n in range(SEQUENCES * _LENGTH)]
    return [tuple(ids[at : at + _LENGTH]) for at in range(0, len(ids), _LENGTH)]


def unchanged(policy: Policy, *, merged: bool = True) -> Probe:
    """Return the probe of a version that has its parent's weights."""
    sequences = default_sequences(policy.vocabulary)
    same = logprobs(policy, sequences, merged=merged)
    chosen = choose(sequences, same, same)
    return replace(chosen, noise=noise(policy, chosen, merged=merged))


def noise(policy: Policy, chosen: Probe, *, merged: bool = True) -> float:
    """Return the mean gap (nats) between a probe's log-probabilities and those of a pass over each of its sequences alone.

    It is the rounding of the arithmetic: below a few times that gap two versions cannot be distinguished.
    """
    alone = [logprobs(policy, [sequence], merged=merged)[0] for sequence in chosen.sequences]
    gaps = [
        abs(a - b)
        for row, new in zip(alone, chosen.new_logprobs, strict=True)
        for a, b in zip(row, new, strict=True)
    ]
    return sum(gaps) / len(gaps)


def choose(sequences: Sequences, new: Logprobs, parent: Logprobs) -> Probe:
    """Return the `SEQUENCES` on which two versions differ most (mean absolute difference). Raise ValueError without sequences."""
    if not sequences:
        raise ValueError("a probe needs a sequence")

    def difference(i: int) -> float:
        return sum(abs(a - b) for a, b in zip(new[i], parent[i], strict=True)) / len(new[i])

    best = sorted(range(len(sequences)), key=difference, reverse=True)[:SEQUENCES]
    return Probe(
        tuple(tuple(sequences[i]) for i in best),
        tuple(tuple(new[i]) for i in best),
        tuple(tuple(parent[i]) for i in best),
    )
