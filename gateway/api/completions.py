"""`POST /v1/completions`, as OpenAI's API has it. What is not supported is refused by name, never ignored."""

from __future__ import annotations

from fastapi import APIRouter, Request, Response

from gateway.api.context import Gateway, asked_object
from gateway.api.generation import admitted, count_replies, generate, respond
from gateway.api.query import QueryRoute
from gateway.api.stored import body_of
from gateway.api.upstream import relay
from gateway.control.models import ServedModel
from gateway.dialects.completions import CompletionAnswer, CompletionRequest, parse
from gateway.dialects.request import replies_of
from gateway.render.offload import offload_read

router = APIRouter(tags=["OpenAI"], route_class=QueryRoute)


@router.post("/v1/completions", openapi_extra=body_of(CompletionRequest.model_json_schema()))
async def completions(request: Request, gateway: Gateway) -> Response:
    """Continues a text, or token ids; whole or as server-sent events."""
    caller = await admitted(request, gateway, "completions")
    body = await request.body()
    values = await offload_read(body, lambda: asked_object(body, gateway.settings.requests))
    model = gateway.models.resolve(values["model"], caller.model)
    if not isinstance(model, ServedModel):
        count_replies(request.scope, *replies_of(values))
        return await relay(gateway, caller, model, "completions", values)
    completion, asked = await offload_read(body, lambda: parse(values))
    generation = await generate(request, gateway, caller, model, asked, body)
    answer = CompletionAnswer(generation.choices, completion, asked, model.renderer)
    return respond(gateway, generation, answer, asked.stream)
