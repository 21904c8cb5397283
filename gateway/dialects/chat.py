"""Chat completions, as OpenAI's API has them: the request, the response, and the response's events."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from typing import Annotated, Any, Literal

import orjson
from pydantic import Field, ValidationError

from gateway.dialects.extensions import EXTENSIONS, EngineFields, ThinkingFields, UsageOptions
from gateway.dialects.forms import check_choice, of_response_format, only_one
from gateway.dialects.images import TEXT_ONLY, ImageSupport
from gateway.dialects.logprobs import LogprobAligner, TokenLogprob, entries
from gateway.dialects.request import (
    Body,
    Effort,
    GenerationRequest,
    LogitBias,
    PromptCacheOptions,
    ServiceTier,
    Unsupported,
    Verbosity,
    check_messages,
    check_results,
    check_tools,
    drop_unsupported,
    unsupported,
)
from gateway.generation.reply import Choices, Delivery, Reply
from gateway.render.renderer import ChatRenderer
from headgate.errors import BadRequest, validation_error

Stop = Annotated[str, Field(min_length=1, max_length=256)]
Metadata = dict[Annotated[str, Field(max_length=64)], Annotated[str, Field(max_length=512)]]
MAX_METADATA = 16
MAX_CHOICES = 128
MAX_TOP_LOGPROBS = 20


class StreamOptions(Body):
    """`stream_options`."""

    include_usage: bool = False
    include_obfuscation: bool = False
    continuous_usage_stats: bool = False
    """vLLM's. Changes nothing: the usage comes with the last chunk."""


class SamplingRequest(EngineFields):
    """The parameters of both of OpenAI's older APIs, chat completions and completions."""

    model: str
    stream: bool | None = False
    stream_options: StreamOptions | None = None
    n: int | None = Field(None, ge=1, le=MAX_CHOICES)
    temperature: float | None = Field(None, ge=0, le=2)
    top_p: float | None = Field(None, gt=0, le=1)
    top_k: int | None = Field(None, ge=-1, le=2**31 - 1)
    """Not in OpenAI's API, but in vLLM's, as are `min_p`, `min_tokens` and `repetition_penalty`."""
    min_p: float | None = Field(None, ge=0, le=1)
    min_tokens: int | None = Field(None, ge=0)
    seed: int | None = Field(None, ge=-(2**63), lt=2**63)
    max_tokens: int | None = Field(None, ge=1)
    presence_penalty: float | None = Field(None, ge=-2, le=2)
    frequency_penalty: float | None = Field(None, ge=-2, le=2)
    repetition_penalty: float | None = Field(None, gt=0, le=10)
    logit_bias: LogitBias | None = None
    stop: Stop | list[Stop] | None = Field(None)
    user: str | None = None

    def generation_request(
        self, api: str, messages: list[Any], recorded: dict[str, Any], **own: Any
    ) -> GenerationRequest:
        """Return a request with what both APIs have in common, and with fields of one's `own`.

        Raise BadRequest for `stream_options` without `stream`.
        """
        if self.stream_options is not None and not self.stream:
            raise BadRequest("stream_options needs stream", code="invalid_value", param="stream_options")
        return GenerationRequest(
            api,
            self.model,
            messages,
            n=self.n or 1,
            stream=bool(self.stream),
            temperature=self.temperature,
            top_p=self.top_p,
            seed=self.seed,
            stop=(self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ()),
            stop_token_ids=tuple(self.stop_token_ids or ()),
            ignore_eos=bool(self.ignore_eos),
            top_k=max(self.top_k or 0, 0),
            min_p=self.min_p or 0.0,
            min_tokens=self.min_tokens or 0,
            presence_penalty=self.presence_penalty or 0.0,
            frequency_penalty=self.frequency_penalty or 0.0,
            repetition_penalty=self.repetition_penalty or 1.0,
            logit_bias=self.logit_bias or {},
            recorded=recorded,
            **own,
        )


class ChatRequest(SamplingRequest, ThinkingFields):
    """The parameters that are supported, and those that are accepted because they change nothing here."""

    messages: list[Any]
    max_completion_tokens: int | None = Field(None, ge=1)
    tools: list[Any] | None = None
    tool_choice: Literal["auto", "none", "required"] | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    response_format: dict[str, Any] | None = None
    logprobs: bool | None = False
    top_logprobs: int | None = Field(None, ge=0, le=MAX_TOP_LOGPROBS)
    reasoning_effort: Effort | None = None
    verbosity: Verbosity | None = None
    service_tier: ServiceTier | None = None
    store: bool | None = None
    """Without effect: every call is recorded, and completions cannot be retrieved."""
    metadata: Metadata | None = Field(None, max_length=MAX_METADATA)
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: str | None = None
    prompt_cache_options: PromptCacheOptions | None = None
    usage: UsageOptions | None = None

    @property
    def usage_streamed(self) -> bool:
        """True if a stream ends with the usage; a whole response always has it."""
        in_options = self.stream_options is not None and self.stream_options.include_usage
        return in_options or (self.usage is not None and self.usage.include)


