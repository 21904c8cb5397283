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
from collections.abc import Callable, Container, Iterable
from dataclasses import dataclass
from typing import Any, Literal, get_args

import orjson

from gateway.dialects.images import TEXT_ONLY, TYPES, ImageSupport, url_part
from gateway.dialects.request import Message, unsupported, unsupported_content
from headgate.errors import BadRequest, invalid

Block = dict[str, Any]
TurnEffort = Literal["low", "medium", "high", "xhigh", "max"]


@dataclass(frozen=True, slots=True)
class _BlockForm:
    """The fields of a type of block, in addition to `type` and `cache_control`."""

    required: dict[str, type]
    optional: tuple[str, ...] = ()


_BLOCKS = {
    "text": _BlockForm({"text": str}, ("citations",)),
    "tool_use": _BlockForm({"id": str, "name": str, "input": dict}, ("caller",)),
    "tool_result": _BlockForm({"tool_use_id": str}, ("content", "is_error")),
    "thinking": _BlockForm({"thinking": str}, ("signature",)),
    "redacted_thinking": _BlockForm({}, ("data",)),
    "image": _BlockForm({"source": dict}, ("transformations",)),
}
_TYPES_OF_ROLE = {
    "user": ("text", "tool_result"),
    "assistant": ("text", "tool_use", "thinking", "redacted_thinking"),
    "system": ("text",),
}
"""The types of blocks in messages of each role; images are allowed where the model takes them."""
_NAMES: dict[type, str] = {str: "a string", dict: "an object"}
_ATTRIBUTION = re.compile(r"\Ax-anthropic-billing-header:[^\n]*\n?")
"""The billing header in Claude Code's system prompt: not meant for the model, and different in every request."""


def conversation(
    system: str | list[Any] | None, messages: list[Any], images: ImageSupport = TEXT_ONLY
) -> list[Message]:
    """Return the messages of a request. Raise BadRequest that names the block that is wrong or not supported."""
    if not messages:
        raise invalid("messages", "the conversation has none")
    result: list[Message] = []
    texts = [
        _ATTRIBUTION.sub("", block["text"])
        for block in _checked_blocks("system", system or "", "system", ImageSupport(images.model))
    ]
    if instructions := "\n".join(filter(None, texts)):
        result.append({"role": "system", "content": instructions})
    turns = [_turn(message, f"messages.{i}", images) for i, message in enumerate(messages)]
    last_user = max((i for i, (role, _) in enumerate(turns) if role == "user"), default=-1)
    turns = [turn for i, turn in enumerate(turns) if i > last_user or not _is_cleared(messages[i])]
    for role, same in itertools.groupby(turns, lambda turn: turn[0]):
        result += _MESSAGES_OF_ROLE[role]([block for _, blocks in same for block in blocks])
    if not result:
        raise invalid("messages", "all of them are empty")
    return result


def effort_of_turn(messages: list[Any]) -> TurnEffort | None:
    """Return the effort that a system message requests since the last reply. The messages are those that `conversation` took."""
    since = itertools.takewhile(lambda message: message["role"] != "assistant", reversed(messages))
    configs = (message.get("output_config") or {} for message in since)
    return next((config["effort"] for config in configs if config.get("effort")), None)


def unknown(values: dict[str, Any], known: Container[str], where: str) -> None:
    """Raise BadRequest for an unknown key with a value other than null."""
    for name, value in values.items():
        if name not in known and value is not None:
            param = f"{where}.{name}"
            raise BadRequest(
                f"Unrecognized request argument supplied: {param}", code="unknown_parameter", param=param
            )


# Checks


def _turn(message: Any, where: str, images: ImageSupport) -> tuple[str, list[Block]]:
    """Return the role of a message, and its checked blocks."""
    if not isinstance(message, dict):
        raise invalid(where, "a message must be an object")
    role = message.get("role")
    if not isinstance(role, str) or role not in _TYPES_OF_ROLE:
        raise invalid(f"{where}.role", f"{role!r} is none of {', '.join(_TYPES_OF_ROLE)}")
    more = ("clear_at", "output_config") if role == "system" else ()
    unknown(message, ("role", "content", *more), where)
    may_be_empty = role == "assistant"
    if role == "system" and _requests_effort(message, where):
        message, may_be_empty = {"content": [], **message}, True
    allowed = images if role == "user" else ImageSupport(images.model)
    blocks = _checked_blocks(role, message.get("content"), f"{where}.content", allowed)
    if not blocks and not may_be_empty:
        raise invalid(f"{where}.content", "there is none")
    return role, blocks


