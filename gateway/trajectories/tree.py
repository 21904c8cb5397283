"""The token tree of one episode. Pure: no I/O, no engine.

A node is a run of token ids that hangs at the first `at` tokens of its parent; it never changes and is never split. So a branch
in the middle of a node costs nothing, a shared prefix is stored once, and stored nodes stay valid.

Where an image stands, tokens are compared by its key (`render/images.py`): a path with another image is another path.

Invariants: parents come before children; the ids along a path are exactly those that an engine was given or sampled; each sampled
token is in exactly one node.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from gateway.render.images import keyed
from headgate.types import ImageSpan, Int32Array, Node

ROOT = -1
_NOTHING = 2**31
"""Stands for the first token of a node that has none."""


@dataclass(frozen=True, slots=True)
class TreePosition:
    """The position after the first `at` tokens of `node`; `START` is the empty path's. `length` counts from the root."""

    node: int
    at: int
    length: int


START = TreePosition(ROOT, 0, 0)


class TokenTree:
    """Nodes in creation order."""

    def __init__(self, nodes: Sequence[Node] = ()) -> None:
        self.nodes: list[Node] = []
        self._starts: list[int] = []
        self._keyed: dict[int, Int32Array] = {}
        """The tokens of nodes with images, by which they are compared."""
        self._children: dict[tuple[int, int, int], tuple[int, ...]] = {}
        """The children of a node at one of its places, by their first token. Tuples of ints, which the garbage collector does not
        track."""
        self._places: dict[int, tuple[int, ...]] = {}
        """The places at which a node has children."""
        for node in nodes:
            self.add(node)

    def add(self, node: Node) -> TreePosition:
        """Add a node; return the place after it. Raise ValueError if it hangs nowhere."""
        if node.index != len(self.nodes) or not ROOT <= node.parent < node.index:
            raise ValueError(f"node {node.index} cannot follow {len(self.nodes)} nodes")
        if node.parent == ROOT:
            start = 0
        else:
            if not 0 <= node.at <= len(self.nodes[node.parent].ids):
                raise ValueError(f"node {node.index} hangs outside its parent")
            start = self._starts[node.parent] + node.at
        self.nodes.append(node)
        self._starts.append(start)
        at = node.at if node.parent != ROOT else 0
        if node.images:
            self._keyed[node.index] = keyed(node.ids, node.images)
        ids = self._keys(node.index)
        first = int(ids[0]) if len(ids) else _NOTHING
        key, places = (node.parent, at, first), self._places.get(node.parent, ())
        self._children[key] = (*self._children.get(key, ()), node.index)
        if at not in places:
            self._places[node.parent] = (*places, at)
        return TreePosition(node.index, len(node.ids), start + len(node.ids))

    def path(self, place: TreePosition) -> Int32Array:
        """Return the token ids from the root to a place; shape (place.length,)."""
        parts: list[Int32Array] = []
        index, at = place.node, place.at
        while index != ROOT:
            node = self.nodes[index]
            parts.append(node.ids[:at])
            index, at = node.parent, node.at
        return np.concatenate(parts[::-1]) if parts else np.empty(0, np.int32)

    def images(self, place: TreePosition) -> tuple[ImageSpan, ...]:
        """Return the images on the path to a place; their offsets count from the root."""
        found: list[ImageSpan] = []
        index, at = place.node, place.at
        while index != ROOT:
            node, start = self.nodes[index], self._starts[index]
            found += [
                image._replace(offset=start + image.offset)
                for image in reversed(node.images)
                if image.offset + image.length <= at
            ]
            index, at = node.parent, node.at
        return tuple(found[::-1])

    def _keys(self, index: int) -> Int32Array:
        return self._keyed.get(index, self.nodes[index].ids)

    def find(self, ids: Int32Array, after: TreePosition = START) -> TreePosition:
        """Return the place of the longest prefix of `ids` in the tree; `after`: a place that is known to be a prefix. `ids`: with
        the keys of images.

        Searches only below `after`, so that a turn of a long conversation costs no more than one of a short conversation.
        """
        best = after
        known = after.at
        if after.node != ROOT:
            known += _common(self._keys(after.node)[after.at :], ids[after.length :])
            best = TreePosition(after.node, known, after.length + known - after.at)
        found = self._branches(after.node, after.length - after.at, after.at, known, ids)
        while found:
            index = found.pop()
            start = self._starts[index]
            count = _common(self._keys(index), ids[start:])
            if start + count > best.length or (start + count == best.length and count and index < best.node):
                best = TreePosition(index, count, start + count)
            found += self._branches(index, start, 0, count, ids)
        return best

    def _branches(self, node: int, start: int, least: int, most: int, ids: Int32Array) -> list[int]:
        """Return the children of a node that begins at `start`, hang at its tokens `least` to `most`, and may go on as `ids`
        does."""
        found: list[int] = []
        for at in self._places.get(node, ()):
            if least <= at <= most:
                found += self._children.get((node, at, _NOTHING), ())
                if start + at < len(ids):
                    found += self._children.get((node, at, int(ids[start + at])), ())
        return found


def _common(left: Int32Array, right: Int32Array) -> int:
    """Return the length of the longest common prefix."""
    size = min(len(left), len(right))
    if not size:
        return 0
    differs = left[:size] != right[:size]
    first = int(differs.argmax())
    return first if differs[first] else size
