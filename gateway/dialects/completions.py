"""Legacy completions, as OpenAI's API has them: prompts as text or as token ids, and responses as they are sampled.

A prompt is not a conversation: nothing is rendered, and nothing is removed from a reply (marks of thinking and of tool calls are
text here). So a prompt and its reply, sent back together, go on where that reply ended.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from typing import Any

import orjson
from pydantic import Field, ValidationError

from gateway.dialects.chat import MAX_CHOICES, SamplingRequest, stream_end, usage_of
from gateway.dialects.extensions import EXTENSIONS
from gateway.dialects.logprobs import LogprobAligner, TokenLogprob
from gateway.dialects.request import GenerationRequest, drop_unsupported, unsupported
from gateway.generation.reply import Choices, Delivery, Reply
from gateway.render.renderer import ChatRenderer
from headgate.errors import invalid, validation_error

Prompt = str | list[int]
MAX_REPLIES = 2048
"""The most replies to all prompts of a request together."""
_MAX_TOKENS = 16
"""The default of `max_tokens`."""


class CompletionRequest(SamplingRequest):
    """The parameters that are supported, and those that are accepted because they change nothing here."""

    prompt: str | list[str] | list[int] | list[list[int]]
    best_of: int | None = Field(None, ge=1, le=MAX_CHOICES)
    echo: bool | None = None
    suffix: str | None = Field(None, max_length=0)
    logprobs: int | None = Field(None, ge=0, le=5)


def parse(values: dict[str, Any]) -> tuple[CompletionRequest, GenerationRequest]:
    """Return a request's body. Raise BadRequest that names what is wrong or not supported."""
    prompts = _prompts(values.get("prompt"))
    if values.get("suffix"):
        instead = "this model only continues a text: describe what follows the gap in the prompt"
        raise unsupported("suffix", "filling a gap", instead)
    drop_unsupported(values, EXTENSIONS)
    try:  # skip validation: the prompts were checked already and may be long
        request = CompletionRequest.model_validate({**values, "prompt": ""})
    except ValidationError as error:
        raise validation_error(error.errors(), values) from error
    if request.best_of is not None and request.best_of != (request.n or 1):
        raise unsupported("best_of", "sampling more than n", "request n replies and choose among them")
    if request.echo and request.logprobs is not None:
        instead = (
            "a prompt's are not known: leave out `logprobs`, or put the prompt before the reply yourself"
        )
        raise unsupported("echo", "echo with log-probabilities", instead)
    generation = request.generation_request(
        "completions",
        [],
        {k: v for k, v in values.items() if k != "prompt"},
        prompts=prompts,
        max_tokens=request.max_tokens or _MAX_TOKENS,
        form=request.content_form,
        logprobs=request.logprobs is not None,
        top_logprobs=request.logprobs or 0,
    )
    if generation.choices > MAX_REPLIES:
        raise invalid("prompt", f"{generation.choices} replies in one request are more than {MAX_REPLIES}")
    return request, generation


def _prompts(given: Any) -> list[Prompt]:
    if isinstance(given, str):
        return [given]
    if isinstance(given, list) and given:
        if _is_ids(given):
            return [given]
        if all(isinstance(prompt, str) for prompt in given):
            return given
        if all(isinstance(prompt, list) and _is_ids(prompt) for prompt in given):
            return given
    raise invalid("prompt", "must be a text, a list of texts, a list of token ids, or a list of such lists")


def _is_ids(given: list[Any]) -> bool:
    """Return true if these may be token ids; the model checks that they exist."""
    return all(type(token) is int and 0 <= token < 2**31 for token in given)


