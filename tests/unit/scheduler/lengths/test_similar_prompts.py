"""Tasks with similar prompts: their features for a new task, and the bound on their number."""

from __future__ import annotations

import random

import numpy as np
import pytest

from scheduler.lengths.similar_prompts import SimilarPrompts

COMMON = list(range(40))
"""A template, in every prompt."""


def tokens(*rare: int) -> np.ndarray:
    return np.array(sorted({*COMMON, *rare}), np.uint32)


def trained(memory: int = 1000) -> SimilarPrompts:
    """Twenty tasks of each of two kinds: those with the tokens 100 to 109 are long, those with 200 to 209 short."""
    similar, draw = SimilarPrompts(memory), random.Random(0)
    for i in range(40):
        kind = 100 + 100 * (i % 2)
        similar.features(f"t{i}", tokens(*(draw.randrange(kind, kind + 10) for _ in range(6))), size=4.0)
        similar.learn(f"t{i}", -1.0 if i % 2 else 2.0)
    return similar


def test_a_new_task_is_as_long_as_those_whose_rare_tokens_it_has() -> None:
    similar = trained()
    for kind, more in ((100, 2.0), (200, -1.0)):
        best, *by_power = similar.features(f"new-{kind}", tokens(*range(kind, kind + 5)), size=5.0)
        assert best > 0.5
        assert by_power[-2:] == pytest.approx([more, 1.0], abs=0.1), (
            "how much longer calls, and this prompt, are"
        )
    assert len(by_power) + 1 == SimilarPrompts.width


def test_tokens_of_all_prompts_distinguish_none() -> None:
    assert trained().features("new", tokens(), size=5.0)[-2] == pytest.approx(0.5, abs=0.1), "the mean of all"
    of_none = trained().features("new", tokens(*range(300, 310)), size=5.0)
    assert of_none[0] == pytest.approx(0, abs=0.1)
    assert of_none[-2] == pytest.approx(0, abs=0.1)


def test_a_task_is_not_similar_to_itself() -> None:
    similar = SimilarPrompts(10)
    similar.features("a", tokens(1000), size=4.0)
    similar.learn("a", 3.0)
    assert similar.features("a", tokens(1000), size=4.0)[:2] == [0, 0]
    assert similar.features("b", tokens(1000), size=4.0)[-2] > 2


def test_a_task_without_a_finished_call_counts_nothing() -> None:
    similar = SimilarPrompts(10)
    similar.features("a", tokens(1000), size=4.0)
    assert similar.features("b", tokens(1000), size=5.0) == [0] * SimilarPrompts.width


def test_the_tasks_that_came_longest_ago_are_forgotten() -> None:
    similar = SimilarPrompts(3)
    words = [np.array([1000 + i], np.uint32) for i in range(4)]
    for i in (0, 1, 2, 0, 3):  # 1 has to go
        similar.features(f"t{i}", words[i], size=4.0)
        similar.learn(f"t{i}", 3.0)
    assert len(similar) == 3
    similar.learn("t1", 3.0)
    features = [similar.features("t3", words[i], size=4.0)[-2] for i in (0, 1, 2)]
    assert features == pytest.approx([3, 0, 3], abs=0.1)
    assert (similar._count == similar._has.sum(1)).all()
