"""Stored answers: who may read them, and stored chat completions.

An answer belongs to the episode in which it was given. The callers of that episode may read, change and delete it; for
others it does not exist.
"""

from __future__ import annotations

import re
import time
from collections.abc import AsyncIterator, Sequence
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Query, Request
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from gateway.api.context import Gateway, Services, json_object
from gateway.api.generation import Generation, identify
from gateway.api.query import QueryRoute
from gateway.dialects.chat import MAX_METADATA, ChatAnswer, ChatRequest, Metadata
from gateway.episodes.callers import Caller
from gateway.errors import BadRequest, NotFound, validation_error
from gateway.render.offload import offload_read
from gateway.store import answers

router = APIRouter(tags=["OpenAI"], route_class=QueryRoute)

Order = Literal["asc", "desc"]
Limit = Annotated[int, Query(ge=1, le=100)]
_METADATA = re.compile(r"metadata\[(.*)\]", re.DOTALL)


class MetadataUpdate(BaseModel):
    """The fields of a stored answer that may be changed."""

    model_config = ConfigDict(extra="forbid", use_attribute_docstrings=True)

    metadata: Metadata | None = Field(None, max_length=MAX_METADATA)


def body_of(schema: dict[str, Any]) -> dict[str, Any]:
    """Describes the body of a route that reads it itself."""
    definitions = schema.get("$defs", {})

    def inlined(value: Any) -> Any:  # references would resolve against the root of the whole OpenAPI document
        if isinstance(value, list):
            return [inlined(item) for item in value]
        if not isinstance(value, dict):
            return value
        if "$ref" in value:
            return inlined(definitions[value["$ref"].removeprefix("#/$defs/")])
        return {name: inlined(item) for name, item in value.items() if name != "$defs"}

    content = {"application/json": {"schema": inlined(schema)}}
    return {"requestBody": {"required": True, "content": content}}


async def owned(gateway: Services, caller: Caller, answer_id: str, api: str) -> dict[str, Any] | None:
    """A stored answer; None if there is none for this caller. An agent's key reaches those of all its episodes."""
    row = await gateway.database.read(lambda c: answers.answer(c, answer_id, api))
    if row is None:
        return None
    if caller.episode is not None:
        return row if row["episode_id"] == caller.episode.id else None
    return row if await gateway.episodes.agent_of(row["episode_id"]) == caller.agent else None


def page(found: Sequence[dict[str, Any]], limit: int) -> dict[str, Any]:
    """A list in OpenAI's form; whatever is over the limit says that there is more."""
    data = list(found[:limit])
    ends = (
        {"first_id": data[0]["id"], "last_id": data[-1]["id"]}
        if data
        else {"first_id": None, "last_id": None}
    )
    return {"object": "list", "data": data, **ends, "has_more": len(found) > limit}


def ordered(found: Sequence[dict[str, Any]], order: Order, after: str | None) -> list[dict[str, Any]]:
    """Things that have ids, in the order that was asked for, from the one after `after` on. Raises BadRequest."""
    listed = list(found) if order == "asc" else list(reversed(found))
    if after is None:
        return listed
    ids = [item["id"] for item in listed]
    if after not in ids:
        raise BadRequest(f"after: the list has no item {after!r}", code="invalid_value", param="after")
    return listed[ids.index(after) + 1 :]


class KeptChat:
    """A chat completion that is stored once it is whole, and before its client has seen the end of it."""

    def __init__(
        self, answer: ChatAnswer, request: ChatRequest, generation: Generation, gateway: Services
    ) -> None:
        self._answer = answer
        self._request = request
        self._generation = generation
        self._gateway = gateway

    async def whole(self) -> dict[str, Any]:
        """The answer in one piece."""
        answer = await self._answer.whole()
        await self._keep(answer)
        return answer

    async def events(self) -> AsyncIterator[bytes]:
        """The answer's events."""
        replies, kept = self._generation.choices.replies, False
        async for events in self._answer.events():
            if not kept and all(reply.over and reply.failure is None for reply in replies):
                kept = True
                await self._keep(await self._answer.whole())
            yield events

    async def _keep(self, answer: dict[str, Any]) -> None:
        row = {
            "id": answer["id"],
            "episode_id": self._generation.episode.id,
            "api": "chat",
            "model": self._generation.model.name,
            "previous": "",
            "messages": [],
            "input": self._request.messages,
            "answer": {**answer, "metadata": self._request.metadata or {}},
            "created_at": self._generation.choices.replies[0].received_at,
        }
        await self._gateway.database.submit(lambda c: answers.insert_answer(c, row))


