"""Turns with secrets, as they are stored. Pure.

A token that has a part in a secret is stored as another one, and the text cannot be recovered: neither from the tokens, nor from
log-probabilities, experts or alternatives. A turn whose prompt or reply has such a token is not trained (`redacted`): its
log-probabilities are those of tokens that no trainer gets. Turns before it on its path are trained.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from headgate.trees import BoolArray
from headgate.types import ABANDONED, REDACTED, Node


@dataclass(frozen=True, slots=True)
class Redaction:
    """What is redacted of a turn."""

    tokens: BoolArray
    """The redacted tokens of its path, from the root to the end of the reply; shape (n,)."""
    prompt: int
    """Tokens of the prompt."""
    placeholder: int
    """The token that is stored in place of a redacted one."""
    requested: dict[str, Any]
    """The request's parameters with marks in place of secrets."""

    @property
    def reply_tokens(self) -> int:
        """The number of redacted tokens of the reply."""
        return int(self.tokens[self.prompt :].sum())

    def stored(self, nodes: Sequence[Node]) -> list[Node]:
        """Return the turn's nodes, the sampled one last, as they are stored."""
        if not self.tokens.any():
            return list(nodes)
        *before, reply = nodes
        start = self.prompt
        found = [self._hidden(reply, start)]
        if reply.mask_reason != ABANDONED:
            found = [replace(found[0], mask_reason=REDACTED)]
        for node in reversed(before):
            start -= len(node.ids)
            hidden = self._hidden(node, start)
            has = bool(self.tokens[start : start + len(node.ids)].any())
            found.append(replace(hidden, mask_reason=REDACTED) if has else hidden)
        return found[::-1]

    def _hidden(self, node: Node, start: int) -> Node:
        tokens = self.tokens[start : start + len(node.ids)]
        ids = np.where(tokens, np.int32(self.placeholder), node.ids).astype(np.int32)
        return replace(node, ids=ids, logprobs=np.zeros_like(node.logprobs), routes=None, kept=None)


def unreadable(nodes: Sequence[Node], replies: frozenset[int] | set[int]) -> set[int]:
    """Return the nodes on whose path stored tokens are not those that the engine saw. `replies`: sampled nodes with redacted
    tokens."""
    found: set[int] = set()
    for node in nodes:
        prompt = node.mask_reason == REDACTED and not node.sampled
        if prompt or node.index in replies or node.parent in found:
            found.add(node.index)
    return found
