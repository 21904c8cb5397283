"""The policy against the model's own forward pass: shared prefixes, windows, softcaps, sinks, chunks of the head."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from bench.families.configs import FAMILIES
from tests.harness.plain_model import plain_logprobs
from trainer.data.packing import MicroBatch, lay_out
from trainer.data.tree import row_of_tokens
from trainer.errors import ConfigError
from trainer.model import head, pretrained, start_check
from trainer.model.attention import NotBySpans
from trainer.model.policy import Policy

SIZES = {
    "vocab_size": 128, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 128,
}  # fmt: skip
ARCHITECTURES: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen3": {},
    "mistral": {"sliding_window": 5},
    "gemma2": {"sliding_window": 5, "attn_logit_softcapping": 0.2, "final_logit_softcapping": 0.5},
    "gpt_oss": {"sliding_window": 5, "num_local_experts": 2, "num_experts_per_tok": 1},
    "granite": {"logits_scaling": 3.0, "attention_multiplier": 0.4},
    "cohere": {"logit_scale": 0.3},
    "gpt2": {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 128},
    # Windows that are in the model's mask alone.
    "phimoe": {"sliding_window": 5, "num_local_experts": 2, "num_experts_per_tok": 1},
    "qwen2_moe": {
        "use_sliding_window": True, "sliding_window": 5, "layer_types": ["sliding_attention", "full_attention"],
        "num_experts": 2, "num_experts_per_tok": 1, "moe_intermediate_size": 16, "shared_expert_intermediate_size": 16,
    },
    # Needs attention in contiguous memory.
    "afmoe": {
        "sliding_window": 5, "num_experts": 2, "num_experts_per_tok": 1, "moe_intermediate_size": 16, "num_dense_layers": 1,
    },
}  # fmt: skip

CHECKED = ("gemma2", "gpt_oss", "qwen2_moe")


def model_of(name: str) -> Any:
    """A tiny random model in float64."""
    torch.manual_seed(3)
    config = AutoConfig.for_model(name, **{**SIZES, **ARCHITECTURES[name]})
    config._experts_implementation = "eager"
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    return model.double().eval()


def tree() -> tuple[MicroBatch, list[list[int]]]:
    """Six rows longer than the window, which branch at different places, one of them a root of its own."""
    generator = np.random.default_rng(4)
    trunk = generator.integers(0, 128, 14).tolist()
    rows = [trunk, *(trunk[:n] + generator.integers(0, 128, 9).tolist() for n in (3, 9, 9, 12))]
    rows = [*sorted(rows), generator.integers(0, 128, 11).tolist()]
    return lay_out([row_of_tokens(row) for row in rows]), rows


def losses(policy: Policy, micro: MicroBatch) -> Tensor:
    with policy.at_work(micro):
        found: Tensor = policy(micro.to("cpu", torch.float64))[0]
        found.pow(2).sum().backward()
        return found.detach()


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_trees_are_computed_as_each_path_apart(name: str) -> None:
    model = model_of(name)
    micro, rows = tree()
    assert len(micro) < sum(map(len, rows)), "something is shared"
    expected = [plain_logprobs(model, torch.tensor(row)) for row in rows]
    trained = [weight for weight in model.parameters() if weight.requires_grad]
    wanted = torch.autograd.grad(sum(e.pow(2).sum() for e in expected), trained, allow_unused=True)
    policy = Policy(model)
    found = losses(policy, micro)
    # Some architectures compute norms, rotary angles or the attention's weights in float32 whatever their dtype.
    tolerance = {"rtol": 1e-10, "atol": 1e-12} if name == "gpt2" else {"rtol": 1e-4, "atol": 1e-5}
    torch.testing.assert_close(found, torch.cat(expected).detach(), **tolerance)
    for parameter, gradient in zip(trained, wanted, strict=True):
        if gradient is not None:
            torch.testing.assert_close(parameter.grad, gradient, **tolerance)


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in CHECKED else pytest.mark.long) for name in ARCHITECTURES]
)
def test_the_check_at_the_start_accepts_it(name: str) -> None:
    model = model_of(name).float()
    start_check.check(Policy(model))


def test_rows_go_through_the_models_own_attention_one_by_one() -> None:
    model = model_of("qwen3")
    _, rows = tree()
    expected = torch.cat([plain_logprobs(model, torch.tensor(row)) for row in rows]).detach()
    policy = Policy(model, "rows")
    start_check.check(policy)
    micro = lay_out([row_of_tokens(row) for row in rows], share_prefixes=policy.shares_prefixes)
    torch.testing.assert_close(policy.logprobs(micro), expected, rtol=1e-5, atol=1e-6)


def test_a_model_that_does_not_attend_by_spans_is_refused_by_name() -> None:
    config = AutoConfig.for_model(
        "mamba", vocab_size=128, hidden_size=32, state_size=4, num_hidden_layers=1, intermediate_size=32
    )
    model = AutoModelForCausalLM.from_config(config).eval()
    with pytest.raises(ConfigError, match=r'MambaForCausalLM.*\[model\] attention = "rows"'):
        start_check.check(Policy(model))


SPARSE = {
    "num_hidden_layers": 3, "num_key_value_heads": 1, "n_routed_experts": 4, "moe_intermediate_size": 16, "sliding_window": 8,
    "compress_rates": {"compressed_sparse_attention": 4, "heavily_compressed_attention": 16},
}  # fmt: skip


@pytest.mark.parametrize(
    ("name", "sizes", "why"),
    [
        ("deepseek_v4", SPARSE, r'deepseek_v4 attends to .* keys from .* tokens .* set attention = "rows"'),
        ("deepseek_v32", FAMILIES["deepseek_v32"].sizes, r'an indexer; set attention = "rows"'),
        ("doge", {}, r'doge makes a mask of its own; set attention = "rows"'),
        (
            "llama4_text",
            {"attention_chunk_size": 5},
            r"llama4_text .*\(attention_chunk_size = 5\).* does not compute",
        ),
    ],
)
def test_attention_that_no_forest_expresses_is_refused_by_name_and_with_the_setting_that_works(
    name: str, sizes: dict[str, Any], why: str
) -> None:
    policy = Policy(AutoModelForCausalLM.from_config(AutoConfig.for_model(name, **SIZES | sizes)).eval())
    with pytest.raises(NotBySpans, match=why):
        policy.logprobs(tree()[0])


def test_a_head_that_scales_its_logits_otherwise_is_refused(tiny_model: Path) -> None:
    model = pretrained.load(tiny_model)
    model.config.logit_scale = 0.5
    with pytest.raises(ConfigError, match="differ from the model's own by"):
        start_check.check(Policy(model, "rows"))


def test_the_head_in_chunks_is_the_head_at_once() -> None:
    torch.manual_seed(2)
    layer = torch.nn.Linear(6, 50).double()
    hidden = torch.randn(9, 6, dtype=torch.float64, requires_grad=True)
    ids, temperature = torch.randint(0, 50, (9,)), torch.rand(9, dtype=torch.float64) + 0.5
    logits = torch.log_softmax(layer(hidden) / temperature[:, None], -1)
    whole = logits[torch.arange(9), ids], -(logits.exp() * logits).sum(-1)
    wanted = torch.autograd.grad((whole[0] * 2 + whole[1]).sum(), [hidden, *layer.parameters()])
    with mock.patch.object(head, "ROWS", 2):
        chunks = head.token_logprobs(head.Head(layer), hidden, ids, temperature, 50, entropy_grad=True)
        found = torch.autograd.grad((chunks[0] * 2 + chunks[1]).sum(), [hidden, *layer.parameters()])
    for ours, theirs in zip((*chunks, *found), (*whole, *wanted), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)


class Adapted(torch.nn.Linear):
    """A layer that is not known to be a plain product."""


@pytest.mark.parametrize(
    ("layer", "cap", "most"),
    [(torch.nn.Linear, None, 1.05), (torch.nn.Linear, 5.0, 1.05), (Adapted, None, 1.5)],
)
def test_the_heads_gradient_in_chunks_is_as_exact_as_at_once_in_bfloat16(
    layer: type[torch.nn.Linear], cap: float | None, most: float
) -> None:
    """A sum of 128 chunks that is rounded after each is five times as far from float64. Where the layer is not a plain product,
    each chunk's gradient is rounded: a third rounding, after that of the product's input and before that of the sum."""
    torch.manual_seed(0)
    tokens, width, vocabulary = 4096, 16, 64
    weight, hidden = (torch.randn(n, width).bfloat16() for n in (vocabulary, tokens))
    ids, ones, factors = torch.randint(vocabulary, (tokens,)), torch.ones(tokens), torch.randn(tokens)

    def gradient(dtype: torch.dtype, rows: int) -> Tensor:
        made = layer(width, vocabulary, bias=False, dtype=dtype)
        made.weight.data = weight.to(dtype)
        with mock.patch.object(head, "ROWS", rows):
            found, _ = head.token_logprobs(head.Head(made, 0.5, cap), hidden.to(dtype), ids, ones, vocabulary)
        (found * factors).sum().backward()
        assert made.weight.grad is not None
        return made.weight.grad.double()

    exact = gradient(torch.float64, tokens)
    at_once, in_chunks = (gradient(torch.bfloat16, rows) - exact for rows in (tokens, 32))
    assert in_chunks.norm() < most * at_once.norm() < 0.01 * exact.norm()


@pytest.mark.parametrize("entropy_grad", [False, True])
def test_a_forbidden_token_leaves_loss_and_entropy_finite(entropy_grad: bool) -> None:
    class Forbidding(torch.nn.Linear):
        def forward(self, hidden: Tensor) -> Tensor:
            return super().forward(hidden).masked_fill(torch.arange(50) == 49, float("-inf"))

    layer = Forbidding(6, 50, bias=False)
    ids = torch.tensor([5, 6, 7])
    logprobs, entropy = head.token_logprobs(
        head.Head(layer), torch.randn(3, 6), ids, torch.ones(3), 50, entropy_grad=entropy_grad
    )
    assert entropy.requires_grad == entropy_grad, "without a bonus, nothing is kept for its gradient"
    (logprobs.sum() + entropy.sum()).backward()
    assert bool(torch.isfinite(entropy).all())
    assert layer.weight.grad is not None
    assert bool(torch.isfinite(layer.weight.grad).all())
