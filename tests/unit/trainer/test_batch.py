"""What the summed gradient of a batch is divided by, counted by hand."""

from __future__ import annotations

from typing import Any

import pytest

from headgate.types import ABANDONED, Episode, Group, TokenFlag
from tests.unit.trainer.trees import prompt, sampled
from trainer.algorithms import REGISTRY
from trainer.data.batch import Batch

LENGTH = 100
TERMS: tuple[dict[str, Any], ...] = (
    {},
    {"kl_coef": 1e-9},
    {"entropy_coef": 1e-9},
    {"mask_token": [0.9, 1.1]},
)


def episode(name: str, reward: float, tokens: int, late: int = 0, mask_reason: str = "") -> Episode:
    flags = [TokenFlag.LATE] * late + [0] * (tokens - late)
    turn = sampled(1, 0, 3, [5] * tokens, flags=flags, mask_reason=mask_reason)
    return Episode(name, reward, (prompt(0, -1, 0, [1, 2, 3]), turn), components={"right": reward})


SILENT = Episode("silent", 0.0, (), components={"right": 0.0})
GROUPS = (
    Group("teaches", "t", 0, (episode("a", 1.0, 8), episode("b", 0.0, 5, late=2), SILENT)),
    Group("equal", "t", 0, (episode("c", 1.0, 11), episode("d", 1.0, 7, late=7))),
    Group("alone", "t", 0, (episode("e", 0.3, 4),)),
    Group("masked", "t", 0, (episode("f", 1.0, 6, mask_reason=ABANDONED), episode("g", 0.0, 9))),
)
TOKENS = (8 + 3, 11, 4, 9)
"""Those of each group that may be trained: not the late ones, nor the abandoned."""
EPISODES = (3, 2, 1, 2)
DIVISORS: dict[str, tuple[dict[str, Any], tuple[float, ...]]] = {
    "grpo": ({}, TOKENS),
    "grpo, by episode": ({"average": "sequence"}, EPISODES),
    "dapo": ({}, TOKENS),
    "cispo": ({}, TOKENS),
    "reinforce++": ({}, TOKENS),
    "dr_grpo": ({"length": LENGTH}, tuple(LENGTH * n for n in EPISODES)),
    "rloo": ({}, EPISODES),
    "gspo": ({}, EPISODES),
    "ppo": ({"minibatches": 2}, TOKENS),
    "a3po": ({"epochs": 2}, TOKENS),
    "sapo": ({}, EPISODES),
    "gmpo": ({}, EPISODES),
    "dppo": ({}, TOKENS),
    "opo": ({}, TOKENS),
    "m2po": ({}, TOKENS),
    "gdpo": ({"components": {"right": 1.0}}, TOKENS),
    "reinforce": ({"initial": -1.0}, EPISODES),
    "kl_cov": ({"minibatches": 1}, TOKENS),
    "clip_cov": ({"minibatches": 1}, TOKENS),
}
"""By algorithm, its settings and what each group adds."""


@pytest.mark.parametrize("term", TERMS, ids=str)
@pytest.mark.parametrize("name", DIVISORS)
def test_the_divisor_counts_groups_without_advantage_with_and_without_a_term(
    name: str, term: dict[str, Any]
) -> None:
    settings, by_group = DIVISORS[name]
    kind = name.split(",")[0]
    algorithm = REGISTRY[kind].model_validate({"type": kind, **settings, **term}).create()
    for portions in ([GROUPS], [[group] for group in GROUPS]):
        batch = Batch(0, algorithm, 16)
        for portion in portions:
            list(batch.add_groups(portion))
        minibatches = [minibatch.normalizer for minibatch in batch.minibatches()]
        half = len(GROUPS) // 2
        expected = [sum(by_group[:half]), sum(by_group[half:])] if kind == "ppo" else [sum(by_group)]
        assert minibatches == expected
        assert batch.normalizer == sum(by_group)
        assert batch.trained + batch.skipped == sum(TOKENS)
        trains_all = "kl_coef" in term or "entropy_coef" in term or kind in ("reinforce", "reinforce++")
        assert (batch.skipped == 0) is trains_all


def test_every_algorithm_has_its_divisor_here() -> None:
    assert {name.split(",")[0] for name in DIVISORS} == REGISTRY.keys()
