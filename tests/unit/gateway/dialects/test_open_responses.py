"""Requests that the Open Responses specification allows, tried one feature at a time: those that are refused are the ones listed.

The features are read from the specification's own types, so a version of it that has more makes this fail until these are tried
too. The list is the table of docs/topics/messages.md.
"""

from __future__ import annotations

import enum
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

import openresponses_types.types as types
from pydantic import BaseModel

from gateway.dialects.responses import generation_request, parse
from gateway.dialects.responses_input import items, messages
from gateway.dialects.responses_tools import Toolbox
from headgate.errors import BadRequest

PAGE = Path(__file__).parents[4] / "docs" / "topics" / "messages.md"
TEXT = {"type": "input_text", "text": "hi"}
TOOL = {"type": "function", "name": "add", "parameters": {"type": "object"}}
CALL = {"type": "function_call", "call_id": "c1", "name": "add", "arguments": "{}"}
PERSON = {"type": "json_schema", "name": "person", "schema": {"type": "object"}, "strict": True}
LOGPROBS = {"include": ["message.output_text.logprobs"]}

FIELDS: dict[str, dict[str, Any]] = {
    "model": {},
    "input": {"input": "hi"},
    "previous_response_id": {"previous_response_id": "resp_1"},
    "tools": {"tools": [TOOL]},
    "metadata": {"metadata": {"a": "b"}},
    "temperature": {"temperature": 1.0},
    "top_p": {"top_p": 0.9},
    "presence_penalty": {"presence_penalty": 0.5},
    "frequency_penalty": {"frequency_penalty": 0.5},
    "parallel_tool_calls": {"parallel_tool_calls": False},
    "stream": {"stream": True},
    "stream_options": {"stream": True, "stream_options": {"include_obfuscation": True}},
    "background": {"background": True},
    "max_output_tokens": {"max_output_tokens": 5},
    "max_tool_calls": {"max_tool_calls": 3},
    "safety_identifier": {"safety_identifier": "s"},
    "prompt_cache_key": {"prompt_cache_key": "k"},
    "instructions": {"instructions": "Be short."},
    "store": {"store": False},
    "top_logprobs": {"top_logprobs": 2, **LOGPROBS},
}
"""A request for each parameter that is not a choice among words."""
NAMED = {"type": "function", "name": "add"}
ITEMS: dict[type[BaseModel], dict[str, Any]] = {
    types.ItemReferenceParam: {"type": "item_reference", "id": "msg_1"},
    types.ReasoningItemParam: {"type": "reasoning", "summary": [], "encrypted_content": "x"},
    types.CompactionSummaryItemParam: {"type": "compaction", "encrypted_content": "x"},
    types.UserMessageItemParam: {"type": "message", "role": "user", "content": "hi"},
    types.SystemMessageItemParam: {"type": "message", "role": "system", "content": [TEXT]},
    types.DeveloperMessageItemParam: {"type": "message", "role": "developer", "content": "hi"},
    types.AssistantMessageItemParam: {
        "type": "message",
        "role": "assistant",
        "content": "hi",
        "phase": "commentary",
    },
    types.FunctionCallItemParam: CALL,
    types.FunctionCallOutputItemParam: {"type": "function_call_output", "call_id": "c1", "output": "3"},
}
PARTS: dict[type[BaseModel], dict[str, Any]] = {
    types.InputTextContentParam: TEXT,
    types.InputImageContentParamAutoParam: {"type": "input_image", "image_url": "data:image/png;base64,AA=="},
    types.InputFileContentParam: {"type": "input_file", "filename": "a.txt", "file_data": "AA=="},
    types.InputVideoContent: {"type": "input_video", "video_url": "https://example.org/a.mp4"},
    types.OutputTextContentParam: {"type": "output_text", "text": "hi"},
    types.RefusalContentParam: {"type": "refusal", "refusal": "no"},
}


