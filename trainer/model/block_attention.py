"""Attention over a forest in blocks, forwards and backwards, for devices without FlexAttention's gradient; exact in float64.

Source: Dao, "FlashAttention-2" (2023): the softmax goes over blocks of keys, and backward computes the scores again from the
logarithm of their sum. Memory: at most `SCORES` scores at a time, and what grows with tokens. Pairs of blocks that see nothing
cost nothing.
Owns no state.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from trainer.model.forest import Forest

BLOCK = 64
"""Tokens of a block: few, for rows may be short. Of long ones, a tile has many blocks of keys."""
SCORES = 2**18
"""Scores at a time, of all heads, or one block of each head if that is more: 1 MiB in float32, which a core has in its cache."""
_LOG2E = math.log2(math.e)
"""Scores are powers of 2 here: the CPU's `exp` takes twenty times as long for numbers whose power is 0."""


def attend_by_blocks(
    forest: Forest,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
) -> tuple[Tensor, Tensor]:
    """Return attention and the logarithm of the sum of its exponentiated scores; both have a gradient.

    `query` has shape (1, heads, tokens, size); `key` and `value` may have fewer heads (grouped queries), `value` another size.
    The results have shapes (1, heads, tokens, size of `value`), in the inputs' dtype, and (1, heads, tokens), in float32 or more.
    """
    found: tuple[Tensor, Tensor] = _Attention.apply(query, key, value, _Tiles(forest, window, scale, softcap))
    return found


