"""`/admin/v1/episodes`: open, restart, reward, close, abandon, look."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated, Any, Literal

from fastapi import Header, Query, Request, Response
from pydantic import BaseModel, ConfigDict, Field, FiniteFloat, Strict

from gateway.api.access import Access, Admin, episode_in_reach
from gateway.api.admin.admin_route import admin_router
from gateway.api.context import Gateway, bearer
from gateway.episodes import retention
from gateway.episodes.open_episode import CALLS
from gateway.render.renderer import ChatRenderer
from gateway.store import refused_calls, turns
from gateway.store.records import EpisodeRecord
from gateway.store.turns import spans_of
from gateway.trajectories.lineage import lineages
from headgate.errors import BadRequest, NotFound, invalid
from headgate.keys import key_of
from headgate.types import AS_REQUESTED, EpisodeMode, EpisodeRequest, EpisodeSampling, Node, TokenFlag

router = admin_router("Episodes", "/episodes", episode_in_reach)

Number = Annotated[FiniteFloat, Strict()]
"""A number in JSON; a truth value, and a number in quotes, are refused."""
Wait = Annotated[float, Query(ge=0, le=86_400, description="Seconds to wait.")]


class SamplingBody(BaseModel):
    """Sampling parameters of an evaluation episode, in place of those that its agent requests. Without any, the agent's stand."""

    model_config = ConfigDict(extra="forbid", use_attribute_docstrings=True)

    temperature: Number | None = Field(None, ge=0, le=2)
    """0 is greedy."""
    top_p: Number | None = Field(None, gt=0, le=1)
    seed: Literal["keep", "ignore"] = "keep"
    """`ignore`: a seed that the agent names, with which several episodes of a task would all be the same."""


class OpenBody(BaseModel):
    """The episode to open."""

    model_config = ConfigDict(extra="forbid", use_attribute_docstrings=True)

    task_id: str = Field(min_length=1, max_length=255)
    group_id: str | None = Field(None, min_length=1, max_length=255)
    group_size: int = Field(1, ge=1, le=1024)
    mode: EpisodeMode = "train"
    model: str | None = None
    """A trained model; the agent's, if none is named, and without an agent the first one."""
    agent: str | None = None
    """One of `[agents]`, whose key then reaches the episode too, by the episode's id."""
    metadata: dict[str, Any] = {}
    sampling: SamplingBody = SamplingBody()
    """Sampling parameters of the calls to the episode's own model. Only for evaluation: training episodes have `[sampling]`."""


class RewardBody(BaseModel):
    """A reward; a final one closes the episode. The component `calls` is the sum of what was posted on calls, never given."""

    model_config = ConfigDict(extra="forbid", use_attribute_docstrings=True)

    reward: Number
    components: dict[str, Number] | None = None
    final: bool = True


class CallRewardBody(BaseModel):
    """A reward of one call."""

    model_config = ConfigDict(extra="forbid", use_attribute_docstrings=True)

    reward: Number


class AbandonBody(BaseModel):
    """The reason why an episode will never be rewarded."""

    model_config = ConfigDict(extra="forbid", use_attribute_docstrings=True)

    reason: str = Field("abandoned", min_length=1, max_length=255)
    """A word for what happened; `agent_failed`: the agent ended without a reward."""
    error: str = Field("", max_length=65_536)
    """The agent's last output, such as the end of its standard error; shown with the episode, shortened if it is long."""