def features() -> Iterator[tuple[str, dict[str, Any]]]:
    """Every feature by its name in the table, with a request that uses it alone."""
    yield from FIELDS.items()
    yield from _choices()
    for kind in _members(types.CreateResponseBody.model_fields["input"].annotation, "ItemParam"):
        item = ITEMS[kind]
        before = [CALL] if item["type"] == "function_call_output" else []
        after = [ITEMS[types.FunctionCallOutputItemParam]] if item["type"] == "function_call" else []
        yield item["type"] if item["type"] != "message" else item["role"], {"input": [*before, item, *after]}
    for holder in (types.UserMessageItemParam, types.AssistantMessageItemParam):
        role = ITEMS[holder]["role"]
        for kind in _members(holder.model_fields["content"].annotation, "Content"):
            part = PARTS[kind]
            yield part["type"], {"input": [{"type": "message", "role": role, "content": [part]}]}
    for kind in _members(types.FunctionCallOutputItemParam.model_fields["output"].annotation, "Content"):
        output = {"type": "function_call_output", "call_id": "c1", "output": [PARTS[kind]]}
        yield f"output: {PARTS[kind]['type']}", {"input": [CALL, output]}


def _choices() -> Iterator[tuple[str, dict[str, Any]]]:
    for choice in _values(types.ToolChoiceValueEnum):
        yield f"tool_choice: {choice}", {"tools": [TOOL], "tool_choice": choice}
    allowed = {"type": "allowed_tools", "mode": "auto", "tools": [NAMED]}
    for choice in (NAMED, allowed):
        yield f"tool_choice: {choice['type']}", {"tools": [TOOL], "tool_choice": choice}
    for included in _values(types.IncludeEnum):
        yield f"include: {included}", {"include": [included]}
    for truncation in _values(types.TruncationEnum):
        yield f"truncation: {truncation}", {"truncation": truncation}
    for tier in _values(types.ServiceTierEnum):
        yield f"service_tier: {tier}", {"service_tier": tier}
    for effort in _values(types.ReasoningEffortEnum):
        yield f"reasoning: {effort}", {"reasoning": {"effort": effort}}
    for summary in _values(types.ReasoningSummaryEnum):
        yield f"reasoning: {summary}", {"reasoning": {"summary": summary}}
    for verbosity in _values(types.VerbosityEnum):
        yield f"text: {verbosity}", {"text": {"verbosity": verbosity}}
    for form in ({"type": "text"}, PERSON):
        yield f"text: {form['type']}", {"text": {"format": form}}


def _values(kind: type[enum.Enum]) -> list[str]:
    return [str(member.value) for member in kind]


def _members(annotation: Any, ending: str) -> list[type[BaseModel]]:
    """Return the models in a union, in lists too, whose names hold `ending`."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        inside = ending in annotation.__name__ and not re.search(r"\d$", annotation.__name__)
        return [annotation] if inside else []
    return [found for part in get_args(annotation) for found in _members(part, ending)]


def refusal(body: dict[str, Any]) -> BadRequest | None:
    """Return the error that the gateway responds, if it does."""
    values = {"model": "m", "input": "hi", **body}
    try:
        parsed = parse(dict(values))
        toolbox = Toolbox.of(parsed.tools or (), "refuse")
        generation_request(parsed, toolbox, messages(_found(items(parsed.input))), values)
    except BadRequest as error:
        return error
    return None


def _found(given: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Items without references, which the store resolves."""
    return [item for item in given if item["type"] != "item_reference"]


def listed() -> dict[str, tuple[str, str]]:
    """Return the refused features that the page lists: each with the code and the parameter of the error."""
    section = PAGE.read_text().partition("## Open Responses")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| `([^`]+)` \| `([^`]+)` \| `([^`]+)` \|", section, flags=re.M)
    return {name: (code, param) for name, code, param in rows}


def test_what_the_specification_has_and_we_refuse_is_listed() -> None:
    tried = list(features())
    assert len(tried) > 50
    errors = {name: error for name, body in tried if (error := refusal(body)) is not None}
    assert {name: (error.code, error.param) for name, error in errors.items()} == listed()


def test_every_parameter_of_the_specification_is_tried() -> None:
    tried = {name for _, body in features() for name in body} | {"model"}
    assert set(types.CreateResponseBody.model_fields) <= tried
