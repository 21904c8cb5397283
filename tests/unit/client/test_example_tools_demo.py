"""The demo with tools: its split, its scorer, and the habits of its teacher."""

from __future__ import annotations

import itertools
import random

import pytest

from examples.tools_demo import tasks, teacher


def orders_of(split: tasks.Split, seed: int, count: int) -> list[str]:
    return [task["question"] for task in itertools.islice(tasks.tasks(split, seed), count)]


def test_no_order_is_in_both_splits_and_the_teacher_sees_none_that_is_held_out() -> None:
    held_out = set(orders_of("heldout", 99, 500))
    seen = set(orders_of("train", 1, 4000))
    seen |= {e["messages"][1]["content"] for e in itertools.islice(teacher.careless_teacher(1), 4000)}
    assert len(held_out) > 250
    assert not held_out & seen


def test_a_total_is_the_sum_of_the_prices_that_the_tool_tells() -> None:
    for task in itertools.islice(tasks.tasks("heldout", 3), 100):
        order = task["question"].splitlines()[1:]
        assert tasks.FEWEST <= len(order) == len(set(order)) <= tasks.MOST
        assert task["total"] == sum(task["prices"][item] for item in order)


@pytest.mark.parametrize(
    ("answer", "reward"),
    [
        ("4 7 12", 1.0),
        ("12", 1.0),
        ("The total is 12.", 1.0),
        ("12 7", 0.0),
        ("112", 0.0),
        ("", 0.0),
        ("none", 0.0),
    ],
)
def test_the_last_number_is_the_answer(answer: str, reward: float) -> None:
    assert tasks.score({"total": 12}, answer) == reward


def test_the_teacher_is_as_careless_as_it_says() -> None:
    rng, order = random.Random(1), ["milk", "rice", "salt", "soap"]
    asked = [teacher.asked_by(order, rng) for _ in range(4000)]
    whole = sum(items == order for items in asked) / len(asked)
    enough = sum(len(items) == 2 for items in asked) / len(asked)
    careful = (1 - teacher.IMPATIENCE) * (1 - teacher.FORGETFULNESS) ** 3
    assert whole == pytest.approx(careful, abs=0.03)
    assert enough == pytest.approx(teacher.IMPATIENCE, abs=0.03)
    assert all(items[0] == "milk" and len(items) in (2, 4) for items in asked)