def _requests_effort(message: dict[str, Any], where: str) -> bool:
    """Check the other fields of a system message; return whether it requests an effort, so that it needs no content."""
    if message.get("clear_at") not in (None, "never", "next_user_message"):
        raise invalid(f"{where}.clear_at", f"{message['clear_at']!r} is none of never, next_user_message")
    config = message.get("output_config") or {}
    if not isinstance(config, dict):
        raise invalid(f"{where}.output_config", "must be an object")
    unknown(config, ("effort",), f"{where}.output_config")
    effort = config.get("effort")
    if effort not in (None, *get_args(TurnEffort)):
        raise invalid(f"{where}.output_config.effort", f"must be one of {', '.join(get_args(TurnEffort))}")
    return effort is not None


def _is_cleared(message: dict[str, Any]) -> bool:
    return message["role"] == "system" and message.get("clear_at") == "next_user_message"


def _checked_blocks(role: str, content: Any, where: str, images: ImageSupport) -> list[Block]:
    """Return the content of a message of this role as blocks, each of which is well-formed."""
    if isinstance(content, str):
        return [{"type": "text", "text": content}]
    if not isinstance(content, list):
        raise invalid(where, "must be a string or a list of content blocks")
    for i, block in enumerate(content):
        _check_block(role, block, f"{where}.{i}", images)
    return content


def _check_block(role: str, block: Any, where: str, images: ImageSupport) -> None:
    kind = block.get("type") if isinstance(block, dict) else None
    if kind not in _TYPES_OF_ROLE[role] and not (kind == "image" and images.enabled):
        raise unsupported_content(where, "a block", kind, images)
    form = _BLOCKS[kind]
    for name, required in form.required.items():
        if not isinstance(block.get(name), required):
            raise invalid(f"{where}.{name}", f"must be there, as {_NAMES[required]}")
    unknown(block, ("type", "cache_control", *form.required, *form.optional), where)
    if kind == "tool_result":  # it may have what a system message may, and images
        _checked_blocks("system", block.get("content") or "", f"{where}.content", images)
    elif kind == "image":
        _check_image(block, where)
    elif kind == "tool_use":
        _arguments(block, where)


def _check_image(block: Block, where: str) -> None:
    """Check the source of an image, and note its place in the request for the errors of reading it later."""
    source = block["source"]
    if block.get("transformations") not in (None, {}, {"oversized_image": "downsize"}):
        instead = "leave it out: the model's processor scales an image down to what it takes"
        raise unsupported(f"{where}.transformations", "anything but 'downsize'", instead)
    if source.get("type") != "base64":
        message = (
            f"an image of the source {source.get('type')!r} is not supported here: the gateway fetches none; send its bytes"
            " as base64"
        )
        raise invalid(f"{where}.source", message, "unsupported_content")
    if source.get("media_type") not in TYPES or not isinstance(source.get("data"), str):
        raise invalid(f"{where}.source", f"needs data, and a media_type of {', '.join(TYPES)}")
    source["where"] = where


def _arguments(block: Block, where: str = "") -> str:
    """Return the input of a tool call as JSON."""
    try:
        return orjson.dumps(block["input"]).decode()
    except orjson.JSONEncodeError as error:  # nested too deep for the JSON writer
        raise invalid(f"{where}.input", str(error)) from error


# Messages


def _system_messages(blocks: list[Block]) -> list[Message]:
    return [{"role": "system", "content": _lines(blocks)}] if blocks else []


def _user_messages(blocks: list[Block]) -> list[Message]:
    messages = [_tool_message(block) for block in blocks if block["type"] == "tool_result"]
    shown = [block for block in blocks if block["type"] in ("text", "image")]
    if shown:
        messages.append({"role": "user", "content": _text_or_parts(shown)})
    return messages


def _tool_message(block: Block) -> Message:
    content = block.get("content") or ""
    result = content if isinstance(content, str) else _text_or_parts(content)
    if block.get("is_error"):
        result = _as_error(result)
    return {"role": "tool", "tool_call_id": block["tool_use_id"], "content": result}


def _as_error(result: str | list[Block]) -> str | list[Block]:
    if isinstance(result, list):
        return [{"type": "text", "text": "Error: "}, *result]
    return result if result.lower().startswith("error") else f"Error: {result}"


def _text_or_parts(blocks: list[Block]) -> str | list[Block]:
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


def _assistant_messages(blocks: list[Block]) -> list[Message]:
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


_MESSAGES_OF_ROLE: dict[str, Callable[[list[Block]], list[Message]]] = {
    "user": _user_messages,
    "assistant": _assistant_messages,
    "system": _system_messages,
}


def _joined(blocks: Iterable[Block], kind: str) -> str:
    return "".join(block[kind] for block in blocks if block["type"] == kind)


def _lines(blocks: Iterable[Block]) -> str:
    return "\n".join(block["text"] for block in blocks)
