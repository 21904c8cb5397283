"""Whatever is sent, the response is an error in OpenAI's form, and the gateway goes on."""

from __future__ import annotations

import gzip
import json
import re
from collections import Counter
from collections.abc import AsyncIterator
from importlib import metadata
from pathlib import Path
from typing import Any

import httpx
import pytest
import pytest_asyncio

from tests.harness.gateways import RunningGateway, run_gateway, settings_for
from tests.harness.records import nodes_of
from tests.harness.scripted import USER
from tests.harness.weights import fake_weights, publish

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest.fixture(scope="module")
async def shared(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[RunningGateway]:
    values = settings_for(tiny_model, tmp_path_factory.mktemp("bad"), staleness={"batch": 64})
    async with run_gateway(values) as running:
        yield running


@pytest_asyncio.fixture(loop_scope="module")
async def gateway(shared: RunningGateway) -> AsyncIterator[RunningGateway]:
    """The module's gateway; afterwards it must still serve, and have lost nothing."""
    episode, headers = await shared.open("kept", mode="eval")
    assert (await shared.chat(headers, model="demo", max_tokens=8)).status_code == 200
    before = await nodes_of(shared, episode)
    yield shared
    assert await nodes_of(shared, episode) == before
    follow_up = await shared.chat(headers, model="demo", max_tokens=8)
    assert follow_up.status_code == 200
    assert (await nodes_of(shared, episode))[: len(before)] == before
    await shared.admin.reward(episode, 1.0)
    assert (await shared.admin.episode(episode))["reward"] == 1.0


def error_of(response: httpx.Response, status: int, code: str | None) -> dict[str, Any]:
    """The error of a response in OpenAI's form."""
    assert response.status_code == status, response.text
    assert response.headers["content-type"] == "application/json"
    body = response.json()
    assert list(body) == ["error"]
    assert body["error"].keys() == {"message", "type", "param", "code"}
    assert body["error"]["message"]
    assert body["error"]["code"] == code
    error: dict[str, Any] = body["error"]
    return error


@pytest.mark.parametrize(
    "body", [b"", b"{", b"[]", b"null", b'"x"', b"\xff\xfe", b'{"model": "m", "seed": 1e999}']
)
async def test_a_body_that_is_no_json_object(gateway: RunningGateway, body: bytes) -> None:
    _, headers = await gateway.open("bad", mode="eval")
    response = await gateway.http.post("/v1/chat/completions", content=body, headers=headers)
    error = error_of(response, 400, "invalid_json")
    if body == b"\xff\xfe":
        assert error["message"] == "the body is not valid UTF-8 JSON: invalid start byte at byte 0"


@pytest.mark.parametrize(
    ("values", "code", "param"),
    [
        ({"temprature": 1}, "unknown_parameter", "temprature"),
        (
            {"stream_options": {"include_usages": True}, "stream": True},
            "unknown_parameter",
            "stream_options.include_usages",
        ),
        ({"stream_options": {"include_usage": True}, "stream": False}, "invalid_value", "stream_options"),
        ({"temperature": -1}, "invalid_value", "temperature"),
        ({"temperature": "hot"}, "invalid_value", "temperature"),
        ({"top_p": 0}, "invalid_value", "top_p"),
        ({"max_tokens": 0}, "invalid_value", "max_tokens"),
        ({"max_tokens": 8, "min_tokens": 9}, "invalid_value", "min_tokens"),
        ({"min_tokens": 2048}, "invalid_value", "min_tokens"),
        ({"seed": 2**70}, "invalid_value", "seed"),
        ({"stop": [""]}, "invalid_value", "stop.0"),
        ({"stop_token_ids": [5]}, "unsupported_parameter", "stop_token_ids"),
        ({"messages": []}, "invalid_value", "messages"),
        ({"messages": "hi"}, "invalid_value", "messages"),
        ({"messages": [{"role": "wizard", "content": "x"}]}, "invalid_value", "messages.0.role"),
        ({"messages": [{"content": "x"}]}, "invalid_value", "messages.0.role"),
        ({"messages": [{"role": "user"}]}, "invalid_value", "messages.0.content"),
        ({"messages": [USER, {"role": "tool", "content": "3"}]}, "invalid_value", "messages.1"),
        (
            {"messages": [{"role": "user", "content": [{"type": "text"}]}]},
            "unsupported_content",
            "messages.0.content.0",
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
            "unsupported_content",
            "messages.0.content.0",
        ),
        (
            {"messages": [{"role": "assistant", "tool_calls": [{"id": "1"}]}]},
            "invalid_value",
            "messages.0.tool_calls.0",
        ),
        ({"tools": [{"type": "function"}]}, "invalid_value", "tools.0"),
        ({"tool_choice": "required"}, "invalid_value", "tool_choice"),
        ({"tool_choice": {"type": "function", "function": {"name": "f"}}}, "invalid_value", "tool_choice"),
        ({"tool_choice": {"type": "custom"}}, "unsupported_parameter", "tool_choice"),
        ({"n": 0}, "invalid_value", "n"),
        ({"top_logprobs": 5}, "invalid_value", "top_logprobs"),
        ({"top_logprobs": 50, "logprobs": True}, "invalid_value", "top_logprobs"),
        ({"logit_bias": {"1": 101}}, "invalid_value", "logit_bias.1"),
        ({"logit_bias": {"1000000": 1}}, "invalid_value", "logit_bias"),
        ({"presence_penalty": 2.5}, "invalid_value", "presence_penalty"),
        ({"response_format": {"type": "xml"}}, "unsupported_parameter", "response_format"),
        ({"reasoning_effort": 5}, "invalid_value", "reasoning_effort"),
        ({"max_tokens": 3000}, "context_length_exceeded", "messages"),
        ({"messages": [{"role": "user", "content": "x" * 3000}]}, "context_length_exceeded", "messages"),
    ],
)
async def test_a_wrong_value_is_named(
    gateway: RunningGateway, values: dict[str, Any], code: str | None, param: str | None
) -> None:
    """The error of a stream that has not begun is the same JSON, not an event."""
    episode, headers = await gateway.open("bad", mode="eval")
    streamed = await gateway.chat(headers, **{"model": "demo", "stream": True, **values})
    response = await gateway.chat(headers, **{"model": "demo", "stream": False, **values})
    if "stream" not in values:
        assert error_of(streamed, 400, code) == response.json()["error"]
    error = error_of(response, 400, code)
    assert error["type"] == "invalid_request_error"
    if param is not None:
        assert error["param"] == param
        assert param.split(".")[0] in error["message"] or code in ("invalid_value", "unsupported_content")
    assert await nodes_of(gateway, episode) == []


BROKEN = {"type": "object", "properties": {"a": {"$ref": "#/$defs/no"}}}
NAMED = {"name": "n", "schema": BROKEN}
FUNCTION = {"name": "f", "parameters": BROKEN}


@pytest.mark.parametrize(
    ("path", "values", "param"),
    [
        (
            "chat/completions",
            {"response_format": {"type": "json_schema", "json_schema": NAMED}},
            "response_format",
        ),
        ("chat/completions", {"structured_outputs": {"json": BROKEN}}, "structured_outputs.json"),
        (
            "chat/completions",
            {"tools": [{"type": "function", "function": FUNCTION}], "tool_choice": "required"},
            "tools",
        ),
        ("completions", {"prompt": "x", "guided_regex": "("}, "guided_regex"),
        ("chat/completions", {"guided_grammar": "no rule"}, "guided_grammar"),
        ("responses", {"input": "x", "text": {"format": {"type": "json_schema", **NAMED}}}, "text.format"),
    ],
)
async def test_a_form_that_the_engine_cannot_compile_is_a_bad_request(
    gateway: RunningGateway, path: str, values: dict[str, Any], param: str
) -> None:
    episode, headers = await gateway.open("bad", mode="eval")
    given = {"messages": [USER]} if path == "chat/completions" else {}
    body = {"model": "demo", **given, **values}
    streamed = await gateway.http.post(f"/v1/{path}", json={**body, "stream": True}, headers=headers)
    response = await gateway.http.post(f"/v1/{path}", json=body, headers=headers)
    error = error_of(response, 400, "invalid_schema")
    assert error_of(streamed, 400, "invalid_schema") == error
    assert (error["type"], error["param"]) == ("invalid_request_error", param)
    assert error["message"].startswith(f"{param}: ")
    assert "Grammar error" in error["message"]
    assert await nodes_of(gateway, episode) == []


async def test_a_form_that_the_engine_cannot_compile_in_anthropics_form(gateway: RunningGateway) -> None:
    _, headers = await gateway.open("bad", mode="eval")
    form = {"format": {"type": "json_schema", "schema": BROKEN}}
    body = {"model": "demo", "max_tokens": 9, "messages": [USER], "output_config": form}
    response = await gateway.http.post("/v1/messages", json=body, headers=headers)
    assert (response.status_code, response.json()["error"]["type"]) == (400, "invalid_request_error")
    assert response.json()["error"]["message"].startswith("output_config.format: ")


@pytest.mark.parametrize("missing", ["model", "messages"])
async def test_a_parameter_that_is_missing_is_named(gateway: RunningGateway, missing: str) -> None:
    _, headers = await gateway.open("bad", mode="eval")
    body = {name: value for name, value in {"model": "demo", "messages": [USER]}.items() if name != missing}
    response = await gateway.http.post("/v1/chat/completions", json=body, headers=headers)
    assert error_of(response, 400, "invalid_value")["param"] == missing


@pytest.mark.parametrize("model", [5, None])
async def test_a_model_of_another_type_is_not_called_missing(gateway: RunningGateway, model: Any) -> None:
    _, headers = await gateway.open("bad", mode="eval")
    error = error_of(await gateway.chat(headers, model=model), 400, "invalid_value")
    assert error["message"] == "model: must be a string"


@pytest.mark.parametrize(
    ("headers", "query", "reason"),
    [
        ({"Authorization": "hg-key"}, "", "no key behind the word Bearer"),
        ({"Authorization": "Basic eDp5"}, "", "no key behind the word Bearer"),
        ({"api-key": "hg-key"}, "", "the header api-key is not read"),
        ({"x-goog-api-key": "hg-key"}, "", "the header x-goog-api-key is not read"),
        ({}, "?key=hg-key", "the query parameter key is not read"),
    ],
)
async def test_a_key_in_the_wrong_place_is_found_there_and_not_quoted(
    gateway: RunningGateway, headers: dict[str, str], query: str, reason: str
) -> None:
    response = await gateway.http.post(f"/v1/chat/completions{query}", headers=headers, json={})
    message = error_of(response, 401, "missing_api_key")["message"]
    assert reason in message and "`Authorization: Bearer KEY`" in message and "hg-key" not in message


@pytest.mark.parametrize(
    ("body", "code"),
    [('{"reward": 1, "fianl": true}', "unknown_parameter"), ('{"final": true}', "invalid_value")],
)
async def test_a_wrong_body_of_a_reward_leaves_the_episode_open(
    gateway: RunningGateway, body: str, code: str
) -> None:
    episode, _ = await gateway.open("bad")
    response = await gateway.http.post(f"/admin/v1/episodes/{episode}/reward", content=body)
    error_of(response, 400, code)
    assert (await gateway.admin.episode(episode))["state"] == "open"
    await gateway.admin.reward(episode, 0.5)


async def test_a_closed_episode_takes_no_calls(gateway: RunningGateway) -> None:
    episode, headers = await gateway.open("bad")
    await gateway.admin.reward(episode, 1.0)
    response = await gateway.chat(headers, model="demo")
    error_of(response, 409, "episode_closed")
    assert response.headers["x-should-retry"] == "false"
    error_of(await gateway.http.post(f"/admin/v1/episodes/{episode}/abandon", json={}), 409, "episode_closed")


@pytest.mark.parametrize("path", ["", "/trajectory", "/reward", "/abandon"])
async def test_an_unknown_episode(gateway: RunningGateway, path: str) -> None:
    url = f"/admin/v1/episodes/ep-none{path}"
    body = {"reward": 1} if path == "/reward" else {}
    posted = path in ("/reward", "/abandon")
    response = await (gateway.http.post(url, json=body) if posted else gateway.http.get(url))
    error_of(response, 404, "no_episode")


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"task_id": ""}, "task_id"),
        ({"task_id": "x" * 300}, "task_id"),
        ({"task_id": "t", "group_size": 0}, "group_size"),
        ({"task_id": "t", "mode": "test"}, "mode"),
        ({"task_id": "t", "taks": 1}, "taks"),
        ({}, "task_id"),
    ],
)
async def test_an_episode_that_cannot_be_opened(
    gateway: RunningGateway, body: dict[str, Any], param: str
) -> None:
    response = await gateway.http.post("/admin/v1/episodes", json=body)
    error = error_of(response, 400, "unknown_parameter" if param == "taks" else "invalid_value")
    assert error["param"] == param


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        (b"", "zero-length"),
        (b'{"task_id": "t",}', "line 1 column 16"),
        (b'{"task_id": "\xff"}', "UTF-8"),
        ('{"task_id": "t"}'.encode("utf-16"), "not valid UTF-8 JSON"),
        (gzip.compress(b'{"task_id": "t"}', mtime=0), "not valid UTF-8 JSON"),
        (b"[]", "must be a JSON object"),
        (b'{"task_id": "t", "metadata": {"a": %s}}' % (b"1" * 5000), "not JSON"),
        (b'{"task_id": "t", "metadata": {"a": 123456789012345678901}}', "123456789012345678901"),
    ],
)
async def test_the_admin_api_reads_bodies_as_the_calls_are_read(
    gateway: RunningGateway, body: bytes, reason: str
) -> None:
    error = error_of(await gateway.http.post("/admin/v1/episodes", content=body), 400, "invalid_json")
    assert reason in error["message"]


