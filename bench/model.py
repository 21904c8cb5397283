"""A tiny random Qwen3 checkpoint for benches, made without torch in a second.

Its tokenizer knows ASCII alone, and every token that an engine samples is one or two whole characters. So a gateway never has to
hold a token back because a character is not whole, and the number of chunks depends only on how tokens were coalesced.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from string import ascii_lowercase

import numpy as np

_SPECIALS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
_MARKS = ["<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>"]
_TEXT_TOKENS = 256
END = 258
"""The token that ends a turn."""
_CONFIG = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "dtype": "float32",
    "vocab_size": 272,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 2048,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "eos_token_id": 258,
    "pad_token_id": 256,
}
MIXTURE = {"num_experts": 128, "num_experts_per_tok": 8, "num_hidden_layers": 48}
"""What makes the config that of a mixture, with the routers of Qwen3-30B-A3B."""
_STD = 0.06
_LEARNED = 8192
"""Tokens that are learned from a corpus."""


def token_texts() -> dict[int, str]:
    """Return every token that an engine may sample, the marks included, with its text."""
    texts = [text.replace("Ċ", "\n").replace("Ġ", " ") for text in _texts()]
    return dict(enumerate([*texts, *_SPECIALS, *_MARKS]))


def save_model(directory: Path, corpus: str = "") -> None:
    """Write config, weights and tokenizer; the same bytes every time.

    With a `corpus` the tokenizer also knows the words of it, so that a prompt has as many characters to a token as prompts have.
    The model itself knows nothing of these tokens: it is for engines that do not look at prompts.
    """
    from safetensors.numpy import save_file

    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(_CONFIG, indent=2))
    random = np.random.default_rng(0)
    weights = {
        name: np.ones(shape, np.float32)
        if len(shape) == 1
        else (_STD * random.standard_normal(shape)).astype(np.float32)
        for name, shape in shapes()
    }
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})
    _save_tokenizer(directory, corpus)


def shapes() -> Iterator[tuple[str, tuple[int, ...]]]:
    """Return the names and shapes of the tensors."""
    hidden, inner, vocabulary, head = 128, 256, 272, 64
    yield "model.embed_tokens.weight", (vocabulary, hidden)
    for layer in range(2):
        prefix = f"model.layers.{layer}."
        for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
            yield f"{prefix}self_attn.{name}.weight", (hidden, hidden)
        for name in ("q_norm", "k_norm"):
            yield f"{prefix}self_attn.{name}.weight", (head,)
        for name in ("gate_proj", "up_proj"):
            yield f"{prefix}mlp.{name}.weight", (inner, hidden)
        yield f"{prefix}mlp.down_proj.weight", (hidden, inner)
        for name in ("input_layernorm", "post_attention_layernorm"):
            yield f"{prefix}{name}.weight", (hidden,)
    yield "model.norm.weight", (hidden,)
    yield "lm_head.weight", (vocabulary, hidden)


def _save_tokenizer(directory: Path, corpus: str) -> None:
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocabulary = {text: i for i, text in enumerate([*_texts(), *_SPECIALS, *_MARKS])}
    merges = _merges(corpus) if corpus else []
    for pair in merges:
        vocabulary.setdefault("".join(pair), len(vocabulary))
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(mark, special=True) for mark in _SPECIALS])
    tokenizer.add_tokens([AddedToken(mark, special=False) for mark in _MARKS])
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<|im_end|>", pad_token="<|endoftext|>"
    )
    fast.save_pretrained(directory)


def _texts() -> list[str]:
    characters = ["Ċ", "Ġ", *(chr(code) for code in range(33, 127))]  # line break and space, byte-level
    pairs = (a + b for a, b in product(ascii_lowercase, repeat=2))
    return [*characters, *pairs][:_TEXT_TOKENS]


def _merges(corpus: str) -> list[tuple[str, str]]:
    """Learn the merges of byte pair encoding from an ASCII text."""
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers

    learner = Tokenizer(models.BPE())
    learner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = trainers.BpeTrainer(vocab_size=_LEARNED, show_progress=False, initial_alphabet=_texts()[:96])
    learner.train_from_iterator(corpus.splitlines(keepends=True), trainer)
    merges = json.loads(learner.to_str())["model"]["merges"]
    return [(a, b) for a, b in merges]
