"""`/v1/responses`, as OpenAI's API has it: responses that are stored, and conversations that continue from them.

A stored response holds what it adds to the conversation; the conversation is the chain of responses that each one continues. Its
messages are those that were rendered and sampled, so the recorder continues from their tokens.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Query, Request, Response

from gateway.api.context import Gateway, Services, body_of, json_object, request_object
from gateway.api.query import QueryRoute
from gateway.api.v1.admission import admit, identify
from gateway.api.v1.generation import Generation, generate
from gateway.api.v1.images import image_support, read_images
from gateway.api.v1.respond import respond
from gateway.api.v1.sampling import tools_of
from gateway.api.v1.upstream import relay
from gateway.control.models import ServedModel
from gateway.dialects import responses as dialect
from gateway.dialects import responses_input as inputs
from gateway.dialects.request import GenerationRequest, Message, unsupported
from gateway.dialects.responses import Includable, ResponsesRequest
from gateway.dialects.responses_input import Item
from gateway.dialects.responses_output import Keep, ResponsesOutput
from gateway.dialects.responses_tools import Toolbox
from gateway.dialects.sizes import check_sizes
from gateway.episodes.callers import Caller
from gateway.render.offload import offload, offload_read
from gateway.store import responses as stored_responses
from gateway.store.responses import StoredResponse
from headgate.errors import BadRequest, NotFound, invalid

router = APIRouter(tags=["OpenAI"], route_class=QueryRoute)
Include = Annotated[
    Sequence[Includable], Query(alias="include[]", description="Changes nothing: responses are stored whole.")
]

DROPPED_TOOLS_HEADER = "x-headgate-dropped-tools"
Order = Literal["asc", "desc"]
Limit = Annotated[int, Query(ge=1, le=100)]
_SCHEMA = ResponsesRequest.model_json_schema()
_COUNTED = {**_SCHEMA, "required": []}


@router.post("/v1/responses", openapi_extra=body_of(_SCHEMA))
async def create_response(request: Request, gateway: Gateway) -> Response:
    """Return a reply to a conversation, whole or as server-sent events."""
    admission = await admit(request, gateway, "responses")
    body = await request.body()
    values = await offload_read(body, lambda: request_object(body))
    caller = await _continuing(gateway, admission.caller, values)
    model = gateway.models.resolve(values["model"], caller.model)
    if not isinstance(model, ServedModel):
        return await relay(gateway, caller, model, "responses", values)
    parsed = await offload_read(body, lambda: dialect.parse(values))
    toolbox = await offload_read(body, lambda: _toolbox(gateway, parsed))
    history = await _history(gateway, caller, parsed.previous_response_id)
    items = await _resolved(
        gateway, caller, await offload_read(body, lambda: inputs.items(parsed.input, image_support(model)))
    )
    new = await offload_read(body, lambda: inputs.messages(items))
    whole = await offload_read(
        body, lambda: dialect.generation_request(parsed, toolbox, [*history, *new], values)
    )
    generation = await generate(replace(admission, caller=caller), model, whole, body)
    new = generation.messages[len(generation.messages) - len(new) :]  # with images by name
    keep = _keep(gateway, generation, parsed, items, new) if parsed.stored else None
    response = ResponsesOutput(generation.choices, parsed, toolbox, model.renderer, keep)
    return respond(
        gateway, generation, response, parsed.stream, response.failure, _left_out(gateway, toolbox)
    )


@router.post("/v1/responses/input_tokens", openapi_extra=body_of(_COUNTED))
async def count_input_tokens(request: Request, gateway: Gateway) -> dict[str, Any]:
    """Count the tokens of a response's prompt."""
    caller = await identify(request, gateway)
    with gateway.limits.admit(caller):
        return {"object": "response.input_tokens", "input_tokens": await _counted(request, gateway, caller)}


