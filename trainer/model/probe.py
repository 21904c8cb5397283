"""The probe of a version, by passes of the model.

Log-probabilities are float32, in nats, at temperature 1.
"""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace

from headgate.probes import Sequences, choose, default_sequences
from headgate.types import Probe
from trainer.data.packing import lay_out
from trainer.data.tree import row_of_tokens
from trainer.model.policy import Policy


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