@pytest.mark.parametrize("kind", ["application/x-www-form-urlencoded", "text/plain", ""])
async def test_json_is_read_whatever_its_content_type(gateway: RunningGateway, kind: str) -> None:
    """`curl -d` names the content type of a form."""
    body = b'{"task_id": "typed", "mode": "eval"}'
    response = await gateway.http.post("/admin/v1/episodes", content=body, headers={"content-type": kind})
    assert response.status_code == 200, response.text


async def test_a_query_parameter_that_is_unknown_is_refused_with_those_that_are_known(
    gateway: RunningGateway,
) -> None:
    """A filter that is ignored would return everything."""
    await gateway.open("filtered", mode="eval")
    for path, name in (
        ("/episodes?task=x", "task"),
        ("/episodes?limit=1&cursor=x", "cursor"),
        ("/timeline?from=x", "from"),
        ("/calls?limit=x", "limit"),
        ("/engines?model=x", "model"),
        ("/steps?limit=9", "limit"),
    ):
        error = error_of(await gateway.http.get(f"/admin/v1{path}"), 400, "unknown_parameter")
        assert error["param"] == name and f"Unrecognized query parameter: {name}" in error["message"]
    known = error_of(await gateway.http.get("/admin/v1/steps?limit=9"), 400, "unknown_parameter")["message"]
    assert known.endswith("takes model, run, after, points, figure")
    none = error_of(await gateway.http.get("/admin/v1/calls?limit=9"), 400, "unknown_parameter")["message"]
    assert none.endswith("takes no query parameters")


