"""StreamRL's elastic rule and its way back, by their definitions."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scheduler.policies.elastic import Elastic, Look, Measured, Trained, Watch, decide, watched

FILLS, FULL = True, False


def seen(*looks: tuple[float, int, bool, int, Trained | None]) -> list[Measured]:
    """The steps that these looks (time, version, whether a batch fills, engines, what the trainer said last) measure."""
    watch, found = Watch(), []
    for look in looks:
        watch, step = watched(watch, Look(*look))
        found += [step] if step is not None else []
    return found


def test_a_step_is_measured_by_what_fills_and_by_what_the_trainer_says_and_not_by_what_is_left() -> None:
    steps = seen(
        (0, 0, FILLS, 2, None),
        (1, 1, FILLS, 2, None),
        (7, 1, FULL, 2, None),
        (9, 2, FILLS, 2, Trained(0, 50)),
        (10, 2, FILLS, 2, Trained(1, 5.5)),
        (11, 2, FILLS, 2, Trained(1, 5.5)),
    )
    assert steps == [Measured(6, 5.5, 2)], "5.5 s of training are hidden in 8 s, of which it waited for 6"


def test_training_that_hides_all_generation_shows_as_much() -> None:
    said = Trained(1, 40.0)
    steps = seen(
        (0, 0, FULL, 3, None), (1, 1, FILLS, 3, None), (11, 1, FULL, 3, None), (41, 2, FILLS, 3, said)
    )
    assert steps == [Measured(10, 40, 3)]


def test_engines_are_the_mean_of_those_that_were_there_while_a_batch_filled() -> None:
    steps = seen(
        (0, 0, FILLS, 1, None),
        (1, 1, FILLS, 3, None),  # a lent node
        (4, 1, FILLS, 1, None),
        (10, 1, FULL, 9, None),
        (20, 2, FILLS, 1, Trained(1, 7)),
    )
    assert steps == [Measured(9, 7, (3 * 3 + 6 * 1) / 9)]


def test_a_step_that_was_not_seen_whole_or_of_which_nobody_spoke_is_not_counted() -> None:
    fills = [(now, 1, FILLS, 1, Trained(1, 3)) for now in (0, 5)]
    assert seen(*fills, (9, 2, FILLS, 1, Trained(1, 3))) == [], "nobody saw its begin"
    jump = [(0, 0, FILLS, 1, None), (1, 1, FILLS, 1, None), (5, 3, FILLS, 1, Trained(1, 3))]
    assert seen(*jump) == [], "nobody saw its end"
    silent = [(0, 0, FILLS, 1, None), (1, 1, FILLS, 1, None), (5, 2, FILLS, 1, None), (9, 3, FILLS, 1, None)]
    assert seen(*silent, (10, 3, FILLS, 1, Trained(1, 3))) == [], "it is two steps late"
    assert seen(*silent, (10, 3, FILLS, 1, Trained(2, 3))) == [Measured(4, 3, 1)]


@pytest.mark.parametrize(
    ("engines", "training", "more", "wanted"),
    [(1, 5, 1, "add"), (1, 5.1, 1, None), (3, 7.5, 1, "add"), (3, 7.6, 1, None), (2, 5, 2, "add"), (2, 5.1, 2, None)],
)  # fmt: skip
def test_a_unit_is_added_while_all_that_it_saves_is_saved(
    engines: int, training: float, more: int, wanted: str | None
) -> None:
    assert decide(Elastic(1), Measured(10, training, engines), more, 0)[1] == wanted
    assert decide(Elastic(1), Measured(10, training, engines), 0, 0)[1] is None, "there is none"


@pytest.mark.parametrize(
    ("engines", "training", "fewer", "wanted"),
    [(2, 20, 1, None), (2, 20.1, 1, "give back"), (4, 13.4, 1, "give back"), (4, 13.3, 1, None), (4, 19, 2, None),
     (4, 20.1, 2, "give back"), (1, 1e6, 1, None), (4, 1e6, 0, None)],
)  # fmt: skip
def test_a_unit_is_given_back_while_training_stays_the_longer_without_it(
    engines: int, training: float, fewer: int, wanted: str | None
) -> None:
    assert decide(Elastic(1), Measured(10, training, engines), 1, fewer)[1] == wanted


def test_so_many_steps_in_a_row_must_say_the_same_and_then_counting_begins_anew() -> None:
    state, add, back, neither = Elastic(2), Measured(10, 1, 2), Measured(1, 10, 2), Measured(10, 9, 2)
    changed = []
    for step in (add, neither, add, back, add, add, add, back, back):
        state, change = decide(state, step, 1, 1)
        changed.append(change)
    assert changed == [None, None, None, None, None, "add", None, None, "give back"]


def test_a_step_without_generation_or_training_adds_nothing() -> None:
    assert decide(Elastic(1), Measured(0, 0, 1), 1, 0)[1] is None


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
        state, change = decide(state, step, more, fewer)
        if change is None:
            break
        used += 1 if change == "add" else -1
        changes.append(change)
    assert change is None, "it comes to rest"
    assert len(set(changes)) <= 1
