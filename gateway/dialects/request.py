"""A generation request, whatever dialect it came in. A value: dialects make it, `api/generation.py` carries it out."""

from __future__ import annotations

import re
from collections.abc import Container, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from gateway.dialects.images import TEXT_ONLY, ImageSupport, check_url, url_part
from gateway.dialects.schemas import check_parameters
from gateway.render.constraints import ContentForm
from gateway.render.meaning import REASONING
from headgate.errors import BadRequest, invalid
from headgate.json_depth import MAX_DEPTH, too_deep

Message = dict[str, Any]
"""The messages in the form of chat completions."""
Tool = dict[str, Any]
Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]
"""The reasoning effort before the reply."""
Verbosity = Literal["low", "medium", "high"]
"""The wanted length of the reply. Accepted and recorded; no template has a place for it."""
ServiceTier = Literal["auto", "default", "flex", "scale", "priority", "fast", "ultrafast"]
"""The wanted tier of speed and price. Accepted and recorded; there is one tier here."""


class Body(BaseModel):
    """A body, or an object in one: no other fields, and values of the types that JSON has (no "2" for 2, no 1 for true)."""

    model_config = ConfigDict(extra="forbid", strict=True)


LogitBias = dict[Annotated[int, Field(strict=False)], Annotated[float, Field(ge=-100, le=100)]]
"""Keys of JSON objects are texts."""


@dataclass(slots=True)
class GenerationRequest:
    """A client's request, in one form for all dialects. None: the client did not send it."""

    api: str
    """chat, completions, responses or messages: as calls are recorded."""
    model: str
    messages: list[Message]
    tools: list[Tool] = field(default_factory=list)
    tool_choice: str = "auto"
    """auto, none, required, or `function:NAME` for one that must be called."""
    parallel_tool_calls: bool = True
    form: ContentForm | None = None
    """The form of the content; None: free text."""
    effort: Effort | None = None
    thinking: bool | None = None
    """False: the model must not think."""
    prompts: Sequence[str | list[int]] = ()
    """The prompts of the legacy completions, in place of messages."""
    n: int = 1
    """Replies to the conversation, or to each prompt."""
    stream: bool = False
    temperature: float | None = None
    top_p: float | None = None
    seed: int | None = None
    max_tokens: int | None = None
    max_tokens_may_exceed: bool = False
    """True if `max_tokens` may exceed the room in the context, so that the reply ends there; otherwise such a request is
    refused."""
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    """Tokens that end a reply in addition to those that end every reply of the model."""
    ignore_eos: bool = False
    """True: no token may end a reply before its `max_tokens`."""
    top_k: int = 0
    min_p: float = 0.0
    min_tokens: int = 0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: dict[int, float] = field(default_factory=dict)
    logprobs: bool = False
    top_logprobs: int = 0
    recorded: dict[str, Any] = field(default_factory=dict)
    """The stored facts about the request, apart from its messages and tools."""

    @property
    def choices(self) -> int:
        """The number of replies. Choice `i * n + j` is of prompt i."""
        return self.n * max(1, len(self.prompts))


def replies_of(values: dict[str, Any]) -> tuple[int, str]:
    """Count the replies that a body requests, and name the parameter that requests most of them.

    The body was not validated: invalid values count as one reply, and are refused elsewhere.
    """
    prompts = values.get("prompt")
    listed = prompts if isinstance(prompts, list) and prompts and not isinstance(prompts[0], int) else None
    each = {name: values.get(name) for name in ("n", "best_of")}
    counts = {name: value for name, value in each.items() if type(value) is int and value > 1}
    param = max(counts, key=lambda name: counts[name], default="n")
    return counts.get(param, 1) * (len(listed) if listed else 1), "prompt" if listed else param


TEXT_ALONE = "this model reads text: send what it needs to know as text"
NO_IMAGES = (
    "{model} is given no images: send in words what is to be known, or call a model that takes them"
    " ([models.NAME] images = true), or an upstream model at /v1/chat/completions, which is sent images as they come"
)
NO_IMAGES_HERE = "a model takes images in messages of the user and in results of tools"
_IMAGES = ("image", "image_url", "image_file", "input_image")


