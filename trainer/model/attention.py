"""Attention over a forest of token spans: one function that any Hugging Face decoder calls instead of its own.

`trainer.model.forest` knows which token sees which. Windows, soft caps and sinks are honored as the layer or the model's mask
gives them; what else a mask may hold raises NotBySpans. `attend` computes by one of `KERNELS`: by default on a GPU,
FlashAttention where the rows of a micro-batch share no prefix (`trainer.model.varlen`), and FlexAttention where they do; for few
tokens in float32, and on the CPU, `trainer.model.block_attention`. Owns the entry `NAME` of transformers' two registries.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any, Protocol, cast

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import AuxRequest, flex_attention
from transformers import AttentionInterface, AttentionMaskInterface

from trainer.config.model import Kernel
from trainer.errors import ConfigError
from trainer.model import recurrent, varlen
from trainer.model.block_attention import attend_by_blocks
from trainer.model.forest import Forest

NAME = "headgate_spans"
_FEW = 8192
"""Tokens in float32 that are not worth a kernel, which takes one to several minutes to compile: the start check has fewer."""


class NotBySpans(ConfigError):
    """A model attends in a way that a forest of spans cannot express; the message names the way, and the setting that works."""


class Exchange(Protocol):
    """The ranks that share one micro-batch (`trainer.model.parallel`): each has a run of its tokens, and between `to_heads` and
    `to_tokens` all tokens of some heads. Each function is collective, and has a gradient.

    Source: Jacobs et al., "DeepSpeed Ulysses" (2023).
    """

    rank: int
    size: int

    def to_heads(self, x: Tensor) -> Tensor:
        """Exchange (1, heads, own tokens, width) for (1, own heads, tokens, width)."""

    def to_tokens(self, x: Tensor) -> Tensor:
        """Exchange (1, own heads, tokens, width) for (1, heads, own tokens, width)."""

    def total(self, x: Tensor) -> Tensor:
        """Return the sum over the ranks, from which all continue alike: the gradient of each is that of its own part."""


class Holder:
    """The forest of the micro-batch that is at work in a model; each of the model's modules has it as `spans`.

    An attribute, and not a context variable, for layers are run again by autograd's own threads.
    """

    def __init__(self, exchange: Exchange | None = None, kernel: Kernel = "auto") -> None:
        self.forest: Forest | None = None
        self.exchange = exchange
        self.kernel = kernel


def install(model: Any, exchange: Exchange | None = None, kernel: Kernel = "auto") -> Holder:
    """Make a model attend by spans. A forward pass needs a forest in the holder, `attention_mask=None` and one row.

    With an exchange, a pass receives only this rank's run of the tokens. A pass raises NotBySpans if the model requires more.
    """
    # Compiled layers call it between their graphs: it depends on a forest's values, and compiles its own kernel.
    AttentionInterface.register(NAME, torch.compiler.disable(_attention))
    AttentionMaskInterface.register(NAME, _window_mask)
    holder = Holder(exchange, kernel)
    for module in model.modules():
        module.spans = holder
        if getattr(module, "indexer", None) is not None:
            module.register_forward_pre_hook(_refuse_chosen_keys)
    model.set_attn_implementation(NAME)
    recurrent.install(model, holder)
    return holder


def _refuse_chosen_keys(module: Any, _: Any) -> None:
    """Raise NotBySpans in a pass by spans, if a layer's indexer chooses the keys that each token attends to."""
    if module.spans.forest is not None:
        raise _refused(module.config, "chooses the keys of each token by an indexer")


def _window_mask(
    *_: Any, config: Any, q_length: int, local_size: int | None = None, use_vmap: bool = False, **__: Any
) -> Tensor | None:
    """Return the forest is the mask, but for a window, which some models (Qwen2-MoE, PhiMoE) put into their mask alone.

    That is returned as a mask whose every number is the window: int64, shape (1, 1, tokens, tokens), one number in memory.
    """
    if local_size is not None and local_size == getattr(config, "attention_chunk_size", None):
        raise NotBySpans(
            f"[model] path: {config.model_type} attends within chunks of its rows (attention_chunk_size = {local_size}),"
            " which this trainer does not compute"
        )
    if use_vmap:
        raise _refused(config, "makes a mask of its own")
    if local_size is None:
        return None
    # On the CPU, where reading it waits for no queue of kernels.
    return torch.tensor(local_size).expand(1, 1, q_length, q_length)


def _window_of(mask: Tensor, module: Any) -> int:
    """Return what `_window_mask` put into a mask. Raise NotBySpans for any other mask."""
    if mask.dtype != torch.int64:
        raise _refused(module.config, "makes a mask of its own")
    return int(mask[0, 0, 0, 0])


def _refused(config: Any, what: str) -> NotBySpans:
    return NotBySpans(
        f'[model] attention = "spans": {config.model_type} {what}; set attention = "rows": every path is then computed'
        " separately, by the model's own attention"
    )


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
    """Return the interface of transformers: (1, heads, tokens, size) in, (1, tokens, heads, size) out, contiguous."""
    forest = module.spans.forest
    assert forest is not None
    if key.shape[2] != query.shape[2]:
        raise _refused(
            module.config,
            f"attends to {key.shape[2]} keys from {query.shape[2]} tokens (compressed attention, or a cache)",
        )
    if attention_mask is not None:
        window = _window_of(attention_mask, module)
        sliding_window = window if sliding_window is None else sliding_window
    exchange = module.spans.exchange
    if exchange is not None:
        if s_aux is not None:
            s_aux = s_aux.chunk(exchange.size)[exchange.rank]
        key, value = (_for_each_rank(x, exchange.size) for x in (key, value))
        query, key, value = (exchange.to_heads(x) for x in (query, key, value))
    scoring = Scoring(scaling, sliding_window, softcap, s_aux)
    found = attend(forest, query, key, value, scoring, module.spans.kernel)
    if exchange is not None:
        found = exchange.to_tokens(found)
    return found.transpose(1, 2).contiguous(), None


