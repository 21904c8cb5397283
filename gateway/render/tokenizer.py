"""A tokenizer as the `renderers` library needs it, without the layers of `transformers` around the Rust one."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

from gateway.render.checkpoint import Checkpoint
from gateway.render.encoding import encode
from gateway.render.special_tokens import ControlTokens

_SHORT = 24
"""Characters up to which a text is looked up: what templates write around messages is short, and always the same."""
_KNOWN = 1024


class BareTokenizer:
    """Encodes and decodes by the underlying `tokenizers.Tokenizer`; for everything else the wrapped tokenizer responds.

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
