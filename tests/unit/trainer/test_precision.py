"""Tensors that stay in float32 among bfloat16 ones: what is published is the checkpoint, to the bit, before any training."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

from tests.unit.trainer.runs import offline_settings
from tests.unit.trainer.trees import group
from trainer.config.settings import Settings
from trainer.model import pretrained
from trainer.rank_trainer import RankTrainer

SIZES = {
    "vocab_size": 256, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 4, "max_position_embeddings": 128, "n_routed_experts": 4, "num_experts_per_tok": 2,
    "moe_intermediate_size": 16, "first_k_dense_replace": 1, "n_group": 2, "topk_group": 1, "q_lora_rank": 16,
    "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 16, "v_head_dim": 16, "n_shared_experts": 1,
}  # fmt: skip
BIAS = "model.layers.1.mlp.gate.e_score_correction_bias"
"""transformers keeps it in float32; about 8, bfloat16 rounds it by up to 0.03, and other experts are chosen."""
QUERY = "model.layers.0.self_attn.q_a_proj.weight"
"""A matrix that this checkpoint stores in float32, for no reason of the architecture's."""


@pytest.fixture(scope="module")
def mixed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """DeepSeek-V3 as it is stored: bfloat16, with a few tensors in float32."""
    directory = tmp_path_factory.mktemp("models") / "mixed"
    torch.manual_seed(4)
    config = AutoConfig.for_model("deepseek_v3", **SIZES)
    AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(directory)
    state = load_file(directory / "model.safetensors")
    state[BIAS] = 8.0 + 0.1 * torch.randn(state[BIAS].shape)
    state[QUERY] = torch.randn(state[QUERY].shape) * 0.1
    save_file(state, directory / "model.safetensors", {"format": "pt"})
    return directory


def settings_of(model: Path, work: Path, **more: Any) -> Settings:
    return offline_settings(model, work, model={"dtype": "bfloat16", **more}, algorithm={"kl_coef": 0.1})


@pytest.mark.parametrize("more", [{}, {"lora": {"rank": 2}}], ids=["whole", "lora"])
def test_version_0_is_the_checkpoint_to_the_bit(mixed: Path, tmp_path: Path, more: dict[str, Any]) -> None:
    trainer = RankTrainer.open(settings_of(mixed, tmp_path / "run", **more))
    pretrained.save(trainer.model, tmp_path / "out", mixed, trainer.gather_weights())
    stored, found = (load_file(folder / "model.safetensors") for folder in (mixed, tmp_path / "out"))
    assert stored.keys() == found.keys()
    for name, value in stored.items():
        assert found[name].dtype == value.dtype, name
        assert torch.equal(found[name], value), name
    assert json.loads((tmp_path / "out" / "config.json").read_text())["dtype"] == "bfloat16"
    metrics = trainer.train([group("g", [1.0, 0.0, 0.5])])
    assert metrics["kl_reference_k3"] == 0.0, "the reference rounds in a pass as the policy does"
    changed = trainer.gather_weights()
    assert changed[QUERY].dtype == torch.float32
    assert not torch.equal(changed[QUERY], stored[QUERY]), "what is trained of it is published too"
    trainer.ranks.close()


def test_a_checkpoint_in_float32_is_published_in_the_runs_dtype(mixed: Path, tmp_path: Path) -> None:
    AutoModelForCausalLM.from_pretrained(mixed, dtype=torch.float32).save_pretrained(tmp_path / "base")
    trainer = RankTrainer.open(settings_of(tmp_path / "base", tmp_path / "run"))
    published = trainer.gather_weights()
    assert {name for name, value in published.items() if value.dtype == torch.float32} == {BIAS}
    trainer.ranks.close()