@pytest.mark.parametrize(
    ("method", "path", "known"),
    [
        ("POST", "/v1/chat/completions?api-version=1", "no query parameters"),
        ("POST", "/v1/messages?stream=1", "beta"),
        ("POST", "/v1/messages/count_tokens?stream=1", "beta"),
        ("POST", "/v1/responses/input_tokens?x=1", "no query parameters"),
        ("GET", "/v1/responses/resp_1?include=x", "stream, starting_after, include_obfuscation, include[]"),
        ("GET", "/v1/models?page=2", "limit, after_id, before_id, beta, client_version"),
        ("GET", "/metrics?name=x", "no query parameters"),
        ("GET", "/health?x=1", "no query parameters"),
    ],
)
async def test_every_route_refuses_query_parameters_that_it_does_not_have(
    gateway: RunningGateway, method: str, path: str, known: str
) -> None:
    _, headers = await gateway.open("queried", mode="eval")
    response = await gateway.http.request(method, path, headers=headers, json={"model": "demo"})
    error = response.json()["error"]
    assert response.status_code == 400 and error["message"].endswith(f"takes {known}")
    name = path.partition("?")[2].partition("=")[0]
    assert error.get("param", name) == name


async def test_query_parameters_that_sdks_send_are_accepted(gateway: RunningGateway) -> None:
    _, headers = await gateway.open("listed", mode="eval")
    for path in ("/v1/models?beta=true", "/v1/models?client_version=0.1", "/v1/models/demo?beta=true"):
        assert (await gateway.http.get(path)).status_code == 200
    missing = await gateway.http.get(
        "/v1/responses/resp_1?include[]=reasoning.encrypted_content", headers=headers
    )
    error_of(missing, 404, "response_not_found")