def check_messages(messages: Sequence[Any], images: ImageSupport = TEXT_ONLY) -> None:
    """Raise BadRequest if a message is of no kind that the model can read."""
    if not messages:
        raise BadRequest("the conversation has no messages", code="invalid_value", param="messages")
    for i, message in enumerate(messages):
        _check_message(message, f"messages.{i}", images)


_TOOL_NAME = re.compile(r"[A-Za-z0-9_-]{1,128}")


def check_tools(tools: Sequence[Any]) -> None:
    """Raise BadRequest if a tool is not a function with a name of its own and the schema of an object."""
    names: set[str] = set()
    for i, tool in enumerate(tools):
        function = tool.get("function") if isinstance(tool, dict) else None
        if isinstance(tool, dict) and tool.get("type") == "custom":
            instead = "offer a function of one string, or the custom tool in /v1/responses"
            raise unsupported(f"tools.{i}", "a tool of type 'custom'", instead)
        if not isinstance(function, dict) or tool.get("type") != "function" or not _named(function):
            raise BadRequest(
                "a tool must be a function with a name", code="invalid_value", param=f"tools.{i}"
            )
        where = f"tools.{i}.function"
        check_tool_name(function["name"], f"{where}.name")
        check_unique(function["name"], names, f"{where}.name")
        names.add(function["name"])
        check_parameters(function.get("parameters"), f"{where}.parameters")


def check_tool_name(name: str, where: str) -> None:
    """Raise BadRequest for a name that neither OpenAI's API nor Anthropic's has for tools."""
    if not _TOOL_NAME.fullmatch(name):
        raise invalid(
            where, f"{name[:200]!r} is not the name of a tool: use 1 to 128 letters, digits, '_' and '-'"
        )


def check_unique(name: str, names: Container[str], where: str) -> None:
    """Raise BadRequest if there is a tool of that name already."""
    if name in names:
        raise invalid(where, f"two tools have the name {name!r}: rename or remove one")


def check_results(messages: Sequence[Message], param: str = "") -> None:
    """Raise BadRequest unless the tool calls of a message have different ids, and each has one result, before the next message
    of another role.

    `param`: the field to name; empty: the message's place.
    """
    pending: dict[str, int] = {}
    """The calls that have no result so far, with the places of their messages."""
    known: set[str] = set()
    for i, message in enumerate(messages):
        where = param or f"messages.{i}"
        if message["role"] == "tool":
            call = message["tool_call_id"]
            if pending.pop(call, None) is None:
                fault = "has a result already" if call in known else "is not among the calls right before it"
                raise BadRequest(
                    f"{where}: a tool's result names the call {call!r}, which {fault}",
                    code="invalid_value",
                    param=param or f"{where}.tool_call_id",
                )
            continue
        _check_results(pending, param)
        pending = {}
        for j, call in enumerate(message.get("tool_calls") or ()):
            if isinstance(name := call.get("id"), str):
                _check_new(name, pending, param or f"{where}.tool_calls.{j}.id")
                pending[name] = i
        known = set(pending)
    _check_results(pending, param)


def _check_new(call: str, pending: Container[str], param: str) -> None:
    if call in pending:
        raise invalid(
            param, f"two tool calls of one message have the id {call!r}: give each an id of its own"
        )


def _check_results(pending: dict[str, int], param: str) -> None:
    for call, at in pending.items():
        where = param or f"messages.{at}"
        message = f"{where}: the tool call {call!r} has no result right after it: send one, also if the tool was not run"
        raise BadRequest(message, code="invalid_value", param=param or f"{where}.tool_calls")


Unsupported = dict[str, tuple[tuple[Any, ...], str]]
"""Parameters that are known and not supported: the values without an effect, and what to do instead of another."""


def drop_unsupported(values: dict[str, Any], parameters: Unsupported, where: str = "") -> None:
    """Remove such parameters from a body where they have no effect. Raise BadRequest where they have one."""
    for name in sorted(parameters.keys() & values.keys()):
        (neutral, instead), value = parameters[name], values.pop(name)
        if isinstance(value, dict):
            value = {key: inner for key, inner in value.items() if inner is not None}
        if value is not None and value not in neutral:
            raise unsupported(f"{where}{name}", "this parameter", instead)


PROMPT_CACHE: Unsupported = {
    "comparison_response_id": ((), "leave it out: an engine's own metrics show what it cached"),
    "prewarm": ((False,), "send the request: its prompt stays cached"),
}


