"""Explains a path that no route has: which base URL is right, and which APIs there are. Pure."""

from __future__ import annotations

import re

from gateway.errors import NoRoute

_APIS = "The APIs here are POST /v1/chat/completions, /v1/completions, /v1/responses and /v1/messages, and GET /v1/models"
_CALLS = re.compile(r"(/api|/openai)?/(chat/completions|completions|responses|messages|models)(/|$)")
_FOREIGN = (
    (re.compile(r"/openai/deployments/"), "Azure's API"),
    (re.compile(r"/v1(alpha|beta)\d*/|.*:(streamG|g)enerateContent"), "Gemini's API"),
    (re.compile(r"/api/(chat|generate|tags|show|embed\w*)$"), "Ollama's API"),
)
_SHOWN = 200
"""Characters of a path that a message quotes."""


def no_route(method: str, path: str, root: str) -> NoRoute:
    """Return the error for a path that no route has. `root`: the URL of the gateway that agents are given, without `/v1`."""
    return NoRoute(
        f"{method} {path[:_SHOWN]}: there is no such route. {_hint(path, root)}", code="no_such_route"
    )


def _hint(path: str, root: str) -> str:
    for form, api in _FOREIGN:
        if form.match(path):
            return f"{api} is not served: use a client of OpenAI's API with the base URL {root}/v1. {_APIS}"
    if "//" in path:
        return f"Two slashes follow one another: the base URL must not end with a slash. It is {root}/v1"
    if path.startswith("/v1/v1"):
        return (
            f"It has /v1 twice: the base URL is {root} for Anthropic's clients, which add /v1 themselves, "
            f"and {root}/v1 for OpenAI's"
        )
    if _CALLS.match(path):
        return f"The base URL lacks /v1: it is {root}/v1 for OpenAI's clients, and {root} for Anthropic's"
    if path.endswith("/"):
        return f"Leave out the slash at the end. {_APIS}"
    return _APIS
