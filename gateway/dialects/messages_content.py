"""Anthropic's content blocks as messages of the chat form.

Invariant: a reply that a client sends back as it got it becomes the very message that was recorded, whatever the client did to
its blocks without changing their meaning (cut a message in two, left the thinking out, moved a `cache_control`). So a
conversation goes on from its recorded tokens.

Decisions: adjacent messages of one role are one turn, as in Anthropic's API; blocks of text are lines of their own, but those
of a reply are one text; results of tools come before the user's text in the same message; a result that is an error begins with
that word; `redacted_thinking` is ignored, as this model cannot read it; a system message that ends at the next message of the
user (`clear_at`) is left out from then on, which begins a branch.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterable
from typing import Any, Literal, get_args

import orjson

from gateway.dialects.images import TEXT_ONLY, TYPES, ImageSupport, url_part
from gateway.dialects.request import Message, unsupported, unsupported_content
from headgate.errors import BadRequest

Block = dict[str, Any]
TurnEffort = Literal["low", "medium", "high", "xhigh", "max"]
_KEYS: dict[str, set[str]] = {
    "text": {"text", "cache_control", "citations"},
    "tool_use": {"id", "name", "input", "cache_control", "caller"},
    "tool_result": {"tool_use_id", "content", "is_error", "cache_control"},
    "thinking": {"thinking", "signature", "cache_control"},
    "redacted_thinking": {"data", "cache_control"},
    "image": {"source", "cache_control", "transformations"},
}
_NEEDED: dict[str, dict[str, type]] = {
    "text": {"text": str},
    "tool_use": {"id": str, "name": str, "input": dict},
    "tool_result": {"tool_use_id": str},
    "thinking": {"thinking": str},
    "redacted_thinking": {},
    "image": {"source": dict},
}
_MESSAGE_KEYS = {
    "system": {"role", "content", "clear_at", "output_config"},
    "user": {"role", "content"},
    "assistant": {"role", "content"},
}
_KINDS = {
    "system": ("text",),
    "user": ("text", "tool_result"),
    "assistant": ("text", "tool_use", "thinking", "redacted_thinking"),
}
_ATTRIBUTION = re.compile(r"\Ax-anthropic-billing-header:[^\n]*\n?")
"""The billing header in Claude Code's system prompt: not meant for the model, and different in every request."""


def conversation(
    system: str | list[Any] | None, messages: list[Any], images: ImageSupport = TEXT_ONLY
) -> list[Message]:
    """Return the messages of a request. Raise BadRequest that names the block that is wrong or not supported."""
    if not messages:
        raise BadRequest("messages: the conversation has none", code="invalid_value", param="messages")
    result: list[Message] = []
    texts = [
        _ATTRIBUTION.sub("", block["text"])
        for block in _blocks("system", system or "", "system", ImageSupport(images.model))
    ]
    if instructions := "\n".join(filter(None, texts)):
        result.append({"role": "system", "content": instructions})
    turns = [_turn(message, f"messages.{i}", images) for i, message in enumerate(messages)]
    last_user = max((i for i, (role, _) in enumerate(turns) if role == "user"), default=-1)
    turns = [turn for i, turn in enumerate(turns) if i > last_user or not _is_cleared(messages[i])]
    for role, same in itertools.groupby(turns, lambda turn: turn[0]):
        result += _MESSAGES[role]([block for _, blocks in same for block in blocks])
    if not result:
        raise BadRequest("messages: all of them are empty", code="invalid_value", param="messages")
    return result


def effort_of_turn(messages: list[Any]) -> TurnEffort | None:
    """Return the effort that a system message requests since the last reply. The messages are those that `conversation` took."""
    since = itertools.takewhile(lambda message: message["role"] != "assistant", reversed(messages))
    configs = (message.get("output_config") or {} for message in since)
    return next((config["effort"] for config in configs if config.get("effort")), None)


def unknown(values: dict[str, Any], known: set[str], where: str) -> None:
    """Raise BadRequest for an unknown key with a value other than null."""
    for name, value in values.items():
        if name not in known and value is not None:
            param = f"{where}.{name}"
            raise BadRequest(
                f"Unrecognized request argument supplied: {param}", code="unknown_parameter", param=param
            )


def _turn(message: Any, where: str, images: ImageSupport) -> tuple[str, list[Block]]:
    if not isinstance(message, dict):
        raise BadRequest(f"{where}: a message must be an object", code="invalid_value", param=where)
    role = message.get("role")
    if not isinstance(role, str) or role not in _MESSAGES:
        text = f"{where}.role: {role!r} is none of {', '.join(_MESSAGES)}"
        raise BadRequest(text, code="invalid_value", param=f"{where}.role")
    unknown(message, _MESSAGE_KEYS[role], where)
    allowed = images if role == "user" else ImageSupport(images.model)
    configured = role == "system" and _check_system(message, where)
    content = message.get("content", [] if configured else None)
    blocks = _blocks(role, content, f"{where}.content", allowed)
    if not blocks and role != "assistant" and not configured:
        raise BadRequest(f"{where}.content: there is none", code="invalid_value", param=f"{where}.content")
    return role, blocks


def _check_system(message: dict[str, Any], where: str) -> bool:
    """Check the other fields of a system message. True if it may have none, as it requests an effort."""
    if message.get("clear_at") not in (None, "never", "next_user_message"):
        text = f"{where}.clear_at: {message['clear_at']!r} is none of never, next_user_message"
        raise BadRequest(text, code="invalid_value", param=f"{where}.clear_at")
    config = message.get("output_config") or {}
    if not isinstance(config, dict):
        param = f"{where}.output_config"
        raise BadRequest(f"{param}: must be an object", code="invalid_value", param=param)
    unknown(config, {"effort"}, f"{where}.output_config")
    if config.get("effort") not in (None, *get_args(TurnEffort)):
        param = f"{where}.output_config.effort"
        text = f"{param}: must be one of {', '.join(get_args(TurnEffort))}"
        raise BadRequest(text, code="invalid_value", param=param)
    return config.get("effort") is not None


