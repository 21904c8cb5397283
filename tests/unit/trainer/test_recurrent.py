"""Layers with a state, packed: each row has the state that it has alone, wherever it branches off."""

from __future__ import annotations

import copy
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from bench.families.configs import FAMILIES
from trainer.data.packing import lay_out
from trainer.data.tree import Row, row_of_tokens
from trainer.errors import ConfigError
from trainer.model import forest
from trainer.model.activations import checkpoint_layers
from trainer.model.policy import Policy
from trainer.model.recurrent import layers_of, pieces_of

HYBRIDS = ("qwen3_5_text", "qwen3_next", "kimi_linear", "lfm2")


def rows_of(*branches: tuple[int, int], trunk: int = 150) -> list[Row]:
    """A row of `trunk` tokens, and for each branch one that has its first n tokens, and m others."""
    generator = np.random.default_rng(3)
    ids = generator.integers(3, 250, trunk).tolist()
    paths = [ids, *([*ids[:n], *generator.integers(3, 250, m).tolist()] for n, m in branches)]
    return [
        row_of_tokens(path, episode_id=str(n)) for n, path in enumerate(sorted(paths, key=lambda path: path))
    ]


def trees() -> list[list[Row]]:
    generator = np.random.default_rng(1)
    drawn = [
        rows_of(
            *((int(n), int(m)) for n, m in zip(*generator.integers(1, 12, (2, 5)), strict=True)), trunk=12
        )
        for _ in range(40)
    ]
    return [rows_of(), rows_of((0, 1), trunk=1), rows_of((3, 1), (4, 1), (5, 1), (5, 2), trunk=8), *drawn]


@pytest.mark.parametrize("rows", trees())
def test_pieces_continue_each_rows_own_tokens(rows: list[Row]) -> None:
    micro = lay_out(rows)
    pieces = pieces_of(micro.positions.numpy())
    assert [token for piece in pieces for token in range(piece.start, piece.stop)] == [*range(len(micro))]
    read: list[list[int]] = []
    for piece in pieces:
        before = [] if piece.before < 0 else read[piece.before]
        own = [*([piece.lead] if piece.lead >= 0 else []), *range(piece.start, piece.stop)]
        assert piece.before < 0 or not pieces[piece.before].is_short, (
            "its states are not those after one token"
        )
        read.append([*before, *own])
        for place in range(piece.start, piece.stop):
            seen = [k for k in range(place + 1) if micro.ends[k] > place]
            assert read[-1][: len(seen)] == seen


def model_of(name: str) -> Any:
    torch.manual_seed(3)
    config = AutoConfig.for_model(FAMILIES[name].model_type, **FAMILIES[name].sizes)
    config._experts_implementation = "eager"
    model = AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.05)
    return model


def learned(policy: Policy, rows: list[Row]) -> tuple[Tensor, dict[str, Tensor]]:
    policy.zero_grad()
    micro = lay_out(rows, share_prefixes=policy.shares_prefixes).to("cpu", torch.float32)
    with policy.at_work(micro):
        found = policy(micro)[0]
        (found * torch.sin(micro.ids[micro.at] * 1.0)).sum().backward()
    named = policy.model.named_parameters()
    return found.detach(), {name: p.grad.clone() for name, p in named if p.grad is not None}


@pytest.mark.parametrize("name", HYBRIDS)
def test_packed_trees_are_the_rows_one_by_one(name: str) -> None:
    """Branches off the chunks of 64 tokens, of unequal length; two that follow each other, and two of one token."""
    rows = rows_of((70, 40), (71, 1), (72, 30), (20, 1), (0, 65), (128, 3))
    model = model_of(name)
    expected, gradients = learned(Policy(copy.deepcopy(model), "rows"), rows)
    policy = Policy(model, "spans")
    checkpoint_layers(policy.layers, 2)
    found, packed = learned(policy, rows)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)
    assert packed.keys() == gradients.keys()
    limit = 1e-5 * max(float(gradient.abs().max()) for gradient in gradients.values())
    for key, gradient in gradients.items():
        torch.testing.assert_close(
            packed[key], gradient, rtol=0, atol=limit, msg=lambda m, k=key: f"{k}: {m}"
        )
    with mock.patch.object(forest, "pieces_of", return_value=[]), torch.no_grad():
        assert (policy.logprobs(lay_out(rows)) - expected).abs().max() > 1e-3


def test_no_layer_continues_a_state_with_one_token() -> None:
    """Kernels for generation would compute it, which have no gradient."""
    model = model_of("qwen3_5_text")
    lengths: list[tuple[int, bool]] = []
    for layer in layers_of(model):
        plain = layer.forward

        def look(hidden_states: Tensor, plain: Any = plain, **named: Any) -> Tensor:
            states = named.get("cache_params")
            lengths.append((hidden_states.shape[1], states is not None and bool(states.recurrent)))
            return plain(hidden_states, **named)

        layer.forward = look
    Policy(model, "spans").logprobs(lay_out(rows_of((70, 1), (71, 1), (71, 5), trunk=90)))
    assert [n for n, continued in lengths if continued]
    assert all(n > 1 for n, continued in lengths if continued)


def test_ranks_that_share_rows_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"\[parallel\] context = 2: Qwen3_5GatedDeltaNet has a state"):
        Policy(model_of("qwen3_5_text"), "spans", mock.Mock(size=2))
