"""Choice of the sequences in a version's probe."""

from __future__ import annotations

import pytest

from headgate.probes import choose, default_sequences
from headgate.types import Probe


def test_a_probe_is_of_the_sequences_whose_tokens_differ_most_on_average() -> None:
    sequences = [(n, n, n) for n in range(5)] + [(5,) * 9]
    parent = [(-1.0,) * (len(sequence) - 1) for sequence in sequences]
    changes = [(0.1, 0.1), (-0.5, 0.5), (0.0, 0.4), (0.3, 0.4), (0.9, 0.0), (0.15,) * 8]
    new = [tuple(a + b for a, b in zip(*both, strict=True)) for both in zip(parent, changes, strict=True)]
    best = [1, 4, 3, 2]
    assert choose(sequences, new, parent) == Probe(
        tuple(sequences[i] for i in best), tuple(new[i] for i in best), tuple(parent[i] for i in best)
    )


def test_a_probe_without_sequences_is_an_error() -> None:
    with pytest.raises(ValueError, match="a sequence"):
        choose([], [], [])


@pytest.mark.parametrize("vocabulary", [2, 256, 150_000])
def test_the_default_sequences_are_tokens_of_the_vocabulary(vocabulary: int) -> None:
    sequences = default_sequences(vocabulary)
    assert {len(sequence) for sequence in sequences} == {16}
    assert all(0 <= token < vocabulary for sequence in sequences for token in sequence)
