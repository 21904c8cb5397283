"""A checkpoint's own chat template: messages to text. Pure computation; knows no tokens."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, cast

Message = dict[str, Any]
Tool = dict[str, Any]


class ChatTemplate:
    """The jinja template that came with a tokenizer. Safe to use from several threads: it holds no state."""

    def __init__(self, tokenizer: Any, *, thinking: bool) -> None:
        """Raises ValueError if the tokenizer has no template. `thinking`: passed on as `enable_thinking`."""
        if not tokenizer.chat_template:
            raise ValueError("the checkpoint has no chat template: set `family` to one of the known families")
        self._tokenizer = tokenizer
        self._thinking = thinking
        self._as_text = not self._takes_objects()

    def text(self, messages: Sequence[Message], tools: Sequence[Tool], *, generation: bool = True) -> str:
        """Messages as text, with the beginning of a reply if `generation`. Raises what the template raises."""
        return cast(
            str,
            self._tokenizer.apply_chat_template(
                [_arguments_as_text(m) for m in messages] if self._as_text else list(messages),
                tools=list(tools) or None,
                add_generation_prompt=generation,
                enable_thinking=self._thinking,
                tokenize=False,
            ),
        )

    def _takes_objects(self) -> bool:
        """Most templates want a tool call's arguments as an object; some put text together and want text."""
        function = {"name": "f", "arguments": {"a": "b"}}
        call = {"id": "call00000", "type": "function", "function": function}
        messages: list[Message] = [
            {"role": "user", "content": "u"},
            {"role": "assistant", "content": "", "tool_calls": [call]},
        ]
        self._as_text = False
        try:
            self.text(messages, [], generation=False)
        except TypeError:
            return False
        except Exception:  # no tool calls at all: it does not matter then
            return True
        return True


def _arguments_as_text(message: Message) -> Message:
    calls = message.get("tool_calls")
    if not calls:
        return message
    return {**message, "tool_calls": [{**c, "function": _function_as_text(c["function"])} for c in calls]}


def _function_as_text(function: dict[str, Any]) -> dict[str, Any]:
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        return function
    return {**function, "arguments": json.dumps(arguments or {}, ensure_ascii=False)}
