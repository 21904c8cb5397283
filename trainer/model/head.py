"""What a model says of given tokens: their log-probabilities, and the entropy of the distributions they were drawn from.

Owns no state. Invariant: both are computed in float32 at least (`loss_dtype`), and column j of every result speaks of token j
(column 0 has no context and is 0).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def loss_dtype(model: Any) -> torch.dtype:
    """The precision in which losses are computed: float32, or that of the weights if it is greater."""
    return torch.promote_types(model.dtype, torch.float32)


def token_logprobs(
    model: Any, ids: Tensor, temperature: Tensor, *, with_entropy: bool = True, entropy_grad: bool = False
) -> tuple[Tensor, Tensor]:
    """Log-probability of every token and the entropy of the distribution it was drawn from.

    `ids` has shape (rows, length), int64, padded on the right: attention is causal, so padding changes nothing before it.
    `temperature` has the same shape, and holds what token j was sampled with; logits are divided by it, as the engine's
    `processed_logprobs` are. Answers two tensors of that shape in nats, of `loss_dtype`; entropy is 0 without `with_entropy`, and
    has a gradient, for which a [tokens, vocabulary] tensor is kept, only with `entropy_grad`.
    """
    logits = model(input_ids=ids, use_cache=False).logits[:, :-1].to(loss_dtype(model))
    scaled = (logits / temperature[:, 1:, None]).log_softmax(-1)
    logprobs = scaled.gather(-1, ids[:, 1:, None]).squeeze(-1)
    entropy = torch.zeros_like(logprobs)
    if with_entropy:
        with torch.set_grad_enabled(entropy_grad and torch.is_grad_enabled()):
            entropy = _entropy(scaled)
    first = logprobs.new_zeros(ids.shape[0], 1)
    return torch.cat([first, logprobs], 1), torch.cat([first, entropy], 1)


def _entropy(logprobs: Tensor) -> Tensor:
    """The entropy over the last dimension; a token of probability 0 adds nothing, to the gradient neither."""
    return -(logprobs.exp() * logprobs.masked_fill(logprobs.isneginf(), 0.0)).sum(-1)
