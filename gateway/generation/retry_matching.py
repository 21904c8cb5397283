"""Finds the earlier request that a retry repeats. Pure.

A client without an idempotency key only repeats a body. Equal bodies may be independent samples (best of n), so the body does not
identify the repeated request; the outcomes of the earlier requests do: a client that has its reply does not retry. Equal
requests are interchangeable, so each client only needs a reply of its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Generic, TypeVar

T = TypeVar("T")


class RequestState(Enum):
    """The state of an earlier request, as far as this process knows."""

    LOST = "its client disconnected without the whole reply"
    REFUSED = "it was refused or failed, and has no reply"
    HERE = "its client reads the reply in this process"
    ELSEWHERE = "it runs in another process, and only that one knows its client"
    RECORDED = "its reply is recorded and was sent whole"


@dataclass(frozen=True, slots=True)
class EarlierRequest(Generic[T]):
    """An earlier request, which a retry may repeat."""

    call_id: str
    state: RequestState
    source: T
    """The source of its reply."""
    arrived: float | None = None
    """When a refused request arrived, by this process's monotonic clock; None: not known, or of another state."""


def find_repeated(earlier: Sequence[EarlierRequest[T]], *, exact: bool) -> EarlierRequest[T] | None:
    """Return the request that a retry repeats; for None or a REFUSED one the retry begins a new reply.

    `exact`: all of `earlier` have the retry's idempotency key, so they are one request. Otherwise, in this order:
    1. a request whose client has disconnected;
    2. a request that was refused or failed: its client is expected to retry;
    3. the only earlier request, even if its client seems to be connected: a connection can break unnoticed;
    4. a request in another process, if none runs here: that process knows whether its client has disconnected.
    """
    lost, served = RequestState.LOST, (RequestState.HERE, RequestState.ELSEWHERE, RequestState.RECORDED)
    states = (lost, *served) if exact else (lost, RequestState.REFUSED)
    for state in states:
        for request in earlier:
            if request.state is state:
                return request
    if exact:
        return None
    if len(earlier) == 1:
        return earlier[0]
    if any(request.state is RequestState.HERE for request in earlier):
        return None
    return next((request for request in earlier if request.state is RequestState.ELSEWHERE), None)


def is_retried(request: EarlierRequest[T], call_id: str, age_s: float, *, now: float) -> bool:
    """Return true if a refused request was repeated by a retry that began the call `call_id` `age_s` ago.

    That call counts for every equal request which had arrived before. The process that refused one of them may not know that,
    because another process received the retry.
    """
    if request.state is not RequestState.REFUSED or request.arrived is None or request.call_id == call_id:
        return False
    return now - request.arrived >= age_s
