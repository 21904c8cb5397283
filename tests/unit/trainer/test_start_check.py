"""The check at the start: what acts only on long rows is seen, and the way out that an error names works."""

from __future__ import annotations

from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.initialization import meta_device_safe_creation_ops

from trainer.errors import ConfigError
from trainer.model import attention, small_copy, start_check
from trainer.model.policy import Attention, Policy
from trainer.model.start_check import SmallCopy

SIZES = {
    "vocab_size": 256, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 256, "pad_token_id": 0,
}  # fmt: skip
LATE = start_check._SHORT + 16
"""Tokens: beyond the rows of the real weights."""


def check(name: str, way: Attention = "spans", **sizes: Any) -> None:
    torch.manual_seed(0)
    model: Any = AutoModelForCausalLM.from_config(AutoConfig.for_model(name, **{**SIZES, **sizes}))
    start_check.check(Policy(model.eval(), way))


def published(name: str) -> Any:
    """A model in its published size, without memory."""
    with torch.device("meta"), meta_device_safe_creation_ops():
        return AutoModelForCausalLM.from_config(AutoConfig.for_model(name))


def test_a_window_that_begins_after_the_short_rows_is_seen() -> None:
    attend: Any = attention.attend

    def without_window(forest: Any, query: Any, key: Any, value: Any, scoring: Any, *kernel: Any) -> Any:
        return attend(forest, query, key, value, replace(scoring, window=None), *kernel)

    check("mistral", sliding_window=LATE)
    with (
        mock.patch.object(attention, "attend", without_window),
        pytest.raises(
            ConfigError, match=rf'differ .* sliding_window = {LATE}; set \[model\] attention = "rows"'
        ),
    ):
        check("mistral", sliding_window=LATE)


def test_attention_over_compressed_tokens_is_refused_with_the_setting_that_works() -> None:
    with pytest.raises(ConfigError, match=r'DeepseekV4.*; set \[model\] attention = "rows"'):
        check("deepseek_v4", sliding_window=24)
    check("deepseek_v4", "rows", sliding_window=24)


def test_no_setting_is_named_where_none_works() -> None:
    chunks = {"attention_chunk_size": LATE, "num_local_experts": 2, "intermediate_size_mlp": 96}
    with pytest.raises(ConfigError, match=r"Llama4ForCausalLM .*; this architecture cannot be trained here"):
        check("llama4_text", **chunks)
    with pytest.raises(ConfigError, match=r"does not name its decoder; this architecture cannot"):
        check("llama4_text", "rows", **chunks)


@pytest.mark.parametrize(
    ("name", "thresholds"),
    [
        ("gemma3_text", {"sliding_window": 4096}),
        pytest.param("deepseek_v32", {"index_topk": 2048}, marks=pytest.mark.long),
        ("deepseek_v4", {"sliding_window": 128, "compress_rates.heavily_compressed_attention": 128}),
        ("gpt_oss", {"sliding_window": 128, "rope_parameters.original_max_position_embeddings": 4096}),
        ("llama4_text", {"attention_chunk_size": 8192, "floor_scale": 8192}),
        ("bamba", {"mamba_chunk_size": 256}),
        pytest.param("minimax", {"block_size": 256}, marks=pytest.mark.long),
    ],
)
def test_a_small_copy_has_every_kind_of_layer_and_low_thresholds(
    name: str, thresholds: dict[str, int]
) -> None:
    model = published(name)
    copy = SmallCopy.of(type(model), model.config)
    assert thresholds.items() <= copy.lowered.items()
    small = small_copy.build(copy.kind, copy.config, torch.float32)
    assert sum(weight.numel() for weight in small.parameters()) < 30e6
    kinds, whole = ({str(module) for module in each.modules()} for each in (small, model))
    assert {kind.partition("(")[0] for kind in kinds} == {kind.partition("(")[0] for kind in whole}
    values = copy.config.to_dict()
    for path in copy.lowered:
        held = values
        for key in path.split("."):
            held = held[key]
        assert held < small_copy.REACH


def test_what_a_small_copy_cannot_show_is_looked_at_in_the_model_or_refused() -> None:
    no_copy = mock.patch.object(small_copy, "small", side_effect=ValueError("no such class"))
    with no_copy:
        check("mistral", sliding_window=LATE)
    with no_copy, pytest.raises(ConfigError, match=r"after 100000 tokens cannot be looked at.*no such class"):
        check("mistral", sliding_window=100_000)


@pytest.mark.long
def test_roundings_of_a_chaotic_model_are_not_taken_for_a_difference() -> None:
    model = published(
        "gemma4_text"
    )  # 30 layers, some of which share keys and values: 0.002 nats by its own sdpa
    assert SmallCopy.of(type(model), model.config).difference("spans") is None
