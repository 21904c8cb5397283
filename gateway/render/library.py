"""The renderers of the `renderers` library, for the families that it knows by name. Pure."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path
from typing import Any

from gateway.config import ModelSettings
from gateway.render.checkpoint import Checkpoint, has_images
from gateway.render.encoding import encode
from gateway.render.special_tokens import ControlTokens

_SHORT = 24
"""Characters up to which a text is looked up: what templates write around messages is short, and always the same."""
_KNOWN = 1024


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


class BareTokenizer:
    """A tokenizer as the library needs it: it encodes and decodes by the underlying `tokenizers.Tokenizer`, without the layers of
    `transformers`, and has the other attributes of the wrapped one.

    It gives no offsets, so the library does not attribute tokens to messages, which is not needed here and which cost
    more than the rendering itself. Control tokens that were cut up (`quoting`) are encoded as text.
    """

    def __init__(self, tokenizer: Checkpoint, control: ControlTokens) -> None:
        self._wrapped = tokenizer
        self._control = control
        self._known = lru_cache(_KNOWN)(self._encode)

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Return the ids of a text."""
        if len(text) <= _SHORT:
            return list(self._known(text, add_special_tokens))
        return self._encode(text, add_special_tokens)

    def _encode(self, text: str, special: bool) -> list[int]:
        if self._control.cut in text:
            return self._control.encode(self._control.guard_uncut(text))
        return encode(self._wrapped.backend_tokenizer, text, special)

    def decode(self, ids: Any, skip_special_tokens: bool = False, **_: Any) -> str:
        """Return the text of ids."""
        ids = [ids] if isinstance(ids, int) else list(ids)
        text: str = self._wrapped.backend_tokenizer.decode(ids, skip_special_tokens=skip_special_tokens)
        return text

    def __len__(self) -> int:
        return len(self._wrapped)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(self._wrapped, name)
