"""Bounds on one request: `[requests]`."""

from __future__ import annotations

from pydantic import Field

from gateway.sections.base import Section


class RequestSettings(Section):
    """`[requests]`: what a request may hold of everything that is gone through one by one; more is refused with 400."""

    messages: int = Field(20_000, ge=1, le=1_000_000)
    """Messages of a conversation, or items of a response's input."""
    parts: int = Field(50_000, ge=1, le=1_000_000)
    """Content parts and tool calls of all messages together."""
    tools: int = Field(1024, ge=1, le=65_536)
    """Tools."""
    stop: int = Field(8191, ge=1, le=65_536)
    """Stop strings. OpenAI takes 4, Anthropic 8191."""
    stop_characters: int = Field(32_768, ge=256, le=1_000_000)
    """Characters of all stop strings together."""
    logit_bias: int = Field(1024, ge=1, le=1_000_000)
    """Tokens that it names."""
