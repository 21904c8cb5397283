"""Hugging Face checkpoints: loading one as a model, writing one, and comparing one with a model. Owns no state."""

from __future__ import annotations

import json
import shutil
from collections import Counter
from collections.abc import Mapping
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor
from transformers.core_model_loading import revert_weight_conversion

from trainer.model import loading

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
    """Return a Hugging Face checkpoint as a model of this process, in evaluation mode. Raise ConfigError."""
    model = loading.empty(path, DTYPES[dtype])
    loading.fill(model, path, device)
    return model


def save(model: Any, directory: Path, companions: Path, state: Mapping[str, Tensor] | None = None) -> None:
    """Write config and one `model.safetensors`, and copy what else engines need from the folder `companions`.

    `state` is written instead of the model's own, which may be spread over ranks, or of another precision.
    """
    directory.mkdir(parents=True, exist_ok=True)
    # Its own, for transformers empties it while it writes.
    own = None if state is None else dict(state)
    model.save_pretrained(directory, state_dict=own, safe_serialization=True, max_shard_size="1000GB")
    if state is not None:
        _write_dtype(directory / "config.json", _bulk(state))
    for file in sorted(companions.iterdir()):
        if file.is_file() and any(fnmatchcase(file.name, pattern) for pattern in _COMPANIONS):
            shutil.copyfile(file, directory / file.name)


def as_stored(model: Any, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return a model's state by the names and in the forms of its checkpoint, in which `save` writes it."""
    found: dict[str, Tensor] = revert_weight_conversion(model, dict(state))
    return found


def _bulk(state: Mapping[str, Tensor]) -> torch.dtype:
    """Return the precision of most of a state's real numbers."""
    numbers: Counter[torch.dtype] = Counter()
    for tensor in state.values():
        if tensor.is_floating_point():
            numbers[tensor.dtype] += tensor.numel()
    return max(numbers, key=lambda dtype: numbers[dtype])


def _write_dtype(config: Path, dtype: torch.dtype) -> None:
    """Write the precision of the weights, by which engines choose theirs."""
    values = json.loads(config.read_text())
    if values.get("dtype") != (name := str(dtype).removeprefix("torch.")):
        config.write_text(json.dumps(values | {"dtype": name}, indent=2) + "\n")


def holds(directory: Path, own: Mapping[str, Tensor], name: str = "model.safetensors") -> bool:
    """Return true if the file `name` of `directory` has the state `own` bit by bit. Raise OSError if it cannot be read."""
    try:
        with safe_open(directory / name, framework="pt") as file:
            names = set(file.keys())
            # Tied weights are stored once.
            stored = {own[name].data_ptr() for name in names & own.keys()}
            whole = names <= own.keys() and all(tensor.data_ptr() in stored for tensor in own.values())
            return whole and all(_same_bits(file.get_tensor(name), own[name].cpu()) for name in names)
    except SafetensorError as error:
        raise OSError(f"{directory}: {error}") from error


def untrained(base: Path, directory: Path) -> list[str]:
    """Return the tensors of a checkpoint that the model class does not have, such as a draft head's, so that `save` omits them.

    A tied output head does not count: it is the embedding.
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
