"""Projects do not see one another: what is another's is served as what is not there, on every route of the admin API."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi import APIRouter

from gateway import app as app_module
from gateway.api.admin.admin_route import AdminRoute
from gateway.api.admin.shown import SHOWN
from gateway.app import create_app
from gateway.config.settings import ConfigError, Settings
from gateway.tenancy.projects import Projects
from tests.harness.gateways import settings_for
from tests.security.tenants import ROOT, Tenants, agent_key_of, bearer, key_of, routes

pytestmark = pytest.mark.asyncio(loop_scope="module")

Request = dict[str, Any]
LOG = "GET /admin/v1/logs/tail"
"""Names something, and is for the root key alone."""
HIDDEN: dict[str, list[Request]] = {
    "GET /admin/v1/episodes/{episode_id}": [{}],
    "GET /admin/v1/episodes/{episode_id}/trajectory": [{}, {"params": {"model": "{model}"}}],
    "GET /admin/v1/episodes/{episode_id}/calls/{upstream_call_id}/exchange": [{}],
    "GET /admin/v1/episodes/{episode_id}/why": [{}],
    "POST /admin/v1/episodes/{episode_id}/calls/{call_id}/reward": [{"json": {"reward": 0.5}}],
    "POST /admin/v1/episodes/{episode_id}/reward": [{"json": {"reward": 0.5, "final": False}}],
    "GET /admin/v1/images/{image}": [{}],
    "GET /admin/v1/leases/{lease_id}/groups": [{"params": {"fence": "{fence}", "model": "{model}"}}],
    "POST /admin/v1/leases/{lease_id}/renew": [
        {"params": {"model": "{model}"}, "json": {"fence": "{fence}"}}
    ],
    "GET /admin/v1/episodes/{episode_id}/tokens": [{}, {"params": {"model": "{model}"}}],
    "GET /admin/v1/runs": [{"params": {"model": "{model}"}}],
    "GET /admin/v1/steps": [{"params": {"model": "{model}"}}],
    "GET /admin/v1/evaluations": [{"params": {"model": "{model}"}}],
    LOG: [{"params": {"log": "{model}"}}],
    "GET /admin/v1/versions": [{"params": {"model": "{model}"}}],
    "GET /admin/v1/canary": [{"params": {"model": "{model}"}}],
    "POST /admin/v1/canary/{action}": [{"json": {"model": "{model}"}}],
    "GET /admin/v1/timeline": [{"params": {"model": "{model}"}}],
    "GET /admin/v1/health": [{"params": {"model": "{model}"}}],
    "GET /admin/v1/batches": [{"params": {"model": "{model}"}}],
    "GET /admin/v1/batches/{batch}/groups": [{"params": {"model": "{model}"}}],
    "GET /admin/v1/staleness": [{"params": {"model": "{model}"}}],
    "GET /admin/v1/status": [{"params": {"model": "{model}"}}],
    "GET /admin/v1/weights/{version}": [{"params": {"model": "{model}"}}],
    "GET /admin/v1/events": [{"params": {"model": "{model}", "wait": "0"}}],
    "POST /admin/v1/steps": [{"json": {"step": 1, "model": "{model}"}}],
    "POST /admin/v1/weights": [{"json": {"version": 1, "path": "/nowhere", "model": "{model}"}}],
    "GET /admin/v1/engines/{engine}": [{}],
    "POST /admin/v1/engines": [{"json": {"model": "{model}"}}],
    "POST /admin/v1/calls/{running_call_id}/move": [{"json": {}}],
    "POST /admin/v1/leases/{lease_id}/nack": [{"params": {"model": "{model}"}, "json": {"fence": "{fence}"}}],
    "POST /admin/v1/leases/{lease_id}/ack": [
        {"params": {"model": "{model}"}, "json": {"fence": "{fence}", "checkpoint": "c"}}
    ],
    "POST /admin/v1/leases": [{"json": {"consumer": "thief", "model": "{model}"}}],
    "POST /admin/v1/episodes": [
        {"json": {"task_id": "t", "mode": "eval", "model": "{model}"}},
        {"json": {"task_id": "t", "mode": "eval", "agent": "{agent}"}},
    ],
    "POST /admin/v1/engines/{engine}/pause": [{}],
    "POST /admin/v1/engines/{engine}/resume": [{}],
    "DELETE /admin/v1/engines/{engine}": [{}],
    "DELETE /admin/v1/episodes/{episode_id}": [{}, {"params": {"force": "true"}}],
    "POST /admin/v1/episodes/{episode_id}/close": [{}],
    "POST /admin/v1/episodes/{episode_id}/abandon": [{"json": {}}],
    "POST /admin/v1/episodes/{episode_id}/restart": [{}],
}
"""Requests that name something; those that destroy it come last."""
ROOTS = (
    "GET /admin/v1/cluster",
    "GET /admin/v1/deletions",
    "GET /admin/v1/nodes",
    "GET /admin/v1/settings",
    "GET /admin/v1/logs",
)
"""Routes that do not exist for a project's key."""
NODES = {
    "POST /admin/v1/nodes": {"json": {"name": "n", "tags": ["train"]}},
    "GET /admin/v1/nodes/{name}": {},
    "POST /admin/v1/nodes/{name}/claim": {"json": {}},
    "POST /admin/v1/nodes/{name}/release": {"json": {}},
    "DELETE /admin/v1/nodes/{name}": {},
    "POST /admin/v1/deletions": {"json": {"agent": "none", "all": True}},
}
"""The root's too; in the order in which a node comes, is used and goes."""
LISTED = (
    "GET /admin/v1/episodes",
    "GET /admin/v1/engines",
    "GET /admin/v1/calls",
    "GET /admin/v1/console",
    "GET /admin/v1/timeline",
)
"""Requests that name nothing."""
COUNTED = ("GET /admin/v1/episodes/histogram", "GET /admin/v1/episodes/facets", "GET /admin/v1/runs")
"""Requests that name nothing, and whose responses are numbers, or nothing before a trainer reported a step."""
NAMED = {"call_id": "upstream_call_id", "name": "engine"}
"""Route parameters that have another name above."""


