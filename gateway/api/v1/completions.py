"""`POST /v1/completions`, as OpenAI's API has it. What is not supported is refused by name, never ignored."""

from __future__ import annotations

from fastapi import APIRouter, Request, Response

from gateway.api.context import Gateway, body_of, request_object
from gateway.api.query import QueryRoute
from gateway.api.v1.admission import admit
from gateway.api.v1.generation import generate
from gateway.api.v1.respond import respond
from gateway.api.v1.upstream import relay
from gateway.control.models import ServedModel
from gateway.dialects.completions import CompletionOutput, CompletionRequest, parse
from gateway.dialects.request import replies_of
from gateway.render.offload import offload_read

router = APIRouter(tags=["OpenAI"], route_class=QueryRoute)


@router.post("/v1/completions", openapi_extra=body_of(CompletionRequest.model_json_schema()))
async def completions(request: Request, gateway: Gateway) -> Response:
    """Continue a text, or token ids; whole or as server-sent events."""
    admission = await admit(request, gateway, "completions")
    body = await request.body()
    values = await offload_read(body, lambda: request_object(body))
    model = gateway.models.resolve(values["model"], admission.caller.model)
    if not isinstance(model, ServedModel):
        admission.count_replies(*replies_of(values))
        return await relay(gateway, admission.caller, model, "completions", values)
    completion, parsed = await offload_read(body, lambda: parse(values))
    generation = await generate(admission, model, parsed, body)
    output = CompletionOutput(generation.choices, completion, parsed, model.renderer)
    return respond(gateway, generation, output, parsed.stream)
