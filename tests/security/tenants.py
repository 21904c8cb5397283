"""Two projects on one gateway, each with all that a project can have; the routes of the application; and a stranger's guesses."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path
from typing import Any

from gateway.engines.fake import FakeEngine, create_fake_app
from gateway.store import images
from headgate.processes.ports import free_port
from tests.harness.gateways import RunningGateway, run_gateway, serve, settings_for
from tests.harness.upstream import Elsewhere
from tests.harness.waiting import until

ROOT = "the-root-key-of-everything"
UPSTREAM_KEY = "sk-the-upstream-key-of-the-admin"
PROJECTS = ("ann", "bob")


def key_of(project: str) -> str:
    return f"the-project-key-of-{project}"


def agent_key_of(project: str) -> str:
    return f"the-agents-key-of-{project}"


def bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


@dataclass
class Tenant:
    """A project, and the names of what it has."""

    name: str
    names: dict[str, str]
    episode_key: str = ""
    headers: dict[str, str] = field(default_factory=dict)


@dataclass
class Tenants:
    """The gateway, who is on it, and the upstream API behind it."""

    gateway: RunningGateway
    ann: Tenant
    bob: Tenant
    elsewhere: Elsewhere

    @property
    def unknown(self) -> dict[str, str]:
        """Names as ann's are, of things that are not there."""
        return {
            "model": "nobodys-policy",
            "agent": "nobodys-agent",
            "episode_id": "ep-00000000000000000000",
            "call_id": "chatcmpl-000000000000000000000000",
            "upstream_call_id": "upstream-000000000000000000000000",
            "running_call_id": "chatcmpl-000000000000000000000001",
            "lease_id": "lease-0000000000000000",
            "fence": self.ann.names["fence"],
            "engine": "nobodys-policy-0",
            "name": "nobodys-node",
            "group_id": "nobodys-group",
            "action": "hold",
            "batch": self.ann.names["batch"],
            "version": self.ann.names["version"],
            "response_id": "resp_000000000000000000000000",
            "image": 64 * "0",
        }


@asynccontextmanager
async def tenants(model: Path, work: Path, **more: Any) -> AsyncIterator[Tenants]:
    """Both projects, each with an open episode, calls, a lease, a trained batch and a call that waits for its engine."""
    async with AsyncExitStack() as stack:
        elsewhere, port = Elsewhere(), free_port()
        await stack.enter_async_context(serve(elsewhere.app(), port))
        values = await _values(stack, model, work, port)
        for section, given in more.items():
            values[section] = {**values.get(section, {}), **given}
        gateway = await stack.enter_async_context(run_gateway(values, in_process=False))
        ann, bob = found = [await _fill(gateway, project) for project in PROJECTS]
        waiting = [await _wait(gateway, tenant) for tenant in found]
        try:
            yield Tenants(gateway, ann, bob, elsewhere)
        finally:
            for task in waiting:
                task.cancel()
            await asyncio.gather(*waiting, return_exceptions=True)


async def _values(stack: AsyncExitStack, model: Path, work: Path, upstream: int) -> dict[str, Any]:
    models: dict[str, Any] = {}
    for name in ("ann-policy", "ann-judge", "bob-policy", "common"):
        port = free_port()
        await stack.enter_async_context(serve(create_fake_app(FakeEngine("none")), port))
        engine = {"launch": "external", "url": f"http://127.0.0.1:{port}"}
        models[name] = {"path": str(model), "train": name.endswith("policy"), "engine": engine, "aliases": []}
    there = {"url": f"http://127.0.0.1:{upstream}/v1", "key": UPSTREAM_KEY}
    models["oracle"] = {"train": False, "upstream": there}
    values = settings_for(model, work, staleness={"batch": 1, "eta": 2, "min_members": 1})
    return {
        **values,
        "models": models,
        "admin": {"key": ROOT},
        "projects": {
            "ann": {
                "key": key_of("ann"),
                "models": ["ann-policy", "ann-judge"],
                "weights": str(work / "ann"),
            },
            "bob": {"key": key_of("bob"), "models": ["bob-policy"]},
        },
        "agents": {
            f"{name}-agent": {"key": agent_key_of(name), "model": f"{name}-policy"} for name in PROJECTS
        },
    }


