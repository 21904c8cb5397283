"""A long row on two ranks with `[parallel] context = 2` is that row on one, in memory that grows with tokens, not with pairs."""

from __future__ import annotations

import resource
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor, distributed
from transformers import AutoConfig, AutoModelForCausalLM

from tests.harness.ranks import on_new_ranks
from trainer.config.parallel import ParallelSettings
from trainer.data.packing import lay_out
from trainer.data.tree import row_of_tokens
from trainer.model import parallel
from trainer.model.policy import Policy

SIZES: dict[str, Any] = {
    "vocab_size": 64, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 2, "head_dim": 8, "sliding_window": 1000, "num_local_experts": 1, "num_experts_per_tok": 1,
    "max_position_embeddings": 2**17, "layer_types": ["sliding_attention", "full_attention"],
    "rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0},
}  # fmt: skip
"""gpt-oss: a layer with a window and one without, with sinks."""
BYTES_A_TOKEN = 10 * 1024
"""Measured: 6.2 KiB on one rank at 8192 tokens, to which one bool for each pair of tokens would add 8, and all scores 64."""


class Result(NamedTuple):
    """What a rank computed."""

    logprobs: Tensor
    gradients: dict[str, Tensor]
    """Summed over the ranks."""
    taken: int
    """Bytes: how far its memory grew beyond that of a short row."""


def compute(tokens: int, context: int) -> Result:
    """Run a row and its beginning with another end forwards and backwards."""
    torch.manual_seed(2)
    config = AutoConfig.for_model("gpt_oss", **SIZES)
    config._experts_implementation = "eager"
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    exchange = parallel.join(ParallelSettings(context=context), "cpu").context_exchange
    policy = Policy(model, exchange=exchange)
    run(policy, 300)
    model.zero_grad()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    logprobs = run(policy, tokens)
    taken = 1024 * (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
    gradients = {name: weight.grad for name, weight in model.named_parameters() if weight.grad is not None}
    for gradient in gradients.values():
        if exchange is not None:
            distributed.all_reduce(gradient)
    return Result(logprobs, gradients, taken)


def run(policy: Policy, tokens: int) -> Tensor:
    ids = np.random.default_rng(1).integers(0, 64, tokens).tolist()
    rows = [row_of_tokens(row) for row in sorted([ids[:-70], [*ids[:-250], 1, 2, 3]])]
    micro = lay_out(rows).to("cpu", torch.float32)
    with policy.at_work(micro):
        found: Tensor = policy(micro)[0]
        (found * torch.linspace(-1, 1, len(found))).sum().backward()
    return found.detach()


@pytest.mark.parametrize("tokens", [8192, pytest.param(131_072, marks=pytest.mark.long)])
def test_a_long_row_is_computed_by_two_ranks_as_by_one_in_memory_for_its_tokens(tokens: int) -> None:
    (alone,) = on_new_ranks(1, compute, tokens, 1)
    together = on_new_ranks(2, compute, tokens, 2)
    for rank in together:
        torch.testing.assert_close(rank.logprobs, alone.logprobs, rtol=0, atol=1e-5)
        for name, gradient in alone.gradients.items():
            assert (rank.gradients[name] - gradient).norm() <= 1e-4 * gradient.norm(), name
    for rank in (alone, *together):
        assert rank.taken < tokens * BYTES_A_TOKEN
