"""Recorded routes of an episode: the experts of a mixture that its tokens went through in the engine (`headgate/routes.py`).

Row i belongs to input position i, so the routes that decide a sampled token's log-probability are those of the token before it.
Pure: no I/O, no model.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
import numpy.typing as npt

from headgate.routes import ABSENT, RouterShape, Routes
from headgate.types import Episode, Group, Node, TokenFlag
from trainer.errors import FeedBroken

Missing = Literal["own", "mask"]


@dataclass(frozen=True, slots=True)
class RouteSupport:
    """The routers that replay routes, and what happens to tokens without them."""

    shape: RouterShape
    missing: Missing
    """`own`: the model chooses; `mask`: a token that is predicted without recorded routes is not trained."""

    def routes_of(self, episode: Episode) -> dict[int, Routes]:
        """Return each node's routes, shape (n, layers, top_k). Raise FeedBroken if the model cannot have made them."""
        return {node.index: self._node(episode.episode_id, node) for node in episode.nodes}

    def masked(self, group: Group) -> Group:
        """Return a group in which tokens that are not trained for want of routes have the flag UNROUTED. Raise FeedBroken."""
        if self.missing == "own":
            return group
        return replace(group, episodes=tuple(map(self._masked, group.episodes)))

    def _masked(self, episode: Episode) -> Episode:
        routes = self.routes_of(episode)
        nodes = (
            replace(node, flags=node.flags | np.uint8(TokenFlag.UNROUTED) * unrouted(node, routes))
            if node.sampled
            else node
            for node in episode.nodes
        )
        return replace(episode, nodes=tuple(nodes))

    def _node(self, episode_id: str, node: Node) -> Routes:
        layers, top_k, experts = len(self.shape.layers), self.shape.top_k, self.shape.experts
        packed = node.routes
        if packed is None:
            return np.full((len(node.ids), layers, top_k), ABSENT, np.int32)
        if (packed.layers, packed.top_k) != (layers, top_k):
            why = f"{packed.layers} layers with {packed.top_k} experts a token, and the model has {layers} with {top_k}"
        else:
            routes = packed.array()
            if len(routes) == len(node.ids) and routes.max(initial=ABSENT) < experts:
                return routes
            why = f"{len(routes)} tokens of {len(node.ids)}, and experts up to {routes.max(initial=ABSENT)} of {experts}"
        raise FeedBroken(
            f"episode {episode_id}, node {node.index}: its routes are of {why}; gateway and trainer need the same checkpoint,"
            " or set [model] router_replay = false"
        )


def unrouted(node: Node, routes: Mapping[int, Routes]) -> npt.NDArray[np.bool_]:
    """Return which tokens of a node are predicted at a position without routes, shape (n,)."""
    absent = routes[node.index][:, 0, 0] < 0
    before = node.parent >= 0 and node.at > 0 and routes[node.parent][node.at - 1, 0, 0] < 0
    return np.concatenate([[before], absent[:-1]])[: len(absent)].astype(np.bool_)
