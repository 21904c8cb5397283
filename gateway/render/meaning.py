"""What of a client's message reaches a prompt: one definition for the renderer and for the digests of conversations. Pure.

Invariant: two messages that differ in what `rendered` returns, except in reasoning and ids of calls, have different digests; what
it leaves out is neither rendered nor hashed. So a recorded conversation is continued only where its prompt is the same.
"""

from __future__ import annotations

from typing import Any

Message = dict[str, Any]

REASONING = ("reasoning_content", "reasoning", "thinking")
"""The names under which clients send back an assistant's reasoning; the first one that is set counts."""
_REASONING = frozenset(REASONING)
_EMPTY = ("", "null")
"""Arguments that some clients send back for a call without any."""


def rendered(message: Message) -> Message:
    """Return the fields of a message that reach the prompt, as the client sent them; reasoning as `reasoning_content`.

    An assistant's `name` is left out: replies are sampled without one, and clients add their own when they send them back.
    """
    role = message["role"]
    found: Message = {"role": role, "content": message.get("content") or message.get("refusal") or ""}
    if role != "assistant" and message.get("name"):
        found["name"] = message["name"]
    if message.get("tool_call_id") is not None:
        found["tool_call_id"] = message["tool_call_id"]
    if message.get("tool_calls"):
        found["tool_calls"] = message["tool_calls"]
    if not _REASONING.isdisjoint(message):
        reasoning = next((message[name] for name in REASONING if message.get(name)), None)
        if reasoning:
            found["reasoning_content"] = reasoning
    return found


def part_text(part: dict[str, Any]) -> str:
    """Return the text of a content part that is not an image."""
    return part.get("text") or part.get("refusal") or ""


def given_arguments(function: dict[str, Any]) -> Any:
    """Return a call's arguments as the client sent them; the empty object where it sent none."""
    given = function.get("arguments")
    if given is None or (isinstance(given, str) and given.strip() in _EMPTY):
        return {}
    return given
