"""The output head on chosen places alone, in chunks: log-probabilities and entropies without the full logits.

Memory: one chunk has at most `ROWS` rows and about `LOGITS` logits, and backward computes each chunk again, so the peak grows
neither with tokens nor with the vocabulary. Owns no state. Invariants: figures are computed in float32 at least (`loss_dtype`);
gradients of the head's weights are summed over chunks in that precision, and rounded once.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from headgate.kept import UNKNOWN

ROWS = 4096
"""Rows of a chunk at most: with fewer, a GPU spends its time on reading the head's weights and summing their gradients."""
LOGITS = 2**27
"""Logits of a chunk at most, unless one row has more: 512 MiB in float32, 883 rows of 151,936."""


def loss_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the precision in which losses are computed: float32, or that of the weights if it is greater."""
    return torch.promote_types(dtype, torch.float32)


@dataclass(frozen=True, slots=True)
class Head:
    """An output layer with what a model does to its logits: hidden states, shape (tokens, width), to (tokens, vocabulary)."""

    layer: nn.Module
    factor: float = 1.0
    cap: float | None = None
    """Logits are bounded by cap * tanh(logit / cap)."""

    def __call__(self, hidden: Tensor) -> Tensor:
        return self.finish(self.layer(hidden))

    def finish(self, logits: Tensor) -> Tensor:
        """Return the layer's output scaled and capped; the same tensor if it is neither."""
        if self.factor != 1.0:
            logits = logits * self.factor
        return logits if self.cap is None else self.cap * torch.tanh(logits / self.cap)

    @property
    def trained(self) -> list[Tensor]:
        """The weights with a gradient, as they are now: sharding puts others in their place for a pass."""
        return [weight for weight in self.layer.parameters() if weight.requires_grad]


def head_of(model: Any) -> Head:
    """Return a Hugging Face causal language model's output layer with the scaling and softcapping of its configuration.

    `Policy.check` finds out whether that is all that the model does between its last layer and its logits.
    """
    config = model.config.get_text_config()
    factor = float(getattr(config, "logit_scale", None) or 1.0) / float(
        getattr(config, "logits_scaling", None) or 1.0
    )
    return Head(model.get_output_embeddings(), factor, getattr(config, "final_logit_softcapping", None))