async def _fill(gateway: RunningGateway, name: str) -> Tenant:
    http, headers, model = gateway.http, bearer(key_of(name)), f"{name}-policy"

    async def admin(method: str, path: str, **given: Any) -> Any:
        response = await http.request(method, f"/admin/v1{path}", headers=headers, **given)
        assert response.is_success, response.text
        return response.json()

    async def post(path: str, **body: Any) -> Any:
        response = await http.post(path, headers=bearer(opened["api_key"]), json=body)
        assert response.is_success, response.text
        return response.json()

    messages = [{"role": "user", "content": f"the secret of {name}"}]
    opened = await admin("POST", "/episodes", json={"task_id": "t", "model": model})
    await post("/v1/chat/completions", model=model, messages=messages, max_tokens=4)
    await admin("POST", f"/episodes/{opened['episode_id']}/reward", json={"reward": 1.0})
    lease = await admin("POST", "/leases", json={"consumer": name, "model": model})
    acked = {"fence": lease["fence"], "checkpoint": "c"}
    await admin("POST", f"/leases/{lease['lease_id']}/ack", params={"model": model}, json=acked)
    group = f"group-of-{name}"
    opened = await admin(
        "POST", "/episodes", json={"task_id": f"task-of-{name}", "group_id": group, "model": model}
    )
    chat = await post("/v1/chat/completions", model=model, messages=messages, max_tokens=4)
    response = await post("/v1/responses", model=model, input=messages[0]["content"], max_output_tokens=16)
    await post("/v1/chat/completions", model="oracle", messages=messages)
    calls = (await admin("GET", f"/episodes/{opened['episode_id']}"))["calls"]
    lease = await admin("POST", "/leases", json={"consumer": name, "model": model})
    image = {"hash": sha256(name.encode()).hexdigest(), "media_type": "image/png", "data": name.encode()}
    await gateway.services.database.submit(
        lambda c: images.keep(c, opened["episode_id"], {image["hash"]}, [image], 2**20)
    )
    names = {
        "model": model,
        "agent": f"{name}-agent",
        "episode_id": opened["episode_id"],
        "call_id": chat["id"],
        "upstream_call_id": next(call["id"] for call in calls if call["id"].startswith("upstream-")),
        "lease_id": lease["lease_id"],
        "fence": str(lease["fence"]),
        "engine": f"{model}-0",
        "group_id": group,
        "action": "hold",
        "batch": "0",
        "version": "0",
        "response_id": response["id"],
        "image": image["hash"],
    }
    return Tenant(name, names, opened["api_key"], bearer(opened["api_key"]))


async def _wait(gateway: RunningGateway, tenant: Tenant) -> asyncio.Task[Any]:
    """A call of the tenant's that waits for its engine."""
    pool = gateway.services.models.local[tenant.names["model"]].pool
    slot = pool.slots[tenant.names["engine"]]
    slot.hold()
    body = {"model": tenant.names["model"], "messages": [{"role": "user", "content": "wait"}]}
    task = asyncio.create_task(gateway.http.post("/v1/chat/completions", headers=tenant.headers, json=body))
    await until(lambda: bool(pool.calls), "the call waits")
    tenant.names["running_call_id"] = next(iter(pool.calls))
    return task


def routes(app: Any) -> Iterator[tuple[str, str]]:
    """(method, path) of every route; a WebSocket's method is WS."""
    for route in app.routes:
        if hasattr(route, "path"):
            for method in getattr(route, "methods", None) or ["WS"]:
                if method != "HEAD":
                    yield method, route.path
        else:
            yield from routes(route.original_router)
