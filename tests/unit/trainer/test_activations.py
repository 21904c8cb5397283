"""Activation checkpointing against the same passes without it: gradients, what is kept, and how often layers run."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM

from tests.unit.trainer.runs import offline_settings
from tests.unit.trainer.trees import group
from trainer.data.packing import lay_out
from trainer.data.tree import row_of_tokens
from trainer.errors import ConfigError
from trainer.model import activations
from trainer.model.activations import checkpoint_layers
from trainer.model.policy import Policy
from trainer.rank_trainer import RankTrainer

SIZES = {
    "vocab_size": 128, "hidden_size": 32, "intermediate_size": 128, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 128,
}  # fmt: skip
ROWS = [[*range(9), 20 + i, *range(30, 40)] for i in range(3)]


def policy_of(name: str) -> Policy:
    """A tiny random model; Gemma 2 slides its window in every other layer."""
    torch.manual_seed(3)
    config = AutoConfig.for_model(name, **SIZES, **({"sliding_window": 5} if name == "gemma2" else {}))
    return Policy(AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval())


def gradients(policy: Policy) -> tuple[list[Tensor], int, list[int]]:
    """The gradients, the bytes kept between the passes in addition to the weights, and how often each layer's MLP ran."""
    weights = {parameter.untyped_storage().data_ptr() for parameter in policy.parameters()}
    kept: dict[int, Tensor] = {}
    runs = [0] * len(policy.layers)

    def keep(tensor: Tensor) -> Tensor:
        if tensor.untyped_storage().data_ptr() not in weights:
            kept[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    def count(index: int) -> Any:
        def ran(*_: Any) -> None:
            runs[index] += 1

        return ran

    for index, layer in enumerate(policy.layers):
        mlp: Any = layer.mlp
        # Before and not after: the second pass stops inside of it, once it has what the gradient needs.
        mlp.register_forward_pre_hook(count(index))
    micro = lay_out([row_of_tokens(row) for row in ROWS])
    with policy.at_work(micro):
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            loss = policy(micro)[0].pow(2).sum()
        size = sum(tensor.untyped_storage().nbytes() for tensor in kept.values())
        loss.backward()
    return [p.grad for p in policy.parameters() if p.grad is not None], size, runs


@pytest.mark.parametrize("name", ["qwen3", "gemma2"])
def test_layers_that_are_computed_again_have_the_same_gradients_and_keep_less(name: str) -> None:
    plain, all_kept, once = gradients(policy_of(name))
    assert once == [1, 1, 1, 1]
    sizes = {}
    for every, wanted in {1: [2, 2, 2, 2], 2: [2, 1, 2, 1], 3: [2, 1, 1, 2]}.items():
        policy = policy_of(name)
        checkpoint_layers(policy.layers, every)
        found, sizes[every], runs = gradients(policy)
        assert runs == wanted
        assert len(found) == len(plain) and all(map(torch.equal, found, plain))
    assert sizes[1] < sizes[2] < all_kept and sizes[1] < all_kept / 3


def test_inputs_of_layers_wait_in_memory_of_the_host_and_nothing_else_does() -> None:
    """Autograd keeps copies of the inputs of those layers alone; gradients are the same to the bit."""
    plain, _, _ = gradients(policy_of("qwen3"))
    for every, layers in {1: [0, 1, 2, 3], 2: [0, 2]}.items():
        policy, inputs, copies = policy_of("qwen3"), [], []
        moved = mock.Mock(wraps=torch.Tensor.copy_)

        def copy(
            self: Tensor,
            source: Tensor,
            *arguments: Any,
            real: Any = moved,
            found: Any = copies,
            **named: Any,
        ) -> Tensor:
            found.append(source.data_ptr())
            copied: Tensor = real(self, source, *arguments, **named)
            return copied

        for index in layers:
            policy.layers[index].register_forward_pre_hook(
                lambda _, given, seen=inputs: seen.append(given[0].data_ptr())
            )
        checkpoint_layers(policy.layers, every, activations.on_host)
        with mock.patch.object(torch.Tensor, "copy_", copy):
            found, _, runs = gradients(policy)
        assert copies == inputs and len(copies) == len(layers)
        assert sum(runs) == len(runs) + len(layers)
        assert len(found) == len(plain) and all(map(torch.equal, found, plain))


@pytest.mark.parametrize("dtype", ["float32", pytest.param("bfloat16", marks=pytest.mark.long)])
def test_a_learner_learns_the_same_with_less_kept(tiny_model: Path, tmp_path: Path, dtype: str) -> None:
    """bf16 shards the model, whose weights must be whole again when a layer is computed again."""
    found = []
    for every, offload in ((0, False), (1, False), (1, True)):
        model = {"dtype": dtype, "activation_checkpointing": every, "activation_offload": offload}
        optimizer = {"lr": 0.01, "offload": "host" if offload else "none"}
        settings = offline_settings(tiny_model, tmp_path / "run", model=model, optimizer=optimizer)
        with (
            mock.patch.object(activations, "checkpoint", wraps=activations.checkpoint) as again,
            mock.patch.object(activations, "save_on_cpu", wraps=activations.save_on_cpu) as host,
        ):
            trainer = RankTrainer.open(settings)
            trainer.train([group("g", [1.0, 0.0])])
            trainer.train([group("h", [1.0, 0.0], version=1)])
        assert (again.called, host.called) == (every == 1, offload)
        found.append(trainer.gather_weights())
        trainer.ranks.close()
    plain, *others = found
    initial = load_file(tiny_model / "model.safetensors")
    assert any(not torch.equal(plain[name], value.to(plain[name].dtype)) for name, value in initial.items())
    for same in others:
        assert plain.keys() == same.keys() and all(torch.equal(plain[name], same[name]) for name in plain)


def test_an_architecture_without_layers_is_refused() -> None:
    layers: list[nn.Module] = []
    checkpoint_layers(layers, 0)
    with pytest.raises(ConfigError, match=r"\[model\] activation_checkpointing = 2"):
        checkpoint_layers(layers, 2)
