"""A tiny random Qwen3 model with a byte-level tokenizer: enough for engines, and made in a second."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

SPECIALS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
MARKS = ["<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>"]
VOCABULARY = 272


def save_tokenizer(directory: Path) -> None:
    """Save a byte-level tokenizer without merges, and Qwen's marks."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(s, special=True) for s in SPECIALS])
    tokenizer.add_tokens([AddedToken(s, special=False) for s in MARKS])
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<|im_end|>", pad_token="<|endoftext|>"
    )
    fast.save_pretrained(directory)


_ENDS = [256, 258]
_HIDDEN, _INNER, _LAYERS, _HEADS, _HEAD_DIM = 128, 256, 2, 2, 64


def tensors() -> dict[str, list[int]]:
    """Return the names and shapes of the model's tensors."""
    inside = _HEADS * _HEAD_DIM
    found = {"model.embed_tokens.weight": [VOCABULARY, _HIDDEN], "lm_head.weight": [VOCABULARY, _HIDDEN]}
    for i in range(_LAYERS):
        layer = f"model.layers.{i}"
        found |= {f"{layer}.{name}_layernorm.weight": [_HIDDEN] for name in ("input", "post_attention")}
        found |= {f"{layer}.self_attn.{name}_norm.weight": [_HEAD_DIM] for name in "qk"}
        found |= {f"{layer}.self_attn.{name}_proj.weight": [inside, _HIDDEN] for name in "qkv"}
        found |= {f"{layer}.mlp.{name}_proj.weight": [_INNER, _HIDDEN] for name in ("gate", "up")}
        found[f"{layer}.self_attn.o_proj.weight"] = [_HIDDEN, inside]
        found[f"{layer}.mlp.down_proj.weight"] = [_HIDDEN, _INNER]
    return {**found, "model.norm.weight": [_HIDDEN]}


def save_model(
    directory: Path,
    seed: int,
    *,
    tied: bool = False,
    scale: float = 3.0,
    length: int = 2048,
    endless: bool = False,
) -> None:
    """Random weights; `scale` makes the distribution clearly not uniform. `length`: the longest request.

    `endless`: the model never ends a reply itself.
    """
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM
    from transformers.utils import logging

    torch.manual_seed(seed)
    config = Qwen3Config(
        vocab_size=VOCABULARY,
        hidden_size=_HIDDEN,
        intermediate_size=_INNER,
        num_hidden_layers=_LAYERS,
        num_attention_heads=_HEADS,
        num_key_value_heads=_HEADS,
        head_dim=_HEAD_DIM,
        max_position_embeddings=length,
        tie_word_embeddings=tied,
        eos_token_id=258,
        pad_token_id=256,
        bos_token_id=None,
    )
    model = Qwen3ForCausalLM(config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.mul_(scale)
        if endless:
            _forbid_ends(model)
    logging.disable_progress_bar()
    model.save_pretrained(directory)
    save_tokenizer(directory)


def _forbid_ends(model: Any) -> None:
    """One dimension is the same after every token, and no layer writes to it: by it the head forbids what ends a reply."""
    model.model.embed_tokens.weight[:, 0] = 1.0
    for layer in model.model.layers:
        layer.self_attn.o_proj.weight[0] = 0.0
        layer.mlp.down_proj.weight[0] = 0.0
    if not model.config.tie_word_embeddings:
        model.lm_head.weight[:, 0] = 0.0
    model.lm_head.weight[_ENDS, 0] = -50.0


@cache
def _load(directory: Path) -> Any:
    import torch
    from transformers import Qwen3ForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    # Its operations are so small that threads would only wait for one another, on a busy machine for most of the time.
    torch.set_num_threads(1)
    return Qwen3ForCausalLM.from_pretrained(directory, dtype=torch.float32)


def logprobs(directory: Path, ids: list[int], temperature: float = 1.0) -> list[float]:
    """Return the log-probability of every token but the first, computed by transformers: the tests' ground truth."""
    import torch

    model = _load(directory)
    with torch.no_grad():
        logits = model(torch.tensor([ids])).logits[0, :-1] / temperature
    picked = logits.log_softmax(-1).gather(-1, torch.tensor(ids[1:])[:, None])
    return picked.flatten().tolist()


def distribution(directory: Path, ids: list[int]) -> list[list[float]]:
    """Return the logits after each token of `ids`, computed by transformers."""
    import torch

    with torch.no_grad():
        return _load(directory)(torch.tensor([ids])).logits[0].tolist()


def probe_of(new: Path, parent: Path) -> dict[str, Any]:
    """Return the probe that a trainer would put into the manifest."""
    sequence = [257, 84, 82, 68, 81, 198, 71, 72, 258, 198]
    return {
        "sequences": [sequence],
        "new_logprobs": [logprobs(new, sequence)],
        "parent_logprobs": [logprobs(parent, sequence)],
    }