def _for_each_rank(x: Tensor, ranks: int) -> Tensor:
    """Return keys or values with a multiple of `ranks` heads: fewer are repeated, as grouped queries do anyway."""
    heads = x.shape[1]
    return x.repeat_interleave(math.lcm(heads, ranks) // heads, 1)


@dataclass(frozen=True, slots=True)
class Scoring:
    """How a layer makes weights of queries and keys, given who sees whom."""

    scale: float | None = None
    """The factor of scores; None: one over the root of the head's size."""
    window: int | None = None
    """How far back a token sees, itself included."""
    softcap: float | None = None
    """Scores are bounded by softcap * tanh(score / softcap)."""
    sinks: Tensor | None = None
    """(heads,): scores to which nothing belongs."""


def attend(
    forest: Forest, query: Tensor, key: Tensor, value: Tensor, scoring: Scoring, kernel: Kernel = "auto"
) -> Tensor:
    """Return the attention of every token to those that it sees, shape (1, heads, tokens, size).

    `key` and `value` may have fewer heads (grouped queries). Memory grows with tokens, and not with pairs of tokens.
    Raise NotBySpans if `kernel` cannot compute it.
    """
    is_small = query.is_cuda and query.dtype == torch.float32 and len(forest) <= _FEW
    if is_small or (kernel == "auto" and not query.is_cuda):
        kernel = "blocks"
    if kernel == "auto":
        kernel = "flex" if _not_by_rows(forest, query, value, scoring) else "varlen"
    return KERNELS[kernel](forest, query, key, value, scoring)


def _not_by_rows(forest: Forest, query: Tensor, value: Tensor, scoring: Scoring) -> str:
    """Return what keeps attention from `by_rows`; an empty string if nothing does."""
    softcap, sinks = scoring.softcap is not None, scoring.sinks is not None
    if why := varlen.lacks(query, value, softcap=softcap, sinks=sinks):
        return why
    return "" if forest.rows is not None else "prefixes that its rows share"


def by_rows(forest: Forest, query: Tensor, key: Tensor, value: Tensor, scoring: Scoring) -> Tensor:
    """Compute `attend` for rows that share no prefix. Raise NotBySpans for what the kernel lacks."""
    if why := _not_by_rows(forest, query, value, scoring):
        raise NotBySpans(
            f"[model] attention_kernel = \"varlen\": this model's attention has {why}, which FlashAttention's kernel does not"
            ' compute; set attention_kernel = "auto"'
        )
    assert forest.rows is not None
    return varlen.attend_by_rows(forest.rows, query, key, value, scoring.scale, scoring.window)


def by_blocks(forest: Forest, query: Tensor, key: Tensor, value: Tensor, scoring: Scoring) -> Tensor:
    """Compute `attend` on any device, in PyTorch."""
    scale = query.shape[3] ** -0.5 if scoring.scale is None else scoring.scale
    found, sums = attend_by_blocks(forest, query, key, value, scale, scoring.window, scoring.softcap)
    return found if scoring.sinks is None else _with_sinks(found, sums, scoring.sinks)


def by_flex(
    forest: Forest, query: Tensor, key: Tensor, value: Tensor, scoring: Scoring, backend: str | None = None
) -> Tensor:
    """Compute `attend` by FlexAttention; on the CPU without gradient and uncompiled, unless `backend` compiles it."""
    softcap = scoring.softcap

    def capped(score: Tensor, *_: Tensor) -> Tensor:
        return score if softcap is None else softcap * torch.tanh(score / softcap)

    backend = backend or ("inductor" if query.is_cuda else None)
    kernel: Any = _compiled(backend) if backend else flex_attention
    options: dict[str, Any] = {} if scoring.sinks is None else {"return_aux": AuxRequest(lse=True)}
    with torch._dynamo.config.patch(_CAPTURE):
        found: Any = kernel(
            query,
            key,
            value,
            score_mod=capped if softcap else None,
            block_mask=forest.block_mask(scoring.window),
            scale=scoring.scale,
            enable_gqa=True,
            **options,
        )
    if scoring.sinks is None:
        return cast("Tensor", found)
    return _with_sinks(found[0], found[1].lse, scoring.sinks)


_CAPTURE = {"specialize_float": True, "recompile_limit": 64}
"""FlexAttention cannot take a soft cap as an input of the graph. Kinds of layers, with and without gradients, in each precision,
are more graphs than the 8 at which torch stops."""


@cache
def _compiled(backend: str) -> Any:
    """Compile FlexAttention, which materializes all scores without compilation. Raise if it cannot be compiled whole."""
    return torch.compile(flex_attention, dynamic=True, fullgraph=True, backend=backend)


KERNELS: Mapping[str, Callable[..., Tensor]] = {"flex": by_flex, "varlen": by_rows, "blocks": by_blocks}
"""The ways to compute `attend`, as `[model] attention_kernel` names them. To add one: write its file, and add it here."""


def _with_sinks(found: Tensor, sums: Tensor, sinks: Tensor) -> Tensor:
    """Return attention whose weights share their sum with a sink, of which `sums`, (1, heads, tokens), are the logarithms.

    exp(score) / (exp(sum) + exp(sink)) is exp(score) / exp(sum) times sigmoid(sum - sink).
    """
    return (found * torch.sigmoid(sums - sinks.to(sums.dtype)[:, None])[..., None]).to(found.dtype)