def token_logprobs(
    head: Head,
    hidden: Tensor,
    ids: Tensor,
    temperature: Tensor,
    vocabulary: int,
    *,
    with_entropy: bool = True,
    entropy_grad: bool = False,
    kept: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Return log-probabilities of tokens, and entropies of the distributions that they were drawn from, in nats.

    `hidden` has shape (tokens, width): the last hidden state before each token. `ids` (int64) and `temperature` have shape
    (tokens,); logits are divided by the temperature, as the engine's `processed_logprobs` are. Both results have shape (tokens,)
    and `loss_dtype`; entropy is 0 without `with_entropy`, and has a gradient only with `entropy_grad`. Gradients have none.
    `kept` (int64, shape (tokens, most)) has the ids over which a token's distribution is normalized, its own among them: a row is
    filled by repeating one of them, and by UNKNOWN alone where all ids count. None: they count for all tokens.
    """
    if not len(ids):
        nothing = hidden.sum(dtype=loss_dtype(hidden.dtype)) * temperature[:0]
        return nothing, nothing.detach()
    chunks = _Chunks(
        head, ids, temperature, max(1, min(ROWS, LOGITS // vocabulary)), with_entropy, entropy_grad, kept
    )
    found: tuple[Tensor, Tensor] = _LogProbs.apply(chunks, hidden, *head.trained)
    return found


@dataclass(frozen=True, slots=True)
class _Chunks:
    head: Head
    ids: Tensor
    temperature: Tensor
    rows: int
    with_entropy: bool
    entropy_grad: bool
    kept: Tensor | None

    def __iter__(self) -> Iterator[slice]:
        return (slice(start, start + self.rows) for start in range(0, len(self.ids), self.rows))

    def scaled(self, part: slice, logits: Tensor) -> Tensor:
        """Return logits over their temperature, in the loss's precision; -inf for ids that a distribution left out."""
        found = logits.detach().to(loss_dtype(logits.dtype), copy=True)
        found.div_(self.temperature[part, None])
        if self.kept is not None and self.kept.shape[1]:
            rows = (self.kept[part, 0] != UNKNOWN).nonzero()
            kept = self.kept[part][rows[:, 0]]
            values = found[rows, kept]
            found[rows[:, 0]] = -torch.inf
            found[rows, kept] = values
        return found


class _LogProbs(torch.autograd.Function):
    """By logit i, the log-probability of token t has the gradient [i = t] - p_i, and the entropy H has -p_i (log p_i + H)."""

    @staticmethod
    def forward(context: Any, chunks: _Chunks, hidden: Tensor, *trained: Tensor) -> tuple[Tensor, Tensor]:
        context.chunks, context.trained = chunks, trained
        found = [_figures(chunks, part, hidden) for part in chunks]
        logprobs, entropies, sums = (torch.cat(each) for each in zip(*found, strict=True))
        if not chunks.entropy_grad:
            context.mark_non_differentiable(entropies)
        context.save_for_backward(hidden, entropies, sums)
        return logprobs, entropies

    @staticmethod
    def backward(context: Any, of_logprobs: Tensor, of_entropies: Tensor) -> tuple[Tensor | None, ...]:
        chunks: _Chunks = context.chunks
        hidden, entropies, sums = context.saved_tensors
        of_hidden = torch.empty_like(hidden)
        totals: list[Tensor] = []
        for part in chunks:
            figures = (entropies[part], sums[part], of_logprobs[part], of_entropies[part])
            inputs = hidden[part].detach().requires_grad_()
            of_hidden[part], *more = _of_layer(
                chunks.head, inputs, context.trained, *_of_output(chunks, part, inputs, figures)
            )
            totals = [total.add_(each) for total, each in zip(totals, more, strict=True)] if totals else more
        rounded = (total.to(weight.dtype) for total, weight in zip(totals, context.trained, strict=True))
        return None, of_hidden, *rounded


def _figures(chunks: _Chunks, part: slice, hidden: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return log-probabilities, entropies and the logarithms of the softmax's sums of a chunk."""
    scaled = chunks.scaled(part, chunks.head(hidden[part]))
    sums = scaled.logsumexp(-1)
    logprobs = scaled.gather(-1, chunks.ids[part, None]).squeeze(-1) - sums
    if not chunks.with_entropy:
        return logprobs, torch.zeros_like(logprobs), sums
    return logprobs, torch.special.entr(scaled.sub_(sums[:, None]).exp_()).sum(-1), sums


def _of_output(
    chunks: _Chunks, part: slice, inputs: Tensor, figures: tuple[Tensor, Tensor, Tensor, Tensor]
) -> tuple[Tensor, Tensor]:
    """Return the output of the head's layer, with its graph, and its gradient."""
    entropies, sums, of_logprobs, of_entropies = figures
    with torch.enable_grad():
        output = chunks.head.layer(inputs)
        logits = chunks.head.finish(output)
    logprobs = chunks.scaled(part, logits).sub_(sums[:, None])
    if chunks.entropy_grad:
        # A token of probability 0 adds nothing.
        inner = logprobs.masked_fill(logprobs.isneginf(), 0.0).add_(entropies[:, None])
        inner.mul_(of_entropies[:, None]).add_(of_logprobs[:, None])
        of_scaled = logprobs.exp_().mul_(inner).neg_()
    else:
        of_scaled = logprobs.exp_().mul_(-of_logprobs[:, None])
    of_scaled.scatter_add_(1, chunks.ids[part, None], of_logprobs[:, None])
    of_logits = of_scaled.div_(chunks.temperature[part, None]).to(logits.dtype)
    return output, of_logits if logits is output else torch.autograd.grad(logits, output, of_logits)[0]


def _of_layer(
    head: Head, inputs: Tensor, trained: Sequence[Tensor], output: Tensor, of_output: Tensor
) -> list[Tensor]:
    """Return the gradients of a chunk's hidden states and, in the loss's precision, of the head's weights."""
    layer = head.layer
    if (
        type(layer) is nn.Linear
        and type(layer.weight) is nn.Parameter
        and len(trained) == len([*layer.parameters()])
    ):
        # Autograd would round the product of each chunk to the weights' precision.
        of_bias = [] if layer.bias is None else [of_output.sum(0, dtype=loss_dtype(of_output.dtype))]
        return [of_output @ layer.weight.detach(), _product(of_output, inputs.detach()), *of_bias]
    of_inputs, *found = torch.autograd.grad(output, [inputs, *trained], of_output)
    return [of_inputs, *(each.to(loss_dtype(each.dtype)) for each in found)]


def _product(left: Tensor, right: Tensor) -> Tensor:
    """Return `left` transposed times `right` in the loss's precision, unrounded."""
    wide = loss_dtype(left.dtype)
    if left.is_cuda and left.dtype != wide:
        return torch.mm(left.mT, right, out_dtype=wide)
    return left.to(wide).mT @ right.to(wide)