@router.post("")
async def open_episode(
    body: OpenBody,
    access: Admin,
    request: Request,
    wait: Wait = 0.0,
    idempotency_key: Annotated[str | None, Header(min_length=16, max_length=255)] = None,
) -> dict[str, Any]:
    """Open an episode once there is a slot within the staleness bound; otherwise 429 with Retry-After.

    With the header `Idempotency-Key` (random, for this episode only) the request can be repeated if its response was lost: it
    returns the same episode and key, even if the episode is closed by now.
    """
    place = body.task_id, body.group_id, body.group_size, body.mode, _model(body, access)
    sampling = EpisodeSampling(**body.sampling.model_dump())
    if body.mode == "train" and sampling != AS_REQUESTED:
        message = (
            'sampling: only for mode = "eval"; [sampling] in the gateway\'s file configures training episodes'
        )
        raise BadRequest(message, code="invalid_value", param="sampling")
    episode_request = EpisodeRequest(*place, body.metadata, body.agent or "", sampling=sampling)
    episodes = access.gateway.episodes
    if idempotency_key is None:
        opened = await episodes.open(episode_request, wait)
    else:
        opened = await episodes.open_once(key_of(bearer(request), idempotency_key), episode_request, wait)
    return {
        "episode_id": opened.episode_id,
        "api_key": opened.api_key,
        "base_url": opened.base_url,
        "version": opened.version,
    }


@router.post("/{episode_id}/reward")
async def post_reward(episode_id: str, body: RewardBody, gateway: Gateway) -> dict[str, Any]:
    """Store a reward. A final one closes the episode; rewards on its calls are added to it.

    `accepted` then states whether the reward counts: in the episode's group, or in an evaluation (`reason` is `eval`); otherwise
    `reason` is why not, such as `no_calls` if the agent sampled nothing. `trainable_tokens` is the number of tokens that can be
    trained, and `notice` what to do if there are none.
    """
    if CALLS in (body.components or {}):
        raise invalid(
            "components", f"{CALLS!r} is reserved for the sum of the rewards posted on calls: rename yours"
        )
    taken = await gateway.episodes.reward(episode_id, body.reward, body.components, body.final)
    shown = asdict(taken) if taken is not None else {}
    return {"episode_id": episode_id, "reward": body.reward, "final": body.final, **shown}


@router.post("/{episode_id}/calls/{call_id}/reward")
async def post_call_reward(
    episode_id: str, call_id: str, body: CallRewardBody, gateway: Gateway
) -> dict[str, Any]:
    """Store the reward of a call, in place of the one before. It counts in the episode's reward."""
    await gateway.episodes.reward_call(episode_id, call_id, body.reward)
    return {"episode_id": episode_id, "call_id": call_id, "reward": body.reward}


@router.post("/{episode_id}/close")
async def close(episode_id: str, response: Response, gateway: Gateway, wait: Wait = 0.0) -> dict[str, Any]:
    """End the episode's run. Its model's graders compute its reward, and it keeps its slot until they are done.

    200 with the outcome (state `closed`, reason, reward, components, error), or 202 (state `grading`) if that takes longer than
    `wait`.
    Closing again is not an error. Without graders the reward is what was posted so far; 409 if nothing was.
    """
    fate = await gateway.episodes.finish(episode_id, wait)
    if fate["state"] != "closed":
        response.status_code = 202
    return {"episode_id": episode_id, **fate}


@router.post("/{episode_id}/restart")
async def restart(episode_id: str, gateway: Gateway) -> dict[str, Any]:
    """Restart the episode after its agent crashed. What the crashed attempt sampled is not trained (`crashed_attempt`).

    Its running calls are stopped, its rewards are forgotten, and no later request repeats one of its calls. The attempt that
    begins has the key of the episode followed by a dot and `attempt`; requests with the key of an earlier attempt get 409
    (`attempt_over`). Keys of `[agents]` have no attempts: their requests belong to the attempt that has begun.
    """
    return {"episode_id": episode_id, "attempt": await gateway.episodes.restart(episode_id)}


@router.post("/{episode_id}/abandon")
async def abandon(episode_id: str, body: AbandonBody, gateway: Gateway) -> dict[str, Any]:
    """Close an episode that will never be rewarded; its slot is free immediately."""
    await gateway.episodes.abandon(episode_id, body.reason, body.error)
    return {"episode_id": episode_id, "reason": body.reason}