def _is_cleared(message: dict[str, Any]) -> bool:
    return message["role"] == "system" and message.get("clear_at") == "next_user_message"


def _blocks(role: str, content: Any, where: str, images: ImageSupport) -> list[Block]:
    """Return the blocks that a message of this role may have, each known to be well-formed."""
    if isinstance(content, str):
        return [{"type": "text", "text": content}]
    if not isinstance(content, list):
        text = f"{where}: must be a string or a list of content blocks"
        raise BadRequest(text, code="invalid_value", param=where)
    for i, block in enumerate(content):
        _check(role, block, f"{where}.{i}", images)
    return content


def _check(role: str, block: Any, where: str, images: ImageSupport) -> None:
    kind = block.get("type") if isinstance(block, dict) else None
    if kind not in _KINDS[role] and not (kind == "image" and images.enabled):
        raise unsupported_content(where, "a block", kind, images)
    for name, form in _NEEDED[kind].items():
        if not isinstance(block.get(name), form):
            param = f"{where}.{name}"
            raise BadRequest(f"{param}: must be there, as {_NAMES[form]}", code="invalid_value", param=param)
    unknown(block, {"type", *_KEYS[kind]}, where)
    if kind == "tool_result":
        _blocks("system", block.get("content") or "", f"{where}.content", images)
    if kind == "image":
        _check_source(block, where)
    if kind == "tool_use":
        _arguments(block, where)


def _check_source(block: Block, where: str) -> None:
    """Store the place of an image in the request with the image, for the errors of reading it later."""
    source = block["source"]
    if block.get("transformations") not in _TRANSFORMATIONS:
        instead = "leave it out: the model's processor scales an image down to what it takes"
        raise unsupported(f"{where}.transformations", "anything but 'downsize'", instead)
    if source.get("type") != "base64":
        message = (
            f"{where}.source: an image of the source {source.get('type')!r} is not supported here: the gateway fetches none;"
            " send its bytes as base64"
        )
        raise BadRequest(message, code="unsupported_content", param=f"{where}.source")
    if source.get("media_type") not in TYPES or not isinstance(source.get("data"), str):
        message = f"{where}.source: needs data, and a media_type of {', '.join(TYPES)}"
        raise BadRequest(message, code="invalid_value", param=f"{where}.source")
    source["where"] = where


_TRANSFORMATIONS: tuple[Any, ...] = (None, {}, {"oversized_image": "downsize"})
_NAMES: dict[Any, str] = {str: "a string", dict: "an object"}


def _arguments(block: Block, where: str = "") -> str:
    try:
        return orjson.dumps(block["input"]).decode()
    except orjson.JSONEncodeError as error:  # nested too deep for the JSON writer
        raise BadRequest(f"{where}.input: {error}", code="invalid_value", param=f"{where}.input") from error


def _system(blocks: list[Block]) -> list[Message]:
    return [{"role": "system", "content": _lines(blocks)}] if blocks else []


def _user(blocks: list[Block]) -> list[Message]:
    messages = [_result(block) for block in blocks if block["type"] == "tool_result"]
    shown = [block for block in blocks if block["type"] in ("text", "image")]
    if shown:
        messages.append({"role": "user", "content": _content(shown)})
    return messages


def _result(block: Block) -> Message:
    content = block.get("content") or ""
    result = content if isinstance(content, str) else _content(content)
    if block.get("is_error"):
        result = _as_error(result)
    return {"role": "tool", "tool_call_id": block["tool_use_id"], "content": result}


def _as_error(result: str | list[Block]) -> str | list[Block]:
    if isinstance(result, list):
        return [{"type": "text", "text": "Error: "}, *result]
    return result if result.lower().startswith("error") else f"Error: {result}"


def _content(blocks: list[Block]) -> str | list[Block]:
    """Return blocks as one text of lines; with images, as parts of chat completions, each run of texts as lines."""
    if all(block["type"] == "text" for block in blocks):
        return _lines(blocks)
    parts: list[Block] = []
    for kind, same in itertools.groupby(blocks, lambda block: block["type"]):
        if kind == "text":
            parts.append({"type": "text", "text": _lines(same)})
        else:
            sources = [block["source"] for block in same]
            parts += [url_part(f"data:{s['media_type']};base64,{s['data']}", s["where"]) for s in sources]
    return parts


def _assistant(blocks: list[Block]) -> list[Message]:
    message: Message = {"role": "assistant", "content": _joined(blocks, "text")}
    if reasoning := _joined(blocks, "thinking"):
        message["reasoning_content"] = reasoning
    calls = [
        {
            "id": block["id"],
            "type": "function",
            "function": {"name": block["name"], "arguments": _arguments(block)},
        }
        for block in blocks
        if block["type"] == "tool_use"
    ]
    if calls:
        message["tool_calls"] = calls
    return [message]


_MESSAGES: dict[str, Callable[[list[Block]], list[Message]]] = {
    "user": _user,
    "assistant": _assistant,
    "system": _system,
}


def _joined(blocks: Iterable[Block], kind: str) -> str:
    return "".join(block[kind] for block in blocks if block["type"] == kind)


def _lines(blocks: Iterable[Block]) -> str:
    return "\n".join(block["text"] for block in blocks)