class _Tiles:
    """The scores of a pass, tile by tile: a block of queries against some blocks of keys."""

    def __init__(self, forest: Forest, window: int | None, scale: float, softcap: float | None) -> None:
        blocks = forest.blocks(window, BLOCK)
        self.count = len(blocks.some)
        self.padding = self.count * BLOCK - len(forest)
        self._some, self._whole = blocks.some, blocks.whole
        self._padded = _padded(forest, self.padding)
        self._window, self._scale, self._softcap = window, scale, softcap

    def of(self, query: int, heads: int) -> Iterator[Tensor]:
        """Yield the blocks of keys that a block of queries sees, in portions that fit; its own come first.

        So the greatest score is finite from the first tile on: every token sees itself.
        """
        visible = self._some[query].nonzero()[:, 0].flip(0)
        yield from visible.split(max(1, SCORES // (heads * BLOCK * BLOCK)))

    def scores(self, query: int, keys: Tensor, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor | None]:
        """Return the scores of a tile, as powers of 2, and, with a soft cap, the derivative of their cap.

        `q` has shape (key heads, group, BLOCK, size), `k` (key heads, keys, size), the scores (key heads, group, BLOCK, keys).
        """
        scores, slope = (q.flatten(1, 2) @ k.mT).unflatten(1, q.shape[1:3]), None
        if self._softcap is None:
            scores.mul_(self._scale * _LOG2E)
        else:
            scores.mul_(self._scale / self._softcap).tanh_()
            slope = 1 - scores * scores
            scores.mul_(self._softcap * _LOG2E)
        if not bool(self._whole[query, keys].all()):
            within = torch.arange(BLOCK, device=keys.device)
            tokens = (keys[:, None] * BLOCK + within).flatten()
            visible = self._padded.sees((query * BLOCK + within)[:, None], tokens, self._window)
            scores.add_(scores.new_zeros(visible.shape).masked_fill_(~visible, -torch.inf))
        return scores, slope

    def gradients(self, scores: Tensor, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        """Return the gradients of a tile's queries and keys by that of its scores, before the soft cap."""
        flat = scores.mul_(self._scale).flatten(1, 2)
        return (flat @ k).unflatten(1, q.shape[1:3]), flat.mT @ q.flatten(1, 2)


def _padded(forest: Forest, more: int) -> Forest:
    """Return the forest with tokens at its end that see themselves alone."""
    n = len(forest)
    own = torch.arange(n + 1, n + more + 1, device=forest.ends.device)
    return Forest(F.pad(forest.positions, (0, more)), torch.cat([forest.ends, own]))


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(
        context: Any, query: Tensor, key: Tensor, value: Tensor, tiles: _Tiles
    ) -> tuple[Tensor, Tensor]:
        q, k, v = _in_blocks(query, key, value, tiles)
        wide = torch.promote_types(query.dtype, torch.float32)
        found = query.new_empty((*q.shape[:4], v.shape[3]))
        sums = query.new_empty(q.shape[:4], dtype=wide)
        for i in range(tiles.count):
            found[:, :, i], sums[:, :, i] = _forward(tiles, i, q[:, :, i].to(wide), k, v)
        tokens = query.shape[2]
        found, sums = (
            found.flatten(2, 3).flatten(0, 1)[:, :tokens],
            sums.flatten(2, 3).flatten(0, 1)[:, :tokens],
        )
        context.save_for_backward(query, key, value, found, sums)
        context.tiles = tiles
        return found[None], sums[None]

    @staticmethod
    def backward(context: Any, gradient: Tensor, of_sums: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        query, key, value, found, sums = context.saved_tensors
        tiles: _Tiles = context.tiles
        q, k, v = _in_blocks(query, key, value, tiles)
        group = q.shape[1]
        wide = sums.dtype
        # Of the scores' gradient, what does not depend on the key (FlashAttention-2, algorithm 2: D).
        shift = _blocked((gradient[0].to(wide) * found).sum(-1) - of_sums[0], tiles, group)
        sums, gradient = _blocked(sums * _LOG2E, tiles, group), _blocked(gradient[0], tiles, group)
        of_q, of_k, of_v = torch.empty_like(q), *(torch.zeros_like(x, dtype=wide) for x in (k, v))
        for i in range(tiles.count):
            rows = [x[:, :, i].to(wide) for x in (q, gradient, sums[..., None], shift[..., None])]
            of_q[:, :, i] = _backward(tiles, i, rows, (k, v), (of_k, of_v))
        tokens = query.shape[2]
        flat = (of_q.flatten(2, 3).flatten(0, 1), of_k.flatten(1, 2), of_v.flatten(1, 2))
        return *(x[None, :, :tokens].to(query.dtype) for x in flat), None  # type: ignore[return-value]


def _forward(tiles: _Tiles, i: int, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Return attention and sums of a block of queries."""
    top: Tensor | None = None
    for keys in tiles.of(i, q.shape[0] * q.shape[1]):
        scores, _ = tiles.scores(i, keys, q, _chosen(k, keys, q.dtype))
        before, highest = top, scores.amax(-1, keepdim=True)
        top = highest if before is None else torch.maximum(before, highest)
        weights = scores.sub_(top).exp2_()
        total = weights.sum(-1, keepdim=True)
        part = (weights.flatten(1, 2) @ _chosen(v, keys, q.dtype)).unflatten(1, q.shape[1:3])
        if before is None:
            found, totals = part, total
        else:
            shrunk = (before - top).exp2_()
            found, totals = found.mul_(shrunk).add_(part), totals.mul_(shrunk).add_(total)
    assert top is not None
    return found / totals, (top + totals.log2()).squeeze(-1) / _LOG2E


def _backward(
    tiles: _Tiles, i: int, rows: list[Tensor], given: tuple[Tensor, Tensor], gradients: tuple[Tensor, Tensor]
) -> Tensor:
    """Return the gradient of a block of queries, and add those of its keys and values to `gradients`."""
    q, gradient, sums, shift = rows
    of_q = torch.zeros_like(q)
    for keys in tiles.of(i, q.shape[0] * q.shape[1]):
        k, v = (_chosen(x, keys, q.dtype) for x in given)
        scores, slope = tiles.scores(i, keys, q, k)
        weights = scores.sub_(sums).exp2_()
        _add(gradients[1], keys, weights.flatten(1, 2).mT @ gradient.flatten(1, 2))
        of_scores = (gradient.flatten(1, 2) @ v.mT).unflatten(1, q.shape[1:3]).sub_(shift).mul_(weights)
        if slope is not None:
            of_scores.mul_(slope)
        part, of_k = tiles.gradients(of_scores, q, k)
        of_q.add_(part)
        _add(gradients[0], keys, of_k)
    return of_q


def _in_blocks(query: Tensor, key: Tensor, value: Tensor, tiles: _Tiles) -> tuple[Tensor, Tensor, Tensor]:
    """Return queries, (key heads, group, blocks, BLOCK, size), and keys and values, (key heads, blocks, BLOCK, size)."""
    group = query.shape[1] // key.shape[1]
    return _blocked(query[0], tiles, group), *(_blocked(x[0], tiles, 1)[:, 0] for x in (key, value))  # type: ignore[return-value]


def _blocked(x: Tensor, tiles: _Tiles, group: int) -> Tensor:
    """Cut (heads, tokens, ...) into (key heads, group, blocks, BLOCK, ...); what is added at the end is zero."""
    if tiles.padding:
        x = F.pad(x, (0, 0) * (x.ndim - 2) + (0, tiles.padding))
    return x.unflatten(1, (tiles.count, BLOCK)).unflatten(0, (-1, group))


def _chosen(x: Tensor, keys: Tensor, dtype: torch.dtype) -> Tensor:
    """Return some blocks of keys or values, shape (key heads, tokens, size)."""
    return x[:, keys].flatten(1, 2).to(dtype)


def _add(x: Tensor, keys: Tensor, more: Tensor) -> None:
    """Add to some blocks, of which none is named twice."""
    x.index_add_(1, keys, more.unflatten(1, (len(keys), BLOCK)))
