"""The split of the GPUs that headgate would plan."""

from __future__ import annotations

from typing import Any

import pytest

from lab.simulate.planned import Planned, split
from tests.unit.lab.simulate.scenarios import run, scenario

ALIKE = {"kind": "lognormal", "median": 300, "sigma": 0.1, "longest": 1000}
TAIL = {"kind": "tail", "median": 300, "longest": 8400}


def test_where_training_is_what_takes_long_more_train_and_where_a_reply_does_fewer() -> None:
    alike, tail = scenario(batch=64, lengths=ALIKE), scenario(batch=64, lengths=TAIL)
    assert split(tail) < split(alike)
    assert split(scenario(batch=64, lengths=TAIL, eta=3)) >= split(tail)  # a reply has more batches' time


@pytest.mark.parametrize("shape", [{"lengths": ALIKE}, {"lengths": TAIL}])
def test_a_run_with_it_keeps_the_bound_and_every_token(shape: dict[str, Any]) -> None:
    given = scenario(eta=1, **shape)
    policy = Planned()
    layout = policy.layout(given)
    assert layout.train_gpus == max(split(given) * given.engine_gpus, given.train_gpus)
    assert layout.rollout + layout.train_gpus == given.gpus
    assert layout.rollout
    run(given, policy=policy)
