"""Models that could see, trained on text: what they see with stays as it is, whatever its name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoConfig, AutoModelForImageTextToText

from tests.harness.ranks import on_ranks
from tests.unit.trainer.rank_trainers import groups_of
from tests.unit.trainer.runs import offline_settings
from trainer.errors import ConfigError
from trainer.model import loading, vision
from trainer.publish.filesystem import WeightsDirectory
from trainer.rank_rpc import serve_commands, shutdown_ranks
from trainer.rank_trainer import RankTrainer

TEXT = {
    "vocab_size": 256, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 1, "head_dim": 16, "max_position_embeddings": 128, "pad_token_id": 0,
}  # fmt: skip
TOWER = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 2, "head_dim": 16,
    "image_size": 28, "patch_size": 14,
}  # fmt: skip
MODELS: dict[str, dict[str, Any]] = {
    "gemma3": {
        "text_config": TEXT, "vision_config": TOWER, "mm_tokens_per_image": 4,
        "image_token_index": 250, "boi_token_index": 251, "eoi_token_index": 252,
    },
    "gemma4": {
        "text_config": {
            **TEXT, "hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 256, "global_head_dim": 16,
        },
        "vision_config": {**TOWER, "num_key_value_heads": 2}, "audio_config": None,
    },
    "mistral3": {
        "text_config": {**TEXT, "model_type": "mistral"}, "vision_config": {**TOWER, "model_type": "pixtral"},
        "image_token_index": 250,
    },
}  # fmt: skip
LANGUAGE = ("language_model", "lm_head")


def save(directory: Path, name: str) -> Path:
    torch.manual_seed(0)
    model: Any = AutoModelForImageTextToText.from_config(AutoConfig.for_model(name, **MODELS[name]))
    model.float().save_pretrained(directory)
    return directory


def trained(path: Path, work: Path, more: dict[str, Any]) -> dict[str, Tensor] | None:
    """The stored tensors after two steps with much weight decay, which shows in whatever decays."""
    given = {
        "optimizer": {"lr": 1e-2, "weight_decay": 0.5}, "batch": {"tokens": 60}, "parallel": {"timeout_s": 60},
    }  # fmt: skip
    trainer = RankTrainer.open(offline_settings(path, work, model=more, **given))
    if not trainer.ranks.is_rank_zero:
        serve_commands(trainer)
        return None
    for _ in range(2):
        trainer.train(groups_of(trainer.version))
    published = WeightsDirectory(work / "weights", path).write(
        1, 0, trainer.model, None, trainer.gather_weights()
    )
    shutdown_ranks(trainer)
    return load_file(published / "model.safetensors")


@pytest.mark.parametrize(
    ("name", "ranks", "dtype"),
    [
        *((name, 1, "bfloat16") for name in MODELS),
        ("gemma3", 2, "float32"),
        *(pytest.param(name, 2, "float32", marks=pytest.mark.long) for name in ("gemma4", "mistral3")),
    ],
)
def test_a_frozen_tower_does_not_decay(tmp_path: Path, name: str, ranks: int, dtype: str) -> None:
    path = save(tmp_path / "model", name)
    stored = load_file(path / "model.safetensors")
    found = on_ranks(ranks, trained, path, tmp_path / "run", {"dtype": dtype})[0]
    assert found.keys() == stored.keys()
    moved = {key for key, value in found.items() if not torch.equal(value, stored[key].to(value.dtype))}
    sees = {key for key in stored if not any(part in key for part in LANGUAGE)}
    assert sees
    assert not moved & sees
    assert moved


def test_a_trained_tower_is_trained(tmp_path: Path) -> None:
    model = loading.empty(save(tmp_path / "model", "gemma3"), torch.float32)
    vision.freeze(model, "trained")
    assert all(weight.requires_grad for weight in model.parameters())


def test_a_model_that_continues_no_text_is_refused_by_its_type(tmp_path: Path) -> None:
    AutoConfig.for_model("vit").save_pretrained(tmp_path)
    with pytest.raises(
        ConfigError, match=r"model_type is 'vit', of which transformers .* has no causal language model"
    ):
        loading.empty(tmp_path, torch.float32)