def filled(value: Any, names: dict[str, str]) -> Any:
    if isinstance(value, dict):
        return {key: filled(inner, names) for key, inner in value.items()}
    if not isinstance(value, str):
        return value
    found = value.format(**names)
    return int(found) if value == "{fence}" else found


async def ask(
    stage: Tenants, key: str, route: str, request: Request, names: dict[str, str]
) -> httpx.Response:
    method, path = route.split()
    return await stage.gateway.http.request(
        method, path.format(**names), headers=bearer(key), **filled(request, names)
    )


def without_names(response: httpx.Response, names: dict[str, str]) -> tuple[int, str, Any]:
    """Return a response without the requested names."""
    text = response.text
    for name in sorted(names, key=lambda name: -len(names[name])):
        if len(names[name]) > 3:
            text = text.replace(names[name], f"<{name}>")
    return response.status_code, text, response.headers.get("retry-after")


async def test_every_admin_route_has_a_decision(tiny_model: Path, tmp_path: Path) -> None:
    app = create_app(Settings.parse(settings_for(tiny_model, tmp_path)))
    shapes = {_shape(route) for route in (*HIDDEN, *LISTED, *COUNTED, *ROOTS, *NODES)}
    found = {f"{method} {path}" for method, path in routes(app) if path.startswith("/admin")}
    assert found, "no admin routes were found"
    assert {route for route in found if _shape(route) not in shapes} == set()


