"""A small copy of a model's configuration, in which everything that begins to act late acts early.

`small` keeps the class and every kind of layer, with few heads, experts and layers; `lowered` then makes each integer small that
shapes no weight and that rows of a few dozen tokens would not reach: windows, chunks, top-k, compression rates, the length of
pretraining. Which integers these are is found by trying and not by their names, because each architecture has names of its own.
Models are only built on the meta device. Owns no state.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from transformers.initialization import meta_device_safe_creation_ops

REACH = 32
"""Tokens: what acts on rows of this many needs no lowering, and what is lowered is below it."""
_VOCABULARY, _INNER, _HEADS, _TOWER_LAYERS = 256, 64, 2, 1
_DEPTH = ("num_hidden_layers", "n_layer", "n_layers", "num_layers", "depth")
_WIDTH = re.compile(r"hidden_size|n_embd|d_model|word_embed_proj_dim|attention_hidden_size|mamba_d_ssm")
_INNER_WIDTH = re.compile(r"(.*_)?(intermediate_size|ffn_dim|n_inner|ffn_hidden_size)(_.*)?")
_HEAD_COUNT = re.compile(r"(.*_)?(heads|n_head)|multi_query_group_num|num_query_groups")
_EXPERTS = re.compile(r"(n|num|moe_num)_((routed|local)_)?experts")
_CHOSEN = re.compile(r"num_experts_per_tok(en)?|moe_topk|moe_k|top_k_experts")
_NO_LENGTH = re.compile(
    r".*(token_id|token_index|vocab|theta|seed|layers?|dim|rank|channels).*"
    r"|max_position_embeddings|n_positions|n_ctx|max_seq_len|model_max_length"
)
"""Integers that are not lengths, or lengths of rows that no engine takes."""
_LENGTH = re.compile(r".*(window|chunk|compress|topk|stride|block_size).*")
"""Lengths, also where they shape weights: a position's embedding within each compressed block."""
_LOWER = (8, 12, 16, 20, 24)

Path = tuple[str | int, ...]


def small(kind: type[Any], config: Any) -> Any:
    """Return a config with the same kinds of layers and small sizes, for models of class `kind`. Raise ValueError."""
    values = config.to_dict()
    text = _text(config, values)
    for name, part in values.items():
        if isinstance(part, dict) and part is not text and name.endswith("_config"):
            _set_depth(part, _TOWER_LAYERS)
    try:
        _narrow(text, config.get_text_config())
        return _shallow(kind, _made(config, values))
    except Exception as error:  # from classes of others, with a config that was never published
        raise ValueError(f"{type(error).__name__}: {str(error).strip().splitlines()[0]}") from error


def lowered(kind: type[Any], config: Any) -> tuple[Any, dict[str, int]]:
    """Return `config` with its late thresholds below `REACH`, and what they were, by name."""
    shapes, found = _shapes(_build(kind, config)), {}
    for number, (path, value) in enumerate(lengths(config)):
        values = config.to_dict()
        _put(_text(config, values), path, _LOWER[number % len(_LOWER)])
        try:
            changed = _made(config, values)
            same = _shapes(_build(kind, changed)) == shapes
        except Exception:  # as above: this one cannot be lowered
            continue
        if same or any(_LENGTH.fullmatch(str(each)) for each in path):
            config = changed
            found[".".join(map(str, path))] = value
    return config, found


def lengths(config: Any) -> list[tuple[Path, int]]:
    """Return the integers above `REACH` of a language model's config that may be thresholds: `lowered` tries each."""
    text = _text(config, config.to_dict())
    return [(path, value) for path, value in _integers(text) if value > REACH and not _is_size(path)]


def build(kind: type[Any], config: Any, dtype: torch.dtype) -> Any:
    """Return a model on the CPU with random weights by which late effects show, in evaluation mode."""
    generator = torch.Generator().manual_seed(0)
    for part in (config, config.get_text_config()):
        part._experts_implementation = "eager"
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = kind._from_config(config, attn_implementation="eager", dtype=dtype).eval()
    with torch.no_grad():
        for weight in model.parameters():
            noise = torch.randn(weight.shape, generator=generator)
            if weight.ndim >= 2:
                # Larger than at the start of training, where distributions are uniform and nothing shows; smaller than what makes
                # deep models (Gemma-3n) chaotic.
                weight.copy_(noise * (0.3 / weight.shape[-1] ** 0.5))
            else:
                weight.add_(noise * 0.1)
    return model


def _build(kind: type[Any], config: Any) -> Any:
    with torch.device("meta"), meta_device_safe_creation_ops():
        return kind._from_config(config, attn_implementation="eager")


