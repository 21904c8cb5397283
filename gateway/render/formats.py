"""The marks of reasoning and tool calls in each model family, found in the tokenizer's vocabulary. Pure.

A mark counts only as one token of its own: text that merely spells it is text. `TOOL_FORMS` is searched in order, and the first
form whose marks are all in the vocabulary is the family's. A form's `parse` reads the text of one held block, marks included, and
returns the calls in it, or none if the block is not whole and well-formed; families that the `renderers` library knows by name
are parsed by the library instead.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from headgate.json_depth import (
    MAX_SAMPLED_DEPTH,
    check_depth,
    finite,
    loads_strictly,
    refuse_constant,
    too_deep,
)

THINKING = (("<think>", "</think>"), ("[THINK]", "[/THINK]"))
"""The marks that begin and end reasoning."""


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A tool call that the model made; `arguments` is JSON text, as OpenAI's API has it."""

    name: str
    arguments: str


@dataclass(frozen=True, slots=True)
class ToolForm:
    """One family's way to write tool calls."""

    name: str
    start: str
    end: str | None
    """None: a block lasts until the next one, or until the reply ends."""
    parse: Callable[[str], list[ToolCall]]
    needs: tuple[str, ...] = ()
    """Other marks without which a tokenizer does not mean this form."""
    bare: bool = False
    """A reply that begins with `{` may be a tool call without any mark."""

    def known_to(self, knows: Callable[[str], bool]) -> bool:
        """Return true if all marks of the form are tokens."""
        return all(knows(mark) for mark in (self.start, self.end, *self.needs) if mark)


def tool_form(knows: Callable[[str], bool]) -> ToolForm | None:
    """Return the form that a vocabulary is made for; None: the family has no marks for tool calls."""
    return next((form for form in TOOL_FORMS if form.known_to(knows)), None)


def json_text(value: Any) -> str:
    """Return arguments as OpenAI's API has them. Raise ValueError for a number that JSON does not have."""
    text = value if isinstance(value, str) else json.dumps(value or {}, ensure_ascii=False, allow_nan=False)
    try:
        text.encode()
    except UnicodeEncodeError:  # half of a surrogate pair, which no response can hold
        return text.encode(errors="replace").decode() if isinstance(value, str) else json.dumps(value)
    return text


def _calls(value: Any) -> list[ToolCall]:
    """Return the calls of a JSON object, or of a list of them; nothing at all if one of them is not well-formed."""
    found = []
    for call in value if isinstance(value, list) else [value]:
        name = call.get("name") if isinstance(call, dict) else None
        arguments = call.get("arguments", call.get("parameters", {})) if isinstance(call, dict) else None
        if not isinstance(name, str) or not name or not isinstance(arguments, dict | str):
            return []
        if isinstance(arguments, str) and too_deep(arguments, MAX_SAMPLED_DEPTH):
            return []
        found.append(ToolCall(name, json_text(arguments)))
    return found


def _sampled(text: str) -> Any:
    """Read JSON that a model wrote. Raise ValueError for what clients could not read, or could not send back."""
    return loads_strictly(text, MAX_SAMPLED_DEPTH)


def _loads(text: str) -> list[ToolCall]:
    try:
        return _calls(_sampled(text))
    except ValueError:
        return []


def _inside(text: str, start: str, end: str) -> str:
    body = text.removeprefix(start)
    return body[: body.rfind(end)] if end in body else ""


def _hermes(text: str) -> list[ToolCall]:
    return _loads(_inside(text, "<tool_call>", "</tool_call>"))


def _glm(text: str) -> list[ToolCall]:
    """Return a name, and then keys and values in marks of their own; a value that is not JSON is a string."""
    body = _inside(text, "<tool_call>", "</tool_call>")
    name, *pairs = body.split("<arg_key>")
    arguments: dict[str, Any] = {}
    for pair in pairs:
        key, found, rest = pair.partition("</arg_key>")
        _, opened, value = rest.partition("<arg_value>")
        value, closed, _ = value.partition("</arg_value>")
        if not (found and opened and closed):
            return []
        try:
            arguments[key.strip()] = _sampled(value)
        except ValueError:
            arguments[key.strip()] = value
    return [ToolCall(name.strip(), json_text(arguments))] if name.strip() else []


def _deepseek(text: str) -> list[ToolCall]:
    calls = []
    for block in _inside(text, "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>").split(
        "<｜tool▁call▁begin｜>"
    )[1:]:
        head, found, rest = block.partition("<｜tool▁sep｜>")
        name, fenced, body = rest.partition("\n```json\n")
        arguments, closed, _ = body.rpartition("\n```")
        if not (found and fenced and closed):  # DeepSeek V3.1 has neither the type nor the fence
            name, arguments = head, rest.partition("<｜tool▁call▁end｜>")[0]
        if not found or not _loads(json.dumps({"name": name.strip(), "arguments": _object(arguments)})):
            return []
        calls.append(ToolCall(name.strip(), arguments.strip()))
    return calls


def _object(text: str) -> Any:
    try:
        return _sampled(text)
    except ValueError:
        return None


def _mistral(text: str) -> list[ToolCall]:
    """Return a list of calls, or (since the eleventh tokenizer) a name, `[ARGS]` and an object."""
    body = text.removeprefix("[TOOL_CALLS]").strip()
    if "[ARGS]" not in body:
        return _loads(body) if body.startswith("[") else []
    name, _, arguments = body.partition("[ARGS]")
    name = name.partition("[CALL_ID]")[0].strip()
    return _calls({"name": name, "arguments": _object(arguments)})


def _llama(text: str) -> list[ToolCall]:
    """Return the calls of one object, or of several with `;` between them."""
    body = text.removeprefix("<|python_tag|>").strip()
    calls: list[ToolCall] = []
    for value in _objects(body):
        if not isinstance(value, dict) or not ({"parameters", "arguments"} & set(value)):
            return []
        calls += _calls(value)
    return calls


def _objects(text: str) -> Iterator[Any]:
    decoder, at = json.JSONDecoder(parse_float=finite, parse_constant=refuse_constant), 0
    while at < len(text):
        try:
            value, at = decoder.raw_decode(text, at)
            check_depth(value, MAX_SAMPLED_DEPTH)
        except (ValueError, RecursionError):
            yield None
            return
        yield value
        at += len(text[at:]) - len(text[at:].lstrip("; \n"))


def _phi(text: str) -> list[ToolCall]:
    return _loads(_inside(text, "<|tool_call|>", "<|/tool_call|>"))


TOOL_FORMS = (
    ToolForm("deepseek", "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>", _deepseek),
    ToolForm("glm", "<tool_call>", "</tool_call>", _glm, needs=("<arg_key>", "</arg_key>")),
    ToolForm("hermes", "<tool_call>", "</tool_call>", _hermes),
    ToolForm("mistral", "[TOOL_CALLS]", None, _mistral),
    ToolForm("phi", "<|tool_call|>", "<|/tool_call|>", _phi),
    ToolForm("llama", "<|python_tag|>", None, _llama, bare=True),
)
