"""Anthropic's Messages API: the requests.

Refused by name: what this model or this gateway cannot do. Accepted, because it changes no token of the reply here:
`cache_control`, `metadata`, `service_tier`, `billing_policy`, `diagnostics`, `thinking.block_binding`, and a context edit that
clears old thinking (what a model sees of that is its template's business, and recorded tokens are given to it as they are).
Accepted as advice: `effort`, for templates that know it, and the budgets of thinking and of a task, which nothing here takes.
All of it is recorded.
"""

from __future__ import annotations

from typing import Any, Literal, TypeVar

from pydantic import Field, ValidationError

from gateway.dialects.chat import Stop, tool_choice
from gateway.dialects.images import TEXT_ONLY, ImageSupport
from gateway.dialects.messages_content import TurnEffort, conversation, effort_of_turn, unknown
from gateway.dialects.request import (
    Body,
    GenerationRequest,
    Tool,
    Unsupported,
    check_results,
    check_tool_name,
    check_unique,
    drop_unsupported,
    unsupported,
)
from gateway.dialects.schemas import check_parameters, check_schema
from gateway.render.constraints import ContentForm
from headgate.errors import BadRequest, invalid, validation_error


class BlockBinding(Body):
    """`thinking.block_binding`. No thinking fails a check here: nothing is read from what is sent back of it."""

    prefix_mismatch_behavior: Literal["error", "drop_block"] | None = None


class Thinking(Body):
    """The parameter `thinking`: whether thinking is shown; `disabled` also turns it off, where the model's template can."""

    type: Literal["enabled", "adaptive", "between_tools", "disabled"]
    budget_tokens: int | None = Field(None, ge=1024)
    display: Literal["summarized", "omitted", "updates"] | None = None
    block_binding: BlockBinding | None = None


class ToolChoice(Body):
    """`tool_choice`."""

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class TaskBudget(Body):
    """`output_config.task_budget`: recorded; no template shows it to a model."""

    type: Literal["tokens"]
    total: int = Field(ge=1)
    remaining: int | None = Field(None, ge=0)


class OutputConfig(Body):
    """`output_config`."""

    effort: TurnEffort | None = None
    format: dict[str, Any] | None = None
    task_budget: TaskBudget | None = None


class ContextManagement(Body):
    """`context_management`."""

    edits: list[dict[str, Any]] | None = Field(None, max_length=64)


class RequestMetadata(Body):
    """`metadata`."""

    user_id: str | None = None


class CountRequest(Body):
    """The parameters that count: `/v1/messages/count_tokens`."""

    model: str
    messages: list[Any]
    system: str | list[Any] | None = None
    tools: list[Any] | None = None
    tool_choice: ToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    output_format: dict[str, Any] | None = None
    """The older name of `output_config.format`."""
    context_management: ContextManagement | None = None
    cache_control: dict[str, Any] | None = None
    billing_policy: dict[str, Any] | None = None
    thread: dict[str, Any] | None = None
    """A conversation that the server keeps; refused, so clients send the whole conversation instead."""


class MessagesRequest(CountRequest):
    """The parameters that are supported, and those that are accepted because they change nothing here."""

    max_tokens: int = Field(ge=1, lt=2**31)
    """May be more than the context has room for; the reply then ends with `model_context_window_exceeded`."""
    stop_sequences: list[Stop] | None = None
    stream: bool | None = None
    temperature: float | None = Field(None, ge=0, le=1)
    top_p: float | None = Field(None, gt=0, le=1)
    top_k: int | None = Field(None, ge=0, lt=2**31)
    metadata: RequestMetadata | None = None
    service_tier: Literal["auto", "standard_only"] | None = None
    diagnostics: dict[str, Any] | None = None


R = TypeVar("R", bound=CountRequest)
_NOT_RECORDED = {"messages", "tools", "system"}
_HARMLESS_EDITS = ("clear_thinking_20251015",)


def parse(
    values: dict[str, Any], images: ImageSupport = TEXT_ONLY
) -> tuple[MessagesRequest, GenerationRequest]:
    """Return a request's body. Raise BadRequest that names what is wrong or not supported."""
    request = _validated(MessagesRequest, values)
    requested = _generation_request(request, images)
    _check_limits(request)
    if requested.messages[-1]["role"] == "assistant":
        instead = "end with the user's message, and state there how the reply must begin"
        raise unsupported("messages", "a last message by the assistant", instead, "unsupported_content")
    requested.stream = bool(request.stream)
    requested.temperature, requested.top_p, requested.top_k = (
        request.temperature,
        request.top_p,
        request.top_k or 0,
    )
    requested.max_tokens, requested.max_tokens_may_exceed = request.max_tokens, True
    requested.stop = tuple(request.stop_sequences or ())
    requested.recorded = {name: value for name, value in values.items() if name not in _NOT_RECORDED}
    return request, requested


def parse_count(values: dict[str, Any], images: ImageSupport = TEXT_ONLY) -> GenerationRequest:
    """Return the body of a request to count its tokens. Raise BadRequest as `parse` does."""
    return _generation_request(_validated(CountRequest, values), images)


def _validated(form: type[R], values: dict[str, Any]) -> R:
    try:
        drop_unsupported(values, _UNSUPPORTED)
        request = form.model_validate(values)
    except ValidationError as error:
        raise validation_error(error.errors(), values) from error
    if request.thread is not None:
        message = "thread: conversations are not kept here: send all messages, and no `thread`"
        details = {"error_code": "thread_unsupported_request", "unsupported": ["thread"]}
        raise BadRequest(message, code="unsupported_parameter", param="thread", details=details)
    return request