_ONLY_TEXT = "this model writes text: leave it out"
_UNSUPPORTED: Unsupported = {
    "modalities": ((["text"],), _ONLY_TEXT),
    "audio": ((), _ONLY_TEXT),
    "moderation": ((), "have the texts moderated before and after the call"),
    "prediction": ((), "leave it out: every token of a reply is sampled"),
    "web_search_options": ((), "offer a tool that searches, which your client runs"),
    "functions": (([],), "send them as `tools`"),
    "function_call": ((), "send `tool_choice`"),
    **EXTENSIONS,
}


def parse(values: dict[str, Any], images: ImageSupport = TEXT_ONLY) -> tuple[ChatRequest, GenerationRequest]:
    """Return a request's body. Raise BadRequest that names what is wrong or not supported."""
    drop_unsupported(values, _UNSUPPORTED)
    try:
        request = ChatRequest.model_validate(values)
    except ValidationError as error:
        raise validation_error(error.errors(), values) from error
    check_messages(request.messages, images)
    check_results(request.messages)
    check_tools(request.tools or ())
    if request.top_logprobs and not request.logprobs:
        raise BadRequest("top_logprobs needs logprobs", code="invalid_value", param="top_logprobs")
    return request, _generation_request(request, values)


def _generation_request(request: ChatRequest, values: dict[str, Any]) -> GenerationRequest:
    tools = request.tools or []
    effort, thinking = request.effort_and_thinking(request.reasoning_effort)
    choice, form = tool_choice(request.tool_choice, tools), request.content_form
    check_choice(form, choice)
    recorded = {name: value for name, value in values.items() if name not in ("messages", "tools")}
    return request.generation_request(
        "chat",
        request.messages,
        recorded,
        tools=tools,
        tool_choice=choice,
        parallel_tool_calls=request.parallel_tool_calls is not False,
        form=only_one(of_response_format(request.response_format), form),
        effort=effort,
        thinking=thinking,
        max_tokens=request.max_completion_tokens or request.max_tokens,
        logprobs=bool(request.logprobs),
        top_logprobs=request.top_logprobs or 0,
    )


def tool_choice(choice: str | dict[str, Any] | None, tools: Sequence[dict[str, Any]]) -> str:
    """Return the choice in `GenerationRequest`'s form. Raise BadRequest if a tool that must be called is not there."""
    if choice is None:
        return "auto"
    if isinstance(choice, str):
        if choice == "required" and not tools:
            raise BadRequest("tool_choice 'required' needs tools", code="invalid_value", param="tool_choice")
        return choice
    function = choice.get("function")
    name = function.get("name") if choice.get("type") == "function" and isinstance(function, dict) else None
    if name is None:
        instead = (
            "send 'auto', 'none', 'required' or a named function; to allow only some tools, send only those"
        )
        raise unsupported("tool_choice", "this choice", instead)
    if name not in [tool["function"]["name"] for tool in tools]:
        raise BadRequest(
            f"tool_choice names {name!r}, which is none of the tools",
            code="invalid_value",
            param="tool_choice",
        )
    return f"function:{name}"


