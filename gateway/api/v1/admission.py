"""Identifies the caller of a request, and reserves the places that the request takes until it is served."""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping
from dataclasses import dataclass

from fastapi import Request

from gateway.api.context import Services, check_placed, credentials, json_object
from gateway.api.query import check_query
from gateway.api.scope import EPISODE, keep_call, keep_ticket
from gateway.control.models import ServedModel
from gateway.dialects.request import GenerationRequest, replies_of
from gateway.episodes.callers import Caller
from gateway.episodes.open_episode import OtherAttempt
from gateway.episodes.refusals import RequestedCall
from gateway.generation.request_key import RequestKey
from gateway.render.offload import offload_read
from gateway.tenancy.limits import Ticket
from headgate.errors import BadRequest, Busy, GatewayError

EPISODE_HEADER = "x-headgate-episode"
_EXPECTED = 2048
"""The most replies of one refused request whose retry is expected: its body was not validated, and may request any number."""


async def identify(request: Request, gateway: Services) -> Caller:
    """Identify the caller. Raise NotAuthenticated, NotFound or Conflict, and BadRequest if two episodes are named."""
    prefix, header = request.scope.get(EPISODE, ""), request.headers.get(EPISODE_HEADER, "")
    if prefix and header and prefix != header:
        message = f"the path names the episode {prefix!r}, and the header {EPISODE_HEADER} another"
        raise BadRequest(message, code="invalid_value", param=EPISODE_HEADER)
    if not (key := credentials(request)):
        check_placed(request)
    return await gateway.callers.identify(key, prefix or header)


@dataclass(frozen=True, slots=True)
class Admission:
    """A request that was admitted."""

    gateway: Services
    caller: Caller
    call: RequestedCall
    ticket: Ticket
    headers: Mapping[str, str]
    """Those of the request; they may name the trace that its calls belong to."""

    def count_replies(self, replies: int, param: str) -> None:
        """Count each reply as a call. Raise Busy or BadRequest if the key may not have this many concurrently."""
        self.ticket.count_replies(replies, param)

    def reserve(self, model: ServedModel, parsed: GenerationRequest, key: RequestKey) -> None:
        """Reserve the places of a request's replies. Raise BadRequest, Busy or Unavailable if there is no room for them."""
        param = "prompt" if len(parsed.prompts) > 1 else "n"
        try:
            self.count_replies(parsed.choices, param)
            if parsed.choices > 1 and not key.retry:  # a retry may find replies that are complete already
                model.pool.check_room(parsed.choices, param)
        except GatewayError:
            _expect_retry(self.gateway, self.caller, key, parsed.choices)
            raise

    async def key(self, body: bytes) -> RequestKey:
        """Return the key of the request, in whatever episode."""
        return await offload_read(body, lambda: _request_key(self.gateway, self.headers, body))


async def admit(request: Request, gateway: Services, api: str, query: Collection[str] = ()) -> Admission:
    """Identify the caller and reserve a place for its request, until it is served. Raise Busy, and as `identify` does.

    `query`: the query parameters that the route has.
    """
    received_at = time.time()
    try:
        caller = await identify(request, gateway)
    except OtherAttempt as other:
        keep_call(request.scope, RequestedCall(api, received_at, other.episode))
        raise
    call = RequestedCall(api, received_at, caller.episode)
    keep_call(request.scope, call)
    check_query(request, query)
    try:
        gateway.database.check()  # refuse now: the sampled tokens could not be recorded
        ticket = gateway.limits.admit(caller)
    except Busy:
        body = await request.body()
        key = await offload_read(body, lambda: _request_key(gateway, request.headers, body))
        replies, _ = await offload_read(body, lambda: replies_of(json_object(body)))
        _expect_retry(gateway, caller, key, min(replies, _EXPECTED))
        raise
    keep_ticket(request.scope, ticket)
    return Admission(gateway, caller, call, ticket, request.headers)


def _expect_retry(gateway: Services, caller: Caller, key: RequestKey, choices: int) -> None:
    """Record that a call was refused before its episode was known, so that its retry gets no other call's reply."""
    if caller.episode is None:
        gateway.agents.refused(caller, key)
        return
    key = key.of_episode(caller.episode.id)
    for index in range(choices):
        gateway.replies.refused(key.choice(index))


def _request_key(gateway: Services, headers: Mapping[str, str], body: bytes) -> RequestKey:
    """Return the key of a request, in whatever episode. An invalid retry count counts as zero."""
    try:
        retries = int(headers.get("x-stainless-retry-count", "0"))
    except ValueError:
        retries = 0
    return RequestKey.of("", body, headers.get("idempotency-key", ""), retries, gateway.redactor.hash_key)
