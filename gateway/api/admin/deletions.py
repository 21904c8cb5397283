"""`/admin/v1/deletions`: delete one caller's or one user's conversations, and what was trained from them."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from gateway.api.access import Admin
from gateway.api.admin.admin_route import admin_router
from headgate.errors import BadRequest, NotFound


async def _root(access: Admin) -> None:
    """Refuse a project's key, for which these routes do not exist."""
    if not access.reach.everything:
        raise NotFound("Not Found", code="not_found")


router = admin_router("Deletions", "", _root)


class DeletionBody(BaseModel):
    """The conversations to delete."""

    model_config = ConfigDict(extra="forbid", use_attribute_docstrings=True)

    agent: str = Field(min_length=1, max_length=255)
    """The agent under whose key they were held, by its name in `[agents]`, or its former name."""
    user: str | None = Field(None, min_length=1, max_length=1024)
    """The user's id, as requests had it in `user`, `safety_identifier`, `metadata.user_id` or `metadata.user`."""
    all: bool = False
    """True: all conversations of the agent."""


@router.post("/deletions")
async def delete_conversations(body: DeletionBody, access: Admin) -> dict[str, Any]:
    """Delete conversations that have begun until now, also open ones. Return the versions that were trained from them."""
    if (body.user is None) != body.all:
        message = 'name a user, or request all conversations of the agent with `"all": true`'
        raise BadRequest(message, code="invalid_value", param="user")
    return await access.gateway.coordinator.erasure.delete(body.agent, body.user)


@router.get("/deletions")
async def list_deletions(access: Admin) -> dict[str, Any]:
    """Return the newest deletions with the versions that were trained from what they deleted."""
    return {"deletions": await access.gateway.coordinator.erasure.reports()}
