"""Micro-batches without padding: rows laid one after another, a prefix that neighbors share computed once.

The tokens of a micro-batch are a forest in depth-first order: a row begins behind what it shares with the row before it. So one
number for each token defines which tokens see it (`ends`), and packing and shared prefixes are one mask.
Invariants:
- every trained token of every row is in one micro-batch, once;
- a micro-batch holds at most `tokens` tokens, unless one unit (a row, or an episode's rows) is longer: that has one of its own;
- the cut depends only on the sequence of groups, and not on the portions in which they arrive.
Pure: no I/O, no model.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, fields, replace

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from headgate.kept import Kept
from headgate.routes import ABSENT
from headgate.types import ImageSpan
from trainer.data.tree import Row

Int64Array = npt.NDArray[np.int64]
_WORDS = ("episodes", "images", "passes")
"""Parts of a micro-batch that are not tensors."""


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """Tokens of shape (tokens,), and what is trained of them, of shape (trained,)."""

    ids: Tensor
    """int64, (tokens,)"""
    positions: Tensor
    """int64, (tokens,): the number of tokens before this one on its path."""
    ends: Tensor
    """int64, (tokens,): token q sees token k if k <= q < ends[k]."""
    at: Tensor
    """int64, (trained,): where the trained token is in `ids`. Rows of different episodes may train one place twice."""
    context: Tensor
    """int64, (trained,): where the token before it on its path is."""
    recorded: Tensor
    """float64, (trained,), nats: the log-probability under the weights that sampled it."""
    versions: Tensor
    """int64, (trained,): the version that sampled it."""
    temperature: Tensor
    """float64, (trained,)"""
    advantages: Tensor
    """float64, (trained,)"""
    weights: Tensor
    """float64, (trained,): the token's weight in the loss's sum."""
    sequences: Tensor
    """int64, (trained,): the token's episode, an index into `episodes`."""
    nodes: Tensor
    """int64, (trained,): the node of the episode's tree that the token is of."""
    routes: Tensor | None = None
    """int64, (tokens, layers, top_k): the recorded experts of each token, -1 where there are none; None: of no token."""
    kept: Tensor | None = None
    """int64, (trained, most): over what each trained token's distribution is normalized (`Kept.padded`); None: all over all."""
    episodes: tuple[str, ...] = ()
    """The ids of the episodes."""
    images: tuple[ImageSpan, ...] = ()
    """The images among `ids`, in order; with any, no prefix is shared."""
    passes: int = 1
    """Passes through the layers if every row has its own: the most rows of the micro-batches that ranks compute at a time."""

    def to(self, device: str, dtype: torch.dtype) -> MicroBatch:
        """Return the same on another device, real numbers in the precision in which the loss is computed."""
        parts = {f.name: getattr(self, f.name) for f in fields(self) if f.name not in _WORDS}
        tensors = {name: tensor for name, tensor in parts.items() if tensor is not None}
        moved = {
            n: t.to(device, dtype) if t.is_floating_point() else t.to(device) for n, t in tensors.items()
        }
        return replace(self, **moved)

    def __len__(self) -> int:
        return len(self.ids)


class Packer:
    """Lays the rows of groups into micro-batches of at most `tokens` tokens; one leaves as soon as the next unit does not fit."""

    def __init__(self, tokens: int, *, share_prefixes: bool = True, whole_episodes: bool = False) -> None:
        """`share_prefixes`: compute common prefixes once. `whole_episodes`: keep the rows of an episode in one micro-batch."""
        self.tokens = tokens
        self._share_prefixes = share_prefixes
        self._whole = whole_episodes
        self._waiting: list[Row] = []
        self._size = 0

    def add(self, rows: Sequence[Row]) -> Iterator[MicroBatch]:
        """Add the rows of the next group, and yield the micro-batches that are full. Exhaust it before the next call."""
        for unit in self._units(rows):
            if self._waiting and self._size + self._length(unit, self._waiting[-1]) > self.tokens:
                yield from self.flush()
            self._size += self._length(unit, self._waiting[-1] if self._waiting else None)
            self._waiting += unit

    def flush(self) -> Iterator[MicroBatch]:
        """Yield the rest, if there is any."""
        if self._waiting:
            leaving, self._waiting, self._size = self._waiting, [], 0
            yield lay_out(leaving, share_prefixes=self._share_prefixes)

    def _units(self, rows: Sequence[Row]) -> list[list[Row]]:
        """Return the sets of rows that must stay together, in an order in which neighbors share most."""
        if not self._whole:
            return [[row] for row in sorted(rows, key=_order)]
        episodes: dict[str, list[Row]] = defaultdict(list)
        for row in sorted(rows, key=_order):
            episodes[row.episode_id].append(row)
        return list(episodes.values())

    def _length(self, unit: Iterable[Row], before: Row | None) -> int:
        """Return the tokens that a unit adds behind the row `before`."""
        total = 0
        for row in unit:
            total += len(row) - (common_prefix(before, row) if self._share_prefixes and before else 0)
            before = row
        return total


def _order(row: Row) -> tuple[bytes, str]:
    """Return a sort key by which rows with common prefixes are adjacent."""
    return row.ids.astype(">u4").tobytes(), row.episode_id


