"""StreamRL's elastic rule and its way back, by their definitions."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scheduler.policies.elastic import (
    WORTH,
    Elastic,
    Measured,
    Observation,
    Shift,
    StepProgress,
    Trained,
    Units,
    decide,
    observe,
)

FILLS, FULL = True, False


def measured(*observations: tuple[float, int, bool, int, Trained | None]) -> list[Measured]:
    """Return the steps of these observations: time, version, whether a batch fills, engines, the trainer's last report."""
    progress, found = StepProgress(), []
    for one in observations:
        progress, step = observe(progress, Observation(*one))
        found += [step] if step is not None else []
    return found


def test_a_step_is_measured_by_the_time_of_filling_and_the_trainers_report() -> None:
    steps = measured(
        (0, 0, FILLS, 2, None),
        (1, 1, FILLS, 2, None),
        (7, 1, FULL, 2, None),
        (9, 2, FILLS, 2, Trained(0, 50)),
        (10, 2, FILLS, 2, Trained(1, 5.5)),
        (11, 2, FILLS, 2, Trained(1, 5.5)),
    )
    assert steps == [Measured(6, 5.5, 2)], "5.5 s of training are hidden in 8 s, of which it waited for 6"


def test_training_that_hides_all_generation_shows_as_much() -> None:
    trained = Trained(1, 40.0)
    steps = measured(
        (0, 0, FULL, 3, None), (1, 1, FILLS, 3, None), (11, 1, FULL, 3, None), (41, 2, FILLS, 3, trained)
    )
    assert steps == [Measured(10, 40, 3)]


def test_engines_are_the_mean_of_those_that_were_there_while_a_batch_filled() -> None:
    steps = measured(
        (0, 0, FILLS, 1, None),
        (1, 1, FILLS, 3, None),  # a lent node
        (4, 1, FILLS, 1, None),
        (10, 1, FULL, 9, None),
        (20, 2, FILLS, 1, Trained(1, 7)),
    )
    assert steps == [Measured(9, 7, (3 * 3 + 6 * 1) / 9)]


def test_a_step_that_was_not_observed_whole_or_not_reported_is_not_counted() -> None:
    fills = [(now, 1, FILLS, 1, Trained(1, 3)) for now in (0, 5)]
    assert measured(*fills, (9, 2, FILLS, 1, Trained(1, 3))) == [], "its begin was not observed"
    jump = [(0, 0, FILLS, 1, None), (1, 1, FILLS, 1, None), (5, 3, FILLS, 1, Trained(1, 3))]
    assert measured(*jump) == [], "its end was not observed"
    silent = [(0, 0, FILLS, 1, None), (1, 1, FILLS, 1, None), (5, 2, FILLS, 1, None), (9, 3, FILLS, 1, None)]
    assert measured(*silent, (10, 3, FILLS, 1, Trained(1, 3))) == [], "it is two steps late"
    assert measured(*silent, (10, 3, FILLS, 1, Trained(2, 3))) == [Measured(4, 3, 1)]


@pytest.mark.parametrize(
    ("engines", "training", "more", "wanted"),
    [(1, 5, 1, "add"), (1, 5.1, 1, None), (3, 7.5, 1, "add"), (3, 7.6, 1, None), (2, 5, 2, "add"), (2, 5.1, 2, None)],
)  # fmt: skip
def test_a_unit_is_added_while_all_that_it_saves_is_saved(
    engines: int, training: float, more: int, wanted: str | None
) -> None:
    assert decide(Elastic(1), Measured(10, training, engines), Units(more))[1] == wanted
    assert decide(Elastic(1), Measured(10, training, engines), Units())[1] is None, "there is none"


@pytest.mark.parametrize(
    ("engines", "training", "fewer", "wanted"),
    [(2, 20, 1, None), (2, 20.1, 1, "give back"), (4, 13.4, 1, "give back"), (4, 13.3, 1, None), (4, 19, 2, None),
     (4, 20.1, 2, "give back"), (1, 1e6, 1, None), (4, 1e6, 0, None)],
)  # fmt: skip
def test_a_unit_is_given_back_while_training_stays_the_longer_without_it(
    engines: int, training: float, fewer: int, wanted: str | None
) -> None:
    assert decide(Elastic(1), Measured(10, training, engines), Units(1, fewer))[1] == wanted


def test_a_number_of_steps_in_a_row_must_agree_and_then_counting_begins_again() -> None:
    state, add, back, neither = Elastic(2), Measured(10, 1, 2), Measured(1, 10, 2), Measured(10, 9, 2)
    changed = []
    for step in (add, neither, add, back, add, add, add, back, back):
        state, change = decide(state, step, Units(1, 1))
        changed.append(change)
    assert changed == [None, None, None, None, None, "add", None, None, "give back"]


def test_a_step_without_generation_or_training_adds_nothing() -> None:
    assert decide(Elastic(1), Measured(0, 0, 1), Units(1, 0, Shift(0, 1, 2)))[1] is None


