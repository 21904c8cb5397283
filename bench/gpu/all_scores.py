"""The reference for `trainer.model.attention`: all scores in memory, and who sees whom by the tokens' paths."""

from __future__ import annotations

import torch
from torch import Tensor

from trainer.model.attention import Scoring


def seen(positions: Tensor, window: int | None = None) -> Tensor:
    """Return, as bool of shape (tokens, tokens), which query (row) sees which key.

    The tokens are in depth-first order: the one before a token on its path is the last one whose position is one less.
    """
    n = len(positions)
    found = torch.zeros(n, n, dtype=torch.bool)
    latest: dict[int, int] = {}
    for token, position in enumerate(positions.tolist()):
        if position > 0:
            found[token] = found[latest[position - 1]]
        found[token, token] = True
        latest[position] = token
    return found if window is None else found & (positions[:, None] - positions < window)


def all_scores(positions: Tensor, query: Tensor, key: Tensor, value: Tensor, scoring: Scoring) -> Tensor:
    """Return attention, shape (1, heads, tokens, size); the arguments are those of `trainer.model.attention.attend`."""
    key, value = (x.repeat_interleave(query.shape[1] // x.shape[1], 1) for x in (key, value))
    scores = query @ key.mT * (query.shape[3] ** -0.5 if scoring.scale is None else scoring.scale)
    if scoring.softcap is not None:
        scores = scoring.softcap * torch.tanh(scores / scoring.softcap)
    scores = scores.masked_fill(~seen(positions, scoring.window).to(scores.device), -torch.inf)
    if scoring.sinks is not None:
        column = scoring.sinks.to(scores)[None, :, None, None].expand(*scores.shape[:3], 1)
        scores = torch.cat([scores, column], 3)
    return scores.softmax(-1)[..., : len(positions)] @ value
