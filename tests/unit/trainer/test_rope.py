"""Positions that transformers makes by the longest row of a pass: they are the engine's, whichever rows share a micro-batch."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from tests.harness.plain_model import plain_logprobs
from trainer.data.packing import lay_out
from trainer.data.tree import row_of_tokens
from trainer.errors import ConfigError
from trainer.model import rope, start_check
from trainer.model.policy import Attention, Policy

TRAINED, LONGEST = 32, 256
"""Positions of the pretraining, and of the config."""
SIZES = {
    "vocab_size": 128, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": LONGEST, "pad_token_id": 0,
}  # fmt: skip
LONG = {
    "rope_type": "longrope", "rope_theta": 10000.0, "short_factor": [1.0] * 8,
    "long_factor": [1.0, 1.5, 2.0, 3.0, 4.0, 6.0, 8.0, 8.0], "original_max_position_embeddings": TRAINED,
}  # fmt: skip
DYNAMIC = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0}


def model_of(name: str, parameters: dict[str, Any], **sizes: Any) -> Any:
    torch.manual_seed(3)
    config = AutoConfig.for_model(name, **{**SIZES, "rope_parameters": parameters, **sizes})
    model = AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(torch.randn_like(weight) * 0.2)
    return model


def tokens(length: int, seed: int) -> list[int]:
    return torch.randint(3, 128, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


def pinned(model: Any, max_model_len: int, rows: list[list[int]], way: Attention = "spans") -> Tensor:
    """What the policy makes of the first row's tokens, with the others in its micro-batch."""
    rope.pin(model, max_model_len)
    policy = Policy(model, way)
    laid = lay_out(
        [row_of_tokens(row, episode_id=str(n)) for n, row in enumerate(rows)],
        share_prefixes=policy.shares_prefixes,
    )
    return policy.logprobs(laid)[: len(rows[0]) - 1]


@pytest.mark.parametrize("way", ["spans", "rows"])
@pytest.mark.parametrize(("max_model_len", "reference"), [(LONGEST, 60), (TRAINED + 1, 60), (TRAINED, 20)])
def test_factors_are_those_of_the_engines_longest_row(
    max_model_len: int, reference: int, way: Attention
) -> None:
    """The reference: the beginning of a row for which transformers itself takes these factors."""
    row = tokens(60, 1)
    model = model_of("phi3", LONG, original_max_position_embeddings=TRAINED)
    with torch.no_grad():
        wanted = plain_logprobs(model, torch.tensor(row[:reference]))[:19]
        other = plain_logprobs(model, torch.tensor(row[: 80 - reference]))[:19]
    for companions in ([], [tokens(60, 2)]):
        found = pinned(model, max_model_len, [row[:20], *companions], way)
        torch.testing.assert_close(found, wanted, rtol=0, atol=1e-5)
    assert (found - other).abs().max() > 0.1, "factors make a difference"
    assert model.config.rope_parameters == LONG | {"partial_rotary_factor": 1.0}, "published as it was read"


def test_the_scale_of_positions_is_vllms_where_a_config_names_it() -> None:
    scales = {"short_mscale": 1.25, "long_mscale": 1.5}
    config = model_of("phimoe", LONG | scales, num_local_experts=2, num_experts_per_tok=1).config
    for max_model_len, scale in ((LONGEST, 1.5), (TRAINED, 1.25)):
        model = AutoModelForCausalLM.from_config(config)
        rope.pin(model, max_model_len)
        cos, sin = model.model.rotary_emb(torch.zeros(1), torch.arange(60)[None])
        torch.testing.assert_close(cos**2 + sin**2, torch.full_like(cos, scale**2))
    plain = model_of("phi3", LONG, original_max_position_embeddings=TRAINED)
    rope.pin(plain, LONGEST)
    assert plain.model.rotary_emb.attention_scaling == pytest.approx(
        math.sqrt(1 + math.log(8) / math.log(32))
    )


def test_dynamic_ntk_has_one_base_for_all_rows_as_in_vllm() -> None:
    row, model = tokens(60, 1), model_of("llama", DYNAMIC, max_position_embeddings=64)
    with torch.no_grad():
        wanted = plain_logprobs(model, torch.tensor(row))
    found = pinned(model, 64, [row, tokens(62, 2)])
    torch.testing.assert_close(found, wanted, rtol=0, atol=1e-5)
    grown = model_of("llama", DYNAMIC | {"max_trained_positions": 16}, max_position_embeddings=64)
    rope.pin(grown, 64)
    base = 10000.0 * (4.0 * 64 / 16 - 3.0) ** (16 / 14)
    expected = base ** -(torch.arange(0, 16, 2) / 16)
    torch.testing.assert_close(grown.model.rotary_emb.inv_freq, expected)


def test_the_check_at_the_start_passes_a_pinned_model_and_no_other() -> None:
    sizes = {"original_max_position_embeddings": TRAINED}
    with pytest.raises(ConfigError, match=r"\[model\] max_model_len is needed: phi3's positions .*longrope"):
        start_check.check(Policy(model_of("phi3", LONG, **sizes)))
    model = model_of("phi3", LONG, **sizes)
    with pytest.raises(ConfigError, match=r"\[model\] max_model_len = 257: vLLM has phi3's positions .* 256"):
        rope.pin(model, LONGEST + 1)
    rope.pin(model, LONGEST)
    start_check.check(Policy(model), LONGEST)