async def test_a_query_value_that_nothing_has_is_refused(gateway: RunningGateway) -> None:
    error = error_of(await gateway.http.get("/admin/v1/episodes?state=nope"), 400, "invalid_value")
    assert error["param"] == "state" and "'open', 'grading' or 'closed'" in error["message"]
    for path in ("episodes", "episodes/facets", "steps", "runs", "versions", "timeline", "health", "events"):
        error = error_of(await gateway.http.get(f"/admin/v1/{path}?model=nope"), 404, "no_model")
        assert error["message"] == "no model 'nope'; there are: demo"


async def test_a_route_that_does_not_exist(gateway: RunningGateway) -> None:
    async def counts() -> Counter[str]:
        lines = (await gateway.http.get("/metrics")).text.splitlines()
        found = (re.match(r'headgate_errors_total\{code="(\w+)",.*\} (\S+)', line) for line in lines)
        return Counter({match[1]: int(float(match[2])) for match in found if match})

    before = await counts()
    error_of(await gateway.http.get("/v1/none"), 404, "no_such_route")
    for path, allowed in (
        ("/v1/completions", "POST"),
        ("/admin/v1/engines", "GET, HEAD, POST"),
        (f"/admin/v1/engines/{gateway.slot.name}", "GET, HEAD, DELETE"),
    ):
        response = await gateway.http.put(path)
        error_of(response, 405, "wrong_method")
        assert response.headers["allow"] == allowed
    counted = await counts()
    assert counted["wrong_method"] == before["wrong_method"] + 3
    assert counted["no_such_route"] == before["no_such_route"] + 1


