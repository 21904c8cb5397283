"""`/admin/v1/events`: the stream of events (docs/topics/events.md)."""

from __future__ import annotations

from typing import Annotated

from fastapi import Header, Query, Response
from pydantic import Field, StringConstraints

from gateway.api.access import Access, Admin
from gateway.api.admin.admin_route import admin_router
from gateway.api.stream import EventStream, openai_failure
from gateway.observe.events import Start
from gateway.store.events import EventFilter
from headgate.errors import BadRequest, invalid

PATH = "/admin/v1/events"
"""Every process of a cluster serves requests to this path itself."""
router = admin_router("Events")

_SUBJECTS = "episode|group|batch|version|engine|node|trainer"
Id = Annotated[int, Field(ge=0, lt=2**53)]
Kind = Annotated[str, StringConstraints(pattern=rf"^({_SUBJECTS})(\.[a-z_]{{1,31}})?$")]
Name = Annotated[str, StringConstraints(min_length=1, max_length=255)]


@router.get("/events", response_class=Response, responses={200: {"content": {"text/event-stream": {}}}})
async def watch(
    access: Admin,
    after: Annotated[Id | None, Query(description="Begin after the event with this id; 0: with all.")] = None,
    last: Annotated[int | None, Query(ge=0, le=10_000, description="Return the last N events first.")] = None,
    kind: Annotated[
        list[Kind] | None,
        Query(max_length=32, description="Only these: `episode`, or `episode.closed`. May be repeated."),
    ] = None,
    model: Annotated[Name | None, Query(description="Only events of this model.")] = None,
    episode: Annotated[Name | None, Query(description="Only events of this episode.")] = None,
    group: Annotated[Name | None, Query(description="Only events of this group.")] = None,
    wait: Annotated[
        float | None,
        Query(
            ge=0,
            le=86_400,
            description="End the stream after this many seconds; 0: after the events that exist.",
        ),
    ] = None,
    last_event_id: Annotated[str | None, Header(description="In place of `after` and `last`.")] = None,
) -> Response:
    """Stream events as server-sent events; without `after` and `last`, from now on. The stream can be resumed after any
    id."""
    feed, start = access.gateway.events, _start(after, last, last_event_id)
    wanted = EventFilter(tuple(kind or ()), await _models(access, model), episode, group)
    feed.check()
    keep_alive_s = access.gateway.settings.server.keep_alive_s
    return EventStream(lambda: feed.watch(wanted, start, wait), keep_alive_s, openai_failure)


def _start(after: int | None, last: int | None, resumed: str | None) -> Start:
    """Return where the stream begins. The header has priority, because a browser repeats the same request with it."""
    if resumed:
        if not (resumed.isascii() and resumed.isdigit() and int(resumed) < 2**53):
            raise invalid("Last-Event-ID", "it must be the `id` of an event")
        return Start(after=int(resumed))
    if after is not None and last is not None:
        raise BadRequest("after and last: name one of the two", code="invalid_value", param="last")
    return Start(after, last)


async def _models(access: Access, model: str | None) -> tuple[str, ...] | None:
    """Return the models whose events are sent; None: all. Raise NotFound."""
    if model is None:
        return None if access.reach.everything else access.reach.models
    return (await access.recorded(model),)
