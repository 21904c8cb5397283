"""Hugging Face checkpoints as models whose weights are read after they are spread over ranks, so that no rank holds them all.

`empty` builds a model without memory, `fill` reads what this rank has of each tensor. Names and forms of stored tensors are
transformers' affair: its renaming, fusion of experts and ties are used as `from_pretrained` does. Owns no state.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors import SafetensorError, safe_open
from torch import nn
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
)
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    Concatenate,
    WeightConverter,
    convert_and_load_state_dict_in_model,
)
from transformers.initialization import meta_device_safe_creation_ops
from transformers.modeling_utils import LoadStateDictConfig
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME, logging

from trainer.errors import ConfigError
from trainer.model import parallel, precision, vision
from trainer.model.parallel import Ranks

_MANY = 5
"""Names that an error shows."""


def empty(path: Path, dtype: torch.dtype) -> Any:
    """Return the model of a checkpoint on the meta device, in evaluation mode (dropout off, which a policy's ratio needs).

    Tied weights are tied; `precision` keeps some tensors in float32 whatever `dtype` is. Raise ConfigError if `path` holds no
    checkpoint of a causal language model.
    """
    if not path.is_dir():
        raise _refused(path, "the folder does not exist; a relative path is resolved from the current folder")
    if not (path / "config.json").is_file():
        raise _refused(path, "the folder is not a checkpoint: it has no config.json")
    try:
        config = AutoConfig.from_pretrained(str(path), local_files_only=True)
        if (quantized := getattr(config, "quantization_config", None)) is not None:
            method = dict(quantized).get("quant_method", "?") if isinstance(quantized, dict) else quantized
            raise ValueError(
                f"its weights are quantized ({method}); write them in bfloat16 first, for adapters too (QLoRA): their probe"
                " fails, and so does importance sampling, unless engines compute with the same rounded weights"
            )
        kind = kind_of(config)
        with torch.device("meta"), meta_device_safe_creation_ops():
            model = kind.from_config(config, dtype=dtype).eval()
        precision.widen(model, path, dtype)
        return model
    except (OSError, ValueError) as error:
        raise _unusable(path, error) from error


def kind_of(config: Any) -> Any:
    """Return the auto class of transformers for a config. Raise ValueError if what it describes does not continue text."""
    if config.model_type in vision.MODELS:
        return AutoModelForImageTextToText
    if type(config) in MODEL_FOR_CAUSAL_LM_MAPPING:
        return AutoModelForCausalLM
    if type(config) in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING:
        return AutoModelForImageTextToText  # of which only text is trained, such as Mistral-3
    raise ValueError(
        f"its model_type is {config.model_type!r}, of which transformers {transformers.__version__} has no causal language model"
    )


def fill(model: Any, path: Path, device: str, ranks: Ranks | None = None) -> None:
    """Give a model that `empty` made its weights and buffers on `device`; of a sharded weight, this rank's part is read.

    Collective, with `ranks`. Raise ConfigError if tensors are missing, of another shape, or such as the model has no place for.
    Tensors of modules that the model does not have at all, such as a draft head's, are left out.
    """
    with ExitStack() as files, _quiet():
        try:
            stored = _slices(path, files)
            with _read_whole(_joined(model)):
                wrong = _put(model, path, stored, device)
            parallel.own(model)
        except (OSError, ValueError, SafetensorError) as error:
            raise _unusable(path, error) from error
    found = wrong if ranks is None else [each for part in ranks.all_gather(wrong) for each in part]
    if unique := sorted(set(found)):
        more = f" and {len(unique) - _MANY} more" if len(unique) > _MANY else ""
        raise _refused(
            path, f"its weights are not those of its config.json: {'; '.join(unique[:_MANY])}{more}"
        )


def _slices(path: Path, files: ExitStack) -> dict[str, Any]:
    """Return the stored tensors by name, as views of files, of which nothing is read yet."""
    names = [SAFE_WEIGHTS_NAME]
    if (index := path / SAFE_WEIGHTS_INDEX_NAME).is_file():
        names = sorted(set(json.loads(index.read_text())["weight_map"].values()))
    found: dict[str, Any] = {}
    for name in names:
        if not (path / name).is_file():
            raise OSError(f"{name} does not exist; its weights are needed as safetensors")
        file = files.enter_context(safe_open(path / name, framework="pt"))
        found |= {key: file.get_slice(key) for key in file.keys()}  # noqa: SIM118 (no mapping)
    return found


def _put(model: Any, path: Path, stored: Mapping[str, Any], device: str) -> list[str]:
    """Fill weights and buffers; return what does not fit, tensor by tensor."""
    shapes = {name: list(tensor.shape) for name, tensor in model.state_dict().items()}
    tied = set(model.all_tied_weights_keys)
    dtype = next(model.parameters()).dtype
    options = LoadStateDictConfig(
        pretrained_model_name_or_path=str(path),
        ignore_mismatched_sizes=True,
        device_map={"": device},
        dtype=dtype,
        dtype_plan=model._get_dtype_plan(dtype),
        weight_mapping=get_model_conversion_mapping(model),
    )
    info, _ = convert_and_load_state_dict_in_model(model, stored, options)
    if info.conversion_errors:
        return [f"{name} cannot be made of what is stored" for name in info.conversion_errors]
    info = model._finalize_model_loading(model, options, info)
    wrong = [f"{name} is missing" for name in info.missing_keys]
    for name, own, _ in info.mismatched_keys:
        shape = stored[name].get_shape() if name in stored else list(own)
        wrong.append(f"{name} has shape {shape}, and the model wants {shapes[name]}")
    modules = {name for name, _ in model.named_modules()}
    wrong += [
        f"{name} has no place in the model"
        for name in info.unexpected_keys
        if name.rpartition(".")[0] in modules
    ]
    return wrong + [
        f"{name} is tied to another, but stored with other values"
        for name in tied - set(model.all_tied_weights_keys)
    ]


def _joined(model: Any) -> list[tuple[nn.Module, str]]:
    """Return the weights that are joined of several stored tensors along the dimension of their shards.

    Transformers reads each rank's part of every stored tensor, and would join these.
    """
    joins = [
        (re.compile(pattern), each.dim)
        for converter in get_model_conversion_mapping(model)
        if isinstance(converter, WeightConverter)
        for each in converter.operations
        if isinstance(each, Concatenate)
        for pattern in converter.target_patterns
    ]
    return [
        (module, key)
        for name, module in model.named_modules()
        for key, weight in module._parameters.items()
        if weight is not None
        and any(
            pattern.search(f"{name}.{key}") and parallel.is_sharded(weight, dim) for pattern, dim in joins
        )
    ]


@contextmanager
def _read_whole(weights: list[tuple[nn.Module, str]]) -> Iterator[None]:
    """Make these weights, of which each rank has a shard, whole ones in the block, and then keep this rank's shard."""
    shards = [(module, key, module.get_parameter(key)) for module, key in weights]
    for module, key, shard in shards:
        whole = torch.empty(shard.shape, dtype=shard.dtype, device="meta")
        module._parameters[key] = nn.Parameter(whole, requires_grad=shard.requires_grad)
    yield
    for module, key, shard in shards:
        own = parallel.shard_of(module.get_parameter(key).detach(), shard)
        module._parameters[key] = nn.Parameter(own, requires_grad=shard.requires_grad)


@contextmanager
def _quiet() -> Iterator[None]:
    """Disable progress bars, which would break the live table, and reports in addition to the error."""
    logging.disable_progress_bar()
    before = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(before)


def _unusable(path: Path, error: Exception) -> ConfigError:
    return _refused(path, f"the checkpoint cannot be used: {str(error).strip().splitlines()[0]}")


def _refused(path: Path, why: str) -> ConfigError:
    return ConfigError(f"[model] path = {str(path)!r}: {why}")
