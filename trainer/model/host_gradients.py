"""Gradients whose sums are in the host's memory, for devices that have room for weights and one layer's gradients alone.

A weight's gradient leaves as soon as a backward pass has made it: it is added to the earlier ones on the device, piece by piece,
and copied to the host. The optimizer has one weight's gradient at a time. Owns the sums.
Invariant: on one rank, a sum and a step are those of gradients on the device, bit by bit.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.linalg import vector_norm

from trainer.model.parallel import by_mesh, local, whole

_PIECE = 2**24
"""Numbers of a piece, of which the device has one in addition: 64 MiB, a power of two, to which pinned memory is rounded up."""
_EPS = 1e-6
"""Added to the norm by which gradients are cut, as `torch.nn.utils.clip_grad_norm_` does."""


class HostGradients:
    """The summed gradients of some weights, whose own `grad` is None between passes."""

    def __init__(self, weights: Iterable[nn.Parameter]) -> None:
        self._sums: dict[nn.Parameter, list[Tensor]] = {}
        """Pieces of each sum, kept for the next one: pinning is slow."""
        self._summed: set[nn.Parameter] = set()
        self._divisor = 1.0
        self._share: Tensor | None = None
        self._weights = [*weights]
        for weight in self._weights:
            weight.register_post_accumulate_grad_hook(self._add)

    @torch.no_grad()
    def _add(self, weight: Tensor) -> None:
        """Add a weight's gradient to its sum, and free it. On the stream that made it, so that no copy is early."""
        assert isinstance(weight, nn.Parameter) and weight.grad is not None
        gradient, weight.grad = local(weight.grad), None
        if gradient.is_cuda:
            gradient.record_stream(torch.cuda.current_stream(gradient.device))
        pieces = gradient.reshape(-1).split(_PIECE)
        if weight not in self._sums:
            self._sums[weight] = [_on_host(piece) for piece in pieces]
        for piece, total in zip(pieces, self._sums[weight], strict=True):
            if weight in self._summed:
                piece.add_(total.to(piece.device, non_blocking=True))
            total.copy_(piece, non_blocking=True)
        self._summed.add(weight)

    @contextmanager
    def at_hand(self, weights: Iterable[nn.Parameter]) -> Iterator[None]:
        """Give the weights their gradients, divided and cut, in the block."""
        chosen = [weight for weight in weights if weight in self._summed]
        for weight in chosen:
            weight.grad = self._gradient(weight)
        yield
        for weight in chosen:
            weight.grad = None

    @torch.no_grad()
    def _gradient(self, weight: nn.Parameter) -> Tensor:
        found = torch.empty_like(weight)
        own = local(found)
        for piece, total in zip(own.view(-1).split(_PIECE), self._sums[weight], strict=True):
            piece.copy_(total, non_blocking=True)
        own.div_(self._divisor)
        if self._share is not None:
            own.mul_(self._share)
        return found

    def divide_and_clip(self, divisor: float, largest: float) -> float:
        """Divide the gradients, cut their norm to `largest`, and return the norm before the cut. Collective."""
        self._divisor = divisor
        summed = [weight for weight in self._weights if weight in self._summed]  # in the order of the sum
        parts = [[vector_norm(self._gradient(weight)) for weight in part] for part in by_mesh(summed)]
        norms = [whole(vector_norm(torch.stack(part))) for part in parts]
        norm = norms[0] if len(norms) == 1 else vector_norm(torch.stack(norms))
        self._share = (largest / (norm + _EPS)).clamp(max=1.0)
        return float(norm)

    def clear(self) -> None:
        """Discard the sums."""
        self._summed, self._divisor, self._share = set(), 1.0, None


def _on_host(piece: Tensor) -> Tensor:
    return torch.empty(piece.shape, dtype=piece.dtype, pin_memory=piece.is_cuda)
