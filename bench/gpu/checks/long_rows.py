"""Long rows: the memory and time of the mask over spans, and of the output head, which may not grow with pairs of tokens."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from itertools import pairwise

import torch
from torch import Tensor, nn

from bench.gpu.checks.place import Figures, Place, require
from trainer.data.packing import lay_out
from trainer.data.tree import row_of_tokens
from trainer.model.forest import Forest
from trainer.model.head import Head, token_logprobs

LINEAR = 3.0
"""What twice the tokens may take: twice, and what a device rounds; pairs of tokens would take four times."""
_TOKENS, _DRY_TOKENS = (16_384, 32_768, 65_536), (512, 1024, 2048)
_WIDTH, _VOCABULARY = 1024, 151_936
_DRY_WIDTH, _DRY_VOCABULARY = 32, 512


def measure(place: Place) -> Figures:
    """Return, by tokens, seconds and GiB of the block mask and of the head's forward and backward pass."""
    figures: Figures = {"mask": {}, "head": {}}
    for tokens in _DRY_TOKENS if place.dry else _TOKENS:
        micro = lay_out([row_of_tokens((0,) * tokens)])
        on_device = micro.positions.to(place.device), micro.ends.to(place.device)
        figures["mask"][tokens] = _cost(place, partial(_mask, *on_device))
        figures["head"][tokens] = _cost(place, partial(_head, place, tokens))
    if place.dry:
        return figures
    for name in ("mask", "head"):
        for (few, less), (many, more) in pairwise(figures[name].items()):
            growth = (more["gib"] + 0.01) / (less["gib"] + 0.01)
            require(
                growth < LINEAR, f"{name}: {many} tokens take {growth:.1f} times as much as {few}", figures
            )
    return figures


def _mask(positions: Tensor, ends: Tensor) -> None:
    Forest(positions, ends).block_mask(None)


def _head(place: Place, tokens: int) -> None:
    width, vocabulary = (_DRY_WIDTH, _DRY_VOCABULARY) if place.dry else (_WIDTH, _VOCABULARY)
    layer = nn.Linear(width, vocabulary, bias=False, device=place.device, dtype=torch.bfloat16)
    hidden = torch.randn(tokens, width, device=place.device, dtype=torch.bfloat16, requires_grad=True)
    ids = torch.zeros(tokens, dtype=torch.int64, device=place.device)
    ones = torch.ones(tokens, device=place.device)
    logprobs, _ = token_logprobs(Head(layer), hidden, ids, ones, vocabulary, with_entropy=False)
    logprobs.sum().backward()


def _cost(place: Place, act: Callable[[], object]) -> dict[str, float]:
    """Return the seconds and the most GiB of the second of two runs."""
    act()
    before = 0
    if not place.dry:
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
    began = time.perf_counter()
    act()
    if place.dry:
        return {"s": time.perf_counter() - began, "gib": 0.0}
    torch.cuda.synchronize()
    return {"s": time.perf_counter() - began, "gib": (torch.cuda.max_memory_allocated() - before) / 2**30}
