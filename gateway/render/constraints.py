"""Grammars for the engine: the form that a request demands of its reply. Pure.

Grammars are xgrammar's structural tags where marks are involved: a mark is demanded as its token, never as letters that spell it,
because the segmenter knows marks by their ids; and text between marks may not contain one. Where the prompt has opened the
reasoning, thinking runs freely to its end mark, and the grammar begins after it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from gateway.render.renderer import ChatRenderer, Tool
from headgate.errors import BadRequest
from headgate.types import Grammar

Format = dict[str, Any]
"""A part of a structural tag."""

_OBJECT: dict[str, Any] = {"type": "object"}


@dataclass(frozen=True, slots=True)
class ContentForm:
    """The form that a reply's content must have."""

    kind: Literal["json", "regex", "choice", "ebnf"]
    value: Any
    """A JSON schema, a regular expression, a list of texts one of which is the content, or an EBNF grammar."""
    param: str
    """The field of the request that has it."""


def constraint(
    renderer: ChatRenderer,
    tools: Sequence[Tool],
    choice: str,
    parallel: bool,
    form: ContentForm | None,
    reasoning: bool,
) -> Grammar | None:
    """Return the grammar that a reply must follow; None: it is free.

    `choice`: `auto`, `none`, `required` or `function:NAME`. A reply that must call a tool has no content, so there `form` has no
    effect. `parallel` false: at most one call where calls are forced (elsewhere the segmenter ends the reply). `reasoning`: the
    prompt ends inside a reasoning block. Raise BadRequest, naming the parameter.
    """
    forced = _forced(tools, choice)
    if not forced and form is None:
        return None
    if forced:
        param, rest = "tools", _calls(renderer, forced, parallel and choice == "required")
    else:
        assert form is not None
        param = form.param
        callable_tools = tools if choice == "auto" else ()
        if not callable_tools and not reasoning and form.kind in _WHOLE:
            return _whole(form)
        rest = _content(form, _marks(renderer) if callable_tools else [])
        if callable_tools:
            calls = _calls(renderer, callable_tools, parallel, param=param)
            rest = {"type": "or", "elements": [calls, rest]}
    if reasoning:
        rest = _sequence(*_thinking(renderer), {"type": "regex", "pattern": "\\n{0,2}"}, rest)
    return Grammar("structural_tag", json.dumps({"type": "structural_tag", "format": rest}), param)


_WHOLE = ("json", "regex", "ebnf")
"""Forms that engines take as they are, if nothing stands before the content."""


def _whole(form: ContentForm) -> Grammar:
    assert form.kind != "choice"
    value = json.dumps(form.value) if form.kind == "json" else form.value
    return Grammar(form.kind, value, form.param)


def _content(form: ContentForm, excluded: list[str]) -> Format:
    """Return a form as a part of a structural tag."""
    match form.kind:
        case "json":
            return _json(form.value, excluded)
        case "regex":
            return {"type": "regex", "pattern": form.value}
        case "ebnf":
            return {"type": "grammar", "grammar": form.value}
        case "choice":
            texts = [_text(text) for text in form.value]
            return texts[0] if len(texts) == 1 else {"type": "or", "elements": texts}


def _forced(tools: Sequence[Tool], choice: str) -> Sequence[Tool]:
    """Return the tools one of which must be called; none: no call is demanded."""
    if choice in ("auto", "none"):
        return ()
    if choice == "required":
        if not tools:
            raise BadRequest("tool_choice needs tools", code="invalid_value", param="tool_choice")
        return tools
    name = choice.removeprefix("function:")
    named = [tool for tool in tools if tool["function"]["name"] == name]
    if not named:
        message = f"tool_choice names {name!r}, which is none of the tools"
        raise BadRequest(message, code="invalid_value", param="tool_choice")
    return named


def _calls(renderer: ChatRenderer, tools: Sequence[Tool], many: bool, param: str = "tool_choice") -> Format:
    """Return the grammar of one call, or of any number of them, in the family's own form."""
    form = renderer.forced_form
    write = _WRITERS.get(form.name) if form is not None else None
    if write is None:
        means = "demand a call" if param == "tool_choice" else "leave the choice between JSON and a call"
        name = f"{renderer.family}, {form.name}" if form is not None else renderer.family
        instead = (
            "send 'auto', and request the call in a message"
            if param == "tool_choice"
            else "leave out one of the two"
        )
        message = f"{param} cannot {means} here: no grammar is known for the calls of this family ({name}): {instead}"
        raise BadRequest(message, code="unsupported_parameter", param=param)
    return write(renderer, tools, many)


