"""Keys: how they are stored, looked up and compared.

Keys are long and random, so a plain digest hides them well enough. Invariant: digests of one length are compared, in constant
time and with every key, so that the time reveals nothing about any key.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import re
from collections.abc import Iterable
from typing import Generic, TypeVar

T = TypeVar("T")

_ATTEMPT = re.compile(r"(?P<key>.+)\.(?P<attempt>[1-9][0-9]{0,8})", re.DOTALL)
"""A key with the number of an attempt. Keys that the gateway makes have no dot of their own."""


class Keyring(Generic[T]):
    """Some keys, as digests, and what each of them opens."""

    def __init__(self, keys: Iterable[tuple[str, T]]) -> None:
        self._digests = [(_digest(key.encode()), opened) for key, opened in keys]

    def find(self, key: str | bytes) -> T | None:
        """Return the value that a key opens; None for an unknown key. Takes the same time for every key."""
        given, found = _digest(key.encode() if isinstance(key, str) else key), None
        for digest, opened in self._digests:
            if hmac.compare_digest(given, digest):
                found = opened
        return found

    def __bool__(self) -> bool:
        return bool(self._digests)


def key_hash(key: str) -> str:
    """Return the stored hash of an episode's key."""
    return _digest(key.encode()).hex()


def key_of(credential: str, idempotency_key: str) -> str:
    """Return the key of the episode that a retryable request opens: a function of the request and its secret `credential`.

    So it need not be stored, and is the same in every process. Where the admin API has no key, it is as secret as the request.
    """
    digest = hmac.digest(credential.encode(), f"an episode's key: {idempotency_key}".encode(), "sha256")
    return f"hg-{base64.urlsafe_b64encode(digest[:24]).decode()}"


def attempt_key(key: str, attempt: int) -> str:
    """Return the key of an attempt at the episode of `key`: the first attempt has the episode's own."""
    return key if attempt == 1 else f"{key}.{attempt}"


def split_attempt(key: str) -> tuple[str, int]:
    """Return an episode's key and the number of the attempt that `key` is of."""
    found = _ATTEMPT.fullmatch(key)
    return (found["key"], int(found["attempt"])) if found else (key, 1)


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()
