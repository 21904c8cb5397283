"""`/admin/v1/nodes`: machines with tags, and trainers that claim theirs and release them (docs/topics/scheduler.md)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fastapi import Response
from pydantic import BaseModel, ConfigDict, Field

from gateway.api.access import Access, Admin
from gateway.api.admin.admin_route import admin_router
from gateway.config import Name, NodeSettings
from gateway.control.nodes import NodeDescription, Nodes
from headgate.errors import NotFound

router = admin_router("Nodes")


class NodeBody(BaseModel):
    """A node; `train` and `rollout` among its tags are its uses."""

    model_config = ConfigDict(extra="forbid", use_attribute_docstrings=True)

    name: Name
    tags: tuple[Name, ...] = Field(min_length=1, max_length=64)
    zone: str = Field("", max_length=64)


class TrainerBody(BaseModel):
    """The model whose trainer sends the request; without a name, the first trained one."""

    model_config = ConfigDict(extra="forbid", use_attribute_docstrings=True)

    model: str | None = None


class ClaimBody(TrainerBody):
    """A claim, and how long its response may wait for the node."""

    wait_s: float = Field(0.0, ge=0, le=3600)


class ReleaseBody(TrainerBody):
    """A release, and for how long the trainer computed on the groups of the batch that it has trained; 0: unknown.

    `load_s`: how long its weights had taken to come back to the node before. `rest_s`: how long it was busy with the rest of that
    batch, such as the step and the publication; waiting is in none of the three."""

    busy_s: float = Field(0.0, ge=0, le=1e7, allow_inf_nan=False)
    load_s: float = Field(0.0, ge=0, le=1e7, allow_inf_nan=False)
    rest_s: float = Field(0.0, ge=0, le=1e7, allow_inf_nan=False)


@router.get("/nodes")
async def list_nodes(access: Admin) -> dict[str, Any]:
    """Every node: tags, role, engines, seconds by role since this gateway decides."""
    return {"nodes": _described(access)}


@router.get("/nodes/{name}")
async def get_node(name: str, access: Admin) -> dict[str, Any]:
    """Return one node."""
    if (node := next((node for node in _described(access) if node["name"] == name), None)) is None:
        raise NotFound(f"no node {name!r}", code="no_node")
    return {**node}


@router.post("/nodes")
async def add_node(body: NodeBody, access: Admin) -> dict[str, Any]:
    """Add a node, or replace the tags of an existing one. Idempotent."""
    nodes = _nodes(access)
    given = NodeSettings.model_validate(body.model_dump(exclude={"name"}))
    return {**nodes.describe(nodes.add(body.name, given))}


@router.delete("/nodes/{name}")
async def remove_node(name: str, access: Admin) -> dict[str, Any]:
    """Remove a node; its engines are drained, so that their calls continue elsewhere, and stopped."""
    nodes = _nodes(access)
    described = nodes.describe(nodes.get(name))
    nodes.remove(name)
    return {**described, "removed": True}


@router.post("/nodes/{name}/claim")
async def claim_node(name: str, body: ClaimBody, access: Admin, response: Response) -> dict[str, Any]:
    """Claim a node for its trainer: 200 when the trainer has it, 202 while its engines are put to sleep (then repeat it).

    Repeat it while the node is used, within `claim_s` of the response; otherwise the claim lapses.
    """
    nodes = _nodes(access)
    model = access.trained(body.model).name
    node = await nodes.claim(name, model, body.wait_s)
    response.status_code = 200 if node.role == "train" else 202
    return {**nodes.describe(node), "claim_s": nodes.claim_s}


@router.post("/nodes/{name}/release")
async def release_node(name: str, body: ReleaseBody, access: Admin) -> dict[str, Any]:
    """Allow lending a trainer's node while it waits for its batch. `claimable`: it will not be lent, and may be claimed again."""
    nodes, model = _nodes(access), access.trained(body.model).name
    return {**nodes.describe(nodes.release(name, model, body.busy_s, body.load_s, body.rest_s))}


def _nodes(access: Access) -> Nodes:
    _check_root(access)
    return access.gateway.coordinator.nodes


def _described(access: Access) -> Sequence[NodeDescription]:
    _check_root(access)
    return access.gateway.view.described_nodes()


def _check_root(access: Access) -> None:
    """Raise NotFound for the key of a project: all models share the nodes, so only the root key reaches them."""
    if not access.reach.everything:
        raise NotFound("no route has this path", code="not_found")