def _made(config: Any, values: dict[str, Any]) -> Any:
    return type(config).from_dict(copy.deepcopy(values))


def _text(config: Any, values: dict[str, Any]) -> dict[str, Any]:
    """Return the part of a config's values that the language model is made of."""
    own = config.get_text_config()
    names = (name for name in values if name.endswith("config") and getattr(config, name, None) is own)
    name = next(names, None)
    return values if name is None else values[name]


def _narrow(text: dict[str, Any], config: Any) -> None:
    """Make a language model narrow. A head keeps its size, by which rotary factors are counted."""
    heads = getattr(config, "num_attention_heads", _HEADS)
    share = _HEADS / (max(heads) if isinstance(heads, list) else heads)
    experts = _fewest_experts(text)
    for key, value in text.items():
        if key.startswith("vocab_size"):
            text[key] = min(value, _VOCABULARY)
        elif key.endswith("token_id") and value is not None:
            text[key] = 0
        elif _INNER_WIDTH.fullmatch(key):
            text[key] = _each(value, lambda n: min(n, _INNER))
        elif _HEAD_COUNT.fullmatch(key) or _WIDTH.fullmatch(key):
            text[key] = _each(value, lambda n: min(n, max(1, round(n * share))))
        elif _EXPERTS.fullmatch(key):
            text[key] = _each(value, lambda n: min(n, experts))


def _each(value: Any, change: Any) -> Any:
    if isinstance(value, list):
        return [_each(each, change) for each in value]
    return change(value) if isinstance(value, int) and value > 0 else value


def _fewest_experts(text: dict[str, Any]) -> int:
    """Return enough experts for a choice in each group of the router, of which the scores of two count."""
    chosen = max([2, *(n for key, n in text.items() if _CHOSEN.fullmatch(key) and isinstance(n, int))])
    groups, taken = text.get("n_group") or 1, text.get("topk_group") or 1
    return max(2, -(-2 * chosen // taken)) * groups


def _set_depth(values: dict[str, Any], layers: int) -> None:
    """Cut layers, and what a config lists for each of them."""
    depth = _depth(values)
    for key, value in values.items():
        if key in _DEPTH:
            values[key] = layers
        elif isinstance(value, list) and len(value) == depth:
            values[key] = value[:layers]


def _depth(values: dict[str, Any]) -> int:
    return next((values[key] for key in _DEPTH if isinstance(values.get(key), int)), 0)


def _shallow(kind: type[Any], config: Any) -> Any:
    """Return the config of the first layers, among which is one of each kind; all of them if a shorter model has other kinds."""
    whole = _kinds(_build(kind, config))
    layers = max((whole.index(each) + 1 for each in set(whole)), default=0)
    if not 0 < layers < len(whole):
        return config
    values = config.to_dict()
    _set_depth(_text(config, values), layers)
    try:
        found = _made(config, values)
        return found if _kinds(_build(kind, found)) == whole[:layers] else config
    except Exception:  # as above
        return config


def _kinds(model: Any) -> list[Any]:
    """Return what distinguishes each layer: its modules, their shapes, and the plain values that they hold."""
    lists = (module for module in model.get_decoder().modules() if isinstance(module, nn.ModuleList))
    return [tuple(_module(*each) for each in layer.named_modules()) for layer in next(lists, [])]


def _module(name: str, module: nn.Module) -> tuple[Any, ...]:
    fields = {
        key: value
        for key, value in vars(module).items()
        if isinstance(value, int | float | str | None) and not key.endswith(("layer_idx", "layer_id"))
    }
    shapes = tuple(tuple(weight.shape) for weight in module.parameters(recurse=False))
    return name, type(module), shapes, tuple(sorted(fields.items(), key=str))


def _shapes(model: nn.Module) -> dict[str, torch.Size]:
    return {name: tensor.shape for name, tensor in model.state_dict().items()}


def _integers(value: Any, path: Path = ()) -> Iterator[tuple[Path, int]]:
    if isinstance(value, dict):
        for key, each in value.items():
            yield from _integers(each, (*path, key))
    elif isinstance(value, list):
        for number, each in enumerate(value):
            yield from _integers(each, (*path, number))
    elif isinstance(value, int) and not isinstance(value, bool):
        yield path, value


def _is_size(path: Path) -> bool:
    names = [each for each in path if isinstance(each, str)]
    sizes = (_WIDTH, _INNER_WIDTH, _HEAD_COUNT, _EXPERTS, _CHOSEN, _NO_LENGTH)
    return any(pattern.fullmatch(names[-1]) for pattern in sizes)


def _put(values: Any, path: Path, value: int) -> None:
    *parents, last = path
    for each in parents:
        values = values[each]
    values[last] = value
