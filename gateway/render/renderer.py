"""A model family's way between messages and token ids, by the `renderers` library. Pure computation; no episode, no engine.

Loading a tokenizer reads files, so `ChatRenderer.load` is called once, at start, from a thread.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, cast

from gateway.errors import BadRequest
from gateway.settings import ModelSettings
from gateway.types import Int32Array

Message = dict[str, Any]
Tool = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Marks:
    """The token ids that divide a reply into reasoning, content and tool calls; None where a family has no such mark."""

    stop: frozenset[int]
    think_start: int | None
    think_end: int | None
    tool_start: int | None
    tool_end: int | None


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A tool call that the model made; `arguments` is JSON text, as OpenAI's API has it."""

    name: str
    arguments: str


class ChatRenderer:
    """One model's tokenizer and template."""

    def __init__(self, tokenizer: Any, renderer: Any) -> None:
        self._tokenizer = tokenizer
        self._renderer = renderer
        self.backend = tokenizer.backend_tokenizer
        """The `tokenizers.Tokenizer` beneath."""
        self.vocabulary = len(tokenizer)
        self.marks = Marks(
            frozenset(renderer.get_stop_token_ids()),
            *(self._token_id(t) for t in ("<think>", "</think>", "<tool_call>", "</tool_call>")),
        )

    @classmethod
    def load(cls, model: ModelSettings) -> ChatRenderer:
        """Reads the tokenizer beside a checkpoint. Raises ValueError for a family that the library does not know."""
        import renderers
        from transformers import AutoTokenizer

        assert model.path is not None
        tokenizer = AutoTokenizer.from_pretrained(str(model.path), local_files_only=True)
        if model.family == "auto":
            return cls(tokenizer, renderers.create_renderer(tokenizer))
        config = renderers.config_from_name(model.family) if model.family != "qwen3" else None
        if config is None:
            config = renderers.Qwen3RendererConfig(enable_thinking=model.thinking)
        return cls(tokenizer, renderers.create_renderer(tokenizer, config))

    def render(self, messages: Sequence[Message], tools: Sequence[Tool]) -> list[int]:
        """The prompt for a reply to `messages`. Raises BadRequest if the template refuses them."""
        return self._guarded(
            lambda: self._renderer.render_ids(
                _plain(messages), tools=_functions(tools), add_generation_prompt=True
            )
        )

    def encode(self, text: str) -> list[int]:
        """The tokens of a text that is given as it is."""
        return cast("list[int]", self.backend.encode(text).ids)

    def bridge(
        self, history: Int32Array, sampled_from: int, new: Sequence[Message], tools: Sequence[Tool]
    ) -> list[int] | None:
        """The ids that extend `history` by new messages, or None where the template rewrites history."""
        known = history.tolist()
        rendered = self._guarded(
            lambda: self._renderer.bridge_to_next_turn(
                known[:sampled_from], known[sampled_from:], _plain(new), tools=_functions(tools)
            )
        )
        if rendered is None or list(rendered.token_ids[: len(known)]) != known:
            return None
        return list(rendered.token_ids[len(known) :])

    def reasoning_open(self, prompt: Sequence[int]) -> bool:
        """Whether a prompt ends inside a reasoning block that the template opened."""
        for token in reversed(prompt[-8:]):
            if token == self.marks.think_end:
                return False
            if token == self.marks.think_start:
                return True
        return False

    def parse_tool_calls(self, ids: Sequence[int], tools: Sequence[Tool]) -> list[ToolCall]:
        """The well-formed tool calls in a run of tokens from a tool mark on."""
        parsed = self._renderer.parse_response(list(ids), tools=_functions(tools))
        return [
            ToolCall(call.name, _arguments(call.arguments))
            for call in parsed.tool_calls
            if call.status == "ok" and call.name
        ]

    def decode(self, ids: Sequence[int]) -> str:
        """Text of tokens, marks included."""
        return cast(str, self.backend.decode(list(ids), skip_special_tokens=False))

    def _token_id(self, token: str) -> int | None:
        return cast("int | None", self.backend.token_to_id(token))

    @staticmethod
    def _guarded(work: Callable[[], Any]) -> Any:
        try:
            return work()
        except (ValueError, KeyError, TypeError, AttributeError, AssertionError) as error:
            raise BadRequest(f"the messages cannot be rendered: {error}", param="messages") from error


def _arguments(value: dict[str, Any] | str | None) -> str:
    return value if isinstance(value, str) else json.dumps(value or {}, ensure_ascii=False)


def _functions(tools: Sequence[Tool]) -> list[Tool] | None:
    return list(tools) or None


def _plain(messages: Sequence[Message]) -> list[Message]:
    """Templates know neither `developer` nor lists of text parts, and want tool arguments as objects."""
    return [_plain_message(message) for message in messages]


def _plain_message(message: Message) -> Message:
    plain = {key: value for key, value in message.items() if value is not None}
    if plain["role"] == "developer":
        plain["role"] = "system"
    content = plain.get("content", "")
    if isinstance(content, list):
        plain["content"] = "".join(part["text"] for part in content)
    else:
        plain["content"] = content
    if calls := plain.get("tool_calls"):
        plain["tool_calls"] = [_plain_call(call) for call in calls]
    return plain


def _plain_call(call: dict[str, Any]) -> dict[str, Any]:
    function = dict(call["function"])
    if isinstance(function.get("arguments"), str):
        try:
            function["arguments"] = json.loads(function["arguments"])
        except ValueError:
            return call
    return {**call, "function": function}
