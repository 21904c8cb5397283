"""The last token of a turn gets the routes of the first node that continues it."""

from __future__ import annotations

import numpy as np

from gateway.store.routes import placed
from headgate.routes import PackedRoutes
from headgate.types import Node


def node(index: int, parent: int, at: int, size: int) -> Node:
    none = np.empty(0, np.float32), np.empty(0, np.int32), np.empty(0, np.uint8)
    return Node(index, parent, at, False, np.arange(size, dtype=np.int32), *none)


def routes(*experts: int) -> PackedRoutes:
    """Return the routes of tokens through one layer; 255: absent."""
    return PackedRoutes(bytes(experts), 1, 1, "uint8")


def test_a_turn_that_is_continued_twice_keeps_the_first_route_of_its_last_token() -> None:
    tree = [node(0, -1, 0, 3), node(1, 0, 3, 1), node(2, 0, 3, 1), node(3, 0, 2, 1)]
    stored = {0: routes(1, 2, 255), 1: routes(7, 3), 2: routes(8, 4), 3: routes(9, 5)}
    found = [one.routes and list(one.routes.data) for one in placed(tree, stored)]
    assert found == [[1, 2, 7], [3], [4], [5]]


def test_routes_of_another_number_of_tokens_and_turns_without_any_stay_unknown() -> None:
    tree = [node(0, -1, 0, 3), node(1, 0, 3, 1), node(2, 1, 1, 2)]
    found = placed(tree, {0: routes(1, 2), 2: routes(6, 3, 4)})
    assert [one.routes and list(one.routes.data) for one in found] == [None, None, [3, 4]]