class PromptCacheOptions(Body):
    """`prompt_cache_options`. Accepted: what prompts have in common is cached by itself, for as long as there is room."""

    mode: Literal["implicit", "explicit"] | None = None
    ttl: str | None = None

    @model_validator(mode="before")
    @classmethod
    def _drop_unsupported(cls, values: Any) -> Any:
        if isinstance(values, dict):
            values = dict(values)
            drop_unsupported(values, PROMPT_CACHE, "prompt_cache_options.")
        return values


def unsupported(where: str, what: str, instead: str, code: str = "unsupported_parameter") -> BadRequest:
    """Return the error for what this gateway cannot do, or this model."""
    return invalid(where, f"{what} is not supported here: {instead}", code)


def unsupported_content(where: str, what: str, kind: Any, images: ImageSupport = TEXT_ONLY) -> BadRequest:
    """Return the error for a part of a conversation that the model cannot read. `what`: the name of such a part in its
    dialect."""
    instead = TEXT_ALONE
    if kind in _IMAGES:
        model = f"the model {images.model!r}" if images.model else "this model"
        instead = NO_IMAGES_HERE if images.enabled else NO_IMAGES.format(model=model)
    return unsupported(where, f"{what} of type {kind!r}", instead, "unsupported_content")


_ROLES = ("system", "developer", "user", "assistant", "tool")
_TEXTS = frozenset(("name", "refusal", *REASONING))


def _check_message(message: Any, where: str, images: ImageSupport) -> None:
    if not isinstance(message, dict):
        raise invalid(where, "a message must be an object")
    role, content = message.get("role"), message.get("content")
    if role not in _ROLES:
        raise invalid(f"{where}.role", f"{role!r} is none of {', '.join(_ROLES)}")
    if isinstance(content, list):
        allowed = images if role in ("user", "tool") else ImageSupport(images.model)
        for j, part in enumerate(content):
            _check_part(part, f"{where}.content.{j}", allowed)
    elif content is not None and not isinstance(content, str):
        raise invalid(f"{where}.content", "must be a string or a list of parts")
    for name in sorted(_TEXTS & message.keys()):
        if message[name] is not None and not isinstance(message[name], str):
            raise invalid(f"{where}.{name}", "must be a string")
    if message.get("tool_calls") is not None:
        _check_tool_calls(message["tool_calls"], where)
    if role == "tool" and not isinstance(message.get("tool_call_id"), str):
        raise BadRequest("a tool message needs a tool_call_id", code="invalid_value", param=where)
    if role in ("user", "system", "developer") and content is None:
        raise BadRequest("the message has no content", code="invalid_value", param=f"{where}.content")


def _check_part(part: Any, where: str, images: ImageSupport) -> None:
    kind = part.get("type") if isinstance(part, dict) else None
    if kind == "image_url" and images.enabled:
        image = part.get("image_url")
        given = image if isinstance(image, dict) else {"url": image}
        part |= url_part(check_url(given.get("url"), where, given.get("detail")), where)
        return
    if kind == "refusal" and isinstance(part.get("refusal"), str):
        return
    if kind != "text" or not isinstance(part.get("text"), str):
        raise unsupported_content(where, "a content part", kind, images)


def _check_tool_calls(calls: Any, where: str) -> None:
    if not isinstance(calls, list):
        raise BadRequest(f"{where}.tool_calls: must be a list", code="invalid_value", param=where)
    for j, call in enumerate(calls):
        function = call.get("function") if isinstance(call, dict) else None
        if not isinstance(function, dict) or not _named(function):
            param = f"{where}.tool_calls.{j}"
            raise BadRequest("a tool call needs a function with a name", code="invalid_value", param=param)
        check_arguments(function.get("arguments"), f"{where}.tool_calls.{j}.function.arguments")


def check_arguments(arguments: Any, where: str) -> None:
    """Raise BadRequest if a call's arguments, which are JSON as text, are nested deeper than templates could follow."""
    if isinstance(arguments, str) and too_deep(arguments):
        message = (
            f"{where}: nested more than {MAX_DEPTH} deep: send them flatter, or as a string in one field"
        )
        raise BadRequest(message, code="too_deep", param=where)


def _named(function: dict[str, Any]) -> bool:
    return isinstance(function.get("name"), str) and bool(function["name"])
