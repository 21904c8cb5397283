"""A model's logits by its own forward pass and transformers' eager attention: the reference for what the trainer computes."""

from __future__ import annotations

import copy
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.func import functional_call
from transformers import AutoModelForCausalLM

_PLAIN: WeakKeyDictionary[Any, Any] = WeakKeyDictionary()


def plain_logits(model: Any, ids: Tensor) -> Tensor:
    """Logits of shape (rows, length, vocabulary), with a gradient to the parameters of `model`, however that one attends."""
    if model not in _PLAIN:
        _PLAIN[model] = AutoModelForCausalLM.from_config(
            copy.deepcopy(model.config), attn_implementation="eager"
        ).eval()
    state = dict(model.named_parameters()) | dict(model.named_buffers())
    inputs = {"input_ids": ids, "use_cache": False}
    logits: Tensor = functional_call(_PLAIN[model], state, kwargs=inputs).logits
    return logits


def plain_logprobs(model: Any, ids: Tensor, temperature: float = 1.0) -> Tensor:
    """Log-probabilities of the tokens of one row but for the first, shape (length - 1,), in nats."""
    scaled = (plain_logits(model, ids[None])[0, :-1] / temperature).log_softmax(-1)
    return scaled[torch.arange(len(ids) - 1), ids[1:]]
