"""An async client of the admin API. It owns one connection pool; close it, or use it with `async with`.

Every method raises `GatewayRefused` when the gateway responds with an error, and httpx's own errors when it does not respond.
Where a method takes a `model`, None is the gateway's first trained one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Any, Literal, Self

import httpx
from httpx_aiohttp import AiohttpTransport

from headgate.arrow import read_stream
from headgate.client.events import EventStream
from headgate.client.refusal import GatewayRefused, OldGateway, body_of, refusal
from headgate.feed_version import FEED_HEADER, FEED_VERSION, OLDEST_FEED
from headgate.http import responds
from headgate.types import (
    AS_REQUESTED,
    EpisodeMode,
    EpisodeOpened,
    EpisodeSampling,
    Group,
    Lease,
    LeasedGroups,
)

__all__ = ["ADMIN", "GatewayClient", "GatewayRefused"]

ADMIN = "/admin/v1"
_UNAVAILABLE = 503
# 0 means no limit: a reward must not wait behind a hundred requests that wait for a slot. (None would be aiohttp's default, 100.)
# The gateway closes idle connections after 5 s: leave before it does.
_LIMITS = httpx.Limits(max_connections=0, keepalive_expiry=4.0)


class GatewayClient:
    """The admin API of one gateway; `base_url` is its root, such as `http://127.0.0.1:8000`."""

    def __init__(self, base_url: str, admin_key: str | None = None, timeout_s: float = 60.0) -> None:
        headers = {FEED_HEADER: str(FEED_VERSION)}
        if admin_key:
            headers["Authorization"] = f"Bearer {admin_key}"
        self._http = httpx.AsyncClient(
            base_url=base_url,
            headers=headers,
            timeout=timeout_s,
            transport=AiohttpTransport(limits=_LIMITS),
        )
        self._timeout_s = timeout_s
        self.url = base_url

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Close the connections."""
        await self._http.aclose()

    # Episodes

    async def open_episode(
        self,
        task_id: str,
        group_id: str | None = None,
        group_size: int = 1,
        mode: EpisodeMode = "train",
        metadata: dict[str, Any] | None = None,
        wait_s: float = 0.0,
        model: str | None = None,
        agent: str | None = None,
        idempotency_key: str | None = None,
        sampling: EpisodeSampling = AS_REQUESTED,
    ) -> EpisodeOpened:
        """Open an episode; wait up to `wait_s` for a slot, then raise `GatewayRefused` with status 429.

        `agent`: one of the gateway's `[agents]`, whose key then reaches the episode too. `idempotency_key`: at least 16
        random characters; a request that repeats the key gets the same episode. `sampling`: parameters of an evaluation
        episode, in place of those that its agent requests.
        """
        body = {
            "task_id": task_id,
            "group_id": group_id,
            "group_size": group_size,
            "mode": mode,
            "metadata": metadata or {},
            "model": model,
            "agent": agent,
            **({"sampling": given} if (given := sampling.stored()) else {}),
        }
        headers = {} if idempotency_key is None else {"Idempotency-Key": idempotency_key}
        response = await self._json(
            "POST", "/episodes", json=body, params={"wait": wait_s}, wait_s=wait_s, headers=headers
        )
        return EpisodeOpened(
            response["episode_id"], response["api_key"], response["base_url"], response["version"]
        )

    async def reward(
        self,
        episode_id: str,
        reward: float,
        components: dict[str, float] | None = None,
        final: bool = True,
    ) -> dict[str, Any]:
        """Post a reward; a final one closes the episode, with what was posted on its calls added.

        The response to a final one has `accepted`, whether the reward counts, with the `reason`; `trainable_tokens`, the number
        of tokens that a trainer can train; and a `notice` of what to do if either is not so.
        """
        body = {"reward": reward, "components": components, "final": final}
        return await self._json("POST", f"/episodes/{episode_id}/reward", json=body)

    async def call_reward(self, episode_id: str, call_id: str, reward: float) -> None:
        """Post the reward of one call (its `id` as the agent saw it). It replaces the call's earlier reward and is added
        to the episode's."""
        await self._json("POST", f"/episodes/{episode_id}/calls/{call_id}/reward", json={"reward": reward})

    async def close_episode(self, episode_id: str, wait_s: float = 0.0) -> dict[str, Any]:
        """End an episode's run, so that the gateway's graders compute its reward; wait up to `wait_s` for that.

        Return `state` (`grading` or `closed`) and, once closed, `reason` (`rewarded`, or why not), `reward` and `components`.
        """
        path = f"/episodes/{episode_id}/close"
        return await self._json("POST", path, params={"wait": wait_s}, wait_s=wait_s)

    async def restart(self, episode_id: str) -> int:
        """Report that an episode's agent crashed and is started again in it: nothing that it did so far is trained or
        rewarded. Return the number of the attempt that begins, whose key is `attempt_key(api_key, number)`."""
        attempt: int = (await self._json("POST", f"/episodes/{episode_id}/restart"))["attempt"]
        return attempt

    async def abandon(self, episode_id: str, reason: str, error: str = "") -> None:
        """Close an episode that gets no reward, so that its slot is free immediately; `error`: its agent's last lines."""
        body = {"reason": reason, "error": error}
        await self._json("POST", f"/episodes/{episode_id}/abandon", json=body)

    async def episode(self, episode_id: str) -> dict[str, Any]:
        """Return an episode's state."""
        return await self._json("GET", f"/episodes/{episode_id}")

    async def episodes(self, **filters: str | int) -> list[dict[str, Any]]:
        """Return the newest episodes; filters: state, mode, group_id, task_id, limit."""
        return (await self._json("GET", "/episodes", params=filters))["episodes"]

    async def trajectory(self, episode_id: str, model: str | None = None) -> dict[str, Any]:
        """Return an episode's token tree, as JSON; of the episode's own model, or of another that it called."""
        return await self._json("GET", f"/episodes/{episode_id}/trajectory", params=_model_query(model))

    async def exchange(self, episode_id: str, call_id: str) -> dict[str, Any]:
        """Return the request to an upstream model and its response."""
        return await self._json("GET", f"/episodes/{episode_id}/calls/{call_id}/exchange")

    async def not_ready(self) -> str:
        """Return the reason why calls would not be served now, such as that no engine is ready; empty if they would be, or if
        the gateway does not know it."""
        try:
            response = await self._http.get("/readyz")
        except httpx.TransportError:
            return ""
        return refusal(response).message if response.status_code == _UNAVAILABLE else ""

    async def is_ready(self) -> bool:
        """Return True if a call would be served now; False also if nothing responds at the URL."""
        return await responds(f"{self.url}/readyz")

    async def image(self, name: str) -> bytes:
        """Return the file of an image that a stored episode has, by its hash (SHA-256, hexadecimal)."""
        return (await self._send("GET", f"/images/{name}")).content

    # Batches

    async def lease(self, consumer: str, model: str | None = None) -> Lease:
        """Lease the next batch, complete or not.

        Raise `GatewayRefused` with status 409 while another consumer has the lease, and `OldGateway`.
        """
        response = await self._send("POST", "/leases", json={"consumer": consumer, "model": model})
        served = int(response.headers.get(FEED_HEADER, 0))
        if served < OLDEST_FEED:
            raise OldGateway(self.url, served)
        body = body_of(response)  # a newer gateway may send further fields
        return Lease(**{field.name: body[field.name] for field in fields(Lease)})

    async def leased_groups(
        self, lease: Lease, cursor: int = 0, wait_s: float = 0.0, model: str | None = None
    ) -> LeasedGroups:
        """Return the rewarded groups after `cursor`, maybe none; wait up to `wait_s` for one."""
        params = {"cursor": cursor, "wait": wait_s, "fence": lease.fence, **_model_query(model)}
        response = await self._send("GET", f"/leases/{lease.lease_id}/groups", params=params, wait_s=wait_s)
        return _leased(response)

    async def renew(self, lease: Lease, model: str | None = None) -> None:
        """Restart the lease's deadline."""
        await self._post_lease(lease, "renew", model)

    async def ack(self, lease: Lease, checkpoint: str, model: str | None = None) -> None:
        """Report that the batch was trained and that `checkpoint` includes it."""
        await self._post_lease(lease, "ack", model, checkpoint=checkpoint)

    async def nack(self, lease: Lease, reason: str, model: str | None = None) -> None:
        """Give the batch back untrained: the next lease is of the same batch, unless a version after it is published."""
        await self._post_lease(lease, "nack", model, reason=reason)

    async def batches(self, model: str | None = None) -> list[dict[str, Any]]:
        """Return the trained batches, in order: batch, groups, trained_at (seconds since the epoch)."""
        return (await self._json("GET", "/batches", params=_model_query(model)))["batches"]

    async def batch_groups(self, batch: int, model: str | None = None) -> tuple[Group, ...]:
        """Return the groups of a trained batch, in the order and form of its lease. Only the flag ORPHANED may differ: it is
        the present one. Raise `GatewayRefused` with status 404 if the batch was not trained.
        """
        response = await self._send("GET", f"/batches/{batch}/groups", params=_model_query(model))
        return _leased(response).groups

    async def staleness(self, model: str | None = None) -> dict[str, Any]:
        """Return the ledger of a trained model: version, next batch to train, batches, waiting groups, and recently lost
        groups."""
        return await self._json("GET", "/staleness", params=_model_query(model))

    async def why(self, episode_id: str) -> dict[str, Any]:
        """Return the history of an episode and its group, in order and in words, and the verdict."""
        return await self._json("GET", f"/episodes/{episode_id}/why")

    async def delete_conversations(self, agent: str, user: str | None = None) -> dict[str, Any]:
        """Delete the conversations of an agent's user, or without one all of the agent.

        Return `episodes`, and the `versions` that were trained from them; `leased`: batches that a trainer had in that moment.
        """
        body = {"agent": agent, "all": True} if user is None else {"agent": agent, "user": user}
        return await self._json("POST", "/deletions", json=body)

    async def _post_lease(self, lease: Lease, action: str, model: str | None, **fields: str) -> None:
        body = {"fence": lease.fence, **fields}
        await self._json("POST", f"/leases/{lease.lease_id}/{action}", json=body, params=_model_query(model))

    # Weights

    async def publish(
        self,
        version: int,
        path: str | None = None,
        wait_s: float = 0.0,
        model: str | None = None,
        url: str | None = None,
        skip_batches: bool = False,
    ) -> dict[str, Any]:
        """Publish a version, in directory `path` or at the server `url` (see docs/topics/weights.md).

        The gateway checks the manifest before it responds, then updates its engines. It responds once the engines run the
        version, or after `wait_s`. The response's `state` is `updating`, `live` or `failed`.
        `skip_batches`: accept a number above the next one, and lose the batches of the numbers between.
        """
        body: dict[str, Any] = {"version": version, "path": path, "url": url, "model": model}
        if skip_batches:
            body["skip_batches"] = True
        return await self._json("POST", "/weights", json=body, params={"wait": wait_s}, wait_s=wait_s)

    async def weights(self, version: int, model: str | None = None) -> dict[str, Any]:
        """Return a version's state, parent, probe reports and the seconds of each step of its update."""
        return await self._json("GET", f"/weights/{version}", params=_model_query(model))

    async def canary(self, model: str | None = None) -> dict[str, Any]:
        """Return the version that a share of new conversations tries, its figures, and the trials before."""
        return await self._json("GET", "/canary", params=_model_query(model))

    async def decide_canary(
        self, action: Literal["hold", "resume", "promote", "rollback"], model: str | None = None
    ) -> dict[str, Any]:
        """Hold the running trial, leave it to its test again, promote its version, or return it; return the state."""
        return await self._json("POST", f"/canary/{action}", json={"model": model})

    async def status(self, model: str | None = None) -> dict[str, Any]:
        """Return a trained model's newest version and batches, every engine, open episodes, and totals."""
        return await self._json("GET", "/status", params=_model_query(model))

    # Engines and calls

    async def engines(self) -> list[dict[str, Any]]:
        """Return the engines of all models."""
        return (await self._json("GET", "/engines"))["engines"]

    async def add_engine(
        self,
        name: str | None = None,
        url: str | None = None,
        model: str | None = None,
        wait_s: float = 0.0,
        node: str | None = None,
    ) -> dict[str, Any]:
        """Add the engine at `url`, or one that the gateway starts. Wait up to `wait_s` until it is open, or asleep on a `node`
        that is not lent."""
        body = {"name": name, "url": url, "model": model, "node": node}
        return await self._json("POST", "/engines", json=body, params={"wait": wait_s}, wait_s=wait_s)

    async def remove_engine(self, name: str, wait_s: float = 0.0) -> dict[str, Any]:
        """Drain and stop an engine; its calls continue elsewhere. `removed` states whether that was done within `wait_s`."""
        return await self._json("DELETE", f"/engines/{name}", params={"wait": wait_s}, wait_s=wait_s)

    async def pause_engine(self, name: str, wait_s: float = 0.0) -> dict[str, Any]:
        """Put an engine to sleep until it is resumed; its calls continue elsewhere. Wait up to `wait_s` until it has none."""
        return await self._json("POST", f"/engines/{name}/pause", params={"wait": wait_s}, wait_s=wait_s)

    async def resume_engine(self, name: str, wait_s: float = 0.0) -> dict[str, Any]:
        """Wake a paused engine; wait up to `wait_s` until it is open."""
        return await self._json("POST", f"/engines/{name}/resume", params={"wait": wait_s}, wait_s=wait_s)

    async def calls(self) -> list[dict[str, Any]]:
        """Return the calls that run in an engine or wait for one."""
        return (await self._json("GET", "/calls"))["calls"]

    async def move_call(self, call_id: str, engine: str | None = None) -> None:
        """Send a call to another engine: to `engine`, or to any; it continues there from its last token."""
        await self._json("POST", f"/calls/{call_id}/move", json={"engine": engine})

    # Nodes

    async def nodes(self) -> list[dict[str, Any]]:
        """Return all nodes, with name, tags, zone, role, reason, claimable, claimed_by, engines, seconds."""
        return (await self._json("GET", "/nodes"))["nodes"]

    async def node(self, name: str) -> dict[str, Any]:
        return await self._json("GET", f"/nodes/{name}")

    async def add_node(self, name: str, tags: Sequence[str], zone: str = "") -> dict[str, Any]:
        """Add a node, or replace the tags of an existing one."""
        return await self._json("POST", "/nodes", json={"name": name, "tags": list(tags), "zone": zone})

    async def remove_node(self, name: str) -> dict[str, Any]:
        """Remove a node; its engines are drained and stopped."""
        return await self._json("DELETE", f"/nodes/{name}")

    async def claim(self, node: str, wait_s: float = 0.0, model: str | None = None) -> dict[str, Any]:
        """Claim a node for a trainer, or renew the claim. Wait up to `wait_s` for the node.

        The response's `role` is `train` once the trainer has the node. The claim lapses unless it is renewed within the
        response's `claim_s` seconds.
        """
        body = {"model": model, "wait_s": wait_s}
        return await self._json("POST", f"/nodes/{node}/claim", json=body, wait_s=wait_s)

    async def release(
        self,
        node: str,
        model: str | None = None,
        busy_s: float = 0.0,
        load_s: float = 0.0,
        rest_s: float = 0.0,
    ) -> dict[str, Any]:
        """Offer a trainer's node for lending while the trainer waits.

        `busy_s`: seconds of its computation on the groups of its last batch, without the step at the end and without waiting.
        The node is recalled by this much before the next batch is complete (`[lending] recall_ahead_share`). `load_s`: seconds
        of loading its weights. `rest_s`: seconds of all other work on the batch, such as the step. `[elastic]` of a cluster
        decides by the sum of the three.
        """
        body = {"model": model, "busy_s": busy_s, "load_s": load_s, "rest_s": rest_s}
        return await self._json("POST", f"/nodes/{node}/release", json=body)

    # Events and metrics

    def events(
        self,
        after: int | None = None,
        last: int | None = None,
        kinds: Sequence[str] = (),
        model: str | None = None,
        episode: str | None = None,
        group: str | None = None,
        wait_s: float | None = None,
    ) -> EventStream:
        """Return the events after an id (0: all), or from the `last` few on; without either, only new events.

        `kinds`: such as `episode` or `episode.closed`. `wait_s`: seconds after which the stream ends; 0: at the newest event.
        """
        given = {
            "after": after,
            "last": last,
            "model": model,
            "episode": episode,
            "group": group,
            "wait": wait_s,
        }
        params = [(name, str(value)) for name, value in given.items() if value is not None]
        return EventStream(self._http, f"{ADMIN}/events", (*params, *(("kind", kind) for kind in kinds)))

    async def post_step(
        self,
        step: int,
        figures: Mapping[str, float],
        version: int | None = None,
        model: str | None = None,
        run: str = "",
        folder: str = "",
    ) -> None:
        """Store a step of the trainer with its finite metrics, and publish it as an event.

        `run`: the name of its curves; `folder`: where a gateway on this machine finds its metrics by token.
        """
        body = {"step": step, "version": version, "figures": dict(figures), "model": model}
        body |= {"run": run, "folder": folder}
        await self._json("POST", "/steps", json=body)

    async def steps(
        self, after: int = -1, figures: Sequence[str] = (), model: str | None = None
    ) -> list[tuple[int, dict[str, float]]]:
        """Return the later steps of a model's newest run with these figures, of which one that a step lacks is left out."""
        query = [("after", str(after)), ("points", "100000"), *(("figure", name) for name in figures)]
        found = await self._json("GET", "/steps", params=[*query, *_model_query(model).items()])
        columns = found["figures"].items()
        return [
            (step, {name: values[row] for name, values in columns if values[row] is not None})
            for row, step in enumerate(found["step"])
        ]

    # Requests

    async def _json(self, method: str, path: str, wait_s: float = 0.0, **kwargs: Any) -> dict[str, Any]:
        return body_of(await self._send(method, path, wait_s, **kwargs))

    async def _send(self, method: str, path: str, wait_s: float = 0.0, **kwargs: Any) -> httpx.Response:
        timeout = httpx.Timeout(self._timeout_s + wait_s)
        response = await self._http.request(method, ADMIN + path, timeout=timeout, **kwargs)
        if response.is_error:
            raise refusal(response)
        return response


def _leased(response: httpx.Response) -> LeasedGroups:
    groups = read_stream(response.content)
    complete = response.headers["x-headgate-complete"] == "true"
    return LeasedGroups(groups, int(response.headers["x-headgate-cursor"]), complete)


def _model_query(model: str | None) -> dict[str, str]:
    return {} if model is None else {"model": model}