async def test_every_admin_route_checks_its_key_its_query_and_its_body() -> None:
    """A router that is not made by `admin_router` would skip them."""
    routers = [
        value.router
        for value in (*vars(app_module).values(), *SHOWN)
        if isinstance(getattr(value, "router", None), APIRouter)
    ]
    admin = [r for router in routers for r in router.routes if getattr(r, "path", "").startswith("/admin")]
    assert len(admin) > 40
    assert [route for route in admin if not isinstance(route, AdminRoute)] == []


def _shape(route: str) -> str:
    return "/".join("{}" if part.startswith("{") else part for part in route.split("/"))


@pytest.mark.parametrize("route", HIDDEN)
async def test_what_is_another_projects_is_not_there(stage: Tenants, route: str) -> None:
    for request in HIDDEN[route]:
        theirs = await ask(stage, key_of("bob"), route, request, stage.ann.names)
        unknowns = await ask(stage, key_of("bob"), route, request, stage.unknown)
        assert without_names(theirs, stage.ann.names) == without_names(unknowns, stage.unknown)
        assert theirs.status_code in (400, 404) and (theirs.status_code == 404 or "{agent}" in str(request))
        assert "ann" not in theirs.text.replace(stage.ann.names["model"], "").replace("ann-agent", "")


@pytest.mark.parametrize("route", ROOTS)
async def test_what_is_the_roots_is_not_there(stage: Tenants, route: str) -> None:
    assert (await ask(stage, key_of("bob"), route, {}, {})).status_code == 404
    assert (await ask(stage, ROOT, route, {}, {})).is_success


async def test_nodes_are_the_roots(stage: Tenants) -> None:
    names = {**stage.unknown, "name": "n"}
    for route, request in NODES.items():
        assert (await ask(stage, key_of("bob"), route, request, names)).status_code == 404
        assert (await ask(stage, ROOT, route, request, names)).is_success, route


async def test_another_projects_lease_and_version_are_not_ones_own(stage: Tenants) -> None:
    mixed = {**stage.ann.names, "model": "bob-policy"}
    for route in (route for route in HIDDEN if "{lease_id}" in route):
        (request,) = HIDDEN[route]
        theirs = await ask(stage, key_of("bob"), route, request, mixed)
        unknowns = await ask(stage, key_of("bob"), route, request, {**stage.unknown, "model": "bob-policy"})
        assert without_names(theirs, mixed) == without_names(
            unknowns, {**stage.unknown, "model": "bob-policy"}
        )
        assert not theirs.is_success


@pytest.mark.parametrize("route", LISTED)
async def test_lists_show_ones_own_alone(stage: Tenants, route: str) -> None:
    own = (await ask(stage, key_of("bob"), route, {}, {})).text
    everything = (await ask(stage, ROOT, route, {}, {})).text
    for name in ("model", "episode_id", "engine", "running_call_id"):
        assert stage.ann.names[name] not in own, name
    assert "bob-policy" in own and "ann-policy" in everything and "bob-policy" in everything


async def test_episodes_are_counted_and_runs_listed_to_their_own_alone(stage: Tenants) -> None:
    for name in ("ann", "bob"):
        step = {"json": {"step": 1, "run": f"run-of-{name}", "model": f"{name}-policy"}}
        assert (await ask(stage, key_of(name), "POST /admin/v1/steps", step, {})).is_success
    shown = {}
    for key in (key_of("ann"), key_of("bob"), ROOT):
        bins, values, runs = [(await ask(stage, key, route, {}, {})).json() for route in COUNTED]
        assert sum(bins["counts"]) == sum(values["modes"].values())
        shown[key] = sum(bins["counts"]), {run["run"] for run in runs["runs"]}
    anns, bobs, everything = shown.values()
    assert (anns[1], bobs[1], everything[1]) == ({"run-of-ann"}, {"run-of-bob"}, {"run-of-ann", "run-of-bob"})
    assert min(anns[0], bobs[0]) > 0 and anns[0] + bobs[0] == everything[0]


