"""The model: loading and saving a Hugging Face causal language model, and what it says of given tokens.

Owns no state. Invariant: log-probabilities and entropies are computed in float32 at least (`loss_dtype`), and column j of every
result speaks of token j (column 0 has no context and is 0).
"""

from __future__ import annotations

import shutil
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor
from transformers import AutoModelForCausalLM
from transformers.utils import logging

from trainer.errors import ConfigError

Dtype = Literal["float32", "bfloat16"]
DTYPES: dict[Dtype, torch.dtype] = {"float32": torch.float32, "bfloat16": torch.bfloat16}
_COMPANIONS = (
    *("tokenizer*.json", "special_tokens_map.json", "added_tokens.json", "normalizer.json", "tekken.json"),
    *("tokenizer.model*", "spiece.model", "sentencepiece*.model", "*.spm", "*.tiktoken"),
    *("vocab.json", "vocab.txt", "vocab.bpe", "merges.txt", "bpe.codes"),
    *("chat_template*", "*.jinja", "generation_config.json"),
    *("*processor_config.json", "*.py"),
)
"""Names of the files that tokenizers, templates, generation and processors need, and the code of a model's own classes."""
_HEAD = "lm_head.weight"


def load(path: Path, dtype: Dtype = "float32", device: str = "cpu") -> Any:
    """A Hugging Face checkpoint as a model in evaluation mode (dropout off, which a policy's ratio needs).

    Raises ConfigError if `path` holds no checkpoint.
    """
    # Its bars would break the live table, once per version.
    logging.disable_progress_bar()
    if not (path / "config.json").is_file():
        raise ConfigError(
            f"[model] path = {str(path)!r}: there is no checkpoint: this folder has no config.json"
        )
    try:
        model = AutoModelForCausalLM.from_pretrained(str(path), dtype=DTYPES[dtype], local_files_only=True)
    except (OSError, ValueError) as error:
        said = str(error).strip().splitlines()[0]
        raise ConfigError(f"[model] path = {str(path)!r}: the checkpoint cannot be used: {said}") from error
    return model.to(device).eval()


def save(model: Any, directory: Path, companions: Path) -> None:
    """Writes config and one `model.safetensors`, and copies what else engines need from the folder `companions`."""
    directory.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(directory, safe_serialization=True, max_shard_size="1000GB")
    for file in sorted(companions.iterdir()):
        if file.is_file() and any(fnmatchcase(file.name, pattern) for pattern in _COMPANIONS):
            shutil.copyfile(file, directory / file.name)


def holds(directory: Path, model: Any) -> bool:
    """True if `directory`, as `save` wrote it, has the weights of `model` bit for bit. Raises OSError if it cannot be
    read."""
    mine = model.state_dict()
    try:
        with safe_open(directory / "model.safetensors", framework="pt") as file:
            names = set(file.keys())
            # Tied weights are stored once.
            stored = {mine[name].data_ptr() for name in names & mine.keys()}
            whole = names <= mine.keys() and all(tensor.data_ptr() in stored for tensor in mine.values())
            return whole and all(_same_bits(file.get_tensor(name), mine[name].cpu()) for name in names)
    except SafetensorError as error:
        raise OSError(f"{directory}: {error}") from error


def untrained(base: Path, directory: Path) -> list[str]:
    """Tensors of a checkpoint that the model class knows nothing of, such as a draft head's, so that `save` left them out.

    A tied output head is no such tensor: it is the embedding.
    """
    left_out = _names(base) - _names(directory)
    return sorted(name for name in left_out if not name.endswith(_HEAD))


def _names(directory: Path) -> set[str]:
    found: set[str] = set()
    for path in directory.glob("*.safetensors"):
        with safe_open(path, framework="pt") as file:
            found |= set(file.keys())
    return found


def _same_bits(left: Tensor, right: Tensor) -> bool:
    if (left.dtype, left.shape) != (right.dtype, right.shape):
        return False
    return torch.equal(*(t.contiguous().reshape(-1).view(torch.uint8) for t in (left, right)))


def loss_dtype(model: Any) -> torch.dtype:
    """The precision in which losses are computed: float32, or that of the weights if it is greater."""
    return torch.promote_types(model.dtype, torch.float32)


def token_logprobs(
    model: Any, ids: Tensor, temperature: Tensor, *, with_entropy: bool = True, entropy_grad: bool = False
) -> tuple[Tensor, Tensor]:
    """Log-probability of every token and the entropy of the distribution it was drawn from.

    `ids` has shape (rows, length), int64, padded on the right: attention is causal, so padding changes nothing before it.
    `temperature` has the same shape, and holds what token j was sampled with; logits are divided by it, as the engine's
    `processed_logprobs` are. Answers two tensors of that shape in nats, of `loss_dtype`; entropy is 0 without `with_entropy`, and
    has a gradient, for which a [tokens, vocabulary] tensor is kept, only with `entropy_grad`.
    """
    logits = model(input_ids=ids, use_cache=False).logits[:, :-1].to(loss_dtype(model))
    scaled = (logits / temperature[:, 1:, None]).log_softmax(-1)
    logprobs = scaled.gather(-1, ids[:, 1:, None]).squeeze(-1)
    entropy = torch.zeros_like(logprobs)
    if with_entropy:
        with torch.set_grad_enabled(entropy_grad and torch.is_grad_enabled()):
            entropy = _entropy(scaled)
    first = logprobs.new_zeros(ids.shape[0], 1)
    return torch.cat([first, logprobs], 1), torch.cat([first, entropy], 1)


def _entropy(logprobs: Tensor) -> Tensor:
    """The entropy over the last dimension; a token of probability 0 adds nothing, to the gradient neither."""
    return -(logprobs.exp() * logprobs.masked_fill(logprobs.isneginf(), 0.0)).sum(-1)
