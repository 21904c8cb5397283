"""`[redaction]`: texts that are never stored (docs/topics/redaction.md)."""

from __future__ import annotations

import re
from typing import Annotated, Literal, Self

from pydantic import AfterValidator, Field, SecretStr, model_validator

from gateway.config.base import Name
from headgate.configuration import Section


def _expression(text: str) -> str:
    try:
        pattern = re.compile(text)
    except re.error as error:
        raise ValueError(f"{text!r} is not a regular expression: {error}") from error
    if pattern.match(""):
        raise ValueError(f"{text!r} matches the empty text, and so would redact nothing or everything")
    return text


class RedactionSettings(Section):
    """`[redaction]`: what is replaced by a mark before anything is stored, logged or published. What was redacted is not
    trained."""

    patterns: tuple[Literal["email", "phone", "card", "key"], ...] = ()
    """Patterns that the gateway has: e-mail addresses, telephone numbers, card numbers (checked by their last digit), and keys
    of APIs, JSON Web Tokens and private keys."""
    rules: dict[Name, Annotated[str, AfterValidator(_expression)]] = Field(
        default_factory=dict, max_length=64
    )
    """Regular expressions of your own, in Python's syntax, by name."""
    hook: str | None = Field(None, pattern=r"^[\w.]+:\w+$")
    """`module:function` in the gateway's process: it receives a text and returns the parts of it to redact, as a list of strings.
    If it fails, all of the text is redacted."""
    key: SecretStr | None = Field(None, min_length=16)
    """Or `HEADGATE_REDACTION_KEY` in the environment. The key of the hashes by which conversations and requests are found
    again, and by which equal secrets have equal marks. With another key, open conversations begin again."""

    @property
    def active(self) -> bool:
        """True if anything is redacted."""
        return bool(self.patterns or self.rules or self.hook)

    @model_validator(mode="after")
    def _has_key(self) -> Self:
        if self.active and self.key is None:
            raise ValueError(
                "`key` is needed, or HEADGATE_REDACTION_KEY in the environment: hashes without a key can be guessed"
            )
        return self
