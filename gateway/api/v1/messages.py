"""Anthropic's `/v1/messages` and `/v1/messages/count_tokens`. What is not supported is refused by name, never ignored."""

from __future__ import annotations

from typing import Any

import orjson
from fastapi import APIRouter, Request, Response

from gateway.api.context import Gateway, Services, body_of, request_object
from gateway.api.errors import anthropic_error_body
from gateway.api.query import BETA, Beta, QueryRoute
from gateway.api.v1.admission import admit, identify
from gateway.api.v1.generation import generate
from gateway.api.v1.images import image_support
from gateway.api.v1.respond import respond
from gateway.api.v1.responses import prompt_tokens
from gateway.control.models import ServedModel
from gateway.dialects.messages import CountRequest, MessagesRequest, parse, parse_count
from gateway.dialects.messages_output import PING, MessagesOutput
from gateway.episodes.callers import Caller
from gateway.render.offload import offload_read
from headgate.errors import BadRequest, GatewayError

router = APIRouter(tags=["Anthropic"], route_class=QueryRoute)


@router.post("/v1/messages", openapi_extra=body_of(MessagesRequest.model_json_schema()))
async def create_message(request: Request, gateway: Gateway, beta: Beta = None) -> Response:
    """Return a reply to a conversation, whole or as server-sent events."""
    admission = await admit(request, gateway, "messages", (BETA,))
    body = await request.body()
    values = await offload_read(body, lambda: request_object(body))
    model = _model(gateway, admission.caller, values["model"])
    message, parsed = await offload_read(body, lambda: parse(values, image_support(model)))
    generation = await generate(admission, model, parsed, body)
    output = MessagesOutput(generation.choices, message)
    return respond(gateway, generation, output, parsed.stream, _failure, keep_alive=PING)


@router.post("/v1/messages/count_tokens", openapi_extra=body_of(CountRequest.model_json_schema()))
async def count_tokens(request: Request, gateway: Gateway, beta: Beta = None) -> dict[str, Any]:
    """Count the tokens that a call with this conversation would have in the caller's episode now."""
    caller = await identify(request, gateway)
    with gateway.limits.admit(caller):
        body = await request.body()
        values = await offload_read(body, lambda: request_object(body))
        model = _model(gateway, caller, values["model"])
        counted = await offload_read(body, lambda: parse_count(values, image_support(model)))
        return {"input_tokens": await prompt_tokens(gateway, caller, model, counted)}


def _model(gateway: Services, caller: Caller, name: str) -> ServedModel:
    model = gateway.models.resolve(name, caller.model)
    if not isinstance(model, ServedModel):
        message = f"model: {name!r} is an upstream model with OpenAI's API: call it at /v1/chat/completions"
        raise BadRequest(message, code="unsupported_model", param="model")
    return model


def _failure(error: GatewayError) -> bytes:
    return b"event: error\ndata: " + orjson.dumps(anthropic_error_body(error)) + b"\n\n"
