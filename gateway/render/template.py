"""A checkpoint's own chat template: messages to text. Pure computation, without tokens except the text of control tokens."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from copy import copy
from functools import cache
from typing import Any

from jinja2 import Template

from gateway.render.checkpoint import Checkpoint
from gateway.render.environment import environment
from gateway.render.escaping import cut
from gateway.render.special_tokens import ControlTokens
from gateway.render.template_guard import marked

Message = dict[str, Any]
Tool = dict[str, Any]


class ChatTemplate:
    """The jinja template that came with a tokenizer. Safe to use from several threads: what it caches never changes."""

    def __init__(self, checkpoint: Checkpoint, control: ControlTokens, *, thinking: bool) -> None:
        """Raise ValueError if the checkpoint has no template. `thinking`: passed on as `enable_thinking`."""
        self._checkpoint = checkpoint
        self._compiled = {
            tools: environment().from_string(checkpoint.template(tools)) for tools in (False, True)
        }
        self._control = control
        self._variables: dict[str, Any] = {"enable_thinking": thinking}
        self._as_text = not self._takes_objects()
        self._marked = cache(self._mark)
        self._guards_all = self._checked()

    def text(self, messages: Sequence[Message], tools: Sequence[Tool], *, generation: bool = True) -> str:
        """Return messages as text, with the beginning of a reply if `generation`. Raise what the template raises."""
        return self._rendered(self._compiled[bool(tools)], messages, tools, generation, str)

    def switched(self, variables: dict[str, Any]) -> ChatTemplate:
        """Return the same template with other variables."""
        other = copy(self)
        other._variables = {**self._variables, **variables}
        other._guards_all = other._checked()
        return other

    def guarded(self, messages: Sequence[Message], tools: Sequence[Tool], text: str) -> str:
        """Return `text` with guards before the control tokens that the template wrote itself, and before no others.

        `text` is the template's for the same messages. Raise ValueError where the two cannot be distinguished.
        """
        ways = [self._guarded, self._uncut] if self._guards_all[bool(tools)] else [self._uncut]
        for way in ways:
            guarded = way(messages, tools)
            if self._control.plain(guarded) == text:
                return guarded
        raise ValueError(
            "they spell a control token, and this model's chat template does not let its own be distinguished from those;"
            ' take it out, or set [render] special_tokens = "allow"'
        )

    def _uncut(self, messages: Sequence[Message], tools: Sequence[Tool]) -> str:
        """Guard by cutting what the template is given: for templates that do not build their tokens from literals alone."""
        given = cut(list(messages), self._control), cut(list(tools), self._control)
        return self._control.guard_uncut(self.text(*given))

    def _prepared(self, messages: Sequence[Message]) -> list[Message]:
        return [_arguments_as_text(m) for m in messages] if self._as_text else list(messages)

    def _guarded(self, messages: Sequence[Message], tools: Sequence[Tool]) -> str:
        rendered = self._rendered(self._marked(bool(tools)), messages, tools, True, self._control.mark)
        return self._control.assemble(rendered)

    def _rendered(
        self,
        template: Template,
        messages: Sequence[Message],
        tools: Sequence[Tool],
        generation: bool,
        written: Callable[[str], str],
    ) -> str:
        """`written`: the text that the template gets for each named special token."""
        if not messages:
            raise ValueError("there are no messages")
        special = {name: written(text) for name, text in self._checkpoint.special_tokens_map.items()}
        return template.render(
            messages=[_aliased(message) for message in self._prepared(messages)],
            tools=list(tools) or None,
            documents=None,
            add_generation_prompt=generation,
            **{**special, **self._variables},
        )

    def _mark(self, tools: bool) -> Template:
        return marked(environment(), self._checkpoint.template(tools), self._control.mark)

    def _checked(self) -> dict[bool, bool]:
        """Check the template with tools and without."""
        return {tools: self._control.as_text and self._check(tools) for tools in (False, True)}

    def _check(self, tools: bool) -> bool:
        """Return whether the template's control tokens are all guarded in conversations that spell none."""
        control, backend = self._control, self._checkpoint.backend_tokenizer
        given = [_TOOL] if tools else []
        for messages in _samples():
            try:
                text = self.text(messages, given)
            except Exception:  # the template refuses such conversations
                continue
            guarded = self._guarded(messages, given)
            ids = backend.encode(text, add_special_tokens=False).ids
            if control.plain(guarded) != text or control.encode(guarded) != ids:
                return False
        return True

    def _takes_objects(self) -> bool:
        """Most templates want a tool call's arguments as an object; some put text together and want text."""
        messages: list[Message] = [
            {"role": "user", "content": "u"},
            {"role": "assistant", "content": "", "tool_calls": [_CALL]},
        ]
        self._as_text = False
        try:
            self.text(messages, [], generation=False)
        except TypeError:
            return False
        except Exception:  # the template has no tool calls, so the response does not matter
            return True
        return True


_CALL: dict[str, Any] = {
    "id": "call00000",
    "type": "function",
    "function": {"name": "f", "arguments": {"a": "b"}},
}
_TOOL: Tool = {
    "type": "function",
    "function": {"name": "f", "description": "d", "parameters": {"type": "object", "properties": {}}},
}


def _samples() -> Iterator[list[Message]]:
    """Return conversations in which a template writes what it can write."""
    system: Message = {"role": "system", "content": "s"}
    user: Message = {"role": "user", "content": "u"}
    greeting: Message = {"role": "assistant", "content": "a"}
    called: Message = {"role": "assistant", "content": "", "tool_calls": [_CALL]}
    result: Message = {"role": "tool", "content": "r", "tool_call_id": "call00000", "name": "f"}
    for begin in ([], [system]):
        yield [*begin, user]
        yield [*begin, user, greeting, user]
        for reply in (called, {**called, "content": "a"}, {**called, "reasoning_content": "t"}):
            yield [*begin, user, reply, result]
            yield [*begin, user, reply, result, greeting, user]
        yield [*begin, user, {**greeting, "reasoning_content": "t"}, user]


def _aliased(message: Message) -> Message:
    """Return a message with its reasoning under both names that templates read."""
    reasoning = message.get("reasoning_content")
    return message if reasoning is None else {"thinking": reasoning, **message}


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
