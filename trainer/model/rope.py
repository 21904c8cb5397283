"""Rotary positions that depend on the length of what is computed, as the engine has them.

transformers chooses LongRoPE's factors and the base of dynamic NTK by the longest row of a pass, so a token's log-probability
would depend on the rows that share its micro-batch. vLLM chooses once, when it starts, and so does `pin`. Source: vLLM 0.32,
`phi3_long_rope_scaled_rope.py` (the long factors for every row as soon as `max_model_len` exceeds the length of pretraining) and
`dynamic_ntk_scaling_rope.py` (one base for all rows). Owns no state; a model keeps its own config, which is what is published.
"""

from __future__ import annotations

import copy
import math
from typing import Any

import torch
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from trainer.errors import ConfigError

_LONG, _DYNAMIC = "longrope", "dynamic"


def pin(model: Any, max_model_len: int | None) -> None:
    """Make a model's positions those of an engine that takes rows of `max_model_len` tokens; most models have no others.

    The weights may be on the meta device still. Raise ConfigError if the length is needed and None, or longer than the engine's
    table of positions.
    """
    fixed = pinned(model.config, max_model_len)
    if fixed is model.config:
        return
    own = model.config.get_text_config()
    for module in model.modules():
        if hasattr(module, "rope_type") and getattr(module, "config", None) is own:
            _pin(module, fixed.get_text_config())


def pinned(whole: Any, max_model_len: int | None) -> Any:
    """Return a model's config without positions that depend on a row's length; itself, if it has none.

    Raise ConfigError as `pin` does.
    """
    config = whole.get_text_config()
    kinds = {kind for _, each in _parts(config) if (kind := _kind(each)) is not None}
    if not kinds:
        return whole
    name = f"{config.model_type}'s positions (rope_type = {' and '.join(sorted(kinds))})"
    if max_model_len is None:
        raise ConfigError(
            f"[model] max_model_len is needed: {name} depend on the longest row that the engine takes; set it to max_model_len of"
            " [models.NAME] in the gateway's file"
        )
    if max_model_len > config.max_position_embeddings:
        raise ConfigError(
            f"[model] max_model_len = {max_model_len}: vLLM has {name} for {config.max_position_embeddings} tokens; set at most"
            " that, here and in the gateway's file"
        )
    found = copy.deepcopy(whole)
    for _, each in _parts(found.get_text_config()):
        if (kind := _kind(each)) is not None:
            (_fix_long if kind == _LONG else _fix_dynamic)(each, config, max_model_len)
    return found


def _parts(config: Any) -> list[tuple[str | None, dict[str, Any]]]:
    """Return the rotary parameters by the type of layer that has them; of None, all layers have them."""
    found = getattr(config, "rope_parameters", None) or {}
    if "rope_type" in found:
        return [(None, found)]
    return [(name, each) for name, each in found.items() if isinstance(each, dict)]


def _kind(parameters: dict[str, Any]) -> str | None:
    """Return the type, of those that depend on a row's length. With `alpha` (Hunyuan), dynamic NTK does not."""
    kind = parameters.get("rope_type")
    return kind if kind == _LONG or (kind == _DYNAMIC and not parameters.get("alpha")) else None


def _fix_long(parameters: dict[str, Any], config: Any, max_model_len: int) -> None:
    original = parameters["original_max_position_embeddings"]
    which = "long" if max_model_len > original else "short"
    ratio = config.max_position_embeddings / original
    factor = 1.0 if ratio <= 1 else math.sqrt(1 + math.log(ratio) / math.log(original))
    scale = parameters.get(f"{which}_mscale") or factor
    chosen = parameters[f"{which}_factor"]
    parameters |= {"short_factor": chosen, "long_factor": chosen, "attention_factor": scale}
    if "long_mscale" in parameters:
        parameters |= {"short_mscale": scale, "long_mscale": scale}


def _fix_dynamic(parameters: dict[str, Any], config: Any, _: int) -> None:
    size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    width = int(size * parameters.get("partial_rotary_factor", 1.0))
    longest = config.max_position_embeddings
    grown = parameters["factor"] * longest / parameters.get("max_trained_positions", longest)
    parameters["rope_theta"] *= (grown - (parameters["factor"] - 1)) ** (width / (width - 2))
    parameters["rope_type"] = "default"


def _pin(module: Any, config: Any) -> None:
    """Give one rotary module a config whose positions do not depend on lengths, and what it made of its own config."""
    module.config = config
    for name, parameters in _parts(config):
        kind = parameters["rope_type"]
        prefix, layer = ("", {}) if name is None else (f"{name}_", {"layer_type": name})
        if name is None:
            module.rope_type = kind
        else:
            module.rope_type[name] = kind
        initial = module.compute_default_rope_parameters if kind == "default" else ROPE_INIT_FUNCTIONS[kind]
        frequencies, scale = initial(config, **layer)
        setattr(module, f"{prefix}attention_scaling", scale)
        for buffer in (getattr(module, f"{prefix}inv_freq"), getattr(module, f"{prefix}original_inv_freq")):
            if not buffer.is_meta:
                with torch.no_grad():
                    buffer.copy_(frequencies)