async def _counted(request: Request, gateway: Services, caller: Caller) -> int:
    body = await request.body()
    values = await offload_read(body, lambda: json_object(body))
    check_sizes(values)
    caller = await _continuing(gateway, caller, values)
    given = values.pop("input", None)
    defaults = {"model": values.get("model") or caller.model, "input": "" if given is None else given}
    parsed = await offload_read(body, lambda: dialect.parse({**values, **defaults}))
    model = gateway.models.resolve(parsed.model, caller.model)
    if not isinstance(model, ServedModel):
        instead = "read `usage` in the responses of this upstream model, which counts its tokens itself"
        raise unsupported("model", f"counting the tokens of {parsed.model!r}", instead)
    history = await _history(gateway, caller, parsed.previous_response_id)
    listed = (
        await offload_read(body, lambda: inputs.items(parsed.input, image_support(model)))
        if given is not None
        else []
    )
    items = await _resolved(gateway, caller, listed)

    def conversation() -> GenerationRequest:
        return dialect.generation_request(
            parsed, _toolbox(gateway, parsed), [*history, *inputs.messages(items)], values
        )

    whole = await offload_read(body, conversation)
    return await prompt_tokens(gateway, caller, model, whole)


@router.get("/v1/responses/{response_id}")
async def response(
    response_id: str,
    request: Request,
    gateway: Gateway,
    stream: bool = False,
    starting_after: int | None = None,
    include_obfuscation: bool | None = None,
    include: Include = (),
) -> dict[str, Any]:
    """Return a stored response. It is not streamed again."""
    stored = await _response(gateway, await identify(request, gateway), response_id)
    parameters = {
        "stream": stream,
        "starting_after": starting_after is not None,
        "include_obfuscation": include_obfuscation,
    }
    for name, refused in parameters.items():
        if refused:
            raise unsupported(name, "this parameter", "leave it out: responses are retrieved whole")
    return stored.answer


@router.delete("/v1/responses/{response_id}")
async def delete_response(response_id: str, request: Request, gateway: Gateway) -> dict[str, Any]:
    """Delete a stored response. Those that continue it still can be, and what was recorded of the call stays."""
    await _response(gateway, await identify(request, gateway), response_id)
    now = time.time()
    if not await gateway.database.submit(lambda c: stored_responses.delete_response(c, response_id, now)):
        raise _no_response(response_id)
    return {"id": response_id, "object": "response", "deleted": True}


@router.get("/v1/responses/{response_id}/input_items")
async def input_items(
    response_id: str,
    request: Request,
    gateway: Gateway,
    order: Order = "desc",
    limit: Limit = 20,
    after: str | None = None,
    include: Include = (),
) -> dict[str, Any]:
    """Return the input of a stored response, without the conversation before it."""
    stored = await _response(gateway, await identify(request, gateway), response_id)
    return _page(_ordered(stored.input, order, after), limit)


@router.post("/v1/responses/{response_id}/cancel")
async def cancel_response(response_id: str, request: Request, gateway: Gateway) -> None:
    """Refused: only background responses can be cancelled, and there are none."""
    await _response(gateway, await identify(request, gateway), response_id)
    message = "only background responses can be cancelled: to stop this one while it is generated, close its connection"
    raise BadRequest(message, code="invalid_value", param="response_id")


def _toolbox(gateway: Services, parsed: ResponsesRequest) -> Toolbox:
    server = gateway.settings.server
    return Toolbox.of(parsed.tools or (), server.hosted_tools, server.tool_grammars)


def _left_out(gateway: Services, toolbox: Toolbox) -> dict[str, str]:
    """Return the header that names the tools that were dropped, which are counted."""
    for kind in toolbox.left_out:
        gateway.metrics.dropped_tools.labels(kind).inc()
    return {DROPPED_TOOLS_HEADER: ", ".join(toolbox.left_out)} if toolbox.left_out else {}


async def _continuing(gateway: Services, caller: Caller, values: dict[str, Any]) -> Caller:
    """Return the caller in the episode of the response that its request continues. Raise Conflict if the run of that one is
    over."""
    previous = values.get("previous_response_id")
    if caller.episode is not None or not isinstance(previous, str):
        return caller
    found = await _owned(gateway, caller, previous)
    if found is None:
        return caller
    episode = await gateway.callers.reach(caller, found.episode_id)
    return replace(caller, episode=episode, model=episode.model)


async def _history(gateway: Services, caller: Caller, previous: str | None) -> list[Message]:
    """Return the conversation that ends with a response."""
    if previous is None:
        return []
    if await _owned(gateway, caller, previous) is None:
        message = f"Previous response with id '{previous}' not found."
        raise NotFound(message, code="previous_response_not_found", param="previous_response_id")
    return await gateway.database.read(lambda c: stored_responses.conversation(c, previous))


