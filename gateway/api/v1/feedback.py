"""`POST /v1/feedback`: what a user thought of a reply, by the response's id, under the key of a live agent."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request
from pydantic import Field, ValidationError

from gateway.api.context import Gateway, body_of, json_object
from gateway.api.query import QueryRoute
from gateway.api.v1.admission import identify
from gateway.dialects.request import Body
from gateway.render.offload import offload_read
from gateway.store import turns
from headgate.errors import Conflict, Forbidden, NotFound, validation_error

router = APIRouter(tags=["headgate"], route_class=QueryRoute)


class Feedback(Body):
    """Feedback on one reply."""

    id: str = Field(min_length=1, max_length=256)
    """The response's `id`."""
    reward: float = Field(allow_inf_nan=False)
    """The reward of the reply, in place of an earlier one; within `[rewards]`."""


@router.post("/v1/feedback", openapi_extra=body_of(Feedback.model_json_schema()))
async def post_feedback(request: Request, gateway: Gateway) -> dict[str, Any]:
    """Store the reward of a reply, while its conversation is open (`[agents] idle_s`) or for `feedback_s` afterwards.

    It counts in the episode's reward."""
    caller = await identify(request, gateway)
    agent = gateway.settings.agents.get(caller.agent)
    if agent is None or not agent.live:
        message = "feedback needs the key of an agent with `live = true` ([agents]): other keys cannot reward their own replies"
        raise Forbidden(message, code="not_live")
    body = await request.body()
    values = await offload_read(body, lambda: json_object(body))
    try:
        feedback = Feedback.model_validate(values)
    except ValidationError as error:
        raise validation_error(error.errors(), values) from error
    episode_id = await gateway.database.read(lambda c: turns.episode_of_call(c, feedback.id))
    if episode_id is None or await gateway.episodes.agent_of(episode_id) != caller.agent:
        raise NotFound(f"no response {feedback.id!r} of this key", code="no_call")
    outcome = "open"
    try:
        await gateway.episodes.reward_call(episode_id, feedback.id, feedback.reward)
    except Conflict as error:
        if error.code != "episode_closed" or agent.feedback_s is None:
            raise
        late = gateway.coordinator.late_feedback
        outcome = await late.reward_call(episode_id, feedback.id, feedback.reward)
    return {"id": feedback.id, "episode_id": episode_id, "reward": feedback.reward, "outcome": outcome}
