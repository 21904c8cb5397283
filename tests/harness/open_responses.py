"""Responses and their events, held against the types of the Open Responses specification.

Three places where the types are not what OpenAI's clients read, and ours are as those: events of reasoning are called
`reasoning_text` there, a JSON schema that is repeated is null in these types, and items of custom tools are OpenAI's alone.
"""

from __future__ import annotations

from typing import Any, get_args

import openresponses_types.types as types
from openresponses_types import ResponseResource
from pydantic import BaseModel


def _events() -> dict[str, type[BaseModel]]:
    """Return the event types by name."""
    found = {}
    for name, model in vars(types).items():
        if name.endswith("StreamingEvent"):
            (kind,) = list(
                get_args(model.model_fields["type"].annotation) or model.model_fields["type"].annotation
            )
            found[str(getattr(kind, "value", kind))] = model
    return found


_EVENTS = _events()


def check_response(response: dict[str, Any]) -> None:
    """Raise ValidationError."""
    text, output = response["text"], response["output"]
    if text["format"]["type"] == "json_schema":
        text = {**text, "format": {**text["format"], "schema": None}}
    known = [item for item in output if item["type"] != "custom_tool_call"]
    ResponseResource.model_validate({**response, "text": text, "output": known})


def check_event(event: dict[str, Any]) -> None:
    """Raise ValidationError, and KeyError for an event that there is not."""
    kind = event["type"].replace("response.reasoning_text.", "response.reasoning.")
    if kind.startswith("response.custom_tool_call_input") or (
        event.get("item", {}).get("type") == "custom_tool_call"
    ):
        return
    if "response" in event:
        check_response(event["response"])
    else:
        _EVENTS[kind].model_validate({**event, "type": kind})
