"""AdamW whose moments are bfloat16 by stochastic rounding: half the memory of float32's.

A decay rate of 0.999 changes a moment by a thousandth, and bfloat16's numbers are 1/256 apart: rounded to the nearest, most
changes are lost. Rounded up with the probability of the lost part, they are right in the mean. Weights and gradients keep their
precision. Invariants: the random numbers of a step depend only on the weight's number and its count of steps, so a resumed run
makes the same steps bit by bit; a step needs memory for `_PIECE` numbers of each kind in addition.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from trainer.model.parallel import local

_PIECE = 2**24
"""Numbers that are computed in float32 at a time."""
_STRIDE = 1_000_003
"""Separates the seeds of a weight's steps from those of the next weight."""


class RoundedAdamW(torch.optim.Optimizer):
    """AdamW as torch has it, but for the precision of its moments."""

    def __init__(self, weights: Iterable[tuple[int, nn.Parameter]], **options: Any) -> None:
        """`weights`: with numbers that stay the same from run to run. `options`: those of `torch.optim.AdamW`."""
        super().__init__([{"params": [weight], "number": number} for number, weight in weights], options)

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Change the weights by their gradients."""
        assert closure is None
        for group in self.param_groups:
            for weight in group["params"]:
                if weight.grad is not None:
                    self._step(weight, group)

    def _step(self, weight: nn.Parameter, group: dict[str, Any]) -> None:
        entry = self.state[weight]
        if not entry:
            entry.update(empty(weight))
        entry["step"] += 1
        count = int(entry["step"])
        assert weight.grad is not None
        tensors = (weight, weight.grad, entry["exp_avg"], entry["exp_avg_sq"])
        generator = torch.Generator(local(weight).device).manual_seed(group["number"] * _STRIDE + count)
        pieces = (local(tensor).view(-1).split(_PIECE) for tensor in tensors)
        for weights, gradient, mean, square in zip(*pieces, strict=True):
            _step_piece(weights, gradient.float(), mean, square, count, group, generator)


def empty(weight: Tensor) -> dict[str, Tensor]:
    """Return the moments of a weight before its first step."""
    kept = {key: torch.zeros_like(weight.detach(), dtype=torch.bfloat16) for key in ("exp_avg", "exp_avg_sq")}
    return {"step": torch.zeros(()), **kept}


def _step_piece(
    weights: Tensor,
    gradient: Tensor,
    mean: Tensor,
    square: Tensor,
    count: int,
    group: dict[str, Any],
    generator: torch.Generator,
) -> None:
    """Source: Loshchilov and Hutter, "Decoupled Weight Decay Regularization" (2019), algorithm 2."""
    (beta1, beta2), lr = group["betas"], group["lr"]
    first = mean.float().lerp_(gradient, 1 - beta1)
    second = square.float().mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
    mean.copy_(rounded(first, generator))
    square.copy_(rounded(second, generator))
    denominator = second.sqrt_().div_((1 - beta2**count) ** 0.5).add_(group["eps"])
    weights.mul_(1 - lr * group["weight_decay"])
    weights.add_(first.div_(denominator).to(weights.dtype), alpha=-lr / (1 - beta1**count))


def rounded(x: Tensor, generator: torch.Generator) -> Tensor:
    """Return float32 numbers in bfloat16: of its two neighbors one, whose mean over the random numbers is `x`."""
    noise = torch.randint(0, 2**16, x.shape, dtype=torch.int32, device=x.device, generator=generator)
    # bfloat16 is the upper half of float32: what is added to the lower half carries over with the right probability.
    return noise.add_(x.view(torch.int32)).bitwise_and_(-(2**16)).view(torch.float32).bfloat16()
