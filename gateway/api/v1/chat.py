"""`POST /v1/chat/completions`, as OpenAI's API has it. What is not supported is refused by name, never ignored."""

from __future__ import annotations

from fastapi import APIRouter, Request, Response

from gateway.api.context import Gateway, body_of, request_object
from gateway.api.query import QueryRoute
from gateway.api.v1.admission import admit
from gateway.api.v1.generation import generate
from gateway.api.v1.images import image_support
from gateway.api.v1.respond import respond
from gateway.api.v1.upstream import relay
from gateway.control.models import ServedModel
from gateway.dialects.chat import ChatOutput, ChatRequest, parse
from gateway.dialects.request import replies_of
from gateway.render.offload import offload_read

router = APIRouter(tags=["OpenAI"], route_class=QueryRoute)


@router.post("/v1/chat/completions", openapi_extra=body_of(ChatRequest.model_json_schema()))
async def chat_completions(request: Request, gateway: Gateway) -> Response:
    """Return a reply to a conversation, whole or as server-sent events."""
    admission = await admit(request, gateway, "chat")
    body = await request.body()
    values = await offload_read(body, lambda: request_object(body))
    model = gateway.models.resolve(values["model"], admission.caller.model)
    if not isinstance(model, ServedModel):
        admission.count_replies(*replies_of(values))
        return await relay(gateway, admission.caller, model, "chat/completions", values)
    chat, parsed = await offload_read(body, lambda: parse(values, image_support(model)))
    generation = await generate(admission, model, parsed, body)
    output = ChatOutput(generation.choices, chat, model.renderer)
    return respond(gateway, generation, output, parsed.stream)
