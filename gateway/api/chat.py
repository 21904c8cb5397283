"""`POST /v1/chat/completions`, as OpenAI's API has it. What is not supported is refused by name, never ignored."""

from __future__ import annotations

import secrets
import time
from collections.abc import AsyncIterator, Sequence
from typing import Annotated, Any, Literal

import numpy as np
import orjson
from fastapi import APIRouter, Request, Response
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from gateway.api.context import Gateway, Services, asked_object, bearer
from gateway.api.errors import validation_error
from gateway.api.stream import EventStream, WholeAnswer
from gateway.api.upstream import relay
from gateway.control.episodes import LiveEpisode
from gateway.control.models import LocalModel
from gateway.errors import BadRequest
from gateway.render.renderer import ChatRenderer
from gateway.render.segmenter import Piece, Segmenter
from gateway.rollout.call import Call
from gateway.rollout.completion import Completion, Segment
from gateway.rollout.replies import RequestKey
from gateway.rollout.reply import Delivery, Reader
from gateway.rollout.upstream import Upstream
from gateway.trajectories.recorder import Prompt, TurnDetails
from gateway.types import Int32Array, Sampling

router = APIRouter(tags=["OpenAI"])

WHOLE_INTERVAL = 16
"""Tokens per chunk from the engine while nobody reads along."""
Stop = Annotated[str, Field(min_length=1, max_length=256)]


class StreamOptions(BaseModel):
    """`stream_options`."""

    model_config = ConfigDict(extra="forbid")

    include_usage: bool = False
    include_obfuscation: bool = False


class ChatMessage(BaseModel):
    """One message. Unknown fields are kept: templates may use them."""

    model_config = ConfigDict(extra="allow")

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[dict[str, Any]] | None = None
    tool_calls: list[dict[str, Any]] | None = None
    tool_call_id: str | None = None


class ChatRequest(BaseModel):
    """The parameters that are supported, and those that are accepted because they change nothing here."""

    model_config = ConfigDict(extra="forbid")

    model: str
    messages: list[ChatMessage] = Field(min_length=1)
    stream: bool | None = False
    stream_options: StreamOptions | None = None
    temperature: float | None = Field(None, ge=0, le=2)
    top_p: float | None = Field(None, gt=0, le=1)
    seed: int | None = Field(None, ge=-(2**63), lt=2**63)
    max_tokens: int | None = Field(None, ge=1)
    max_completion_tokens: int | None = Field(None, ge=1)
    stop: Stop | list[Stop] | None = Field(None)
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    logprobs: bool | None = False
    user: str | None = None
    metadata: dict[str, str] | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None


_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "n": (None, 1),
    "logit_bias": (None, {}),
    "presence_penalty": (None, 0),
    "frequency_penalty": (None, 0),
    "top_logprobs": (None, 0),
    "response_format": (None, {"type": "text"}),
    "parallel_tool_calls": (None, True),
    "store": (None, False),
    "service_tier": (None, "auto", "default"),
    "reasoning_effort": (None,),
    "modalities": (None, ["text"]),
    "audio": (None,),
    "prediction": (None,),
    "web_search_options": (None,),
    "functions": (None, []),
    "function_call": (None,),
    "verbosity": (None,),
}
"""Parameters that are known and not supported yet, with the values that ask for nothing."""


@router.post("/v1/chat/completions")
async def chat_completions(request: Request, gateway: Gateway) -> Response:
    """A reply to a conversation, whole or as server-sent events."""
    received_at = time.time()
    episode = await gateway.episodes.authenticate(bearer(request))
    body = await request.body()
    values = asked_object(body)
    model = gateway.models.resolve(values["model"], episode.model)
    if isinstance(model, Upstream):
        return await relay(model, episode, "chat/completions", values)
    asked = _parse(values)
    key = _request_key(request, episode, body)
    segment = _segment(asked, model.renderer)

    async def begin() -> Completion:
        messages = [m.model_dump(exclude_unset=True) for m in asked.messages]
        prompt = await model.recorder.prepare(episode.id, messages, _tools(asked))
        await gateway.episodes.authenticate(bearer(request))  # it may have been closed meanwhile
        sampling = _sampling(asked, gateway, model, episode, prompt)
        details = TurnDetails("chat", bool(asked.stream), _asked(asked), sampling, received_at)
        details.mask_reason, details.request_key = model.mask_reason(episode.model), key.stored
        return _completion(gateway, model, episode.id, prompt, details, segment)

    reader = await gateway.replies.open(key, episode.calls, begin, segment)
    answer = ChatAnswer(reader, asked, model.renderer)
    if asked.stream:
        return EventStream(answer.events, gateway.settings.server.keep_alive_s, orjson.dumps, reader)
    return WholeAnswer(answer.whole, reader)


