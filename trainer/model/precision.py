"""Which tensors of a model stay in float32 where its other weights are kept or published in fewer bits. Owns no state.

The one rule of `[model] dtype`: a tensor stays in float32 if the architecture keeps it there (such as the bias by which a router
chooses experts), if it is a buffer that passes use in float32, or if the checkpoint stores it in more bits than the bulk of its
numbers. A checkpoint that is wholly in float32 has no such tensors.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from math import prod
from pathlib import Path
from typing import Any

import torch
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    WeightConverter,
    WeightRenaming,
    build_glob_alternation,
    rename_source_key,
)

from headgate.weights.tensors import Malformed, tensors_of

_BITS = {"F64": 64, "F32": 32, "F16": 16, "BF16": 16}
"""Of one number, by safetensors' name of its kind."""


def kept(model: Any, path: Path, dtype: torch.dtype, names: Mapping[str, Any]) -> frozenset[str]:
    """Return those of `names`, a model's tensors as transformers names them, that stay in float32 while others are in `dtype`.

    `path`: the checkpoint that the model was made of. Raise ValueError if it cannot be read.
    """
    if dtype == torch.float32:
        return frozenset()
    buffers = {name for name, buffer in model.named_buffers() if buffer.dtype == torch.float32}
    return frozenset((buffers | _planned(model, dtype, names) | _stored(model, path, names)) & names.keys())


def widen(model: Any, path: Path, dtype: torch.dtype) -> None:
    """Make those tensors of a model without memory float32 that stay so, before anything is read into it.

    Raise ValueError if the checkpoint `path` cannot be read.
    """
    wide = kept(model, path, dtype, model.state_dict())
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if name in wide:
            tensor.data = tensor.data.float()


def _planned(model: Any, dtype: torch.dtype, names: Iterable[str]) -> set[str]:
    """Return the names that transformers keeps in float32, as its loading matches them."""
    if not (plan := model._get_dtype_plan(dtype)):
        return set()
    pattern, _, _ = build_glob_alternation([*plan])
    return {name for name in names if pattern.search(name)}


def _stored(model: Any, path: Path, names: Mapping[str, Any]) -> set[str]:
    """Return the names of what the checkpoint stores in more bits than most of its numbers, by the model's names."""
    try:
        stored = {name: tensor for name, tensor in tensors_of(path).items() if tensor.dtype in _BITS}
    except Malformed as error:
        raise ValueError(str(error)) from error
    numbers: Counter[int] = Counter()
    for tensor in stored.values():
        numbers[_BITS[tensor.dtype]] += prod(tensor.shape)
    most = max(numbers, key=lambda bits: numbers[bits], default=0)
    wide = [name for name, tensor in stored.items() if _BITS[tensor.dtype] > most]
    if not wide:
        return set()
    mapping = get_model_conversion_mapping(model)
    renamings = [each for each in mapping if isinstance(each, WeightRenaming)]
    converters = [each for each in mapping if isinstance(each, WeightConverter)]
    prefix = model.base_model_prefix
    return {rename_source_key(name, renamings, converters, prefix, names)[0] for name in wide}
