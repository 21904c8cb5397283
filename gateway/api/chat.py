"""`POST /v1/chat/completions`, as OpenAI's API has it. What is not supported is refused by name, never ignored."""

from __future__ import annotations

from fastapi import APIRouter, Request, Response

from gateway.api.context import Gateway, asked_object
from gateway.api.generation import admitted, count_replies, generate, respond
from gateway.api.images import image_support
from gateway.api.query import QueryRoute
from gateway.api.stored import KeptChat, body_of
from gateway.api.upstream import relay
from gateway.control.models import ServedModel
from gateway.dialects.chat import ChatAnswer, ChatRequest, parse
from gateway.dialects.request import replies_of
from gateway.render.offload import offload_read

router = APIRouter(tags=["OpenAI"], route_class=QueryRoute)


@router.post("/v1/chat/completions", openapi_extra=body_of(ChatRequest.model_json_schema()))
async def chat_completions(request: Request, gateway: Gateway) -> Response:
    """A reply to a conversation, whole or as server-sent events."""
    caller = await admitted(request, gateway, "chat")
    body = await request.body()
    values = await offload_read(body, lambda: asked_object(body, gateway.settings.requests))
    model = gateway.models.resolve(values["model"], caller.model)
    if not isinstance(model, ServedModel):
        count_replies(request.scope, *replies_of(values))
        return await relay(gateway, caller, model, "chat/completions", values)
    chat, asked = await offload_read(body, lambda: parse(values, image_support(model)))
    generation = await generate(request, gateway, caller, model, asked, body)
    plain = ChatAnswer(generation.choices, chat, model.renderer)
    answer = KeptChat(plain, chat, generation, gateway) if chat.store else plain
    return respond(gateway, generation, answer, asked.stream)
