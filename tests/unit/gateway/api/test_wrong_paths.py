"""The hint for a path that no route has."""

from __future__ import annotations

import pytest

from gateway.api.errors import error_response
from gateway.api.wrong_paths import no_route

ROOT = "http://gateway:8000/e/ep-1"
V1 = f"{ROOT}/v1"


@pytest.mark.parametrize(
    ("path", "hint"),
    [
        ("/chat/completions", f"The base URL lacks /v1: it is {V1} for OpenAI's clients"),
        ("/models/demo", f"The base URL lacks /v1: it is {V1}"),
        ("/openai/chat/completions", f"The base URL lacks /v1: it is {V1}"),
        ("/v1/v1/messages", f"It has /v1 twice: the base URL is {ROOT} for Anthropic's clients"),
        ("/v1/v1/chat/completions", f"{V1} for OpenAI's"),
        ("/v1//chat/completions", f"must not end with a slash. It is {V1}"),
        ("/openai/deployments/x/chat/completions", "Azure's API is not served: use a client of OpenAI's API"),
        ("/v1beta/models/demo:generateContent", "Gemini's API is not served"),
        ("/api/chat", "Ollama's API is not served"),
        ("/v1/chat/completions/chat/completions", f"the base URL must end before the endpoint. It is {V1}"),
        ("/v1/chat/completions/v1/chat/completions", "It has an endpoint twice"),
        ("/responses/responses", "It has an endpoint twice"),
        ("/api/v1/chat/completions", f"no prefix before /v1: the base URL is {V1} for OpenAI's clients"),
        ("/admin/v1/chat/completions", "no prefix before /v1"),
        ("/v1/admin/episodes", f"The admin API is at {ROOT}/admin/v1, and its clients need the base URL {ROOT}"),
        ("/admin/v1/admin/v1/status", "The admin API is at"),
        ("/V1/chat/completions", "Paths are in lower case"),
        ("/v1/Chat/completions", "Paths are in lower case"),
        ("/v1/files/ABC", "The APIs here are"),
        ("/admin/v1/nothing", "The APIs here are"),
        ("/v1/chat/completions/", "Leave out the slash at the end"),
        ("/v1/messages/batches", "The APIs here are POST /v1/chat/completions"),
    ],
)  # fmt: skip
def test_the_right_base_url_is_named(path: str, hint: str) -> None:
    error = no_route("POST", path, ROOT)
    assert (error.status, error.code) == (404, "no_such_route")
    assert error.message.startswith(f"POST {path}: no route has this path. ") and hint in error.message


@pytest.mark.parametrize(
    ("path", "anthropic"),
    [
        ("/v1/messages/batches", True),
        ("/messages", True),
        ("/v1/v1/messages", True),
        ("/v1//messages", True),
        ("/e/ep-1/v1/messages", True),
        ("/v1/threads/t/messages", False),
        ("/v1/chat/completions/messages-1", False),
    ],
)
def test_the_error_has_the_form_of_the_requested_api(path: str, anthropic: bool) -> None:
    body = bytes(error_response(no_route("POST", path, ROOT), path).body)
    assert (b'"type":"not_found_error"' in body) == anthropic
    assert (b'"code":"no_such_route"' in body) != anthropic
