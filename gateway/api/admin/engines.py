"""`/admin/v1/engines`: what runs where, more and fewer, pauses. `/admin/v1/calls`: calls that run or wait, and moving them."""

from __future__ import annotations

import secrets
from typing import Annotated, Any

from fastapi import Query
from pydantic import BaseModel, ConfigDict, Field

from gateway.api.access import Access, Admin
from gateway.api.admin.admin_route import admin_router
from gateway.control.models import LocalModel
from gateway.engines.address import check_place
from gateway.generation.slot import Slot
from headgate.errors import BadRequest, Busy, Conflict, NotFound, jittered

router = admin_router("Engines")

Wait = Annotated[float, Query(ge=0, le=3600, description="Seconds to wait for the change to complete.")]


class AddBody(BaseModel):
    """An engine to add: a running one at `url`, or, without one, a child process as [engine] configures it."""

    model_config = ConfigDict(extra="forbid", use_attribute_docstrings=True)

    model: str | None = None
    name: str | None = Field(None, min_length=1, max_length=64, pattern=r"^[\w.-]+$")
    url: str | None = Field(None, pattern="^https?://", max_length=1024)
    mirror: str | None = Field(None, pattern="^https?://", max_length=1024)
    """The mirror of weights on the machine of an engine at `url`."""
    node: str | None = Field(None, max_length=64)
    """The engine's node; while the node is not lent, the engine sleeps."""


class MoveBody(BaseModel):
    """The engine where a call continues; by default any other."""

    model_config = ConfigDict(extra="forbid", use_attribute_docstrings=True)

    engine: str | None = None


@router.get("/engines")
async def list_engines(access: Admin) -> dict[str, Any]:
    """Return every engine: state, version, streams, and the fitted coefficients of its speed (docs/topics/scheduler.md)."""
    return {
        "engines": [
            _described(access, model.name, slot)
            for model in access.models
            for slot in model.pool.slots.values()
        ]
    }


@router.get("/engines/{name}")
async def get_engine(name: str, access: Admin) -> dict[str, Any]:
    """Return one engine."""
    model, slot = _find(access, name)
    return _described(access, model, slot)


def _described(access: Access, model: str, slot: Slot) -> dict[str, Any]:
    return {**slot.describe(model), "speed": access.gateway.view.speeds(model).get(slot.name)}


@router.post("/engines")
async def add_engine(body: AddBody, access: Admin, wait: Wait = 0.0) -> dict[str, Any]:
    """Add an engine; it gets calls once it runs the newest version and has passed the probe."""
    gateway, model = access.gateway, access.one(body.model)
    await _check(body, access, model)
    if body.url is None and gateway.settings.engine_of(model.name).launch == "external":
        message = "url: [engine] launch = 'external' starts no engine: name the address of one that runs"
        raise BadRequest(message, code="url_needed", param="url")
    name = body.name or f"{model.name}-{secrets.token_hex(3)}"
    if any(name in other.pool.slots for other in gateway.models):
        raise Conflict(f"an engine {name!r} exists already: choose another name", code="engine_exists")
    zone = gateway.coordinator.nodes.get(body.node).settings.zone if body.node else ""
    slot = Slot(name, body.url, body.node or "", body.mirror or "", zone)
    gateway.host.add(model.name, slot)
    await model.pool.wait_until(lambda: slot.state in ("open", "asleep") or slot.given_up, wait)
    return {**slot.describe(model.name)}


@router.delete("/engines/{name}")
async def remove_engine(name: str, access: Admin, wait: Wait = 0.0) -> dict[str, Any]:
    """Drain an engine, so that its calls continue elsewhere, and stop it."""
    model, slot = _find(access, name)
    access.gateway.host.remove(model, name)
    pool = access.one(model).pool
    await pool.wait_until(lambda: name not in pool.slots, wait)
    return {**slot.describe(model), "removed": name not in pool.slots}


@router.post("/engines/{name}/pause")
async def pause_engine(name: str, access: Admin, wait: Wait = 0.0) -> dict[str, Any]:
    """Put an engine to sleep until it is resumed; its calls continue elsewhere, or wait. A restart of the gateway resumes it."""
    model, slot = _find(access, name)
    host = access.gateway.host
    host.pause(model, name, paused=True)
    pool, count = access.one(model).pool, host.models[model].steps.runs
    await pool.wait_until(
        lambda: slot.state == "quarantined" or (slot.state == "asleep" and not count(slot)[0]), wait
    )
    return {**slot.describe(model)}


@router.post("/engines/{name}/resume")
async def resume_engine(name: str, access: Admin, wait: Wait = 0.0) -> dict[str, Any]:
    """Wake a paused engine; it gets calls once it runs the newest version and has passed the probe."""
    model, slot = _find(access, name)
    access.gateway.host.pause(model, name, paused=False)
    await access.one(model).pool.wait_until(lambda: slot.state == "open" or slot.given_up, wait)
    return {**slot.describe(model)}


@router.get("/calls")
async def list_calls(access: Admin) -> dict[str, Any]:
    """Every call that runs in an engine or waits for one; of models that are shared between projects, to the root key alone."""
    return {"calls": [call for model in access.models for call in model.pool.describe_calls()]}


@router.post("/calls/{call_id}/move")
async def move_call(call_id: str, body: MoveBody, access: Admin) -> dict[str, Any]:
    """Send a call to another engine; it continues there from its last token."""
    for model in access.models:
        if call_id in model.pool.calls:
            await model.pool.move(call_id, body.engine)
            return {"call_id": call_id, "engine": body.engine}
    raise NotFound(f"no call {call_id!r} is running or waiting", code="no_call")


async def _check(body: AddBody, access: Access, model: LocalModel) -> None:
    """Raise BadRequest for what the key may not request: a URL is an address to which this gateway would connect."""
    settings = access.gateway.settings
    if not access.reach.everything:
        for param, given in (
            ("url", body.url), ("mirror", body.mirror), ("name", body.name), ("node", body.node),
        ):  # fmt: skip
            if given is not None:
                message = f"{param}: only the root key may give engines' addresses, names and nodes"
                raise BadRequest(message, code="root_key_needed", param=param)
        most = settings.limits.project.engines
        if len(model.pool.slots) >= most:
            message = f"the model {model.name!r} has {most} engines already ([limits.project] engines)"
            raise Busy(message, retry_after=jittered(10.0), code="too_many_engines")
    engine = settings.engine_of(model.name)
    if body.node is not None:
        tags = access.gateway.coordinator.nodes.get(body.node).settings.tags
        if "rollout" not in tags:
            message = f"the node {body.node!r} lacks the tag 'rollout' (its tags: {', '.join(tags)})"
            raise Conflict(message, code="node_not_for_rollout")
    if body.url is not None:
        await check_place(body.url, allow_public=engine.allow_public)
    if body.mirror is not None:
        await check_place(body.mirror, allow_public=True, param="mirror")


def _find(access: Access, name: str) -> tuple[str, Slot]:
    for model in access.models:
        if slot := model.pool.slots.get(name):
            return model.name, slot
    raise NotFound(f"no engine {name!r}", code="no_engine")