@given(
    work=st.floats(0.1, 1e5),
    training=st.floats(0.1, 1e4),
    own=st.integers(1, 8),
    lent=st.integers(0, 8),
    units=st.lists(st.integers(1, 8), max_size=12),
    used=st.integers(0, 12),
)
def test_at_constant_times_growing_and_shrinking_never_alternate(
    work: float, training: float, own: int, lent: int, units: list[int], used: int
) -> None:
    """Of spare units of any size, those that are used are the first; `lent` engines sample only while the trainer waits."""
    used, changes, state = min(used, len(units)), [], Elastic(1)
    for _ in range(len(units) + 1):
        engines = own + sum(units[:used])
        step_s = max((work + lent * training) / (engines + lent), training)
        generation_s = step_s if step_s > training else work / engines
        step = Measured(generation_s, training, work / generation_s)
        more, fewer = (units[used] if used < len(units) else 0), (units[used - 1] if used else 0)
        state, change = decide(state, step, Units(more, fewer))
        if change is None:
            break
        used += 1 if change == "add" else -1
        changes.append(change)
    assert change is None, "it settles"
    assert len(set(changes)) <= 1


@pytest.mark.parametrize(
    ("generation", "training", "wanted"),
    [
        (10, 40, "train on more"),
        (10, 39.9, None),
        (20, 10, "train on fewer"),
        (20, 10.1, None),
        (30, 30, None),
    ],
)
def test_a_node_goes_where_all_that_it_saves_is_saved(
    generation: float, training: float, wanted: str | None
) -> None:
    """Two engines: 10 s become 20 without one of them, and 20 s become 13.3 with one more; two ranks become four, or 1.5."""
    units = Units(more_ranks=Shift(1, 2, 4), fewer_ranks=Shift(1, 4, 3))
    assert decide(Elastic(1), Measured(generation, training, 2), units)[1] == wanted
    assert decide(Elastic(1), Measured(generation, training, 2), Units())[1] is None, "there is none"
    last = Units(more_ranks=Shift(2, 2, 4))
    assert decide(Elastic(1), Measured(10, 1e6, 2), last)[1] is None, "no engine would sample"


@given(
    work=st.floats(0.1, 1e5),
    training=st.floats(0.1, 1e5),
    spread=st.floats(0, 0.5),
    own=st.integers(1, 8),
    nodes=st.lists(st.integers(0, 8), max_size=6),
    spare=st.lists(st.integers(1, 8), max_size=6),
    start=st.tuples(st.integers(0, 6), st.integers(0, 6)),
)
def test_at_constant_work_nothing_is_undone(
    work: float,
    training: float,
    spread: float,
    own: int,
    nodes: list[int],
    spare: list[int],
    start: tuple[int, int],
) -> None:
    """`nodes` have engines, and a rank each once they train; one more rank has a node of its own. Training on r ranks takes
    `training` / r, and a share of `spread` more for each of them."""
    ranks, used = (min(begin, len(given)) for begin, given in zip(start, (nodes, spare), strict=True))
    changes, state = set(), Elastic(1)
    for _ in range(2 * (len(nodes) + len(spare)) + 1):
        engines = own + sum(nodes[ranks:]) + sum(spare[:used])
        seconds = training / (ranks + 1) * (1 + spread * ranks)
        units = Units(
            spare[used] if used < len(spare) else 0,
            spare[used - 1] if used else 0,
            Shift(nodes[ranks], ranks + 1, ranks + 2) if ranks < len(nodes) else None,
            Shift(nodes[ranks - 1], ranks + 1, ranks) if ranks else None,
        )
        state, change = decide(state, Measured(work / engines, seconds, engines), units)
        if change is None:
            break
        used += {"add": 1, "give back": -1}.get(change, 0)
        ranks += {"train on more": 1, "train on fewer": -1}.get(change, 0)
        changes.add(change)
    assert change is None, "it settles"
    assert changes <= {"add", "train on fewer"} or changes <= {"give back", "train on more"}


def test_what_limits_the_run_decides_whether_a_node_is_added_or_moved() -> None:
    """12 s of generation are 6 s with twice the engines, less than the 10 s of training: evenly divided, 2 s would be wasted."""
    units, step = Units(more=1), Measured(12, 10, 1)
    assert decide(Elastic(1), step, units)[1] is None
    assert decide(Elastic(1), step, units, {"one more engine": WORTH})[1] == "add"
    assert decide(Elastic(1), step, units, {"one more engine": WORTH - 0.01})[1] is None
    shifts, training = Units(more_ranks=Shift(1, 1, 2)), Measured(4, 12, 3)
    assert decide(Elastic(1), training, shifts, {"one more rank": 0.0})[1] is None
    assert decide(Elastic(1), training, shifts, {"one more rank": 0.4})[1] == "train on more"
