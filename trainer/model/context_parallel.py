"""Ranks that compute a micro-batch together: what each sends to the others within attention, and its gradient.

Source: Jacobs et al., "DeepSpeed Ulysses" (2023). Owns no state. Every function is collective.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


class ContextExchange:
    """`trainer.model.attention.Exchange` over a process group: every function is collective, and so is its gradient."""

    def __init__(self, group: Any) -> None:
        self._group = group
        self.rank = dist.get_rank(group)
        self.size = dist.get_world_size(group)

    def to_heads(self, x: Tensor) -> Tensor:
        """Exchange (1, heads, own tokens, width) for (1, own heads, tokens, width)."""
        found: Tensor = _Swap.apply(x, 1, 2, self._group)
        return found

    def to_tokens(self, x: Tensor) -> Tensor:
        """Exchange (1, own heads, tokens, width) for (1, heads, own tokens, width)."""
        found: Tensor = _Swap.apply(x, 2, 1, self._group)
        return found

    def total(self, x: Tensor) -> Tensor:
        """Return the sum over the ranks; its gradient is each rank's own."""
        found: Tensor = _Total.apply(x, self._group)
        return found


class _Swap(torch.autograd.Function):
    """Cuts a tensor along one dimension, one piece for each rank, and joins what it gets of them along another."""

    @staticmethod
    def forward(context: Any, x: Tensor, cut: int, join: int, group: Any) -> Tensor:
        context.arguments = cut, join, group
        sent = torch.stack(x.chunk(dist.get_world_size(group), cut))
        got = torch.empty_like(sent)
        dist.all_to_all_single(got, sent, group=group)
        return torch.cat([*got], join)

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        cut, join, group = context.arguments
        return _Swap.apply(gradient, join, cut, group), None, None, None


class _Total(torch.autograd.Function):
    """A sum over ranks that all continue with alike, so that the gradient of each rank's part is that of the sum."""

    @staticmethod
    def forward(context: Any, x: Tensor, group: Any) -> Tensor:
        total = x.clone()
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient, None
