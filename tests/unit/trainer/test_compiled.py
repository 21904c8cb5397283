"""Compiled layers against the same layers uncompiled: log-probabilities, gradients, and the number of graphs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from trainer.config.model import ModelSettings
from trainer.data.packing import MicroBatch, lay_out
from trainer.data.tree import row_of_tokens
from trainer.errors import ConfigError
from trainer.model import activations, compiled
from trainer.model.policy import Policy

SIZES = {
    "vocab_size": 128, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 128,
}  # fmt: skip
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}


def policy_of(name: str) -> Policy:
    torch.manual_seed(3)
    config = AutoConfig.for_model(name, **SIZES, **(EXPERTS if "moe" in name else {}))
    return Policy(AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval())


def micro_of(tokens: int) -> MicroBatch:
    """Rows that share a prefix."""
    return lay_out([row_of_tokens([*range(9), 20 + i, *range(30, 30 + tokens)]) for i in range(3)])


def passes(policy: Policy, micro: MicroBatch) -> list[Tensor]:
    """Log-probabilities with and without gradient, and the gradients."""
    policy.zero_grad()
    without = policy.logprobs(micro)
    with policy.at_work(micro):
        found = policy(micro)[0]
        found.mean().backward()
    return [without, found.detach(), *(w.grad for w in policy.parameters() if w.grad is not None)]


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
@pytest.mark.parametrize(
    ("name", "backend"),
    [
        ("qwen3", "aot_eager"),
        pytest.param("qwen3", "inductor", marks=pytest.mark.long),
        pytest.param("qwen3_moe", "inductor", marks=pytest.mark.long),
    ],
)
@pytest.mark.parametrize("checkpointed", [pytest.param(0, marks=pytest.mark.long), 1])
def test_compiled_layers_compute_the_same_and_no_size_of_a_batch_is_compiled_again(
    name: str, backend: str, checkpointed: int
) -> None:
    torch._dynamo.reset()
    plain, policy = policy_of(name), policy_of(name)
    compiled.compile_layers(policy.layers, backend)
    activations.checkpoint_layers(policy.layers, checkpointed)
    counts = []
    for tokens in (10, 13, 29):
        micro, before = micro_of(tokens), compiled.graphs()
        for found, expected in zip(passes(policy, micro), passes(plain, micro), strict=True):
            torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
        counts.append(compiled.graphs() - before)
    assert counts[0] > 0 and counts[1:] == [0, 0]
    # The model's own pass, with which the start compares, is not compiled.
    policy.plain([torch.arange(10)])
    assert compiled.graphs() - before == 0


@pytest.mark.parametrize(
    ("values", "tensor", "expert", "has_states", "why"),
    [
        ({"attention": "rows"}, 1, 1, False, "attention"),
        ({"router_replay": True}, 1, 1, False, "router_replay"),
        ({}, 2, 1, False, "tensor = 2"),
        ({}, 1, 2, False, "expert = 2"),
        ({}, 1, 1, True, "have a state"),
    ],
)
def test_what_cannot_be_compiled_is_refused_by_name(
    values: dict[str, Any], tensor: int, expert: int, has_states: bool, why: str
) -> None:
    settings = ModelSettings.model_validate({"path": "m", "compile": True, **values})
    with pytest.raises(ConfigError, match=rf"\[model\] compile = true: .*{why}.*set it to false"):
        compiled.is_wanted(settings, "cpu", tensor, expert, has_states=has_states)
    default = settings.model_copy(update={"compile": "auto"})
    assert not compiled.is_wanted(default, "cuda:0", tensor, expert, has_states=has_states)


def test_layers_are_compiled_by_default_on_gpus_alone() -> None:
    settings = ModelSettings(path=Path("m"))
    found = [compiled.is_wanted(settings, device, 1, 1, has_states=False) for device in ("cuda:0", "cpu")]
    assert found == [True, False]
