"""Converts tools of the Responses API to functions that a model can call, and its calls to items that clients expect.

A tool in a namespace is the function `NAMESPACE.NAME`, a custom tool a function of one string. Invariant: a call that a
client sends back unchanged becomes the recorded call again, whatever tools the request has; so converting back needs no
request.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import orjson

from gateway.dialects.request import Tool, check_tool_name, check_unique, unsupported
from gateway.dialects.schemas import check_parameters
from headgate.errors import BadRequest, invalid

Hosted = Literal["drop", "refuse"]
"""The ways of treating tools that OpenAI would run."""
Grammars = Literal["refuse", "describe"]
"""The ways of treating a grammar that a custom tool's input is to follow."""
_HOSTED = (
    "apply_patch",
    "code_interpreter",
    "computer",
    "computer_use_preview",
    "file_search",
    "image_generation",
    "local_shell",
    "mcp",
    "programmatic_tool_calling",
    "shell",
    "tool_search",
    "web_search",
    "web_search_2025_08_26",
    "web_search_preview",
    "web_search_preview_2025_03_11",
)
"""Types of tools that OpenAI runs, or that its own models alone know how to call."""
_INPUT = "input"
"""The one argument of a custom tool."""
_FREE_TEXT: dict[str, Any] = {
    "type": "object",
    "properties": {_INPUT: {"type": "string"}},
    "required": [_INPUT],
    "additionalProperties": False,
}


@dataclass(frozen=True, slots=True)
class Source:
    """The client's tool that a function stands for."""

    name: str
    namespace: str = ""
    custom: bool = False


@dataclass(slots=True)
class Toolbox:
    """The tools of one request."""

    functions: list[Tool] = field(default_factory=list)
    """The tools as functions, in the form of chat completions."""
    left_out: list[str] = field(default_factory=list)
    """Types of hosted tools that were dropped."""
    sources: dict[str, Source] = field(default_factory=dict)
    """The client's tools, by the name of the function that stands for each."""
    grammars: Grammars = "refuse"

    @classmethod
    def of(cls, tools: Sequence[Any], hosted: Hosted, grammars: Grammars = "refuse") -> Toolbox:
        """Make a request's toolbox. Raise BadRequest for tools that no function can stand for, or that are to be refused."""
        box = cls(grammars=grammars)
        for i, tool in enumerate(tools):
            kind = tool.get("type") if isinstance(tool, dict) else None
            if kind in _HOSTED and hosted == "drop":
                box.left_out.append(kind)
            elif kind == "namespace":
                box._add_namespace(tool, f"tools.{i}")
            else:
                box._add(tool, f"tools.{i}")
        return box

    def call(self, call: dict[str, Any]) -> dict[str, Any]:
        """Return a model's call as the fields of its item, `type` among them. A function that the client did not offer keeps its
        name.
        """
        name, arguments = call["function"]["name"], call["function"]["arguments"]
        source = self.sources.get(name, Source(name))
        place = {"namespace": source.namespace} if source.namespace else {}
        named = {"call_id": call["id"], "name": source.name, **place}
        if source.custom:
            return {"type": "custom_tool_call", **named, "input": _input(arguments)}
        return {"type": "function_call", **named, "arguments": arguments}

    def _add_namespace(self, namespace: dict[str, Any], where: str) -> None:
        """Add the tools of a namespace, whose description goes before that of its first tool."""
        name, tools = namespace.get("name"), namespace.get("tools")
        if not isinstance(name, str) or not name or not isinstance(tools, list):
            raise invalid(where, "a namespace needs a name and a list of tools")
        check_tool_name(name, f"{where}.name")
        about = namespace.get("description")
        for i, tool in enumerate(tools):
            self._add(tool, f"{where}.tools.{i}", name, about if i == 0 and isinstance(about, str) else "")

    def _add(self, tool: Any, where: str, namespace: str = "", about: str = "") -> None:
        kind = tool.get("type") if isinstance(tool, dict) else None
        if kind not in ("function", "custom"):
            raise _unsupported(kind, where)
        name = tool.get("name")
        if not isinstance(name, str) or not name:
            raise invalid(where, "a tool needs a name")
        check_tool_name(name, f"{where}.name")
        if not isinstance(tool.get("description"), str | None):
            raise invalid(f"{where}.description", "must be a string")
        source = Source(name, namespace, kind == "custom")
        function = {key: tool[key] for key in _KNOWN[kind] if tool.get(key) is not None}
        function["name"] = function_name(name, namespace)
        grammar = ""
        if source.custom:
            function["parameters"] = _FREE_TEXT
            grammar = self._grammar(tool.get("format"), f"{where}.format")
        else:
            check_parameters(function.get("parameters"), f"{where}.parameters")
        if about or grammar:
            paragraphs = (about, str(function.get("description", "")), grammar)
            function["description"] = "\n\n".join(filter(None, paragraphs))
        check_unique(function["name"], self.sources, f"{where}.name")
        self.sources[function["name"]] = source
        self.functions.append({"type": "function", "function": function})

    def _grammar(self, given: Any, where: str) -> str:
        """Return what the model reads about the form of a custom tool's input; empty if any text will do. Raise BadRequest for a
        grammar that is to be refused.
        """
        if given is None or (isinstance(given, dict) and given.get("type") == "text"):
            return ""
        definition = given.get("definition") if isinstance(given, dict) else None
        if self.grammars == "describe" and isinstance(definition, str):
            return f"`{_INPUT}` must follow this {given.get('syntax')} grammar:\n{definition}"
        instead = (
            "send the format 'text' and check what the tool is given; the setting [server] tool_grammars ="
            ' "describe" describes the grammar to the model, and does not enforce it'
        )
        raise unsupported(where, "a grammar of a custom tool", instead)


_KNOWN = {"function": ("name", "description", "parameters", "strict"), "custom": ("name", "description")}


def function_name(name: str, namespace: str | None) -> str:
    """Return the name of the function that stands for a tool. No name in OpenAI's API has a dot."""
    return f"{namespace}.{name}" if namespace else name


def custom_arguments(given: str) -> str:
    """Return the arguments of the function that stands for a custom tool."""
    return orjson.dumps({_INPUT: given}).decode()


def offered(tools: Sequence[Any]) -> Iterator[dict[str, Any]]:
    """Return the tools that the model was given, as the response repeats them; null where a value was not given."""
    for tool in tools:
        if tool["type"] == "function":
            yield {"description": None, "parameters": None, "strict": None, **tool}
        elif tool["type"] not in _HOSTED:
            yield tool


def _input(arguments: str) -> str:
    """Return a custom tool's input: the one string in the arguments, or all that the model wrote if it did not keep to that."""
    try:
        values = orjson.loads(arguments)
    except orjson.JSONDecodeError:
        return arguments
    if isinstance(values, dict) and values.keys() == {_INPUT} and isinstance(values[_INPUT], str):
        return str(values[_INPUT])
    return arguments


def _unsupported(kind: Any, where: str) -> BadRequest:
    instead = "offer tools of type 'function', 'custom' or 'namespace', which your client runs"
    if kind in _HOSTED:
        instead += '; the setting [server] hosted_tools = "drop" leaves such tools out'
    return unsupported(where, f"a tool of type {kind!r}", instead)
