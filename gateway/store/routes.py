"""Statements about the experts that the tokens of nodes went through (`headgate/routes.py`).

A row has those of one node's tokens, and before them, where the node has a parent, that of the token which it follows: the last
token of a turn is computed only when a later prompt continues it, and nodes never change. `of` puts it where it belongs.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from sqlalchemy import Connection, insert, select

from gateway.store.columns import portions
from gateway.store.models import NodeRouteRow
from headgate.routes import PackedRoutes
from headgate.types import Node


def insert_routes(connection: Connection, routes: Iterable[tuple[str, str, int, PackedRoutes]]) -> None:
    """Store routes, each with the episode, the model and the index of its node."""
    rows = [
        {"episode_id": episode_id, "model": model, "index": index, **packed._asdict()}
        for episode_id, model, index, packed in routes
    ]
    connection.execute(insert(NodeRouteRow), rows)


def shape(connection: Connection, model: str) -> PackedRoutes | None:
    """Return the routes of no tokens, in the shape in which those of a model are stored; None if none are."""
    columns = (NodeRouteRow.layers, NodeRouteRow.top_k, NodeRouteRow.dtype)
    row = connection.execute(select(*columns).where(NodeRouteRow.model == model).limit(1)).first()
    return None if row is None else PackedRoutes(b"", *row)


def with_routes(
    connection: Connection, model: str, nodes: Mapping[str, Sequence[Node]]
) -> dict[str, Sequence[Node]]:
    """Return the trees of some episodes, by their ids, with the stored routes of their nodes."""
    found: dict[str, dict[int, PackedRoutes]] = {}
    for some in portions(list(nodes)):
        query = select(*NodeRouteRow.__table__.c).where(
            NodeRouteRow.episode_id.in_(some), NodeRouteRow.model == model
        )
        for row in connection.execute(query).mappings():
            packed = PackedRoutes(row["data"], row["layers"], row["top_k"], row["dtype"])
            found.setdefault(row["episode_id"], {})[row["index"]] = packed
    return {
        episode_id: placed(tree, found[episode_id]) if episode_id in found else tree
        for episode_id, tree in nodes.items()
    }


def placed(tree: Sequence[Node], stored: Mapping[int, PackedRoutes]) -> list[Node]:
    """Return a tree with its stored routes; a turn's last token has those of the first node that continues it.

    Routes of another number of tokens than their node has are left out.
    """
    own: dict[int, Any] = {}
    for node in tree:
        packed = stored.get(node.index)
        if packed is None:
            continue
        before = int(node.parent >= 0)
        rows = packed.raw()
        if len(rows) != len(node.ids) + before:
            continue
        own[node.index] = rows[before:]
        parent, last = own.get(node.parent), node.at - 1
        if before and parent is not None and last >= 0 and (parent[last] == np.iinfo(rows.dtype).max).all():
            own[node.parent] = parent = parent.copy()
            parent[last] = rows[0]
    return [
        replace(node, routes=stored[node.index]._replace(data=own[node.index].tobytes()))
        if node.index in own
        else node
        for node in tree
    ]
