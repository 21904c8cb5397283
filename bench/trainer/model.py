"""The model of the trainer's bench: small, random, Qwen3's architecture, with a tokenizer of special tokens alone."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from tokenizers import Tokenizer, models
from transformers import (
    PreTrainedTokenizerFast,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)
from transformers.utils import logging


@dataclass(frozen=True, slots=True)
class Shape:
    """The sizes of a model."""

    vocabulary: int = 8192
    hidden: int = 256
    layers: int = 4
    context: int = 4096
    experts: int = 0
    """Of each layer, of which a token goes through two, together as wide as the dense layer; 0: it is dense."""


def write_model(folder: Path, shape: Shape) -> None:
    """Write a checkpoint in float32."""
    logging.disable_progress_bar()
    torch.manual_seed(1)
    inner = 3 * shape.hidden
    experts = {
        "num_experts": shape.experts,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": inner // 2,
        "norm_topk_prob": True,
    }
    config = (Qwen3MoeConfig if shape.experts else Qwen3Config)(
        vocab_size=shape.vocabulary,
        hidden_size=shape.hidden,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.hidden // 64,
        num_key_value_heads=shape.hidden // 64,
        head_dim=64,
        intermediate_size=inner,
        max_position_embeddings=shape.context,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=0,
        pad_token_id=1,
        dtype="float32",
        **(experts if shape.experts else {}),
    )
    (Qwen3MoeForCausalLM if shape.experts else Qwen3ForCausalLM)(config).save_pretrained(folder)
    words = Tokenizer(models.WordLevel({"<end>": 0, "<pad>": 1, "recorded": 2}, unk_token="<pad>"))
    PreTrainedTokenizerFast(tokenizer_object=words, eos_token="<end>", pad_token="<pad>").save_pretrained(
        folder
    )
