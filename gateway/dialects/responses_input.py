"""The items of a response's input: in one form, and as messages. Pure.

An item's id is computed from the id of the response that has the item, so that the item can be found by its id alone, and
a retry gets the same ids. One reply is one message of the conversation, however many items show it: items that a client
sends back are joined again, so that the recorder recognizes the conversation.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from gateway.dialects.images import TEXT_ONLY, ImageSupport, check_url, url_part
from gateway.dialects.request import Message, check_arguments, unsupported, unsupported_content
from gateway.dialects.responses_tools import custom_arguments, function_name
from headgate.errors import BadRequest, invalid

Item = dict[str, Any]


def items(given: str | Sequence[Any], images: ImageSupport = TEXT_ONLY) -> list[Item]:
    """Return an input as items of one form, as they are listed; `item_reference` is left as it is. Raise BadRequest."""
    if isinstance(given, str):
        given = [{"role": "user", "content": given}]
    if not given:
        raise BadRequest("the input has no items", code="invalid_value", param="input")
    return [_item(item, f"input.{i}", images) for i, item in enumerate(given)]


def with_ids(found: Sequence[Item], response_id: str) -> list[Item]:
    """Return the items of a response's input, each with an id."""
    return [
        {**item, "id": item.get("id") or item_id(_PREFIXES[item["type"]], response_id, f"i{index}")}
        for index, item in enumerate(found)
    ]


def item_id(prefix: str, response_id: str, place: int | str) -> str:
    """Return the id of a response's item. `place`: its index in the output, or i and its index in the input."""
    return f"{prefix}_{response_id.removeprefix('resp_')}_{place}"


def response_of(item: Item) -> str:
    """Return the id of the response that an item belongs to, read from the item's id; empty if that is not one of ours."""
    match = _ITEM_ID.fullmatch(str(item.get("id") or ""))
    return f"resp_{match[1]}" if match else ""


_PREFIXES = {
    "message": "msg",
    "reasoning": "rs",
    "function_call": "fc",
    "function_call_output": "fco",
    "custom_tool_call": "ctc",
    "custom_tool_call_output": "ctco",
}
_ITEM_ID = re.compile(rf"(?:{'|'.join(_PREFIXES.values())})_([0-9a-f]+)_i?[0-9]+")
_CALLS = {"function_call": "arguments", "custom_tool_call": "input"}
"""The types of items that are tool calls, and the field that holds each one's input."""
_OUTPUTS = ("function_call_output", "custom_tool_call_output")


def messages(found: Sequence[Item]) -> list[Message]:
    """Convert items to messages in the form of chat completions."""
    joined: list[Message] = []
    before: Item = {}
    for item in found:
        if not _by_assistant(item):
            joined.append(_message(item))
        elif not _by_assistant(before) or _begins(item, before):
            joined.append(_join({"role": "assistant", "content": None}, item))
        else:
            _join(joined[-1], item)
        before = item
    for message in joined:
        if message["role"] == "assistant" and not message.get("tool_calls"):
            message["content"] = message["content"] or ""
    return joined


def _by_assistant(item: Item) -> bool:
    return item.get("role") == "assistant" or item.get("type") in ("reasoning", *_CALLS)


def _begins(item: Item, before: Item) -> bool:
    """Return true if an item belongs to another reply than the item before it. Clients need not send ids."""
    if (own := response_of(item)) and (other := response_of(before)):
        return own != other
    return item["type"] == "reasoning" or (item["type"] == before["type"] == "message")


def _join(message: Message, item: Item) -> Message:
    if item["type"] == "message":
        message["content"] = (message["content"] or "") + _text(item["content"])
    elif item["type"] in _CALLS:
        custom = item["type"] == "custom_tool_call"
        arguments = custom_arguments(item["input"]) if custom else item["arguments"]
        function = {"name": function_name(item["name"], item.get("namespace")), "arguments": arguments}
        call = {"id": item["call_id"], "type": "function", "function": function}
        message["tool_calls"] = [*message.get("tool_calls", ()), call]
    elif text := _text(item.get("content") or item["summary"]):
        message["reasoning_content"] = message.get("reasoning_content", "") + text
    return message


def _message(item: Item) -> Message:
    if item["type"] == "message":
        return {"role": item["role"], "content": _content(item["content"])}
    output = item["output"]
    text = output if isinstance(output, str) else _content(output)
    return {"role": "tool", "tool_call_id": item["call_id"], "content": text}