class ChatOutput:
    """The replies to a request, in OpenAI's form, for one client."""

    def __init__(self, choices: Choices, request: ChatRequest, renderer: ChatRenderer) -> None:
        self._choices = choices
        self._request = request
        self._renderer = renderer
        self._aligners = [LogprobAligner(renderer) for _ in choices.replies] if request.logprobs else []
        self._tool_calls_sent = [0] * len(choices.replies)
        self._begun = [False] * len(choices.replies)
        first = choices.replies[0]
        head = {"id": first.call_id, "created": int(first.received_at), "model": request.model}
        self._head = b"data: " + orjson.dumps({**head, "object": "chat.completion.chunk"})[:-1]
        self._whole_head = {**head, "object": "chat.completion", "service_tier": "default"}

    async def complete(self) -> dict[str, Any]:
        """Return the response in one piece."""
        logged: list[list[dict[str, Any]]] = [[] for _ in self._choices.replies]
        async for deliveries in self._choices:
            for index, delivery in deliveries if self._request.logprobs else ():
                logged[index] += self._entries(self._aligners[index].add(delivery))
        for index, aligner in enumerate(self._aligners):
            logged[index] += self._entries(aligner.end())
        choices = [self._choice(i, reply, logged[i]) for i, reply in enumerate(self._choices.replies)]
        return {**self._whole_head, "choices": choices, "usage": self._usage()}

    def _choice(self, index: int, reply: Reply, entries: list[dict[str, Any]]) -> dict[str, Any]:
        return {
            "index": index,
            "message": {"refusal": None, **_both_names(reply.message())},
            "logprobs": {"content": entries, "refusal": None} if self._request.logprobs else None,
            "finish_reason": reply.finish_reason,
        }

    async def events(self) -> AsyncIterator[bytes]:
        """Yield the response as server-sent events, each a `data:` line; what has come together is yielded together."""
        async for deliveries in self._choices:
            yield b"".join([self._events(index, delivery) for index, delivery in deliveries])
        last = [self._last_event(i, reply) for i, reply in enumerate(self._choices.replies)]
        yield stream_end(last, self._head, self._usage() if self._request.usage_streamed else None)

    def _events(self, index: int, delivery: Delivery) -> bytes:
        events = []
        if not self._begun[index]:
            self._begun[index] = True
            events.append(self._event(index, {"role": "assistant", "content": ""}))
        if not self._request.logprobs and len(delivery.pieces) == 1 and delivery.pieces[0].kind == "content":
            text = orjson.dumps(delivery.pieces[0].text)  # the usual case: most events of most streams
            events.append(
                b"%b%b%d%b%b%b" % (self._head, _BEFORE_INDEX, index, _BEFORE_TEXT, text, _AFTER_TEXT)
            )
            return b"".join(events)
        logprobs = self._entries(self._aligners[index].add(delivery)) if self._request.logprobs else None
        for delta in self._deltas(index, delivery) or ([{}] if logprobs else []):
            events.append(self._event(index, delta, logprobs))
            logprobs = None
        return b"".join(events)

    def _event(
        self,
        index: int,
        delta: dict[str, Any],
        logprobs: list[dict[str, Any]] | None = None,
        finish: str | None = None,
    ) -> bytes:
        choice = {
            "index": index,
            "delta": delta,
            "logprobs": None if logprobs is None else {"content": logprobs, "refusal": None},
            "finish_reason": finish,
        }
        return self._head + b',"choices":[' + orjson.dumps(choice) + b"]}\n\n"

    def _deltas(self, choice: int, delivery: Delivery) -> list[dict[str, Any]]:
        deltas: list[dict[str, Any]] = []
        for piece in delivery.pieces:
            if piece.tool_call is not None:
                index = self._tool_calls_sent[choice]
                self._tool_calls_sent[choice] += 1
                call = self._choices.replies[choice].tool_calls[index]
                deltas.append({"tool_calls": [{"index": index, **call}]})
            else:
                name = "reasoning_content" if piece.kind == "reasoning" else "content"
                deltas.append(_both_names({name: piece.text}))
        return deltas

    def _last_event(self, index: int, reply: Reply) -> bytes:
        left = self._entries(self._aligners[index].end()) if self._request.logprobs else []
        return self._event(index, {}, left or None, reply.finish_reason)

    def _entries(self, tokens: Sequence[TokenLogprob]) -> list[dict[str, Any]]:
        return entries(tokens, self._renderer, self._request.top_logprobs or 0)

    def _usage(self) -> dict[str, Any]:
        return usage_of(self._choices.prompt_tokens, self._choices.completion_tokens)


def _both_names(message: dict[str, Any]) -> dict[str, Any]:
    """Return a message or a part of one with its reasoning under vLLM's present name too, which newer clients read."""
    reasoning = message.get("reasoning_content")
    return message if reasoning is None else {**message, "reasoning": reasoning}


_BEFORE_INDEX = b',"choices":[{"index":'
_BEFORE_TEXT = b',"delta":{"content":'
_AFTER_TEXT = b'},"logprobs":null,"finish_reason":null}]}\n\n'


def stream_end(last: Sequence[bytes], head: bytes, usage: dict[str, Any] | None) -> bytes:
    """Return the last events of all choices, the usage if there is one, and `[DONE]`."""
    counted = b""
    if usage is not None:
        counted = head + b"," + orjson.dumps({"choices": [], "usage": usage})[1:] + b"\n\n"
    return b"".join([*last, counted, b"data: [DONE]\n\n"])


def usage_of(prompt: int, completion: int) -> dict[str, int]:
    """Return the usage, in tokens."""
    return {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}