@pytest.mark.asyncio(loop_scope="function")
async def test_a_status_shows_ones_own_alone(own_stage: Tenants) -> None:
    own = (await ask(own_stage, key_of("bob"), "GET /admin/v1/status", {}, {})).json()
    everything = (await ask(own_stage, ROOT, "GET /admin/v1/status", {}, {})).json()
    assert own["model"] == "bob-policy" and own["models"] == ["bob-policy"]
    assert {engine["model"] for engine in own["engines"]} == {"bob-policy"}
    assert (own["open_episodes"], everything["open_episodes"]) == (1, 2)
    assert sum(own["episodes"].values()) == 2 and sum(everything["episodes"].values()) == 4


async def test_groups_of_the_same_name_are_different_groups(stage: Tenants) -> None:
    """Names of groups are the tenants' own: what is shown of one has nothing of the other."""
    http = stage.gateway.http

    async def stories() -> list[str]:
        path = f"/admin/v1/episodes/{stage.ann.names['episode_id']}/why"
        found = [await http.get(path, headers=bearer(key)) for key in (key_of("ann"), ROOT)]
        assert all(story.is_success for story in found)
        return [story.text for story in found]

    before = await stories()
    body = {"task_id": "t", "group_id": stage.ann.names["group_id"], "model": "bob-policy"}
    opened = await http.post("/admin/v1/episodes", headers=bearer(key_of("bob")), json=body)
    path = f"/admin/v1/episodes/{opened.json()['episode_id']}"
    await http.post(f"{path}/abandon", headers=bearer(key_of("bob")), json={"reason": "bobs-reason"})
    assert await stories() == before


async def test_models_of_another_project_cannot_be_called(stage: Tenants) -> None:
    messages = [{"role": "user", "content": "hi"}]
    for path, body in (
        ("/v1/chat/completions", {"messages": messages}),
        ("/v1/completions", {"prompt": "hi"}),
        ("/v1/responses", {"input": "hi"}),
        ("/v1/messages", {"messages": messages, "max_tokens": 4}),
        ("/v1/messages/count_tokens", {"messages": messages}),
        ("/v1/responses/input_tokens", {"input": "hi"}),
    ):
        for key in (stage.bob.episode_key, agent_key_of("bob")):
            responses = []
            for model in ("ann-policy", "ann-judge", "no-such-thing"):
                given = {**body, "model": model}
                response = await stage.gateway.http.post(path, headers=bearer(key), json=given)
                responses.append((response.status_code, response.text.replace(model, "MODEL")))
            assert responses[0][0] == 404 and len(set(responses)) == 1, (path, responses)


async def test_models_without_a_project_are_for_all(stage: Tenants) -> None:
    messages = [{"role": "user", "content": "hi"}]
    for tenant in (stage.ann, stage.bob):
        for model in ("common", "oracle"):
            body = {"model": model, "messages": messages, "max_tokens": 4}
            response = await stage.gateway.http.post(
                "/v1/chat/completions", headers=tenant.headers, json=body
            )
            assert response.status_code == 200, response.text
        path = f"/admin/v1/episodes/{tenant.names['episode_id']}/trajectory"
        found = await stage.gateway.http.get(
            path, params={"model": "common"}, headers=bearer(key_of(tenant.name))
        )
        assert found.json()["nodes"]
    engine = await stage.gateway.http.get("/admin/v1/engines/common-0", headers=bearer(key_of("ann")))
    assert engine.status_code == 404  # its engines carry the calls of all


