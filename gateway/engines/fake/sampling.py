"""What the fake engine samples: a pure function of the weights' identity, the tokens so far and the seed."""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Sequence
from pathlib import Path

from gateway.engines.fake.blocks import Block

VOCABULARY = 256
END_CHANCE = 1 / 24
"""The chance that a token is the first of the request's stop tokens."""


def identity(weights: str) -> str:
    """Return the identity of the directory of a checkpoint, or of an adapter."""
    files = (Path(weights) / name for name in ("adapter_model.safetensors", "model.safetensors"))
    file = next((file for file in files if file.exists()), Path(weights))
    return hashlib.sha256(file.read_bytes() if file.is_file() else weights.encode()).hexdigest()[:16]


def next_token(
    weights_id: str, context: Sequence[int], seed: int | None, stop: Sequence[int]
) -> tuple[int, float]:
    """Return the token that follows `context`, and its log-probability (nats)."""
    return draw(weights_id, Fingerprint(context), context[-1], seed, stop)


class Fingerprint:
    """A hash of a growing context; a token is added at the same cost however many there are."""

    def __init__(self, context: Sequence[int]) -> None:
        self._hash = hashlib.blake2b(array("q", context).tobytes(), digest_size=16)

    def add(self, token: int) -> None:
        """Append a token to the context."""
        self._hash.update(array("q", (token,)).tobytes())

    def __str__(self) -> str:
        return self._hash.hexdigest()


def draw(
    weights_id: str, fingerprint: Fingerprint, previous: int, seed: int | None, stop: Sequence[int]
) -> tuple[int, float]:
    """Return the same as `next_token`, by the fingerprint of the context and its last token."""
    key = f"{weights_id}:{seed}:{fingerprint}".encode()
    draw = int.from_bytes(hashlib.blake2b(key, digest_size=8).digest(), "big")
    chance = (draw >> 40) / 2**24
    token = stop[0] if stop and chance < END_CHANCE else (draw >> 8) % VOCABULARY
    return token, token_logprob(weights_id, previous, token)


def token_logprob(weights_id: str, previous: int, token: int) -> float:
    """Return the log-probability (nats, between -6 and 0) of `token` after `previous`."""
    digest = hashlib.blake2b(f"{weights_id}:{previous}:{token}".encode(), digest_size=4).digest()
    return -6.0 * (int.from_bytes(digest, "big") + 1) / 2**32


def logprob_of(weights_id: str, block: Block | None, previous: int, token: int) -> float:
    """Return the log-probability of `token` by a block of weights, or by their identity."""
    if block is not None and block.digits is not None:
        return block.logprob(previous, token)
    return token_logprob(weights_id, previous, token)