def _request_key(request: Request, episode: LiveEpisode, body: bytes) -> RequestKey:
    """A retry count that is none counts as zero."""
    try:
        retries = int(request.headers.get("x-stainless-retry-count", "0"))
    except ValueError:
        retries = 0
    return RequestKey.of(episode.id, body, request.headers.get("idempotency-key", ""), retries)


def _tools(asked: ChatRequest) -> list[dict[str, Any]]:
    return [] if asked.tool_choice == "none" else asked.tools or []


def _segment(asked: ChatRequest, renderer: ChatRenderer) -> Segment:
    stop = [asked.stop] if isinstance(asked.stop, str) else asked.stop or []

    def segment(prompt: Int32Array) -> Segmenter:
        reasoning = renderer.reasoning_open(prompt[-8:].tolist())
        return Segmenter(renderer, reasoning=reasoning, tools=_tools(asked), stop=stop)

    return segment


def _completion(
    gateway: Services,
    model: LocalModel,
    episode_id: str,
    prompt: Prompt,
    details: TurnDetails,
    segment: Segment,
) -> Completion:
    limits = gateway.settings.calls
    call = Call(
        f"chatcmpl-{secrets.token_hex(12)}",
        prompt.ids.tolist(),
        details.used,
        model.pool,
        interval=1 if details.stream else WHOLE_INTERVAL,
        episode_id=episode_id,
        max_failures=limits.max_failures,
    )
    return Completion(
        *(episode_id, call, prompt, details, segment),
        recorder=model.recorder,
        metrics=gateway.metrics,
        grace_s=limits.grace_s,
    )


class ChatAnswer:
    """A reply in OpenAI's form, for one client."""

    def __init__(self, reader: Reader, asked: ChatRequest, renderer: ChatRenderer) -> None:
        self._reader = reader
        self._reply = reader.reply
        self._asked = asked
        self._renderer = renderer
        self._tool_calls_sent = 0
        head = {"id": self._reply.call_id, "created": int(self._reply.received_at), "model": asked.model}
        self._head = orjson.dumps({**head, "object": "chat.completion.chunk"})[:-1]
        self._whole_head = {**head, "object": "chat.completion"}

    async def whole(self) -> Response:
        """The answer in one piece."""
        entries: list[dict[str, Any]] = []
        async for delivery in self._reader:
            if self._asked.logprobs:
                entries += self._logprobs(delivery)
        choice = {
            "index": 0,
            "message": {"refusal": None, **self._reply.message()},
            "logprobs": {"content": entries, "refusal": None} if self._asked.logprobs else None,
            "finish_reason": self._reply.finish_reason,
        }
        answer = {**self._whole_head, "choices": [choice], "usage": self._usage()}
        return Response(orjson.dumps(answer), media_type="application/json")

    async def events(self) -> AsyncIterator[bytes]:
        """The answer as server-sent events; every event is one `data:` line."""
        first = True
        async for delivery in self._reader:
            if first:
                yield self._event({"role": "assistant", "content": ""})
                first = False
            logprobs = self._logprobs(delivery) if self._asked.logprobs else None
            for delta in self._deltas(delivery.pieces) or ([{}] if logprobs else []):
                yield self._event(delta, logprobs=logprobs)
                logprobs = None
        yield self._event({}, finish=self._reply.finish_reason)
        options = self._asked.stream_options
        if options is not None and options.include_usage:
            usage = orjson.dumps({"choices": [], "usage": self._usage()})
            yield b"data: " + self._head + b"," + usage[1:] + b"\n\n"
        yield b"data: [DONE]\n\n"

    def _event(
        self, delta: dict[str, Any], logprobs: list[dict[str, Any]] | None = None, finish: str | None = None
    ) -> bytes:
        choice = {
            "index": 0,
            "delta": delta,
            "logprobs": None if logprobs is None else {"content": logprobs, "refusal": None},
            "finish_reason": finish,
        }
        return b"data: " + self._head + b',"choices":[' + orjson.dumps(choice) + b"]}\n\n"

    def _deltas(self, pieces: Sequence[Piece]) -> list[dict[str, Any]]:
        deltas: list[dict[str, Any]] = []
        for piece in pieces:
            if piece.tool_call is not None:
                index = self._tool_calls_sent
                self._tool_calls_sent += 1
                call = self._reply.tool_calls[index]
                deltas.append({"tool_calls": [{"index": index, **call}]})
            else:
                name = "reasoning_content" if piece.kind == "reasoning" else "content"
                deltas.append({name: piece.text})
        return deltas

    def _logprobs(self, delivery: Delivery) -> list[dict[str, Any]]:
        """In the precision in which they are recorded, so that they are the same when the record answers."""
        entries = []
        recorded = np.asarray(delivery.logprobs, np.float32).tolist()
        for token, logprob in zip(delivery.ids, recorded, strict=True):
            text = self._renderer.decode([token])
            entry = {"token": text, "logprob": logprob, "bytes": list(text.encode()), "top_logprobs": []}
            entries.append(entry)
        return entries

    def _usage(self) -> dict[str, int]:
        prompt, completion = self._reply.prompt_tokens, self._reply.completion_tokens
        return {
            "prompt_tokens": prompt,
            "completion_tokens": completion,
            "total_tokens": prompt + completion,
        }


