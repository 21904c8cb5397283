"""Numbers the conversations of an episode and their turns. Pure.

Conversations are numbered in the order in which their first turns were sampled. A turn continues the conversation of the turn
before it if its prompt has all of that turn's tokens and no other turn continued it first; otherwise it begins a conversation.
"""

from __future__ import annotations

from collections.abc import Sequence

from headgate.types import Node


def lineages(nodes: Sequence[Node]) -> dict[int, int]:
    """Return the number of the conversation of each sampled node, by the node's index; nodes in creation order, as they are
    stored."""
    found: dict[int, int] = {}
    ends: dict[int, int] = {}  # the last turn of each conversation
    count = 0
    for node in nodes:
        if not node.sampled:
            continue
        line = ends.pop(_turn_before(nodes, node), None)
        if line is None:
            line, count = count, count + 1
        found[node.index] = ends[node.index] = line
    return found


def _turn_before(nodes: Sequence[Node], node: Node) -> int:
    """Return the last turn in a node's prompt; -1 if there is none, or if not all of it is there."""
    while node.parent >= 0:
        parent = nodes[node.parent]
        if parent.sampled:
            return parent.index if node.at == len(parent.ids) else -1
        node = parent
    return -1
