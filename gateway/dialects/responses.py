"""Responses, as OpenAI's API has them: the request. `responses_input.py` has its items."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, get_args

from pydantic import Field, ValidationError

from gateway.dialects.chat import MAX_METADATA, MAX_TOP_LOGPROBS, Metadata, tool_choice
from gateway.dialects.extensions import ELSEWHERE, EXTENSIONS
from gateway.dialects.forms import of_named_schema, of_response_format
from gateway.dialects.request import (
    Body,
    Effort,
    GenerationRequest,
    Message,
    PromptCacheOptions,
    ServiceTier,
    Unsupported,
    Verbosity,
    drop_unsupported,
    unsupported,
)
from gateway.dialects.responses_tools import Toolbox, function_name
from gateway.render.constraints import ContentForm
from headgate.errors import BadRequest, invalid, validation_error

LOGPROBS = "message.output_text.logprobs"
Summary = Literal["auto", "concise", "detailed"]
Includable = Literal["message.output_text.logprobs", "reasoning.encrypted_content"]
"""Clients that keep their own history always request encrypted reasoning; there is none here, and they get null."""


class Reasoning(Body):
    """`reasoning`. The model's template decides which earlier reasoning the model sees, whatever `context` requests."""

    effort: Effort | None = None
    summary: Summary | None = None
    generate_summary: Summary | None = None
    """The older name of `summary`."""
    context: Literal["auto", "current_turn", "all_turns"] | None = None
    mode: Literal["standard"] | None = None


class ResponsesRequest(Body):
    """The parameters that are supported, and those that are accepted because they change nothing here."""

    model: str
    input: str | list[Any]
    instructions: str | None = None
    previous_response_id: str | None = None
    store: bool | None = None
    stream: bool | None = False
    stream_options: dict[Literal["include_obfuscation"], bool] | None = None
    temperature: float | None = Field(None, ge=0, le=2)
    top_p: float | None = Field(None, gt=0, le=1)
    presence_penalty: float | None = Field(None, ge=-2, le=2)
    frequency_penalty: float | None = Field(None, ge=-2, le=2)
    top_logprobs: int | None = Field(None, ge=0, le=MAX_TOP_LOGPROBS)
    max_output_tokens: int | None = Field(None, ge=1)
    tools: list[Any] | None = None
    tool_choice: Literal["auto", "none", "required"] | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    text: dict[str, Any] | None = None
    reasoning: Reasoning | None = None
    truncation: Literal["auto", "disabled"] | None = None
    """Nothing is ever left out: with `auto` too, a prompt that does not fit is refused."""
    service_tier: ServiceTier | None = None
    include: list[str] | None = Field(None, max_length=64)
    metadata: Metadata | None = Field(None, max_length=MAX_METADATA)
    user: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: str | None = None
    prompt_cache_options: PromptCacheOptions | None = None
    client_metadata: dict[str, Any] | None = None
    """Codex's own ids of its session and turn: recorded, and nothing follows from them."""

    @property
    def stored(self) -> bool:
        """True if the client may come back for the response."""
        return self.store is not False

    @property
    def logprobs(self) -> bool:
        """True if log-probabilities are part of the response."""
        return LOGPROBS in (self.include or ())

    @property
    def summarized(self) -> bool:
        """True if reasoning is also shown as a summary."""
        return self.reasoning is not None and bool(self.reasoning.summary or self.reasoning.generate_summary)

    @property
    def format(self) -> dict[str, Any]:
        """The form that the text must have."""
        return (self.text or {}).get("format") or {"type": "text"}


_UNSUPPORTED: Unsupported = {
    "access_programs": ((), "leave it out: it is OpenAI's own"),
    "background": ((False,), "stream the response, or wait for it"),
    "background_options": (({},), "stream the response, or wait for it"),
    "context_management": (([],), "shorten the conversation before you send it"),
    "conversation": ((), "continue by previous_response_id, or send the whole conversation as `input`"),
    "image": ((), "this model writes text: leave it out"),
    "max_tool_calls": ((), "count the calls where your client runs the tools"),
    "moderation": ((), "have the texts moderated before and after the call"),
    "prompt": ((), "send its text as `instructions` and `input`"),
    **EXTENSIONS,
    **ELSEWHERE,
}
_NOT_RECORDED = {"input", "instructions", "tools"}


