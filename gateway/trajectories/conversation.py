"""Finds the recorded turn that a request continues, from its messages. Pure.

Every prefix of a conversation has a digest of the tools and of each message's meaning: all that `render/meaning.py` defines as
rendered of it, with parsed arguments. Reasoning and the ids of an assistant message's tool calls are left out, because clients
seldom send them back unchanged. So is an argument that has its tool's default value at its first level: Claude Code writes
such arguments into the calls that it sends back. Hashing is incremental: one digest per message.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Sequence
from typing import Any

import orjson

from gateway.render.meaning import given_arguments, part_text, rendered
from headgate.json_depth import finite, loads_strictly

Message = dict[str, Any]
Defaults = dict[str, dict[str, Any]]
"""The default values of arguments, by tool and argument."""


class Chain:
    """A conversation's digests."""

    def __init__(
        self, messages: Sequence[Message], tools: Sequence[dict[str, Any]], key: bytes = b""
    ) -> None:
        """`key`: that of the hashes; digests with different keys differ."""
        self._state = hashlib.blake2b(_canonical(list(tools)), digest_size=16, key=key)
        self._defaults = _defaults(tools)
        self.digests = [self._state.digest()]
        """The digest of every prefix: element k covers the first k messages."""
        for message in messages:
            self._state.update(_canonical(_meaning(message, self._defaults)))
            self.digests.append(self._state.digest())

    def followed_by(self, message: Message) -> bytes:
        """Return the digest of the conversation with one more message, at the cost of that message."""
        state = self._state.copy()
        state.update(_canonical(_meaning(message, self._defaults)))
        return state.digest()


def digests(messages: Sequence[Message], tools: Sequence[dict[str, Any]], key: bytes = b"") -> list[bytes]:
    """Return the digest of every prefix: element k covers the first k messages."""
    return Chain(messages, tools, key).digests


def tool_call_id(call_id: str, index: int) -> str:
    """Return the id of one of the tool calls in a call's reply: a function of the call, so that a replay has the same."""
    return f"call_{hashlib.blake2b(f'{call_id}:{index}'.encode(), digest_size=12).hexdigest()}"


def tool_call_ids(messages: Sequence[Message], length: int) -> set[str]:
    """Return the ids of the tool calls of the reply that ends the first `length` messages: as it states them, or the results
    after it."""
    found = {call.get("id") for call in messages[length - 1].get("tool_calls") or ()}
    for message in messages[length:]:
        if message["role"] != "tool":
            break
        found.add(message.get("tool_call_id"))
    return {name for name in found if isinstance(name, str)}


def _meaning(message: Message, defaults: Defaults) -> dict[str, Any]:
    meaning = rendered(message)
    meaning.pop("reasoning_content", None)
    if isinstance(meaning["content"], list):
        meaning["content"] = _parts(meaning["content"])
    if calls := meaning.get("tool_calls"):
        meaning["tool_calls"] = [_call(call["function"], defaults) for call in calls]
    return meaning


def _parts(parts: Sequence[dict[str, Any]]) -> str | list[str | dict[str, Any]]:
    """Return parts as one text; with images, a list of these (by their hashes) and of the texts around them."""
    found: list[str | dict[str, Any]] = [""]
    for part in parts:
        if part.get("type") == "image":
            found += [{"image": part["image"]}, ""]
        else:
            found[-1] = str(found[-1]) + part_text(part)
    return found if len(found) > 1 else str(found[0])


def _defaults(tools: Sequence[dict[str, Any]]) -> Defaults:
    """Return the default values in the tools' schemas. A schema without properties has none."""
    found: Defaults = {}
    for tool in tools:
        function = tool.get("function") or {}
        parameters = function.get("parameters")
        properties = parameters.get("properties") if isinstance(parameters, dict) else None
        if not isinstance(properties, dict) or not isinstance(function.get("name"), str):
            continue
        found[function["name"]] = {
            name: schema["default"]
            for name, schema in properties.items()
            if isinstance(schema, dict) and "default" in schema
        }
    return found


def _call(function: dict[str, Any], defaults: Defaults) -> list[Any]:
    """Return a function call's canonical form. Arguments on which JSON libraries disagree (numbers that are too large, nesting
    that is
    too deep) are compared as text."""
    arguments = given_arguments(function)
    if isinstance(arguments, str):
        with contextlib.suppress(ValueError, TypeError):
            parsed = loads_strictly(arguments, parse_float=_number)
            orjson.dumps(parsed)
            arguments = parsed
    usual = defaults.get(function.get("name") or "")
    if usual and isinstance(arguments, dict):
        arguments = {name: value for name, value in arguments.items() if not _usual(usual, name, value)}
    return [function.get("name"), arguments]


def _usual(usual: dict[str, Any], name: str, value: Any) -> bool:
    """Return true for the argument's default value; true and 1 are two values."""
    return name in usual and _canonical(usual[name]) == _canonical(value)


def _number(text: str) -> float | int:
    """Clients in JavaScript write 1.0 as 1."""
    value = finite(text)
    return int(value) if value.is_integer() and abs(value) < 2**53 else value


def _canonical(value: Any) -> bytes:
    try:
        return orjson.dumps(value, option=orjson.OPT_SORT_KEYS)
    except TypeError:  # a model can sample text that orjson does not write, such as half of a surrogate pair
        return json.dumps(value, sort_keys=True).encode()
