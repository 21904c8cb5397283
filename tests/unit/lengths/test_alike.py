"""Tasks whose prompts are alike: what they say of a new one, and that they are forgotten."""

from __future__ import annotations

import random

import numpy as np
import pytest

from scheduler.lengths.alike import Alike

COMMON = list(range(40))
"""A template, in every prompt."""


def tokens(*rare: int) -> np.ndarray:
    return np.array(sorted({*COMMON, *rare}), np.uint32)


def taught(memory: int = 1000) -> Alike:
    """Twenty tasks of each of two kinds: those with the tokens 100 to 109 are long, those with 200 to 209 short."""
    alike, draw = Alike(memory), random.Random(0)
    for i in range(40):
        kind = 100 + 100 * (i % 2)
        alike.told(f"t{i}", tokens(*(draw.randrange(kind, kind + 10) for _ in range(6))), size=4.0)
        alike.learn(f"t{i}", -1.0 if i % 2 else 2.0)
    return alike


def test_a_new_task_is_as_long_as_those_whose_rare_tokens_it_has() -> None:
    alike = taught()
    for kind, more in ((100, 2.0), (200, -1.0)):
        best, *by_power = alike.told(f"new-{kind}", tokens(*range(kind, kind + 5)), size=5.0)
        assert best > 0.5
        assert by_power[-2:] == pytest.approx([more, 1.0], abs=0.1), (
            "how much longer calls, and this prompt, are"
        )
    assert len(by_power) + 1 == Alike.width


def test_what_all_prompts_have_tells_none_of_them_from_another() -> None:
    assert taught().told("new", tokens(), size=5.0)[-2] == pytest.approx(0.5, abs=0.1), "the mean of all"
    of_none = taught().told("new", tokens(*range(300, 310)), size=5.0)
    assert of_none[0] == pytest.approx(0, abs=0.1)
    assert of_none[-2] == pytest.approx(0, abs=0.1)


def test_a_task_is_not_told_of_itself() -> None:
    alike = Alike(10)
    alike.told("a", tokens(1000), size=4.0)
    alike.learn("a", 3.0)
    assert alike.told("a", tokens(1000), size=4.0)[:2] == [0, 0]
    assert alike.told("b", tokens(1000), size=4.0)[-2] > 2


def test_a_task_of_which_no_call_is_over_says_nothing() -> None:
    alike = Alike(10)
    alike.told("a", tokens(1000), size=4.0)
    assert alike.told("b", tokens(1000), size=5.0) == [0] * Alike.width


def test_the_tasks_that_came_longest_ago_are_forgotten() -> None:
    alike = Alike(3)
    words = [np.array([1000 + i], np.uint32) for i in range(4)]
    for i in (0, 1, 2, 0, 3):  # 1 has to go
        alike.told(f"t{i}", words[i], size=4.0)
        alike.learn(f"t{i}", 3.0)
    assert len(alike) == 3
    alike.learn("t1", 3.0)
    said = [alike.told("t3", words[i], size=4.0)[-2] for i in (0, 1, 2)]
    assert said == pytest.approx([3, 0, 3], abs=0.1)
    assert (alike._count == alike._has.sum(1)).all()
