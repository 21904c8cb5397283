"""Texts that no model has room for are refused before a list of their tokens is made."""

from __future__ import annotations

from typing import NoReturn

import pytest

from gateway.config.models import MAX_CONTEXT
from gateway.render.encoding import encode
from headgate.errors import BadRequest


class Encoding:
    def __len__(self) -> int:
        return MAX_CONTEXT

    @property
    def ids(self) -> NoReturn:
        raise AssertionError("the list would be long")


class Backend:
    """Finds more tokens than a context can have."""

    def encode_batch_fast(self, texts: list[str], *, add_special_tokens: bool) -> list[Encoding]:
        return [Encoding() for _ in texts]


def test_no_list_is_made_of_more_tokens_than_any_context_has() -> None:
    with pytest.raises(BadRequest, match="prompt is too long: 1048576 tokens > 1048575 maximum") as refused:
        encode(Backend(), "a long text " * 3, False)
    assert refused.value.code == "context_length_exceeded"