def _parse(values: dict[str, Any]) -> ChatRequest:
    for name, neutral in _NEUTRAL.items():
        if values.pop(name, None) not in neutral:
            message = f"the parameter '{name}' is not supported by this gateway yet"
            raise BadRequest(message, code="unsupported_parameter", param=name)
    try:
        asked = ChatRequest.model_validate(values)
    except ValidationError as error:
        raise validation_error(error.errors()) from error
    _check(asked)
    return asked


def _check(asked: ChatRequest) -> None:
    if asked.tool_choice not in (None, "auto", "none"):
        message = "the parameter 'tool_choice' supports 'auto' and 'none' here, nothing else yet"
        raise BadRequest(message, code="unsupported_parameter", param="tool_choice")
    if asked.stream_options is not None and not asked.stream:
        raise BadRequest("stream_options needs stream", code="invalid_value", param="stream_options")
    for i, tool in enumerate(asked.tools or []):
        function = tool.get("function")
        if tool.get("type") != "function" or not isinstance(function, dict) or not function.get("name"):
            raise BadRequest(
                "a tool must be a function with a name", code="invalid_value", param=f"tools.{i}"
            )
    for i, chat_message in enumerate(asked.messages):
        _check_message(chat_message, f"messages.{i}")


def _check_message(message: ChatMessage, where: str) -> None:
    if isinstance(message.content, list):
        for j, part in enumerate(message.content):
            if part.get("type") != "text" or not isinstance(part.get("text"), str):
                kind = f"a content part of type {part.get('type')!r} is not supported: this model reads text"
                raise BadRequest(kind, code="unsupported_content", param=f"{where}.content.{j}")
    for j, call in enumerate(message.tool_calls or []):
        function = call.get("function")
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            param = f"{where}.tool_calls.{j}"
            raise BadRequest("a tool call needs a function with a name", code="invalid_value", param=param)
    if message.role == "tool" and message.tool_call_id is None:
        raise BadRequest("a tool message needs a tool_call_id", code="invalid_value", param=where)
    if message.role in ("user", "system", "developer") and message.content is None:
        raise BadRequest("the message has no content", code="invalid_value", param=f"{where}.content")


def _sampling(
    asked: ChatRequest, gateway: Services, model: LocalModel, episode: LiveEpisode, prompt: Prompt
) -> Sampling:
    """The parameters to use; in training episodes the configuration may override what was asked for."""
    limits, longest = gateway.settings.sampling, model.settings.max_model_len
    room = longest - len(prompt.ids)
    max_tokens = asked.max_completion_tokens or asked.max_tokens
    if room < 1 or (max_tokens or 1) > room:
        message = (
            f"this model's context is {longest} tokens: the messages take {len(prompt.ids)}"
            f" and the reply was asked to take up to {max_tokens or 'the rest'}"
        )
        raise BadRequest(message, code="context_length_exceeded", param="messages")
    temperature = limits.default_temperature if asked.temperature is None else asked.temperature
    top_p = 1.0 if asked.top_p is None else asked.top_p
    seed = asked.seed
    if episode.mode == "train" and model.name == episode.model:
        temperature, top_p = limits.temperature.apply(temperature), limits.top_p.apply(top_p)
        seed = seed if limits.seed == "keep" else None
    return Sampling(temperature, top_p, max_tokens or room, seed, sorted(model.renderer.marks.stop))


def _asked(asked: ChatRequest) -> dict[str, Any]:
    """What the agent asked for, without the conversation, which is in the tokens."""
    return asked.model_dump(exclude_unset=True, exclude={"messages", "tools"}, mode="json")