async def _resolved(gateway: Services, caller: Caller, items: Sequence[Item]) -> list[Item]:
    """Return the items, with those that are only referred to in their places."""
    known: dict[str, dict[str, Item]] = {}
    """The items of each response that is referred to, by the response's id and their own; each response is read once."""
    for item in items:
        if item["type"] == "item_reference" and (response := inputs.response_of(item)) not in known:
            known[response] = await _items_of(gateway, caller, response)
    return [_referred(known, item) if item["type"] == "item_reference" else item for item in items]


async def _items_of(gateway: Services, caller: Caller, response_id: str) -> dict[str, Item]:
    """Return the items of a stored response, its input's and its own, by id."""
    found = await _owned(gateway, caller, response_id)
    items = [*found.input, *found.answer["output"]] if found else []
    return {item["id"]: item for item in items if item["type"] != "item_reference"}


def _referred(known: dict[str, dict[str, Item]], reference: Item) -> Item:
    item = known[inputs.response_of(reference)].get(reference["id"])
    if item is None:
        raise NotFound(f"Item with id '{reference['id']}' not found.", code="item_not_found", param="input")
    return item


def _keep(
    gateway: Services,
    generation: Generation,
    parsed: ResponsesRequest,
    items: Sequence[Item],
    new: Sequence[Message],
) -> Keep:
    """Store the response with what it adds to the conversation."""
    reply = generation.choices.replies[0]

    async def keep(response: dict[str, Any]) -> None:
        kept: dict[str, Any] = {
            "messages": [*new, reply.message()],
            "input": inputs.with_ids(items, response["id"]),
            "answer": response,
        }
        kept = await offload(kept, lambda: gateway.redactor.json(kept))
        stored = StoredResponse(
            id=response["id"],
            episode_id=generation.episode.id,
            model=generation.model.name,
            previous=parsed.previous_response_id or "",
            **kept,
            created_at=reply.received_at,
        )
        await gateway.database.submit(lambda c: stored_responses.insert_response(c, stored))

    return keep


async def prompt_tokens(
    gateway: Services, caller: Caller, model: ServedModel, parsed: GenerationRequest
) -> int:
    """Return the number of tokens of the prompt: in the caller's episode, if there is one."""
    parsed, _ = await read_images(gateway, parsed)
    tools, switches = tools_of(parsed), model.renderer.switches(parsed.effort, parsed.thinking)
    if caller.episode is not None:
        prompt = await model.recorder.prepare(caller.episode.id, parsed.messages, tools, switches)
        return len(prompt.ids)
    renderer = model.renderer.switched(switches)
    return len(await offload((parsed.messages, tools), lambda: renderer.render(parsed.messages, tools)))


async def _owned(gateway: Services, caller: Caller, response_id: str) -> StoredResponse | None:
    """Return a stored response, or None if the caller has none of that id. An agent's key reaches those of all its episodes."""
    stored = await gateway.database.read(lambda c: stored_responses.response(c, response_id))
    if stored is None:
        return None
    if caller.episode is not None:
        return stored if stored.episode_id == caller.episode.id else None
    return stored if await gateway.episodes.agent_of(stored.episode_id) == caller.agent else None


def _page(found: Sequence[dict[str, Any]], limit: int) -> dict[str, Any]:
    """Return a list in OpenAI's form. What exceeds the limit only sets `has_more`."""
    data = list(found[:limit])
    ends = (
        {"first_id": data[0]["id"], "last_id": data[-1]["id"]}
        if data
        else {"first_id": None, "last_id": None}
    )
    return {"object": "list", "data": data, **ends, "has_more": len(found) > limit}


def _ordered(found: Sequence[dict[str, Any]], order: Order, after: str | None) -> list[dict[str, Any]]:
    """Return items in the requested order, starting behind the item `after`. Raise BadRequest if there is no such item."""
    listed = list(found) if order == "asc" else list(reversed(found))
    if after is None:
        return listed
    ids = [item["id"] for item in listed]
    if after not in ids:
        raise invalid("after", f"the list has no item {after!r}")
    return listed[ids.index(after) + 1 :]


async def _response(gateway: Services, caller: Caller, response_id: str) -> StoredResponse:
    found = await _owned(gateway, caller, response_id)
    if found is None:
        raise _no_response(response_id)
    return found


def _no_response(response_id: str) -> NotFound:
    return NotFound(
        f"Response with id '{response_id}' not found.", code="response_not_found", param="response_id"
    )