def _content(parts: Sequence[dict[str, Any]]) -> str | list[dict[str, Any]]:
    """Return parts as one text; with images, as parts of chat completions."""
    if all(part["type"] != "input_image" for part in parts):
        return _text(parts)
    return [
        url_part(part["image_url"], "input")
        if part["type"] == "input_image"
        else {"type": "text", "text": _text([part])}
        for part in parts
    ]


def _text(parts: Sequence[dict[str, Any]]) -> str:
    return "".join(part.get("text", part.get("refusal", "")) for part in parts)


_ROLES = ("user", "assistant", "system", "developer")
_TEXT = ("input_text", "output_text")


def _item(item: Any, where: str, images: ImageSupport) -> Item:
    if not isinstance(item, dict):
        raise invalid(where, "an item must be an object")
    kind = item.get("type") or ("message" if "role" in item else "item_reference")
    shown: Item = {"type": kind, **({"id": item["id"]} if _is_text(item.get("id")) else {})}
    if kind == "message":
        return {**shown, **_message_item(item, where, images)}
    if kind in _CALLS:
        known = ("call_id", "name", _CALLS[kind])
        _need(item, (*known, *(["namespace"] if item.get("namespace") is not None else [])), where)
        if kind == "function_call":
            check_arguments(item["arguments"], f"{where}.arguments")
        called = {name: item[name] for name in (*known, "namespace") if item.get(name) is not None}
        return {**shown, **called, "status": "completed"}
    if kind in _OUTPUTS:
        _need(item, ("call_id",), where)
        output = item.get("output")
        if not isinstance(output, str):
            output = _parts(output, ("input_text",), f"{where}.output", images)
        return {**shown, "call_id": item["call_id"], "output": output, "status": "completed"}
    if kind == "reasoning":
        return {**shown, **_thought(item, where)}
    if kind == "item_reference":
        _need(item, ("id",), where)
        return shown
    instead = "leave it out, or describe it to the model in a message"
    raise unsupported(where, f"an item of type {kind!r}", instead, "unsupported_content")


def _message_item(item: Item, where: str, images: ImageSupport) -> Item:
    role, content = item.get("role"), item.get("content")
    if role not in _ROLES:
        raise invalid(where, f"role: {role!r} is none of {', '.join(_ROLES)}")
    if isinstance(content, str):
        content = [{"type": "input_text", "text": content}]
    by_assistant = role == "assistant"
    allowed = images if role == "user" else ImageSupport(images.model)
    parts = _parts(content, (*_TEXT, "refusal") if by_assistant else _TEXT, f"{where}.content", allowed)
    shown = [_output_part(part) if by_assistant else _input_part(part) for part in parts]
    return {"role": role, "content": shown, "status": "completed"}


def _input_part(part: dict[str, Any]) -> dict[str, Any]:
    return part if part["type"] == "input_image" else {**part, "type": "input_text"}


def _output_part(part: dict[str, Any]) -> dict[str, Any]:
    if part["type"] == "refusal":
        return part
    return {"type": "output_text", "text": part["text"], "annotations": [], "logprobs": []}


def _thought(item: Item, where: str) -> Item:
    summary = _parts(item.get("summary") or [], ("summary_text",), f"{where}.summary")
    content = _parts(item.get("content") or [], ("reasoning_text",), f"{where}.content")
    return {"summary": summary, "content": content, "encrypted_content": None}


def _parts(
    given: Any, kinds: Sequence[str], where: str, images: ImageSupport = TEXT_ONLY
) -> list[dict[str, Any]]:
    if not isinstance(given, list):
        raise invalid(where, "must be a string or a list of parts")
    found = []
    for i, part in enumerate(given):
        kind = part.get("type") if isinstance(part, dict) else None
        if kind == "input_image" and images.enabled:
            found.append(_image(part, f"{where}.{i}"))
            continue
        if kind not in kinds:
            raise unsupported_content(f"{where}.{i}", "a part", kind, images)
        name = "refusal" if kind == "refusal" else "text"
        _need(part, (name,), f"{where}.{i}")
        found.append({"type": kind, name: part[name]})
    return found


def _image(part: dict[str, Any], where: str) -> dict[str, Any]:
    if part.get("file_id") is not None:
        instead = "send its bytes as a data URL in image_url"
        raise unsupported(where, "an image by file_id", instead, "unsupported_content")
    url = check_url(part.get("image_url"), where, part.get("detail"))
    return {"type": "input_image", "image_url": url, "detail": part.get("detail") or "auto"}


def _need(value: dict[str, Any], names: Sequence[str], where: str) -> None:
    for name in names:
        if not isinstance(value.get(name), str):
            raise invalid(where, f"{name} must be a string")


def _is_text(value: Any) -> bool:
    return isinstance(value, str) and bool(value)
