"""`/admin/v1/deletions`: delete one caller's or one user's conversations, and what was trained from them."""

from __future__ import annotations

from typing import Any, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from gateway.api.access import Admin
from gateway.api.admin.admin_route import admin_router
from headgate.errors import NotFound


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

    @model_validator(mode="after")
    def _names_one(self) -> Self:
        if (self.user is None) != self.all:
            raise ValueError("name a `user`, or all conversations of the agent with `all`")
        return self


@router.post("/deletions")
async def delete_conversations(body: DeletionBody, access: Admin) -> dict[str, Any]:
    """Delete conversations that have begun until now, also open ones. Return the versions that were trained from them."""
    return await access.gateway.coordinator.erasure.delete(body.agent, body.user)


@router.get("/deletions")
async def list_deletions(access: Admin) -> dict[str, Any]:
    """Return the newest deletions with the versions that were trained from what they deleted."""
    return {"deletions": await access.gateway.coordinator.erasure.reports()}