def parse(values: dict[str, Any]) -> ResponsesRequest:
    """Return a request's body, but for its items. Raise BadRequest that names what is wrong or not supported."""
    drop_unsupported(values, _UNSUPPORTED)
    try:
        request = ResponsesRequest.model_validate(values)
    except ValidationError as error:
        raise validation_error(error.errors(), values) from error
    for name in request.include or ():
        if name not in get_args(Includable):
            raise unsupported(
                "include", repr(name), f"leave it out; there are {', '.join(get_args(Includable))}"
            )
    if request.top_logprobs and not request.logprobs:
        raise BadRequest(
            f"top_logprobs needs include: {LOGPROBS!r}", code="invalid_value", param="top_logprobs"
        )
    if request.stream_options is not None and not request.stream:
        raise BadRequest("stream_options needs stream", code="invalid_value", param="stream_options")
    _check_text(request.text or {})
    return request


def generation_request(
    request: ResponsesRequest, toolbox: Toolbox, conversation: Sequence[Message], values: dict[str, Any]
) -> GenerationRequest:
    """Return the generation request, in a conversation that already has the request's own messages."""
    choice = request.tool_choice
    if isinstance(choice, dict) and choice.get("type") in ("function", "custom"):
        name = function_name(str(choice.get("name")), choice.get("namespace"))
        choice = {"type": "function", "function": {"name": name}}
    _check_outputs(conversation)
    system = [{"role": "system", "content": request.instructions}] if request.instructions else []
    return GenerationRequest(
        "responses",
        request.model,
        [*system, *conversation],
        toolbox.functions,
        tool_choice(choice, toolbox.functions),
        parallel_tool_calls=request.parallel_tool_calls is not False,
        form=_form(request.format),
        stream=bool(request.stream),
        temperature=request.temperature,
        top_p=request.top_p,
        max_tokens=request.max_output_tokens,
        presence_penalty=request.presence_penalty or 0.0,
        frequency_penalty=request.frequency_penalty or 0.0,
        effort=request.reasoning.effort if request.reasoning else None,
        logprobs=request.logprobs,
        top_logprobs=request.top_logprobs or 0,
        recorded={name: value for name, value in values.items() if name not in _NOT_RECORDED},
    )


def _check_outputs(conversation: Sequence[Message]) -> None:
    """Raise BadRequest unless each call has one output, anywhere after it, and no other call has its id until then."""
    called: dict[str, bool] = {}
    """Calls, and whether each has an output."""
    for message in conversation:
        for call in message.get("tool_calls") or ():
            if not called.get(call["id"], True):
                raise invalid("input", f"two calls have the call_id {call['id']!r}: give each one of its own")
            called[call["id"]] = False
        if message["role"] == "tool":
            name = message["tool_call_id"]
            if called.get(name, True):
                fault = "has an output already" if name in called else "is not among the calls before it"
                raise invalid("input", f"an output names the call {name!r}, which {fault}")
            called[name] = True
    for name, has_output in called.items():
        if not has_output:
            raise invalid("input", f"the call {name!r} has no output: send one, also if the tool was not run")


def _check_text(text: dict[str, Any]) -> None:
    for name, value in text.items():
        if name not in ("format", "verbosity"):
            raise BadRequest(
                f"Unrecognized request argument supplied: text.{name}",
                code="unknown_parameter",
                param=f"text.{name}",
            )
        if name == "verbosity" and value not in (None, *get_args(Verbosity)):
            raise invalid("text.verbosity", f"must be one of {', '.join(get_args(Verbosity))}")
        if name == "format" and value is not None and not isinstance(value, dict):
            raise invalid("text.format", "must be an object")


def _form(given: dict[str, Any]) -> ContentForm | None:
    if given.get("type") == "json_schema":
        return of_named_schema(given, "text.format", "text.format")
    return of_response_format(given, "text.format")
