"""The model: loading and saving a Hugging Face causal language model, and what it says of given tokens.

Owns no state. Invariant: log-probabilities and entropies are computed in float32 whatever the dtype of the weights, and
column j of every result speaks of token j (column 0 has no context and is 0).
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM
from transformers.utils import logging

Dtype = Literal["float32", "bfloat16"]
DTYPES: dict[Dtype, torch.dtype] = {"float32": torch.float32, "bfloat16": torch.bfloat16}
_WEIGHT_SUFFIXES = (".safetensors", ".safetensors.index.json", ".bin", ".bin.index.json", ".pt")
_NOT_OF_THE_MODEL = {"manifest.json", "warmstart.json", "config.json"}


def load(path: Path, dtype: Dtype = "float32", device: str = "cpu") -> Any:
    """A Hugging Face checkpoint as a model in evaluation mode (dropout off, which a policy's ratio needs).

    Raises OSError if `path` holds no checkpoint.
    """
    # Its bars would break the live table, once per version.
    logging.disable_progress_bar()
    model = AutoModelForCausalLM.from_pretrained(str(path), dtype=DTYPES[dtype])
    return model.to(device).eval()


def save(model: Any, directory: Path, companions: Path) -> None:
    """Writes config and one `model.safetensors`, and copies the tokenizer's and generation files of `companions`."""
    directory.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(directory, safe_serialization=True, max_shard_size="1000GB")
    for file in sorted(companions.iterdir()):
        if file.is_file() and not file.name.endswith(_WEIGHT_SUFFIXES) and file.name not in _NOT_OF_THE_MODEL:
            shutil.copyfile(file, directory / file.name)


def token_logprobs(
    model: Any, ids: Tensor, temperature: Tensor, *, with_entropy: bool = True
) -> tuple[Tensor, Tensor]:
    """Log-probability of every token and the entropy of the distribution it was drawn from.

    `ids` has shape (rows, length), int64, padded on the right: attention is causal, so padding changes nothing before it.
    `temperature` has the same shape, float32, and holds what token j was sampled with; logits are divided by it, as the
    engine's `processed_logprobs` are. Answers two float32 tensors of that shape in nats; entropy is 0 without `with_entropy`.
    """
    logits = model(input_ids=ids, use_cache=False).logits[:, :-1].float()
    scaled = (logits / temperature[:, 1:, None]).log_softmax(-1)
    logprobs = scaled.gather(-1, ids[:, 1:, None]).squeeze(-1)
    entropy = -(scaled.exp() * scaled).sum(-1) if with_entropy else torch.zeros_like(logprobs)
    first = logprobs.new_zeros(ids.shape[0], 1)
    return torch.cat([first, logprobs], 1), torch.cat([first, entropy], 1)
