"""The tokens that top-p, top-k or min-p left to choose from, for each sampled token: its sampling distribution's support.

A log-probability under a truncated distribution is normalized over these tokens, so a trainer that computes it again needs them.
Packed: the count of each token, then the ids of all, both as little-endian int32. A count of 0 means that the set is not known.
Pure.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple, Self

import numpy as np
import numpy.typing as npt

UNKNOWN = -1
"""Fills the rows of `Kept.padded`."""
_MISSING = 1e-4
"""The most probability that a recorded set may lack: log-probabilities are off by as much, which is less than engines' noise."""


class Kept(NamedTuple):
    """The kept tokens of n tokens."""

    counts: npt.NDArray[np.int32]
    """Shape (n,); 0: not known."""
    ids: npt.NDArray[np.int32]
    """Shape (sum of counts,): those of the first token, then those of the second, and so on."""

    @classmethod
    def none(cls, n: int) -> Self:
        """Return the sets of `n` tokens of which none is known."""
        return cls(np.zeros(n, np.int32), np.empty(0, np.int32))

    @classmethod
    def of(cls, sets: Mapping[int, Sequence[int]], n: int) -> Self:
        """Return the sets of `n` tokens, by the index of the token; those of others are not known."""
        parts = [sets.get(i, ()) for i in range(n)]
        ids = np.fromiter((token for part in parts for token in part), np.int32)
        return cls(np.fromiter(map(len, parts), np.int32, n), ids)

    @classmethod
    def unpacked(cls, data: bytes, n: int) -> Self:
        """Return the inverse of `packed`. Raise ValueError unless the sets are of `n` tokens."""
        values = np.frombuffer(data, "<i4")
        counts, ids = values[:n], values[n:]
        if len(counts) != n or (counts < 0).any() or int(counts.sum(dtype=np.int64)) != len(ids):
            raise ValueError(f"{len(data)} bytes are not the kept tokens of {n} tokens")
        return cls(counts, ids)

    @classmethod
    def joined(cls, parts: Iterable[Kept]) -> Self:
        """Return sets one after another."""
        counts, ids = zip(*parts, strict=True)
        return cls(np.concatenate(counts), np.concatenate(ids))

    @property
    def known(self) -> npt.NDArray[np.bool_]:
        """Which tokens' sets are known, shape (n,)."""
        return self.counts > 0

    def packed(self) -> bytes:
        """Return the sets as bytes."""
        return self.counts.astype("<i4").tobytes() + self.ids.astype("<i4").tobytes()

    def at(self, chosen: npt.NDArray[np.bool_]) -> Kept:
        """Return the sets of the chosen tokens; `chosen` has shape (n,)."""
        return Kept(self.counts[chosen], self.ids[np.repeat(chosen, self.counts)])

    def padded(self) -> npt.NDArray[np.int64]:
        """Return one row of ids for each token, shape (n, largest count).

        A row is UNKNOWN throughout where the set is not known; else its last id fills it, which names no further token.
        """
        if not len(self.ids):
            return np.full((len(self.counts), 0), UNKNOWN, np.int64)
        ends = np.cumsum(self.counts)[:, None]
        places = (ends - self.counts[:, None]) + np.arange(self.counts.max())
        rows = self.ids[np.minimum(places, np.maximum(ends - 1, 0))].astype(np.int64)
        rows[~self.known] = UNKNOWN
        return rows


def kept_of(token: int, alternatives: Iterable[tuple[int, float]]) -> tuple[int, ...]:
    """Return the ids that an engine's truncated distribution kept; none unless `alternatives` has all of them.

    `alternatives`: the likeliest ids, each with its log-probability under the truncated distribution, which is that of
    probability 0 for ids that were left out. They are all if their probabilities add up to 1.
    """
    found = {other: math.exp(logprob) for other, logprob in alternatives if logprob > -1e3}
    return tuple(found) if token in found and abs(sum(found.values()) - 1) <= _MISSING else ()