class CompletionOutput:
    """The replies to a request, in OpenAI's form, for one client."""

    def __init__(
        self,
        choices: Choices,
        request: CompletionRequest,
        generation: GenerationRequest,
        renderer: ChatRenderer,
    ) -> None:
        self._choices = choices
        self._request = request
        self._generation = generation
        self._renderer = renderer
        self._aligners = [LogprobAligner(renderer) for _ in choices.replies] if generation.logprobs else []
        self._begun = [not request.echo] * len(choices.replies)
        first = choices.replies[0]
        self._whole_head = {
            "id": first.call_id,
            "object": "text_completion",
            "created": int(first.received_at),
            "model": request.model,
        }
        self._head = b"data: " + orjson.dumps(self._whole_head)[:-1]

    async def complete(self) -> dict[str, Any]:
        """Return the response in one piece."""
        by_choice: list[list[Delivery]] = [[] for _ in self._choices.replies]
        async for deliveries in self._choices:
            for index, delivery in deliveries:
                by_choice[index].append(delivery)
        choices = [
            self._choice(
                i,
                self._echoed(i) + _text(by_choice[i]),
                self._all_tokens(i, by_choice[i]),
                reply.finish_reason,
            )
            for i, reply in enumerate(self._choices.replies)
        ]
        return {**self._whole_head, "choices": choices, "usage": self._usage()}

    async def events(self) -> AsyncIterator[bytes]:
        """Yield the response as server-sent events, each a `data:` line; what has come together is yielded together."""
        async for deliveries in self._choices:
            yield b"".join([self._event(index, delivery) for index, delivery in deliveries])
        last = [self._end(index, reply) for index, reply in enumerate(self._choices.replies)]
        options = self._request.stream_options
        counted = self._usage() if options is not None and options.include_usage else None
        yield stream_end(last, self._head, counted)

    def _event(self, index: int, delivery: Delivery) -> bytes:
        text = _text([delivery])
        if not self._begun[index]:
            self._begun[index] = True
            text = self._echoed(index) + text
        if not self._generation.logprobs:
            return b"%b%b%d%b%b%b" % (
                self._head,
                _BEFORE_INDEX,
                index,
                _BEFORE_TEXT,
                orjson.dumps(text),
                _END,
            )
        return self._chunk(self._choice(index, text, self._aligners[index].add(delivery), None))

    def _end(self, index: int, reply: Reply) -> bytes:
        left = self._aligners[index].end() if self._generation.logprobs else []
        return self._chunk(self._choice(index, "", left, reply.finish_reason))

    def _chunk(self, choice: dict[str, Any]) -> bytes:
        return self._head + b',"choices":[' + orjson.dumps(choice) + b"]}\n\n"

    def _choice(
        self, index: int, text: str, tokens: Sequence[TokenLogprob], finish: str | None
    ) -> dict[str, Any]:
        logprobs = self._logprobs(tokens) if tokens else None
        return {"index": index, "text": text, "logprobs": logprobs, "finish_reason": finish}

    def _all_tokens(self, index: int, deliveries: Sequence[Delivery]) -> list[TokenLogprob]:
        if not self._generation.logprobs:
            return []
        aligner = self._aligners[index]
        return [sampled for delivery in deliveries for sampled in aligner.add(delivery)] + aligner.end()

    def _echoed(self, index: int) -> str:
        """Return the text before a choice's own."""
        if not self._request.echo:
            return ""
        prompt = self._generation.prompts[index // self._generation.n]
        return prompt if isinstance(prompt, str) else self._renderer.decode(prompt)

    def _logprobs(self, tokens: Sequence[TokenLogprob]) -> dict[str, Any]:
        most = self._generation.top_logprobs
        names = [self._token_key(sampled.token) for sampled in tokens]
        tops = [
            {**{self._token_key(i): x for i, x in sampled.alternatives[:most]}, name: sampled.logprob}
            for name, sampled in zip(names, tokens, strict=True)
        ]
        return {
            "tokens": names,
            "token_logprobs": [sampled.logprob for sampled in tokens],
            "top_logprobs": tops,
            "text_offset": [sampled.offset for sampled in tokens],
        }

    def _token_key(self, token: int) -> str:
        return self._renderer.token_bytes(token).decode(errors="replace")

    def _usage(self) -> dict[str, Any]:
        prompt = sum(reply.prompt_tokens for reply in self._choices.replies[:: self._generation.n])
        return usage_of(prompt, self._choices.completion_tokens)


_BEFORE_INDEX = b',"choices":[{"index":'
_BEFORE_TEXT = b',"text":'
_END = b',"logprobs":null,"finish_reason":null}]}\n\n'


def _text(deliveries: Sequence[Delivery]) -> str:
    return "".join([piece.text for delivery in deliveries for piece in delivery.pieces])
