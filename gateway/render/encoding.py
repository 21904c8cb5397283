"""Encodes text with a tokenizer of the `tokenizers` library."""

from __future__ import annotations

from typing import Any

from gateway.config.models import MAX_CONTEXT
from headgate.errors import BadRequest

_LONG = 16
"""Characters from which on it pays not to have offsets computed."""


def encode(backend: Any, text: str, special: bool) -> list[int]:
    """Return the ids of a text, by a `tokenizers.Tokenizer`: as a batch of one, which needs neither offsets nor Python's lock.

    Raise BadRequest for a text that no model's context has room for: making, copying and freeing a list of that many ids
    would each keep Python's lock from the event loop.
    """
    if len(text) < _LONG:
        found = backend.encode(text, add_special_tokens=special)
    else:
        found = backend.encode_batch_fast([text], add_special_tokens=special)[0]
    if len(found) >= MAX_CONTEXT:
        message = f"prompt is too long: {len(found)} tokens > {MAX_CONTEXT - 1} maximum; shorten it"
        raise BadRequest(message, code="context_length_exceeded")
    ids: list[int] = found.ids
    return ids
