"""The regression on prompts: a line is found, and a task counts once."""

from __future__ import annotations

import numpy as np
import pytest

from scheduler.lengths.prompts import Prompts


def test_before_a_fit_it_predicts_nothing_and_afterwards_the_value_of_the_line() -> None:
    prompts, draw = Prompts(), np.random.default_rng(0)
    columns = draw.normal(5, 2, (400, 3))
    assert prompts.predict(columns[0]) is None
    values = 2 + columns @ [0.5, -1, 0]
    prompts.fit(columns, values, [f"t{i}" for i in range(400)])
    assert prompts.predict(np.array([4.0, 6, 9])) == pytest.approx(2 + 2 - 6, abs=0.05)


def test_a_task_counts_once_however_often_it_was_called() -> None:
    prompts = Prompts()
    prompts.fit(np.zeros((101, 1)), np.array([1.0] * 100 + [3.0]), ["often"] * 100 + ["once"])
    assert prompts.predict(np.zeros(1)) == pytest.approx(2)


def test_a_column_that_never_changed_does_not_count() -> None:
    prompts = Prompts()
    columns = np.array([[7.0, i] for i in range(50)])
    prompts.fit(columns, columns[:, 1], [f"t{i}" for i in range(50)])
    assert prompts.predict(np.array([7000.0, 25])) == pytest.approx(25, abs=0.1)
