"""The renderers of the `renderers` library, for the families that it knows by name. Pure."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from gateway.config import ModelSettings
from gateway.render.checkpoint import Checkpoint, has_images
from gateway.render.special_tokens import ControlTokens
from gateway.render.tokenizer import BareTokenizer


def of_library(
    tokenizer: Checkpoint,
    control: ControlTokens,
    model: ModelSettings,
    switches: dict[str, Any] | None = None,
) -> tuple[Any | None, Any | None]:
    """Return a family's renderer, and the one that keeps earlier reasoning; None for what the library does not have.

    Raise ValueError for switches that the family does not know.
    """
    if model.family == "template":
        return None, None
    import renderers

    bare = BareTokenizer(tokenizer, control)
    if model.family == "auto":
        return _registered(bare), None
    config = renderers.config_from_name(model.family)
    assert config is not None
    values = {"enable_thinking": model.thinking} if "enable_thinking" in type(config).model_fields else {}
    values |= switches or {}
    config = type(config)(**values)
    try:
        keeping = renderers.create_renderer(bare, type(config)(**values, thinking_retention="all"))
    except ValueError:  # the family's own settings contradict this one
        keeping = None
    return renderers.create_renderer(bare, config), keeping


def _registered(bare: BareTokenizer) -> Any | None:
    """Return the renderer of a model that the library knows by its name at Hugging Face; else None: the template counts."""
    import renderers
    from renderers.base import MODEL_RENDERER_MAP

    if bare.name_or_path in MODEL_RENDERER_MAP:
        return renderers.create_renderer(bare)
    if has_images(Path(bare.name_or_path)):
        raise ValueError(
            "its model sees images: set family = 'template', and images = true if it may be given any"
        )
    return None
