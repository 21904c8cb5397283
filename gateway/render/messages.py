"""A client's messages in the form that templates take. Pure.

Templates know neither `developer` nor lists of parts, want the arguments of calls as objects, and some take no system message but
the first. Invariant: what `Systems.placed` makes of the messages after a reply does not depend on those before it, so a recorded
conversation can be continued with them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from gateway.render.gil import LARGE, release_gil
from gateway.render.images import ImageMarks
from gateway.render.meaning import Message, given_arguments, part_text, rendered
from headgate.json_depth import loads

Tool = dict[str, Any]
Write = Callable[[list[Message], list[Tool]], str]

_BETWEEN = "\n\n"
"""The text between system messages that are merged, and between one and the user's message that it is put into."""


def plain(messages: Sequence[Message], marks: ImageMarks | None) -> list[Message]:
    """Return messages as templates take them. Raise ValueError for images that the model cannot see."""
    return [_plain_message(message, marks) for message in messages]


def _plain_message(message: Message, marks: ImageMarks | None) -> Message:
    found = rendered(message)
    if found["role"] == "developer":
        found["role"] = "system"
    if isinstance(found["content"], list):
        found["content"] = "".join(_part_text(part, marks) for part in found["content"])
    if "tool_calls" in found:
        found["tool_calls"] = [_plain_call(call) for call in found["tool_calls"]]
    return found


def _part_text(part: dict[str, Any], marks: ImageMarks | None) -> str:
    if part.get("type") != "image":
        return part_text(part)
    if marks is None:
        raise ValueError("the conversation has images, and this model sees none")
    return marks.text_of(part)


def _plain_call(call: dict[str, Any]) -> dict[str, Any]:
    arguments = given_arguments(call["function"])
    if isinstance(arguments, str):
        try:
            arguments = _parsed(arguments)
        except ValueError:
            return call
    return {**call, "function": {**call["function"], "arguments": arguments}}


def _parsed(text: str) -> Any:
    """Raise ValueError where a call's arguments are not JSON."""
    value = loads(text)
    return release_gil(value) if len(text) >= LARGE else value


@dataclass(frozen=True, slots=True)
class Systems:
    """The system messages that a template writes in addition to a first one."""

    several: bool = True
    """It writes several at the beginning."""
    later: bool = True
    """It writes one after the beginning."""

    @classmethod
    def accepted(cls, write: Write) -> Systems:
        """Find out what a template takes, with tools and without. `write`: a conversation as the template writes it."""
        first, second = ({"role": "system", "content": content} for content in _TRIED)
        user, reply = {"role": "user", "content": "u"}, {"role": "assistant", "content": "a"}
        return cls(_writes(write, [first, second, user]), _writes(write, [first, user, reply, second, user]))

    def placed(self, messages: Sequence[Message], *, begins: bool = True) -> list[Message]:
        """Return messages without the system messages that the template refuses or drops. `begins`: they begin the conversation.

        Those at the beginning are merged into one. A later one becomes a part of the user's message next to it, or a message of
        the user.
        """
        leading = 0
        while begins and leading < len(messages) and messages[leading]["role"] == "system":
            leading += 1
        first, rest = list(messages[:leading]), messages[leading:]
        if leading > 1 and not self.several:
            first = [{**first[0], "content": _joined(first)}]
        if self.later or all(message["role"] != "system" for message in rest):
            return [*first, *rest]
        return [*first, *_as_users(rest)]


_TOOL: Tool = {
    "type": "function",
    "function": {"name": "f", "description": "d", "parameters": {"type": "object", "properties": {}}},
}
_TRIED = ("headgatefirst", "headgatesecond")


def _writes(write: Write, messages: list[Message]) -> bool:
    try:
        texts = [write(messages, tools) for tools in ([], [_TOOL])]
    except Exception:  # templates raise anything
        return False
    return all(word in text for word in _TRIED for text in texts)


def _as_users(messages: Sequence[Message]) -> list[Message]:
    """Return messages with system messages as text of the user, each run of both as one message."""
    found: list[Message] = []
    moved = False
    """True while the last message found may take in a neighbor: one of the two is a system message."""
    for message in messages:
        system = message["role"] == "system"
        joins = found and found[-1]["role"] == "user" and (system or (moved and message["role"] == "user"))
        if joins:
            found[-1] = {**found[-1], "content": _joined([found[-1], message])}
        else:
            found.append({**message, "role": "user"} if system else message)
        moved = system
    return found


def _joined(messages: Sequence[Message]) -> str:
    return _BETWEEN.join(message["content"] for message in messages if message["content"])
