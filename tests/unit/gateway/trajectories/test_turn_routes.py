"""Each position's routes are those of the run that computed it first; what no run reported is absent, and counted."""

from __future__ import annotations

import numpy as np
import pytest

from gateway.trajectories.turn_routes import TurnRoutes
from headgate.routes import RouterShape, Routes

ROUTERS = RouterShape(layers=(1, 2), top_k=2, experts=8, total_layers=3)
PROMPT = 3


def report(run: int, positions: range) -> np.ndarray:
    """Return what an engine reports: rows that name their run and position, and a layer without a router."""
    rows = [[[0, 0], [run, 7], [at % 7, 7]] for at in positions]
    return np.asarray(rows, np.uint8).reshape(-1, 3, 2)


def runs_and_positions(routes: TurnRoutes, start: int, end: int) -> list[tuple[int, int] | None]:
    packed = routes.packed(start, end)
    rows: Routes | list[None] = packed.array() if packed else [None] * (end - start)
    return [None if row is None or (row == -1).all() else (int(row[0, 0]), int(row[1, 0])) for row in rows]


def run(routes: TurnRoutes, number: int, before: int, after: int, reported: np.ndarray | None = None) -> None:
    routes.begin_run(before)
    rows = report(number, range(routes.next, PROMPT + after - 1)) if reported is None else reported
    routes.end_run(rows, after)


def test_tokens_keep_the_routes_of_the_version_that_predicted_the_next_token_from_them() -> None:
    routes = TurnRoutes(ROUTERS, PROMPT)
    run(routes, 1, 0, 2)
    assert routes.next == 4, "the second sampled token was not an input yet"
    run(routes, 2, 2, 4)
    assert runs_and_positions(routes, 0, 7) == [(1, 0), (1, 1), (1, 2), (1, 3), (2, 4), (2, 5), None]
    assert routes.counts(4) == {"recorded": 6, "missing": 0, "impossible": 0}


def test_what_a_dead_engine_sampled_has_no_routes_though_another_computes_it_again() -> None:
    routes = TurnRoutes(ROUTERS, PROMPT)
    routes.begin_run(0)
    run(routes, 2, 2, 4)  # after two tokens whose engine never reported
    assert runs_and_positions(routes, 0, 7) == [(2, 0), (2, 1), None, None, (2, 4), (2, 5), None]
    assert routes.counts(4) == {"recorded": 4, "missing": 2, "impossible": 0}


def test_only_positions_that_are_not_recorded_yet_are_requested() -> None:
    routes = TurnRoutes(ROUTERS, PROMPT, first=2)
    assert routes.next == 2
    run(routes, 1, 0, 2)
    assert runs_and_positions(routes, 0, 5) == [None, None, (1, 2), (1, 3), None]
    assert routes.counts(2)["recorded"] == 2


@pytest.mark.parametrize(
    "reported",
    [
        report(1, range(3)),
        report(1, range(5)),
        report(1, range(4))[:, :, :1],
        np.zeros((4, 4, 2), np.uint8),
        np.zeros((4, 3, 2), np.float32),
        np.empty(0, np.uint8),
    ],
)
def test_a_report_of_another_shape_is_dropped_and_counted(reported: np.ndarray) -> None:
    routes = TurnRoutes(ROUTERS, PROMPT)
    run(routes, 1, 0, 2, reported)
    assert routes.packed(0, 5) is None
    assert routes.counts(2) == {"recorded": 0, "missing": 0, "impossible": 4}


@pytest.mark.parametrize("wrong", [[8, 1], [3, 3]])
def test_experts_that_cannot_be_chosen_make_their_token_absent(wrong: list[int]) -> None:
    routes, reported = TurnRoutes(ROUTERS, PROMPT), report(1, range(4))
    reported[2, 1] = wrong
    run(routes, 1, 0, 2, reported)
    assert runs_and_positions(routes, 0, 4) == [(1, 0), (1, 1), None, (1, 3)]
    assert routes.counts(2) == {"recorded": 3, "missing": 0, "impossible": 1}


def test_a_run_that_reports_nothing_leaves_its_tokens_without_routes() -> None:
    routes = TurnRoutes(ROUTERS, PROMPT)
    routes.begin_run(0)
    routes.end_run(None, 2)
    assert routes.counts(2) == {"recorded": 0, "missing": 4, "impossible": 0}