async def test_a_wrong_base_url_is_explained_and_never_redirected(gateway: RunningGateway) -> None:
    twice = await gateway.http.post("/v1/responses/responses", json={"model": "demo"})
    assert "It has an endpoint twice" in error_of(twice, 404, "no_such_route")["message"]
    for path in ("/chat/completions", "/e/ep-1/chat/completions", "/v1/chat/completions/", "/v1/models/"):
        response = await gateway.http.get(path, headers={"host": "localhost:9"})
        error = error_of(response, 404, "no_such_route")
        root = gateway.url + ("/e/ep-1" if path.startswith("/e/") else "")
        assert f"{root}/v1" in error["message"] or "Leave out the slash" in error["message"]


async def test_head_is_served_as_get_is_without_the_body(gateway: RunningGateway) -> None:
    for path in ("/", "/healthz", "/v1/models", "/admin/v1/status", "/metrics"):
        head, get = await gateway.http.head(path), await gateway.http.get(path)
        assert (head.status_code, head.content) == (200, b""), path
        assert head.headers["content-type"] == get.headers["content-type"]
    assert (await gateway.http.head("/v1/none")).status_code == 404
    stream = await gateway.http.head("/admin/v1/events")  # it has no end
    assert stream.headers["content-type"].startswith("text/event-stream")


