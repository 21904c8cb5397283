"""StreamRL's elastic rule, by its definition."""

from __future__ import annotations

from scheduler.policies.elastic import Elastic, Measured, Watch, decide, watched


def seen(*looks: tuple[float, int, bool]) -> list[Measured]:
    """The steps that these looks (time, version, whether its batch is complete) measure."""
    watch, found = Watch(), []
    for now, version, ready in looks:
        watch, step = watched(watch, now, version, ready)
        found += [step] if step is not None else []
    return found


def test_a_step_is_waiting_and_then_training() -> None:
    steps = seen((0, 0, False), (1, 1, False), (4, 1, False), (7, 1, True), (9, 2, False))
    assert steps == [Measured(8, 2)]
    assert steps[0].delta_s == 6


def test_a_step_whose_begin_nobody_saw_is_not_counted() -> None:
    assert seen((0, 0, False), (3, 0, True), (5, 1, False)) == []
    assert seen((0, 0, False), (1, 1, False), (2, 1, True), (5, 4, False)) == []


def test_a_batch_that_was_complete_before_says_that_training_is_the_bottleneck() -> None:
    assert seen((0, 0, True), (1, 1, True), (5, 2, True)) == [Measured(4, 4)]


def test_a_unit_is_added_while_the_whole_of_its_gain_is_gain() -> None:
    for units, training, worth in (
        (1, 5, True),
        (1, 5.1, False),
        (3, 7.5, True),
        (3, 7.6, False),
        (1, 12, False),
    ):
        _, more = decide(Elastic(steps=1), Measured(10, training), units)
        assert more is worth, (units, training)


def test_so_many_steps_in_a_row_must_say_so_and_then_counting_begins_anew() -> None:
    state, worth, not_worth = Elastic(steps=2), Measured(10, 1), Measured(10, 9)
    added = []
    for step in (worth, not_worth, worth, worth, worth, worth):
        state, more = decide(state, step, 1)
        added.append(more)
    assert added == [False, False, False, True, False, True]


def test_generation_that_takes_no_longer_than_training_is_never_helped() -> None:
    assert not decide(Elastic(steps=1), Measured(0, 0), 1)[1]


def test_a_batch_that_was_trained_between_two_looks_took_no_time() -> None:
    watch, _ = watched(Watch(version=0), 10.0, 1, ready=False)
    assert watched(watch, 25.0, 2, ready=False)[1] == Measured(15.0, 0.0)