@router.get("/v1/chat/completions")
async def list_chat_completions(
    request: Request,
    gateway: Gateway,
    model: str | None = None,
    order: Order = "asc",
    limit: Limit = 20,
    after: str | None = None,
    metadata_: Annotated[str | None, Query(alias="metadata[KEY]", description="Its value under KEY.")] = None,
) -> dict[str, Any]:
    """Return the stored chat completions of the episode, or of all episodes of the agent."""
    caller = await identify(request, gateway)
    owner = answers.Owner(caller.episode.id if caller.episode else "", caller.agent)
    if after is not None:
        await _completion(gateway, caller, after)
    matches = ((_METADATA.fullmatch(name), value) for name, value in request.query_params.multi_items())
    metadata = {match[1]: value for match, value in matches if match}
    found = await gateway.database.read(
        lambda c: answers.list_answers(
            c, "chat", owner, model=model, metadata=metadata, order=order, limit=limit + 1, after=after
        )
    )
    return page(found, limit)


@router.get("/v1/chat/completions/{completion_id}")
async def chat_completion(completion_id: str, request: Request, gateway: Gateway) -> dict[str, Any]:
    """A stored chat completion."""
    row = await _completion(gateway, await identify(request, gateway), completion_id)
    answer: dict[str, Any] = row["answer"]
    return answer


@router.post(
    "/v1/chat/completions/{completion_id}", openapi_extra=body_of(MetadataUpdate.model_json_schema())
)
async def update_chat_completion(completion_id: str, request: Request, gateway: Gateway) -> dict[str, Any]:
    """Replaces the metadata of a stored chat completion."""
    caller = await identify(request, gateway)
    try:
        body = await request.body()
        values = await offload_read(body, lambda: json_object(body))
        metadata = MetadataUpdate.model_validate(values).metadata or {}
    except ValidationError as error:
        raise validation_error(error.errors(), values) from error
    await _completion(gateway, caller, completion_id)
    changed = await gateway.database.submit(lambda c: answers.set_metadata(c, completion_id, metadata))
    if changed is None:
        raise _no_completion(completion_id)
    return changed


@router.delete("/v1/chat/completions/{completion_id}")
async def delete_chat_completion(completion_id: str, request: Request, gateway: Gateway) -> dict[str, Any]:
    """Deletes a stored chat completion; what was recorded of the call stays."""
    await _completion(gateway, await identify(request, gateway), completion_id)
    now = time.time()
    if not await gateway.database.submit(lambda c: answers.delete_answer(c, completion_id, now)):
        raise _no_completion(completion_id)
    return {"object": "chat.completion.deleted", "id": completion_id, "deleted": True}


@router.get("/v1/chat/completions/{completion_id}/messages")
async def chat_completion_messages(
    completion_id: str,
    request: Request,
    gateway: Gateway,
    order: Order = "asc",
    limit: Limit = 20,
    after: str | None = None,
) -> dict[str, Any]:
    """The messages that a stored chat completion answers."""
    row = await _completion(gateway, await identify(request, gateway), completion_id)
    shown = [_message_json(message, f"{completion_id}-{i}") for i, message in enumerate(row["input"])]
    return page(ordered(shown, order, after), limit)


def _message_json(message: dict[str, Any], message_id: str) -> dict[str, Any]:
    content = message.get("content")
    parts = content if isinstance(content, list) else None
    return {**message, "id": message_id, "content": None if parts else content, "content_parts": parts}


async def _completion(gateway: Services, caller: Caller, completion_id: str) -> dict[str, Any]:
    found = await owned(gateway, caller, completion_id, "chat")
    if found is None:
        raise _no_completion(completion_id)
    return found


def _no_completion(completion_id: str) -> NotFound:
    message = f"no stored chat completion has the id {completion_id!r}"
    return NotFound(message, code="completion_not_found", param="completion_id")
