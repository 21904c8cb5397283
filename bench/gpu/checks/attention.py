"""Attention over spans against all scores in float64, forward and backward, and the seconds that its kernels take to compile."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from itertools import product

import torch
from torch import Tensor

from bench.gpu.all_scores import all_scores
from bench.gpu.batches import branching
from bench.gpu.checks.place import Figures, Place, require
from trainer.data.packing import lay_out
from trainer.data.tree import rows_of
from trainer.model.attention import Scoring, attend
from trainer.model.forest import Forest

SEVERAL = 4.0
"""How many times the error of all scores in the same dtype and on the same device another order of sums may have."""
SCORINGS = {
    "plain": Scoring(),
    "window": Scoring(window=24),
    "softcap": Scoring(softcap=0.5),
    "scale": Scoring(scale=0.3),
    "sinks": Scoring(window=24, sinks=torch.tensor([-1.0, 0.0, 1.0, 2.0])),
}
_PARTS = ("output", "query", "key", "value")


def forest(device: str, *, shared: bool) -> Forest:
    """Return two groups of episodes that branch: spans with long prefixes, and tokens that do not see one another.

    Or, not `shared`, their rows one by one, which another kernel computes.
    """
    rows = rows_of([(episode, {}) for group in branching() for episode in group.episodes]).rows
    micro = lay_out(rows, share_prefixes=shared)
    return Forest(micro.positions.to(device), micro.ends.to(device))


def measure(place: Place) -> Figures:
    """Return, by dtype, the seconds of the first pass and the largest error as a share of the error that is allowed."""
    figures: Figures = {}
    worst = ("", 0.0)
    for dtype in (torch.bfloat16, torch.float32):
        name = str(dtype).removeprefix("torch.")
        began = time.perf_counter()
        for (scoring, given), shared in product(SCORINGS.items(), (True, False)):
            part, share = largest_error(place.device, dtype, given, shared=shared)
            case = f"{name} {scoring} {part}{'' if shared else ', rows apart'}"
            worst = max(worst, (case, share), key=lambda found: found[1])
        figures[f"{name}_s"] = round(time.perf_counter() - began, 2)
    figures |= {"worst": worst[0], "share_of_bound": worst[1]}
    return require(worst[1] < 1.0, f"attention is wrong: {worst[0]}", figures)


def largest_error(device: str, dtype: torch.dtype, scoring: Scoring, *, shared: bool) -> tuple[str, float]:
    """Return the part with the largest error, and the error as a share of the bound."""
    torch.manual_seed(1)
    reference = forest("cpu", shared=shared).positions
    made = [torch.randn(1, heads, len(reference), 64, dtype=torch.float64) for heads in (4, 2, 2)]
    cotangent = torch.randn(1, 4, len(reference), 64, dtype=torch.float64)
    exact = [x.to(dtype).double().requires_grad_() for x in made]
    expected = _both_ways(partial(all_scores, reference, scoring=scoring), exact, cotangent)
    given = [x.to(device, dtype).requires_grad_() for x in made]
    found = _both_ways(partial(attend, forest(device, shared=shared), scoring=scoring), given, cotangent)
    again = [x.detach().requires_grad_() for x in given]
    plain = _both_ways(partial(all_scores, reference, scoring=scoring), again, cotangent)
    shares = {
        part: _error(ours, right) / (SEVERAL * _error(simple, right))
        for part, ours, simple, right in zip(_PARTS, found, plain, expected, strict=True)
    }
    part = max(shares, key=lambda name: shares[name])
    return part, shares[part]


def _both_ways(of: Callable[..., Tensor], inputs: list[Tensor], cotangent: Tensor) -> list[Tensor]:
    """Return the output of a function of the inputs and the gradients, in float64 on the CPU."""
    found = of(*inputs)
    gradients = torch.autograd.grad(found, inputs, cotangent.to(found))
    return [tensor.detach().double().cpu() for tensor in (found, *gradients)]


def _error(found: Tensor, exact: Tensor) -> float:
    return float((found - exact).norm() / exact.norm())
