"""The key of a request, which its retries share."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, replace

from headgate.errors import Unprocessable


@dataclass(frozen=True, slots=True)
class RequestKey:
    """Identifies a request within its episode: `name` is a hash of its idempotency key if it has one, else of its body."""

    episode_id: str
    name: str
    body: str
    retry: bool
    exact: bool = False
    """True if the request has an idempotency key, which names one request."""

    @classmethod
    def of(
        cls, episode_id: str, body: bytes, idempotency_key: str, retries: int, secret: bytes = b""
    ) -> RequestKey:
        """Return the key of a request; `secret`: the key of its hashes.

        One with an idempotency key counts as a retry: the first looks like the others.
        """
        content = hashlib.blake2b(body, digest_size=16, person=b"body", key=secret).hexdigest()
        if not idempotency_key:
            return cls(episode_id, content, content, retries > 0)
        key = hashlib.blake2b(idempotency_key.encode(), digest_size=16, person=b"key", key=secret).hexdigest()
        return cls(episode_id, key, content, True, True)

    def of_episode(self, episode_id: str) -> RequestKey:
        """Return the same request's key in an episode."""
        return RequestKey(episode_id, self.name, self.body, self.retry, self.exact)

    def choice(self, index: int) -> RequestKey:
        """Return the key of one of the request's choices."""
        if index == 0:
            return self
        name = hashlib.blake2b(f"{self.name}:{index}".encode(), digest_size=16).hexdigest()
        return replace(self, name=name)

    @property
    def stored(self) -> str:
        """The key as it is stored with a call; begins with the name."""
        return self.name + self.body

    @property
    def place(self) -> tuple[str, str]:
        """The part that retries of one request share."""
        return self.episode_id, self.name

    def check(self, stored: str) -> None:
        """Raise Unprocessable if the stored key of an earlier request with this name is of another body."""
        if stored != self.stored:
            message = "this idempotency key was used for a request with another body"
            raise Unprocessable(message, code="idempotency_key_reused", param="Idempotency-Key")
