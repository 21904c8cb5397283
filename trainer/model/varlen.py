"""Attention of rows that share no prefix, each by itself: FlashAttention's kernel for rows of varying length, as PyTorch has it.

On the CPU, PyTorch's own attention computes one row after another. Owns no state.
Source: Dao, "FlashAttention-2" (2023).
"""

from __future__ import annotations

from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.varlen import varlen_attn

from trainer.model.forest import Rows

_WIDEST = 256
"""The kernel's largest size of a head, which must be a multiple of `_STEP`."""
_STEP = 8
_HALF = (torch.bfloat16, torch.float16)


def lacks(query: Tensor, value: Tensor, *, softcap: bool, sinks: bool) -> str:
    """Return what of a layer's attention the kernel lacks; an empty string if nothing."""
    size = query.shape[3]
    if softcap:
        return "a soft cap of its scores"
    if sinks:
        return "sinks"
    if value.shape[3] != size:
        return f"values of another size ({value.shape[3]}) than its keys ({size})"
    if query.is_cuda and (size > _WIDEST or size % _STEP):
        return f"heads of size {size} (at most {_WIDEST}, in steps of {_STEP})"
    if query.is_cuda and query.dtype not in _HALF:
        return f"numbers of {str(query.dtype).removeprefix('torch.')}"
    return ""


def attend_by_rows(
    rows: Rows,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    scale: float | None = None,
    window: int | None = None,
) -> Tensor:
    """Return the attention of every token to the tokens of its row up to itself, the last `window` of them.

    All have shape (1, heads, tokens, size), as the result; `key` and `value` may have fewer heads (grouped queries).
    """
    if not query.is_cuda:
        parts = []
        for a, b in pairwise(rows.starts.tolist()):
            q, k, v = (x[:, :, a:b] for x in (query, key, value))
            parts.append(_row(q, k, v, scale, window))
        return torch.cat(parts, 2)
    q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))
    found = varlen_attn(
        q,
        k,
        v,
        rows.starts,
        rows.starts,
        rows.longest,
        rows.longest,
        scale=scale,
        window_size=(-1 if window is None else window - 1, 0),
        enable_gqa=True,
    )
    assert isinstance(found, Tensor)
    return found.transpose(0, 1)[None]


def _row(query: Tensor, key: Tensor, value: Tensor, scale: float | None, window: int | None) -> Tensor:
    seen = None
    if window is not None and window < query.shape[2]:
        at = torch.arange(query.shape[2], device=query.device)
        seen = (at <= at[:, None]) & (at[:, None] - at < window)
    return F.scaled_dot_product_attention(
        query, key, value, attn_mask=seen, is_causal=seen is None, scale=scale, enable_gqa=True
    )
