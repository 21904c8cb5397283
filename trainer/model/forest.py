"""Which tokens of a micro-batch see which: by token, and by block of tokens.

Token q sees token k if `k <= q < ends[k]` (`trainer.data.packing`) and, with a window, if q's position is less than `window`
after k's. Owns the tables of blocks, made once for each window, and the pieces of layers with a state.
Invariants: tensors have numbers for tokens and for pairs of blocks, never for pairs of tokens; every token sees itself.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

from trainer.model.recurrent import Piece, pieces_of

FLEX_BLOCK = 128
"""Tokens of a block of FlexAttention."""


@dataclass(frozen=True, slots=True)
class Blocks:
    """Pairs of blocks, both bool, shape (blocks of queries, blocks of keys)."""

    some: Tensor
    """True where a query may see a key; false where none does."""
    whole: Tensor
    """True where each query sees each key."""


@dataclass(frozen=True, slots=True)
class Rows:
    """Rows that share no prefix, one behind another."""

    starts: Tensor
    """int32, (rows + 1,): where each begins, and the number of tokens."""
    longest: int
    """The tokens of the longest."""


class Forest:
    """The attention pattern of one micro-batch."""

    def __init__(self, positions: Tensor, ends: Tensor) -> None:
        """Both have shape (tokens,), int64."""
        self.positions = positions
        self.ends = ends
        self._blocks: dict[tuple[int | None, int], Blocks] = {}
        self._masks: dict[int | None, BlockMask] = {}
        self._pieces: list[Piece] | None = None

    def __len__(self) -> int:
        return len(self.positions)

    def sees(self, queries: Tensor, keys: Tensor, window: int | None) -> Tensor:
        """Return, as bool, which queries see which keys; both are numbers of tokens, and broadcast."""
        return _sees(self.positions, self.ends, queries, keys, window)

    @property
    def pieces(self) -> list[Piece]:
        """The pieces at which layers with a state start again."""
        if self._pieces is None:
            self._pieces = pieces_of(self.positions.cpu().numpy())
        return self._pieces

    @cached_property
    def rows(self) -> Rows | None:
        """The rows, if none continues a prefix of another one; None if one does. Its first use waits for the device."""
        positions = self.positions.cpu()
        starts, follows = positions == 0, positions[1:] == positions[:-1] + 1
        if not bool((follows | starts[1:]).all()):
            return None
        bounds = F.pad(starts.nonzero()[:, 0], (0, 1), value=len(self))
        return Rows(bounds.to(self.ends.device, torch.int32), int(bounds.diff().max()))

    def blocks(self, window: int | None, size: int) -> Blocks:
        """Return the pairs of blocks of `size` tokens that have anything to see, by the extremes of ends and positions."""
        if (window, size) not in self._blocks:
            self._blocks[window, size] = self._make_blocks(window, size)
        return self._blocks[window, size]

    def block_mask(self, window: int | None) -> BlockMask:
        """Return the pattern as FlexAttention takes it."""
        if window not in self._masks:
            self._masks[window] = self._make_mask(window)
        return self._masks[window]

    def _make_blocks(self, window: int | None, size: int) -> Blocks:
        first = torch.arange(0, len(self), size, device=self.ends.device)
        last = (first + size - 1).clamp(max=len(self) - 1)
        soonest, latest = _extremes(self.ends, size)
        nearest, farthest = _extremes(self.positions, size)
        some = (first <= last[:, None]) & (first[:, None] < latest)
        whole = (last <= first[:, None]) & (last[:, None] < soonest)
        if window is not None:
            some &= nearest[:, None] - farthest < window
            whole &= farthest[:, None] - nearest < window
        if len(self) % size:
            # No token sees what lies behind the last token.
            whole[-1] = False
        return Blocks(some, whole)

    def _make_mask(self, window: int | None) -> BlockMask:
        # Tensors, and not the forest: what the compiler captures are inputs of its graph.
        blocks, positions, ends = self.blocks(window, FLEX_BLOCK), self.positions, self.ends

        def sees(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
            return _sees(positions, ends, query, key, window)

        return BlockMask.from_kv_blocks(
            *_ordered(blocks.some & ~blocks.whole),
            *_ordered(blocks.whole),
            BLOCK_SIZE=FLEX_BLOCK,
            mask_mod=sees,
            seq_lengths=(len(self), len(self)),
        )


def _sees(positions: Tensor, ends: Tensor, queries: Tensor, keys: Tensor, window: int | None) -> Tensor:
    visible = (keys <= queries) & (queries < ends[keys])
    return visible if window is None else visible & (positions[queries] - positions[keys] < window)


def _extremes(numbers: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """Return the least and the greatest of each block."""
    each = torch.cat([numbers, numbers[-1:].expand(-len(numbers) % size)]).view(-1, size)
    return each.amin(1), each.amax(1)


def _ordered(pairs: Tensor) -> tuple[Tensor, Tensor]:
    """Return how many blocks of keys each block of queries has, and their numbers, those first, as FlexAttention lists them."""
    order = pairs.to(torch.int8).argsort(dim=1, descending=True, stable=True)
    return pairs.sum(1, dtype=torch.int32)[None, None], order.to(torch.int32)[None, None]