async def test_tools_for_vllm_find_what_they_ask_first(gateway: RunningGateway) -> None:
    for method, path in (("GET", "/health"), ("GET", "/ping"), ("POST", "/ping")):
        response = await gateway.http.request(method, path)
        assert (response.status_code, response.content) == (200, b"")
    assert (await gateway.http.get("/version")).json() == {"version": metadata.version("headgate")}


@pytest.fixture
def sound(tmp_path: Path, gateway: RunningGateway) -> Path:
    """A sound version 1."""
    return publish(fake_weights(tmp_path / "source", "one"), tmp_path / "v1", 1, 0)


async def refused(gateway: RunningGateway, status: int, code: str | None, **body: Any) -> None:
    version = (await gateway.admin.status())["version"]
    response = await gateway.http.post("/admin/v1/weights", json=body, params={"wait": 10})
    error_of(response, status, code)
    assert (await gateway.admin.status())["version"] == version


@pytest.mark.parametrize(
    ("path", "version", "code"),
    [("{tmp}/none", 1, "no_manifest"), ("/dev/null", 1, "no_manifest"), ("{tmp}/v1", 9, "bad_manifest")],
    ids=["no folder", "no directory", "another version"],
)
async def test_a_version_that_cannot_be_read_is_refused(
    gateway: RunningGateway, sound: Path, tmp_path: Path, path: str, version: int, code: str
) -> None:
    await refused(gateway, 422, code, version=version, path=path.format(tmp=tmp_path))


async def test_a_version_that_is_no_number(gateway: RunningGateway, sound: Path) -> None:
    for version in (0, -1, "one", 2**31):
        await refused(gateway, 400, "invalid_value", version=version, path=str(sound))


async def test_a_version_is_used_once(gateway: RunningGateway, sound: Path, tmp_path: Path) -> None:
    assert (await gateway.admin.publish(1, str(sound), wait_s=60))["state"] == "live"
    elsewhere = publish(tmp_path / "source", tmp_path / "again", 1, 0)
    await refused(gateway, 409, "version_used", version=1, path=str(elsewhere))
    assert (await gateway.admin.publish(1, str(sound), wait_s=60))["state"] == "live"
    assert (await gateway.admin.status())["newest_version"] == 1
    later = publish(tmp_path / "source", tmp_path / "v5", 5, 1)
    assert (await gateway.admin.publish(5, str(later), wait_s=60, skip_batches=True))["state"] == "live"
    assert (await gateway.admin.status())["newest_version"] == 5
    earlier = publish(tmp_path / "source", tmp_path / "v3", 3, 1)
    await refused(gateway, 409, "version_not_newer", version=3, path=str(earlier))
    response = await gateway.http.get("/admin/v1/weights/3")
    error_of(response, 404, "no_version")


@pytest.mark.parametrize("probe", [None, {}])
async def test_a_version_without_a_probe_is_refused(gateway: RunningGateway, sound: Path, probe: Any) -> None:
    manifest = json.loads((sound / "manifest.json").read_text())
    (sound / "manifest.json").write_text(json.dumps({**manifest, "probe": probe}))
    await refused(gateway, 422, "no_probe", version=1, path=str(sound))


async def test_no_lease_is_held(gateway: RunningGateway) -> None:
    for route in ("renew", "ack", "nack"):
        body = {"fence": 1, **({"checkpoint": "c"} if route == "ack" else {})}
        error_of(await gateway.http.post(f"/admin/v1/leases/none/{route}", json=body), 404, "no_lease")
    error_of(await gateway.http.get("/admin/v1/leases/none/groups", params={"fence": 1}), 404, "no_lease")
    missing = await gateway.http.get("/admin/v1/leases/none/groups")
    assert error_of(missing, 400, "invalid_value")["param"] == "fence"
