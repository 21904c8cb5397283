"""Attention over a forest of token spans: one function that any Hugging Face decoder calls in place of its own.

Token q sees token k if `k <= q < ends[k]` (`trainer.data.packing`), and within a layer's sliding window. Softcapping and sinks
are honoured as the layer gives them. `attend` chooses the way: FlexAttention where it is compiled (GPUs), else scaled dot-product
attention by span, which is also the float64 reference. Owns the entry `NAME` of transformers' two registries.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from itertools import pairwise
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention
from transformers import AttentionInterface, AttentionMaskInterface

NAME = "headgate_spans"


@dataclass(frozen=True, slots=True)
class Span:
    """A run of consecutive tokens of one path, and the tokens before it on that path."""

    length: int
    prefix: tuple[tuple[int, int], ...]
    """(span, n): the first n tokens of an earlier span, from the root on."""
    before: int
    """Tokens of the prefix."""


class Forest:
    """The attention pattern of one micro-batch: which tokens see which."""

    def __init__(self, positions: Tensor, ends: Tensor) -> None:
        """Both have shape (tokens,), int64."""
        self.positions = positions
        self.ends = ends
        self._block_masks: dict[int | None, BlockMask] = {}
        self._causal_masks: dict[tuple[int, int, int | None], Tensor] = {}

    @cached_property
    def spans(self) -> Sequence[Span]:
        """The spans, in order."""
        positions = self.positions.tolist()
        starts = [i for i, position in enumerate(positions) if i == 0 or position != positions[i - 1] + 1]
        found: list[Span] = []
        path: tuple[tuple[int, int], ...] = ()
        for start, stop in pairwise([*starts, len(positions)]):
            prefix = _cut(path, positions[start])
            found.append(Span(stop - start, prefix, positions[start]))
            path = (*prefix, (len(found) - 1, stop - start))
        return found

    def causal_mask(self, span: Span, window: int | None) -> Tensor:
        """bool, (span, prefix and span): true where the query sees the key."""
        key = (span.length, span.before, window)
        if key not in self._causal_masks:
            device = self.positions.device
            queries = torch.arange(span.before, span.before + span.length, device=device)[:, None]
            distance = queries - torch.arange(span.before + span.length, device=device)
            mask = distance >= 0
            self._causal_masks[key] = mask if window is None else mask & (distance < window)
        return self._causal_masks[key]

    def block_mask(self, window: int | None) -> BlockMask:
        """The same as a mask for FlexAttention, made once for each width of the window."""
        if window not in self._block_masks:
            self._block_masks[window] = self._block_mask(window)
        return self._block_masks[window]

    def _block_mask(self, window: int | None) -> BlockMask:
        positions, ends, n = self.positions, self.ends, len(self.positions)

        def sees(batch: Tensor, head: Tensor, q: Tensor, k: Tensor) -> Tensor:
            seen = (k <= q) & (q < ends[k])
            return seen if window is None else seen & (positions[q] - positions[k] < window)

        return create_block_mask(sees, None, None, n, n, device=str(positions.device))


class Exchange(Protocol):
    """The ranks that share one micro-batch (`trainer.model.parallel`): each has a run of its tokens, and between `to_heads` and
    `to_tokens` all tokens of some heads. Each function is collective, and has a gradient.

    Source: Jacobs et al., "DeepSpeed Ulysses" (2023).
    """

    rank: int
    size: int

    def to_heads(self, x: Tensor) -> Tensor:
        """(1, heads, own tokens, width) to (1, own heads, tokens, width)."""

    def to_tokens(self, x: Tensor) -> Tensor:
        """(1, own heads, tokens, width) to (1, heads, own tokens, width)."""

    def total(self, x: Tensor) -> Tensor:
        """The sum over the ranks, from which all go on alike: the gradient of each is that of its own part."""


class Holder:
    """The forest of the micro-batch that is at work in a model; each of the model's modules has it as `spans`.

    An attribute, and not a context variable, for layers are run again by autograd's own threads.
    """

    def __init__(self, exchange: Exchange | None = None) -> None:
        self.forest: Forest | None = None
        self.exchange = exchange


def install(model: Any, exchange: Exchange | None = None) -> Holder:
    """Makes a model attend by spans. A forward pass needs a forest in the holder, `attention_mask=None` and one row.

    With an exchange, a pass is given this rank's run of the tokens alone.
    """
    AttentionInterface.register(NAME, _attention)
    AttentionMaskInterface.register(NAME, _no_mask)
    holder = Holder(exchange)
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
    exchange = module.spans.exchange
    if exchange is not None:
        if s_aux is not None:
            s_aux = s_aux.chunk(exchange.size)[exchange.rank]
        key, value = (_for_each_rank(x, exchange.size) for x in (key, value))
        query, key, value = (exchange.to_heads(x) for x in (query, key, value))
    found = attend(forest, query, key, value, Scoring(scaling, sliding_window, softcap, s_aux))
    if exchange is not None:
        found = exchange.to_tokens(found)
    return found.transpose(1, 2), None


def _for_each_rank(x: Tensor, ranks: int) -> Tensor:
    """Keys or values with a multiple of `ranks` heads: fewer are repeated, as grouped queries do anyway."""
    heads = x.shape[1]
    return x.repeat_interleave(math.lcm(heads, ranks) // heads, 1)


@dataclass(frozen=True, slots=True)
class Scoring:
    """How a layer makes weights of queries and keys, beside who sees whom."""

    scale: float | None = None
    """The factor of scores; None: one over the root of the head's size."""
    window: int | None = None
    """How far back a token sees, itself included."""
    softcap: float | None = None
    """Scores are bounded by softcap * tanh(score / softcap)."""
    sinks: Tensor | None = None
    """(heads,): scores to which nothing belongs."""


