"""Bounds the size of a request, in any dialect, before anything iterates over it. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from headgate.errors import BadRequest

MOST = {
    "messages": 20_000,
    "parts": 50_000,
    "tools": 1024,
    "stop": 8191,
    "stop_characters": 32_768,
    "logit_bias": 1024,
}
"""The most of everything that is iterated over one by one: far above what agents send, and harmless to the event loop. OpenAI
allows 4 stop strings, Anthropic 8191."""
_COUNTED = {
    "messages": "messages",
    "input": "messages",
    "stop": "stop",
    "stop_sequences": "stop",
    "logit_bias": "logit_bias",
}
"""Parameters, and the bounds that hold for them."""
_LISTS = ("content", "tool_calls", "output", "summary")
"""The fields in which a message or an item has parts."""


def check_sizes(values: dict[str, Any]) -> None:
    """Raise BadRequest, which names the parameter, if a request holds more of something than `MOST`."""
    for name, setting in _COUNTED.items():
        if isinstance(given := values.get(name), list | dict):
            _check(name, len(given), setting)
    if isinstance(given := values.get("tools"), list):
        _check("tools", sum(map(_tools, given)), "tools")
    for name in ("stop", "stop_sequences"):
        if isinstance(given := values.get(name), list):
            characters = sum(len(string) for string in given if isinstance(string, str))
            _check(name, characters, "stop_characters", "characters")
    for name in ("messages", "input"):
        if isinstance(given := values.get(name), list):
            _check(name, sum(_parts(given)), "parts", "content parts and tool calls")


def _check(name: str, count: int, bound: str, of: str = "entries") -> None:
    if count > (limit := MOST[bound]):
        message = f"{name}: {count} {of} are more than the {limit} that a request may have: send fewer"
        raise BadRequest(message, code="too_many", param=name)


def _tools(tool: Any) -> int:
    """Count tools; a namespace counts as the tools in it."""
    inner = tool.get("tools") if isinstance(tool, dict) else None
    return 1 + len(inner) if isinstance(inner, list) else 1


def _parts(messages: list[Any]) -> Iterator[int]:
    """Yield the number of parts in each list of parts; a tool's result may be a part, and have parts of its own."""
    for message in messages:
        if isinstance(message, dict):
            for name in _LISTS:
                if isinstance(parts := message.get(name), list):
                    yield len(parts)
                    yield from _results(parts)


def _results(parts: list[Any]) -> Iterator[int]:
    for part in parts:
        if isinstance(part, dict) and isinstance(inner := part.get("content"), list):
            yield len(inner)
