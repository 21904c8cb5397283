"""The output head on chosen places alone, in chunks: log-probabilities and entropies without the full logits.

Memory: one chunk holds at most `CHUNK` logits, and backward computes each chunk again, so the peak grows neither with tokens nor
with the vocabulary. Owns no state. Invariant: figures are computed in float32 at least (`loss_dtype`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

CHUNK = 2**24
"""Logits of a chunk: 64 MiB in float32."""

Head = Callable[[Tensor], Tensor]
"""Hidden states, shape (tokens, width), to logits, shape (tokens, vocabulary)."""


def loss_dtype(dtype: torch.dtype) -> torch.dtype:
    """The precision in which losses are computed: float32, or that of the weights if it is greater."""
    return torch.promote_types(dtype, torch.float32)


def head_of(model: Any) -> Head:
    """Returns a Hugging Face causal language model's output layer with the scaling and softcapping of its configuration.

    `Policy.check` finds out whether that is all that the model does between its last layer and its logits.
    """
    config, layer = model.config.get_text_config(), model.get_output_embeddings()
    factor = float(getattr(config, "logit_scale", None) or 1.0) / float(
        getattr(config, "logits_scaling", None) or 1.0
    )
    cap = getattr(config, "final_logit_softcapping", None)

    def head(hidden: Tensor) -> Tensor:
        logits: Tensor = layer(hidden)
        if factor != 1.0:
            logits = logits * factor
        return logits if cap is None else cap * torch.tanh(logits / cap)

    return head


def token_logprobs(
    head: Head,
    hidden: Tensor,
    ids: Tensor,
    temperature: Tensor,
    vocabulary: int,
    *,
    with_entropy: bool = True,
    entropy_grad: bool = False,
) -> tuple[Tensor, Tensor]:
    """Log-probabilities of tokens, and entropies of the distributions that they were drawn from, in nats.

    `hidden` has shape (tokens, width): the last hidden state before each token. `ids` (int64) and `temperature` have shape
    (tokens,); logits are divided by the temperature, as the engine's `processed_logprobs` are. Both results have shape (tokens,)
    and `loss_dtype`; entropy is 0 without `with_entropy`, and has a gradient only with `entropy_grad`.
    """
    size = max(1, CHUNK // vocabulary)
    found = []
    for start in range(0, len(ids), size):
        part = slice(start, start + size)
        chunk = (head, hidden[part], ids[part], temperature[part], with_entropy, entropy_grad)
        found.append(
            checkpoint(_chunk, *chunk, use_reentrant=False, preserve_rng_state=False)
            if torch.is_grad_enabled()
            else _chunk(*chunk)
        )
    if not found:
        nothing = hidden.sum(dtype=loss_dtype(hidden.dtype)) * temperature[:0]
        return nothing, nothing.detach()
    logprobs, entropies = zip(*found, strict=True)
    return torch.cat(logprobs), torch.cat(entropies)


def _chunk(
    head: Head, hidden: Tensor, ids: Tensor, temperature: Tensor, with_entropy: bool, entropy_grad: bool
) -> tuple[Tensor, Tensor]:
    logits = head(hidden)
    scaled = (logits.to(loss_dtype(logits.dtype)) / temperature[:, None]).log_softmax(-1)
    logprobs = scaled.gather(-1, ids[:, None]).squeeze(-1)
    if not with_entropy:
        return logprobs, torch.zeros_like(logprobs)
    with torch.set_grad_enabled(entropy_grad and torch.is_grad_enabled()):
        return logprobs, _entropy(scaled)


def _entropy(logprobs: Tensor) -> Tensor:
    """The entropy over the last dimension; a token of probability 0 adds nothing, to the gradient neither."""
    return -(logprobs.exp() * logprobs.masked_fill(logprobs.isneginf(), 0.0)).sum(-1)