async def test_models_are_listed_to_those_who_may_call_them(stage: Tenants) -> None:
    async def listed(headers: dict[str, str]) -> set[str]:
        response = await stage.gateway.http.get("/v1/models", headers=headers)
        assert response.status_code == 200, response.text
        return {model["id"] for model in response.json()["data"]}

    shared = {"common", "oracle"}
    for own in (stage.ann.headers, bearer(agent_key_of("ann")), bearer(key_of("ann"))):
        assert await listed(own) == {"ann-policy", "ann-judge", *shared}
    assert await listed(stage.bob.headers) == {"bob-policy", *shared}
    assert await listed(bearer(ROOT)) == {"ann-policy", "ann-judge", "bob-policy", *shared}
    for path in ("/v1/models", "/v1/models/ann-policy"):
        assert (await stage.gateway.http.get(path)).status_code == 401
    for model in ("ann-policy", "ann-judge"):
        theirs = await stage.gateway.http.get(f"/v1/models/{model}", headers=stage.bob.headers)
        unknowns = await stage.gateway.http.get("/v1/models/no-such", headers=stage.bob.headers)
        assert theirs.status_code == 404
        assert theirs.text.replace(model, "M") == unknowns.text.replace("no-such", "M")


async def test_a_projects_key_names_no_addresses(stage: Tenants) -> None:
    """An engine's address is where the gateway sends prompts."""
    for body in ({"url": "http://127.0.0.1:1"}, {"mirror": "http://127.0.0.1:1"}, {"name": "mine"}):
        response = await stage.gateway.http.post(
            "/admin/v1/engines", headers=bearer(key_of("bob")), json={"model": "bob-policy", **body}
        )
        assert (response.status_code, response.json()["error"]["code"]) == (400, "root_key_needed")
    assert list(stage.gateway.services.models.local["bob-policy"].pool.slots) == ["bob-policy-0"]


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (
            {"projects": {"p": {"key": "0123456789abcdef", "models": ["demo"]}}},
            "[admin] key is needed with [projects]",
        ),
        (
            {
                "admin": {"key": ROOT},
                "projects": {n: {"key": f"0123456789abcdef{n}", "models": ["demo"]} for n in ("p", "q")},
            },
            "it may be in only one",
        ),
        ({"admin": {"key": ROOT}, "projects": {"p": {"key": ROOT, "models": ["demo"]}}}, "two of the keys"),
        (
            {"admin": {"key": ROOT}, "projects": {"p": {"key": "0123456789abcdef", "models": ["x"]}}},
            "no model",
        ),
    ],
)
async def test_projects_that_would_not_be_apart_are_refused(
    tiny_model: Path, tmp_path: Path, more: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message.replace("[", r"\[")):
        Settings.parse(settings_for(tiny_model, tmp_path, **more))


@pytest.mark.asyncio(loop_scope="function")
async def test_what_is_out_of_reach_is_not_touched(own_stage: Tenants) -> None:
    """The owner's same requests are served, so the refusals are not an accident."""
    names, key = own_stage.ann.names, key_of("ann")
    for route, requests in HIDDEN.items():
        for request in requests:
            await ask(own_stage, key_of("bob"), route, request, names)
    row = (await ask(own_stage, key, "GET /admin/v1/episodes/{episode_id}", {}, names)).json()
    assert (row["state"], row["reward"]) == ("open", None)
    for route, requests in HIDDEN.items():
        for request in requests if route != LOG else ():
            response = await ask(own_stage, key, route, request, names)
            refused = response.status_code in (400, 401, 404) or response.status_code >= 500
            gone = route.endswith("/ack") and "no_lease" in response.text  # it was given back just before
            assert not refused or gone or "url_needed" in response.text, (route, response.text)


async def test_a_model_that_projects_share_is_run_by_none_of_them(tiny_model: Path, tmp_path: Path) -> None:
    """Its engines carry the calls of all of them: they call it, and the root key alone sees where it runs."""
    models = {"shared": {"path": str(tiny_model), "train": False}}
    projects = {name: {"key": key_of(name), "models": ["shared"]} for name in ("ann", "bob")}
    values = settings_for(tiny_model, tmp_path, admin={"key": ROOT}, models=models, projects=projects)
    found = Projects(Settings.parse(values))
    for name in projects:
        reach = found.reach(key_of(name))
        assert reach is not None and not reach.has("shared") and reach.models == ()
    assert found.root.has("shared") and found.callable("shared", "shared")