def _generation_request(request: CountRequest, images: ImageSupport) -> GenerationRequest:
    _check_edits(request.context_management)
    _check_thinking(request.thinking)
    config = request.output_config or OutputConfig()
    names: set[str] = set()
    tools = [_tool(tool, f"tools.{i}", names) for i, tool in enumerate(request.tools or ())]
    messages = conversation(request.system, request.messages, images)
    check_results(messages, "messages")
    return GenerationRequest(
        "messages",
        request.model,
        messages,
        tools,
        _tool_choice(request.tool_choice, tools),
        parallel_tool_calls=not (request.tool_choice and request.tool_choice.disable_parallel_tool_use),
        form=_form(request),
        effort=effort_of_turn(request.messages) or config.effort,
        thinking=False if request.thinking and request.thinking.type == "disabled" else None,
    )


def _check_edits(requested: ContextManagement | None) -> None:
    for i, edit in enumerate((requested.edits if requested else None) or ()):
        if edit.get("type") not in _HARMLESS_EDITS:
            instead = "edit the messages before you send them"
            raise unsupported(f"context_management.edits.{i}", f"the edit {edit.get('type')!r}", instead)


def _check_thinking(requested: Thinking | None) -> None:
    if requested is not None and (requested.budget_tokens is None) == (requested.type == "enabled"):
        raise invalid("thinking.budget_tokens", "goes with the type 'enabled', and with no other")


def _check_limits(request: MessagesRequest) -> None:
    """Raise BadRequest for what Anthropic's API refuses of parameters that are right by themselves."""
    budget = request.thinking.budget_tokens if request.thinking else None
    if budget is not None and budget >= request.max_tokens:
        raise invalid("max_tokens", f"must be greater than thinking.budget_tokens, {budget}")
    if budget is not None and request.temperature not in (None, 1):
        raise invalid("temperature", "may only be 1 when thinking is enabled: leave it out")
    for i, stop in enumerate(request.stop_sequences or ()):
        if not stop.strip():
            raise invalid(f"stop_sequences.{i}", "must not be whitespace alone")


_TOOL_KEYS = {
    "type",
    "name",
    "description",
    "input_schema",
    "cache_control",
    "strict",
    "eager_input_streaming",
}
_OWN_TOOLS = "offer one with a name and an input_schema, which your client runs"
_AT_ONCE = "offer all tools in the first request (Claude Code: ENABLE_TOOL_SEARCH=false)"
_UNSUPPORTED: Unsupported = {
    "compaction": (
        (),
        "have the model summarize in a call of its own, and send the summary in place of the messages",
    ),
    "container": ((), "run code in a tool of your own"),
    "fallback_credit_token": ((), "leave it out: nothing is billed, and no reply here has one"),
    "fallbacks": ((), "ask another model yourself when this one fails"),
    "inference_geo": (("global",), "leave it out: calls are served where the engines are"),
    "mcp_servers": ((), "connect to them in your client, and offer their tools as your own"),
    "speed": (("standard",), "leave it out: there is one speed"),
}
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "defer_loading": (False,),
    "allowed_callers": (["direct"],),
    "input_examples": ([],),
}


def _tool(tool: Any, where: str, names: set[str]) -> Tool:
    """Return a tool in the form of chat completions."""
    if not isinstance(tool, dict):
        raise invalid(where, "a tool must be an object")
    if tool.get("type") not in (None, "custom"):
        raise unsupported(where, f"the tool {tool['type']!r}, which is not the client's own,", _OWN_TOOLS)
    if tool.get("defer_loading") is True:
        raise unsupported(f"{where}.defer_loading", "a tool that is loaded later", _AT_ONCE)
    values = {name: value for name, value in tool.items() if value not in _NEUTRAL.get(name, ())}
    unknown(values, _TOOL_KEYS, where)
    name, schema, description = tool.get("name"), tool.get("input_schema"), tool.get("description")
    if not isinstance(name, str) or not name or not isinstance(schema, dict):
        raise invalid(where, "a tool needs a name and an input_schema, which is an object")
    check_tool_name(name, f"{where}.name")
    check_unique(name, names, f"{where}.name")
    names.add(name)
    check_parameters(schema, f"{where}.input_schema")
    if not isinstance(description, str | None):
        raise invalid(f"{where}.description", "must be a string")
    function: dict[str, Any] = {"name": name}
    if description is not None:
        function["description"] = description
    function["parameters"] = schema
    if tool.get("strict"):
        function["strict"] = True
    return {"type": "function", "function": function}


def _tool_choice(requested: ToolChoice | None, tools: list[Tool]) -> str:
    if requested is None or requested.type in ("auto", "none"):
        return requested.type if requested else "auto"
    if requested.type == "any":
        return tool_choice("required", tools)
    return tool_choice({"type": "function", "function": {"name": requested.name or ""}}, tools)


def _form(request: CountRequest) -> ContentForm | None:
    requested = request.output_config.format if request.output_config else None
    param = "output_config.format" if requested else "output_format"
    requested = requested or request.output_format
    if requested is None:
        return None
    if requested.get("type") != "json_schema" or not isinstance(requested.get("schema"), dict):
        instead = "send a json_schema, or describe the form in a message and check the reply"
        raise unsupported(param, f"the format {requested.get('type')!r}", instead)
    return ContentForm("json", check_schema(requested["schema"], f"{param}.schema"), param)