def common_prefix(left: Row, right: Row) -> int:
    """Return how many tokens two rows have in common at their beginning, with the same routes where both have them."""
    n = _first_true(left.ids[: len(right)] != right.ids[: len(left)])
    if left.routes is None or right.routes is None:
        return n
    ours, theirs = left.routes[:n], right.routes[:n]
    known = (ours[:, 0, 0] >= 0) & (theirs[:, 0, 0] >= 0)
    return _first_true(known & (ours != theirs).any((1, 2)))


def _first_true(values: npt.NDArray[np.bool_]) -> int:
    """Return the index of the first true value; their number if there is none."""
    return int(values.argmax()) if values.any() else len(values)


def lay_out(rows: Sequence[Row], *, share_prefixes: bool = True) -> MicroBatch:
    """Return rows as one micro-batch; the prefix that a row shares with the row before is not repeated, if `share_prefixes`."""
    # Placeholders of different images are the same tokens.
    assert not share_prefixes or not any(row.images for row in rows)
    ids, positions, ends, paths = _forest(rows, share_prefixes)
    trained = [row.train.nonzero()[0] for row in rows]
    numbers = {episode: i for i, episode in enumerate(dict.fromkeys(row.episode_id for row in rows))}

    def column(values: Iterable[npt.NDArray[np.generic]], dtype: torch.dtype) -> Tensor:
        return torch.as_tensor(np.concatenate([*values])).to(dtype)

    def pick(name: str, dtype: torch.dtype) -> Tensor:
        return column((getattr(row, name)[at] for row, at in zip(rows, trained, strict=True)), dtype)

    lengths = torch.tensor([len(at) for at in trained])
    return MicroBatch(
        ids=torch.as_tensor(ids),
        positions=torch.as_tensor(positions),
        ends=torch.as_tensor(ends),
        at=column((path[at] for path, at in zip(paths, trained, strict=True)), torch.int64),
        context=column((path[at - 1] for path, at in zip(paths, trained, strict=True)), torch.int64),
        recorded=pick("logprobs", torch.float64),
        versions=pick("versions", torch.int64),
        temperature=pick("temperature", torch.float64),
        advantages=pick("advantages", torch.float64),
        weights=torch.tensor([row.weight for row in rows], dtype=torch.float64).repeat_interleave(lengths),
        sequences=torch.tensor([numbers[row.episode_id] for row in rows]).repeat_interleave(lengths),
        nodes=pick("nodes", torch.int64),
        routes=_routes(rows, paths, len(ids)),
        kept=_kept(rows),
        episodes=tuple(numbers),
        images=tuple(
            image._replace(offset=int(path[image.offset]))
            for row, path in zip(rows, paths, strict=True)
            for image in row.images
        ),
        passes=1 if share_prefixes else len(rows),
    )


def _routes(rows: Sequence[Row], paths: Sequence[Int64Array], tokens: int) -> Tensor | None:
    """Return the routes of each token; those of a shared prefix are of the first row that has them."""
    recorded = [(row.routes, path) for row, path in zip(rows, paths, strict=True) if row.routes is not None]
    if not recorded:
        return None
    found = np.full((tokens, *recorded[0][0].shape[1:]), ABSENT, np.int64)
    for routes, path in recorded:
        absent = found[path, 0, 0] < 0
        found[path[absent]] = routes[absent]
    return torch.as_tensor(found)


def _kept(rows: Sequence[Row]) -> Tensor | None:
    """Return what the distributions of the trained tokens kept, one row after another."""
    if all(row.kept is None for row in rows):
        return None
    found = Kept.joined((Kept.none(len(row)) if row.kept is None else row.kept).at(row.train) for row in rows)
    return torch.as_tensor(found.padded())


def even(micros: Sequence[MicroBatch]) -> list[MicroBatch]:
    """Return micro-batches that ranks compute at a time, with the same number of passes: each gathers the layers' weights."""
    passes = max((micro.passes for micro in micros), default=1)
    return [replace(micro, passes=passes) for micro in micros]


def _forest(
    rows: Sequence[Row], share_prefixes: bool
) -> tuple[Int64Array, Int64Array, Int64Array, list[Int64Array]]:
    """Return ids, positions and ends, each of shape (tokens,), and for each row where its tokens are."""
    shared = [0] * len(rows)
    if share_prefixes:
        shared[1:] = [common_prefix(left, right) for left, right in itertools.pairwise(rows)]
    offsets = np.cumsum([0, *(len(row) - n for row, n in zip(rows, shared, strict=True))])
    ids, positions = np.empty(offsets[-1], np.int64), np.empty(offsets[-1], np.int64)
    ends = np.full(offsets[-1], offsets[-1], np.int64)
    paths: list[Int64Array] = []
    path = np.empty(0, np.int64)
    for row, n, start, stop in zip(rows, shared, offsets, offsets[1:], strict=False):
        ends[path[n:]] = start
        ids[start:stop], positions[start:stop] = row.ids[n:], np.arange(n, len(row))
        path = np.concatenate([path[:n], np.arange(start, stop)])
        paths.append(path)
    return ids, positions, ends, paths
