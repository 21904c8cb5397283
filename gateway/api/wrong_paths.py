"""Explains a path that no route has: the right base URL, and the APIs. Pure."""

from __future__ import annotations

import re

from headgate.errors import BadRequest

_APIS = "The APIs here are POST /v1/chat/completions, /v1/completions, /v1/responses and /v1/messages, and GET /v1/models"
_CALL = r"/(chat/completions|completions|responses|messages|models)(?=/|$)"
_FOREIGN = (
    (re.compile(r"(/v1)?(/openai)?/deployments/"), "Azure's API"),
    (re.compile(r"/v1(alpha|beta)\d*/|.*:(streamG|g)enerateContent"), "Gemini's API"),
    (re.compile(r"/api/(chat|generate|tags|show|embed\w*)$"), "Ollama's API"),
)
_TWICE = rf"(/v1)?{_CALL}(/v1)?{_CALL}|/v1{_CALL}/v1(/|$)"
_HINTS = (
    (r".*//", "Two slashes follow one another: the base URL must not end with a slash. It is {root}/v1"),
    (
        _TWICE,
        "It has an endpoint twice: the base URL must end before the endpoint. It is {root}/v1 for OpenAI's clients, which"
        " add the rest, and {root} for Anthropic's",
    ),
    (
        r"/v1/v1(/|$)",
        "It has /v1 twice: the base URL is {root} for Anthropic's clients, which add /v1 themselves, and {root}/v1 for"
        " OpenAI's",
    ),
    (
        r"/(v1|admin/v1|api|openai|api/v1|openai/v1)/admin(/|$)",
        "The admin API is at {root}/admin/v1, and its clients need the base URL {root}",
    ),
    (
        rf"/(api|openai)/v1(/|$)|/admin/v1{_CALL}",
        "The APIs for agents have no prefix before /v1: the base URL is {root}/v1 for OpenAI's clients, and {root} for"
        " Anthropic's",
    ),
    (
        rf"(?!(/admin)?/v1(/|$))(?i:(/admin)?/v1)(/|$)|(?!/v1{_CALL})/v1(?i:{_CALL})",
        "Paths are in lower case: the base URL is {root}/v1 for OpenAI's clients, and {root} for Anthropic's and the admin API's",
    ),
    (
        rf"(/api|/openai)?{_CALL}",
        "The base URL lacks /v1: it is {root}/v1 for OpenAI's clients, and {root} for Anthropic's",
    ),
    (r".*/$", "Leave out the slash at the end. " + _APIS),
)
"""Forms of paths and what to do about each; the first one that fits counts."""
_SHOWN = 200
"""Characters of a path that a message quotes."""


def no_route(method: str, path: str, root: str) -> BadRequest:
    """Return the error for a path that no route has. `root`: the gateway's URL for agents, without `/v1`."""
    message = f"{method} {path[:_SHOWN]}: no route has this path. {_hint(path, root)}"
    return BadRequest(message, code="no_such_route", status=404)


def is_doubled(path: str) -> bool:
    """Return whether a path has an endpoint twice: other routes may fit it, with the endpoint in place of an id."""
    return re.match(_TWICE, path) is not None


def _hint(path: str, root: str) -> str:
    for form, api in _FOREIGN:
        if form.match(path):
            return f"{api} is not served: use a client of OpenAI's API with the base URL {root}/v1. {_APIS}"
    return next((hint.format(root=root) for form, hint in _HINTS if re.match(form, path)), _APIS)
