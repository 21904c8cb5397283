"""Token trees of episodes: their paths, and which sampled tokens may not be trained, with the reason.

Invariants: the paths of a tree hold each of its tokens; of the tokens that several paths hold, `Piece.earlier` counts those that
an earlier path has, so that a sampled token is trained at most once. Pure: no I/O, no model.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from headgate.types import Node, TokenFlag

BoolArray = npt.NDArray[np.bool_]

UNTRAINED = (
    TokenFlag.INVALID_LOGPROB
    | TokenFlag.GREEDY
    | TokenFlag.CONSTRAINED
    | TokenFlag.TRUNCATED
    | TokenFlag.UNCONFIRMED
    | TokenFlag.ORPHANED
    | TokenFlag.LATE
    | TokenFlag.UNROUTED
)
"""Flags of tokens that were not drawn from the policy's own distribution, or not certainly from a version that counts."""


class Piece(NamedTuple):
    """The part of a path that is in one node."""

    node: Node
    length: int
    """The number of the node's tokens that the path holds: its first ones."""
    earlier: int
    """The number of these that an earlier path holds too."""


Path = Sequence[Piece]
"""From the root of a tree to a leaf: what one call saw, and what it sampled."""


def paths(nodes: Sequence[Node]) -> Iterator[Path]:
    """Yield the path to each leaf, in the order of the leaves."""
    by_index = {node.index: node for node in nodes}
    continued = {
        node.parent for node in nodes
        if node.parent >= 0 and node.at == len(by_index[node.parent].ids)
    }  # fmt: skip
    known = dict.fromkeys(by_index, 0)
    for leaf in nodes:
        if leaf.index in continued:
            continue
        path = []
        for node, length in _to(leaf, by_index):
            path.append(Piece(node, length, min(known[node.index], length)))
            known[node.index] = max(known[node.index], length)
        yield path


def _to(leaf: Node, nodes: dict[int, Node]) -> list[tuple[Node, int]]:
    """Return the nodes from the root to `leaf`, each with how many of its tokens the path holds."""
    path = [(leaf, len(leaf.ids))]
    while path[-1][0].parent >= 0:
        child = path[-1][0]
        path.append((nodes[child.parent], child.at))
    return path[::-1]


def untrained(node: Node) -> Iterator[tuple[str, BoolArray]]:
    """Yield the tokens of a sampled node that may not be trained, by reason; shape (n,) each, and none is in two of them."""
    if node.mask_reason:
        yield node.mask_reason, np.ones(len(node.ids), dtype=np.bool_)
        return
    forbidden = node.flags & int(UNTRAINED)
    for flags in np.unique(forbidden):
        if flags:
            yield _reason(int(flags)), forbidden == flags
    left = forbidden == 0
    if node.parent < 0 and len(left) and left[0]:
        # The first token of a row has no context from which it could be predicted.
        first = np.arange(len(left)) == 0
        yield "no_context", first
        left &= ~first
    invalid = left & ~np.isfinite(node.logprobs)
    if invalid.any():
        yield _reason(TokenFlag.INVALID_LOGPROB), invalid


def _reason(flags: int) -> str:
    """Return the first of the flags that forbids training, as a word."""
    return next(flag for flag in UNTRAINED if flag & flags).name.lower()  # type: ignore[union-attr]