def _parameters(tool: Tool) -> dict[str, Any]:
    parameters: dict[str, Any] = tool["function"].get("parameters") or _OBJECT
    return parameters


def _one_of(renderer: ChatRenderer, tools: Sequence[Tool], before: str, between: str, after: str) -> Format:
    """Return a call to one of the tools: its name and its arguments within fixed text."""
    excluded = _marks(renderer)
    options = [
        _sequence(
            _text(before + json.dumps(tool["function"]["name"], ensure_ascii=False)[1:-1] + between),
            _json(_parameters(tool), excluded),
            *([_text(after)] if after else []),
        )
        for tool in tools
    ]
    return options[0] if len(options) == 1 else {"type": "or", "elements": options}


def _hermes(renderer: ChatRenderer, tools: Sequence[Tool], many: bool) -> Format:
    marks = renderer.marks
    body = _one_of(renderer, tools, '\n{"name": "', '", "arguments": ', "}\n")
    call = _sequence(_token(marks.tool_start), body, _token(marks.tool_end))
    return _repeated(call, "\n") if many else call


def _listed(renderer: ChatRenderer, tools: Sequence[Tool], many: bool) -> Format:
    """Return a JSON list between marks; the last mark is missing in some families."""
    marks = renderer.marks
    if "[ARGS]" in renderer.call_example:
        call = _sequence(_token(marks.tool_start), _one_of(renderer, tools, "", "[ARGS]", ""))
        return _repeated(call, "") if many else call
    call = _one_of(renderer, tools, '{"name": "', '", "arguments": ', "}")
    calls = _repeated(call, ", ") if many else call
    end = [_token(marks.tool_end)] if marks.tool_end is not None else []
    return _sequence(_token(marks.tool_start), _text("["), calls, _text("]"), *end)


def _bare(renderer: ChatRenderer, tools: Sequence[Tool], many: bool) -> Format:
    """Llama's templates know one call in a reply."""
    return _one_of(renderer, tools, '{"name": "', '", "parameters": ', "}")


def _deepseek(renderer: ChatRenderer, tools: Sequence[Tool], many: bool) -> Format:
    marks, known = renderer.marks, renderer.backend.token_to_id
    fence = ("\n```json\n", "\n```") if "```json" in renderer.call_example else ("<｜tool▁sep｜>", "")
    begin = [_token(known("<｜tool▁call▁begin｜>"))]
    if fence[1]:
        begin += [_text("function"), _token(known("<｜tool▁sep｜>"))]
    body = _one_of(renderer, tools, "", *fence)
    call = _sequence(*begin, body, _token(known("<｜tool▁call▁end｜>")))
    calls = _repeated(call, "\n") if many else call
    return _sequence(_token(marks.tool_start), calls, _token(marks.tool_end))


_WRITERS: dict[str, Callable[[ChatRenderer, Sequence[Tool], bool], Format]] = {
    "deepseek": _deepseek,
    "hermes": _hermes,
    "mistral": _listed,
    "phi": _listed,
    "llama": _bare,
}
"""The writers of tool-call grammars, by the name of a form in `formats`; other forms have none yet."""


def _thinking(renderer: ChatRenderer) -> list[Format]:
    marks = renderer.marks
    forbidden = {marks.think_end, marks.tool_start, *marks.stop} - {None}
    free: Format = {"type": "any_tokens", "exclude_tokens": sorted(t for t in forbidden if t is not None)}
    return [free, _token(marks.think_end)]


def _marks(renderer: ChatRenderer) -> list[str]:
    """Return the marks that text within a grammar may not contain, because the segmenter would take them for the end or the
    beginning of a call."""
    form = renderer.form
    return [mark for mark in (form.start, form.end) if mark] if form is not None else []


def _json(schema: dict[str, Any], excluded: list[str]) -> Format:
    """Return JSON without some words. xgrammar drops bounds on a string's length where words are excluded, so bounds go first."""
    part: Format = {"type": "json_schema", "json_schema": schema}
    text = json.dumps(schema)
    bounded = '"maxLength"' in text or '"minLength"' in text
    return {**part, "excludes": excluded} if excluded and not bounded else part


def _text(value: str) -> Format:
    return {"type": "const_string", "value": value}


def _token(token: int | None) -> Format:
    assert token is not None
    return {"type": "token", "token": token}


def _sequence(*elements: Format) -> Format:
    return {"type": "sequence", "elements": list(elements)}


def _repeated(part: Format, separator: str) -> Format:
    more = _sequence(_text(separator), part) if separator else part
    return _sequence(part, {"type": "star", "content": more})
