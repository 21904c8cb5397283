"""The probe of a version: a few token sequences by which its weights can be told from its parent's.

Pure but for the model that is asked. Log-probabilities are float32, in nats, at temperature 1.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from gateway.types import Probe
from trainer.model.head import token_logprobs

SEQUENCES = 4
TOKENS = 64
CANDIDATES = 32

Sequences = Sequence[tuple[int, ...]]
Logprobs = Sequence[tuple[float, ...]]


def candidates(ends: Sequences) -> list[tuple[int, ...]]:
    """Up to `CANDIDATES` of the ends (the last `TOKENS` tokens) of a batch's rows, all different and spread over the batch."""
    chosen = dict.fromkeys(ends[:: max(1, len(ends) // CANDIDATES)])
    return [sequence for sequence in chosen if len(sequence) > 1][:CANDIDATES]


@torch.no_grad()
def logprobs(model: Any, sequences: Sequences, device: str = "cpu") -> list[tuple[float, ...]]:
    """For each sequence, what the model says of every token but the first."""
    if not sequences:
        return []
    longest = max(map(len, sequences))
    ids = torch.zeros(len(sequences), longest, dtype=torch.int64, device=device)
    for i, sequence in enumerate(sequences):
        ids[i, : len(sequence)] = torch.tensor(sequence)
    values, _ = token_logprobs(model, ids, torch.ones(ids.shape, device=device), with_entropy=False)
    rows = values.cpu().tolist()
    return [tuple(row[1 : len(s)]) for row, s in zip(rows, sequences, strict=True)]


def choose(sequences: Sequences, new: Logprobs, parent: Logprobs) -> Probe | None:
    """The `SEQUENCES` on which two versions differ most (mean absolute difference); None without sequences."""
    if not sequences:
        return None

    def difference(i: int) -> float:
        return sum(abs(a - b) for a, b in zip(new[i], parent[i], strict=True)) / len(new[i])

    best = sorted(range(len(sequences)), key=difference, reverse=True)[:SEQUENCES]
    return Probe(
        tuple(tuple(sequences[i]) for i in best),
        tuple(tuple(new[i]) for i in best),
        tuple(tuple(parent[i]) for i in best),
    )