@router.delete("/{episode_id}")
async def delete_episode(
    episode_id: str,
    access: Admin,
    force: Annotated[
        bool, Query(description="Delete the episode even if a batch was trained on it.")
    ] = False,
) -> dict[str, Any]:
    """Delete a closed episode with all that was recorded in it. 409 where it is not closed, or may still be trained."""
    gateway = access.gateway
    await access.episode(episode_id)
    database = gateway.database.fenced(gateway.coordinator.fence)
    return {"episode_id": episode_id, **await retention.delete_episode(database, episode_id, force=force)}


@router.get("/{episode_id}")
async def get_episode(episode_id: str, access: Admin) -> dict[str, Any]:
    """Return one episode, with its calls and those that were refused.

    `id` is `episode_id` (of a call, `call_id`) under its old name.
    """
    row = await access.episode(episode_id)
    calls, refused = await access.gateway.database.read(
        lambda c: (turns.calls(c, episode_id), refused_calls.of_episode(c, episode_id))
    )
    shown = [{"call_id": call["id"], **{k: v for k, v in call.items() if k != "digest"}} for call in calls]
    return {**_named(row), "calls": shown, "refused_calls": refused}


@router.get("/{episode_id}/trajectory")
async def get_trajectory(episode_id: str, access: Admin, model: str | None = None) -> dict[str, Any]:
    """Return the episode's token tree: a node hangs at the first `at` tokens of its parent (-1: the root).

    For the episode's model, or another that it called. `lineage` numbers the conversations: sub-agents, samples of one prompt,
    and edited or compacted histories each have their own.
    """
    row = await access.episode(episode_id)
    found = access.called(model or row["model"], row["model"])
    nodes = (await access.gateway.database.read(lambda c: turns.nodes(c, found.name, [episode_id])))[
        episode_id
    ]
    lines = lineages(nodes)
    return {
        "episode_id": episode_id,
        "model": found.name,
        "reward": row["reward"],
        "nodes": [{**_node(found.renderer, node), "lineage": lines.get(node.index)} for node in nodes],
    }


@router.get("/{episode_id}/calls/{call_id}/exchange")
async def get_exchange(episode_id: str, call_id: str, gateway: Gateway) -> dict[str, Any]:
    """Return the request to an upstream model and its response."""
    row = await gateway.database.read(lambda c: turns.exchange(c, episode_id, call_id))
    if row is None:
        message = f"episode {episode_id!r} has no call {call_id!r} to an upstream model"
        raise NotFound(message, code="no_exchange")
    return row


def _named(row: EpisodeRecord) -> dict[str, Any]:
    return {"episode_id": row["id"], **row}


def _model(body: OpenBody, access: Access) -> str:
    """Return the trained model that an episode is opened for."""
    if body.agent is None:
        return access.trained(body.model).name
    agents = access.gateway.settings.agents
    model = access.gateway.settings.model_of(body.agent) if body.agent in agents else ""
    if not model or not access.reach.has(model):
        message = f"agent: no agent {body.agent!r} is configured ([agents.NAME])"
        raise BadRequest(message, code="unknown_agent", param="agent")
    if body.model is not None and access.trained(body.model).name != model:
        raise invalid("model", f"the agent {body.agent!r} belongs to the model {model!r}")
    return model


def _node(renderer: ChatRenderer, node: Node) -> dict[str, Any]:
    return {
        "index": node.index,
        "parent": node.parent,
        "at": node.at,
        "sampled": node.sampled,
        "text": renderer.decode(node.ids.tolist()),
        "ids": node.ids.tolist(),
        "logprobs": node.logprobs.tolist(),
        "versions": spans_of(node),
        "flags": [TokenFlag(f).name if f else "" for f in node.flags.tolist()],
        "temperature": node.temperature,
        "mask_reason": node.mask_reason,
        "call_id": node.call_id,
        "reward": node.reward,
        "finish_reason": node.finish_reason,
    }
