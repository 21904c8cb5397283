"""Attention over a forest of token spans: one function that any Hugging Face decoder calls in place of its own.

Token q sees token k if `k <= q < ends[k]` (`trainer.data.packing`), and within a layer's sliding window. Softcapping and sinks
are honoured as the layer gives them. `attend` chooses the way: FlexAttention where it is compiled (GPUs), else scaled dot-product
attention by span, which is also the float64 reference. Owns the entry `NAME` of transformers' two registries.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention
from transformers import AttentionInterface, AttentionMaskInterface

NAME = "headgate_spans"


@dataclass(frozen=True, slots=True)
class Span:
    """Tokens [start, stop) of one row, and the tokens before them on their path."""

    start: int
    stop: int
    prefix: Tensor | None
    """int64: indices of the tokens before `start` on the path; None without any."""


class Forest:
    """Who sees whom in one micro-batch."""

    def __init__(self, positions: Tensor, ends: Tensor) -> None:
        """Both have shape (tokens,), int64."""
        self.positions = positions
        self.ends = ends

    @cached_property
    def spans(self) -> Sequence[Span]:
        """The runs of consecutive tokens of a path, in order."""
        positions = self.positions.tolist()
        starts = [0, *(i for i in range(1, len(positions)) if positions[i] != positions[i - 1] + 1)]
        found = []
        for start, stop in zip(starts, [*starts[1:], len(positions)], strict=True):
            prefix = (self.ends[:start] > start).nonzero()[:, 0] if positions[start] else None
            found.append(Span(start, stop, prefix))
        return found

    def block_mask(self, window: int | None) -> BlockMask:
        """The same as a mask for FlexAttention, made once for each width of the window."""
        if window not in self._masks:
            self._masks[window] = self._block_mask(window)
        return self._masks[window]

    @cached_property
    def _masks(self) -> dict[int | None, BlockMask]:
        return {}

    def _block_mask(self, window: int | None) -> BlockMask:
        positions, ends, n = self.positions, self.ends, len(self.positions)

        def sees(batch: Tensor, head: Tensor, q: Tensor, k: Tensor) -> Tensor:
            seen = (k <= q) & (q < ends[k])
            return seen if window is None else seen & (positions[q] - positions[k] < window)

        return create_block_mask(sees, None, None, n, n, device=str(positions.device))


class Holder:
    """The forest of the micro-batch that is at work in a model; each of the model's modules has it as `spans`.

    An attribute, and not a context variable, for layers are run again by autograd's own threads.
    """

    def __init__(self) -> None:
        self.forest: Forest | None = None


def install(model: Any) -> Holder:
    """Makes a model attend by spans. A forward pass needs a forest in the holder, `attention_mask=None` and one row."""
    AttentionInterface.register(NAME, _attention)
    AttentionMaskInterface.register(NAME, _no_mask)
    holder = Holder()
    for module in model.modules():
        module.spans = holder
    model.set_attn_implementation(NAME)
    return holder


def _no_mask(*_: Any, **__: Any) -> None:
    """The forest is the mask."""


def _attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None = None,
    *,
    scaling: float | None = None,
    softcap: float | None = None,
    sliding_window: int | None = None,
    s_aux: Tensor | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """The interface of transformers: (1, heads, tokens, size) in, (1, tokens, heads, size) out."""
    forest = module.spans.forest
    assert forest is not None
    found = attend(forest, query, key, value, scaling, window=sliding_window, softcap=softcap, sinks=s_aux)
    return found.transpose(1, 2), None


def attend(
    forest: Forest,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    scale: float | None = None,
    *,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Attention of every token to those that it sees, shape (1, heads, tokens, size).

    `key` and `value` may have fewer heads (grouped queries). `softcap` bounds scores by softcap * tanh(score / softcap); `sinks`,
    of shape (heads,), are scores to which nothing belongs.
    """
    if query.is_cuda and sinks is None:
        return by_flex(forest, query, key, value, scale, window=window, softcap=softcap)
    return by_span(forest, query, key, value, scale, window=window, softcap=softcap, sinks=sinks)


def by_flex(
    forest: Forest,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    scale: float | None = None,
    *,
    window: int | None = None,
    softcap: float | None = None,
) -> Tensor:
    """`attend` by FlexAttention; on the CPU without gradient and uncompiled."""

    def capped(score: Tensor, *_: Tensor) -> Tensor:
        return score if softcap is None else softcap * torch.tanh(score / softcap)

    kernel: Any = _compiled() if query.is_cuda else flex_attention
    mask = forest.block_mask(window)
    found: Tensor = kernel(
        query,
        key,
        value,
        score_mod=capped if softcap else None,
        block_mask=mask,
        scale=scale,
        enable_gqa=True,
    )
    return found


_COMPILED: list[Any] = []


def _compiled() -> Any:
    """FlexAttention without compilation has no kernel, and materialises all scores."""
    if not _COMPILED:
        _COMPILED.append(torch.compile(flex_attention, dynamic=True))
    return _COMPILED[0]


def by_span(
    forest: Forest,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    scale: float | None = None,
    *,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """`attend` span by span: each against its own path's keys."""
    plain = softcap is None and sinks is None
    found = []
    for span in forest.spans:
        q, own = query[:, :, span.start : span.stop], slice(span.start, span.stop)
        k, v = (_of_path(x, span, own) for x in (key, value))
        before = k.shape[2] - q.shape[2]
        if plain and before == 0 and (window is None or k.shape[2] <= window):
            out = F.scaled_dot_product_attention(
                q, k, v, is_causal=True, scale=scale, enable_gqa=_grouped(q, k)
            )
        else:
            mask = _causal(q.shape[2], before, window, q.device)
            out = _masked(q, k, v, mask, scale, softcap, sinks)
        found.append(out)
    return torch.cat(found, 2)


def _of_path(x: Tensor, span: Span, own: slice) -> Tensor:
    mine = x[:, :, own]
    return mine if span.prefix is None else torch.cat([x.index_select(2, span.prefix), mine], 2)


def _grouped(query: Tensor, key: Tensor) -> bool:
    return query.shape[1] != key.shape[1]


def _causal(queries: int, before: int, window: int | None, device: torch.device) -> Tensor:
    """bool, (queries, before + queries): true where the query sees the key."""
    distance = (torch.arange(queries, device=device) + before)[:, None] - torch.arange(
        before + queries, device=device
    )
    return (distance >= 0) if window is None else (distance >= 0) & (distance < window)


def _masked(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor,
    scale: float | None,
    softcap: float | None,
    sinks: Tensor | None,
) -> Tensor:
    if softcap is None and sinks is None:
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale, enable_gqa=_grouped(q, k))
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    scores = q @ k.transpose(2, 3) * (scale if scale is not None else q.shape[3] ** -0.5)
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    scores = scores.masked_fill(~mask, -torch.inf)
    if sinks is not None:
        column = sinks.to(scores.dtype)[None, :, None, None].expand(*scores.shape[:3], 1)
        scores = torch.cat([scores, column], 3)
    weights = scores.softmax(-1, dtype=torch.promote_types(scores.dtype, torch.float32)).to(v.dtype)
    return weights[..., : k.shape[2]] @ v