def attend(forest: Forest, query: Tensor, key: Tensor, value: Tensor, scoring: Scoring) -> Tensor:
    """Attention of every token to those that it sees, shape (1, heads, tokens, size).

    `key` and `value` may have fewer heads (grouped queries).
    """
    if query.is_cuda and scoring.sinks is None:
        return by_flex(forest, query, key, value, scoring)
    return by_span(forest, query, key, value, scoring)


def by_flex(
    forest: Forest, query: Tensor, key: Tensor, value: Tensor, scoring: Scoring, backend: str | None = None
) -> Tensor:
    """`attend` by FlexAttention, without sinks; on the CPU without gradient and uncompiled, unless `backend` compiles it."""
    softcap = scoring.softcap

    def capped(score: Tensor, *_: Tensor) -> Tensor:
        return score if softcap is None else softcap * torch.tanh(score / softcap)

    backend = backend or ("inductor" if query.is_cuda else None)
    kernel: Any = _compiled(backend) if backend else flex_attention
    with torch._dynamo.config.patch(_CAPTURE):
        found: Tensor = kernel(
            query,
            key,
            value,
            score_mod=capped if softcap else None,
            block_mask=forest.block_mask(scoring.window),
            scale=scoring.scale,
            enable_gqa=True,
        )
    return found


_CAPTURE = {"specialize_float": True, "recompile_limit": 64}
"""FlexAttention cannot take a soft cap as an input of the graph. Kinds of layers, with and without gradients, in each precision,
are more graphs than the 8 at which torch stops."""


@cache
def _compiled(backend: str) -> Any:
    """FlexAttention without compilation has no kernel, and materialises all scores: what cannot be compiled whole raises."""
    return torch.compile(flex_attention, dynamic=True, fullgraph=True, backend=backend)


def by_span(forest: Forest, query: Tensor, key: Tensor, value: Tensor, scoring: Scoring) -> Tensor:
    """`attend` span by span: each against its own path's keys."""
    # Not slices: the gradient of each would be a tensor of all tokens.
    parts = [x.split([span.length for span in forest.spans], 2) for x in (query, key, value)]
    found = []
    for number, span in enumerate(forest.spans):
        q, (k, v) = parts[0][number], (_of_path(x, span, number) for x in parts[1:])
        within = scoring.window is None or k.shape[2] <= scoring.window
        mask = None if within and not span.before else forest.causal_mask(span, scoring.window)
        if scoring.softcap is None and scoring.sinks is None:
            out = F.scaled_dot_product_attention(
                q, k, v, attn_mask=mask, is_causal=mask is None, scale=scoring.scale,
                enable_gqa=q.shape[1] != k.shape[1],
            )  # fmt: skip
        else:
            out = _explicit(q, k, v, forest.causal_mask(span, scoring.window), scoring)
        found.append(out)
    return torch.cat(found, 2)


def _cut(path: Sequence[tuple[int, int]], tokens: int) -> tuple[tuple[int, int], ...]:
    """The first `tokens` tokens of a path."""
    found = []
    for span, n in path:
        if tokens > 0:
            found.append((span, min(n, tokens)))
        tokens -= n
    return tuple(found)


def _of_path(parts: Sequence[Tensor], span: Span, number: int) -> Tensor:
    """The keys or values of a span and of what is before it."""
    if not span.prefix:
        return parts[number]
    return torch.cat([*(parts[earlier][:, :, :n] for earlier, n in span.prefix), parts[number]], 2)


def _explicit(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, scoring: Scoring) -> Tensor:
    """Attention with all scores in memory, for what no kernel of PyTorch knows."""
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    scores = q @ k.transpose(2, 3) * (scoring.scale if scoring.scale is not None else q.shape[3] ** -0.5)
    if scoring.softcap is not None:
        scores = scoring.softcap * torch.tanh(scores / scoring.softcap)
    scores = scores.masked_fill(~mask, -torch.inf)
    if scoring.sinks is not None:
        column = scoring.sinks.to(scores.dtype)[None, :, None, None].expand(*scores.shape[:3], 1)
        scores = torch.cat([scores, column], 3)
    weights = scores.softmax(-1, dtype=torch.promote_types(scores.dtype, torch.float32)).to(v.dtype)
    return weights[..., : k.shape[2]] @ v
