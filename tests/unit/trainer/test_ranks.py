"""Learners on several ranks: what one learns, from where another number stopped, and a rank that dies ends the others' step."""

from __future__ import annotations

import os
import signal
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.harness.ranks import DIED, on_ranks
from tests.unit.trainer.learning import STEPS, assert_close, groups_of, learn, settings_of
from trainer.data.batch import Batch
from trainer.errors import RankLost
from trainer.learner import Learner
from trainer.orders import beat, follow
from trainer.settings import Settings

ALGORITHMS = {
    "grpo": {"type": "grpo"},
    "with a reference": {"type": "grpo", "kl_coef": 0.1, "entropy_coef": 0.01, "normaliser": "sequence"},
    "kl in the reward": {"type": "grpo", "kl_coef": 0.1, "kl": "k1"},
}


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize(("ranks", "context"), [(2, 1), (3, 1), (2, 2), (4, 2)])
def test_several_ranks_learn_what_one_learns(
    exact_model: Path, tmp_path: Path, algorithm: str, ranks: int, context: int
) -> None:
    settings = [
        settings_of(exact_model, tmp_path / str(n), ALGORITHMS[algorithm], context=shared)
        for n, shared in ((1, 1), (ranks, context))
    ]
    ((expected, one),) = on_ranks(1, learn, settings[0], torch.float64, STEPS)
    (curve, several), *others = on_ranks(ranks, learn, settings[1], torch.float64, STEPS)
    assert others == [None] * (ranks - 1)
    assert_close(curve, expected, 1e-9)
    assert several.keys() == one.keys()
    for name, value in one.items():
        torch.testing.assert_close(several[name], value, rtol=0, atol=1e-9)
    assert {point["skipped_steps"] for point in curve} == {0.0}


@pytest.mark.parametrize(("dtype", "limit"), [("float32", 1e-5), ("bfloat16", 0.02)])
def test_two_ranks_learn_what_one_learns_but_for_rounding(
    exact_model: Path, tmp_path: Path, dtype: str, limit: float
) -> None:
    settings = [settings_of(exact_model, tmp_path / str(n), {}, dtype) for n in (1, 2)]
    ((expected, _),) = on_ranks(1, learn, settings[0], torch.float32, STEPS)
    (curve, _), _ = on_ranks(2, learn, settings[1], torch.float32, STEPS)
    for name in ("loss", "grad_norm", "kl_recorded_k3"):
        found = [point[name] for point in curve]
        assert found == pytest.approx([point[name] for point in expected], rel=limit, abs=limit), name


@pytest.mark.parametrize(("before", "after"), [(2, 1), (1, 2), (2, 2)])
def test_a_run_goes_on_with_another_number_of_ranks(
    exact_model: Path, tmp_path: Path, before: int, after: int
) -> None:
    straight, cut = (settings_of(exact_model, tmp_path / name, {}) for name in ("straight", "cut"))
    ((expected, one),) = on_ranks(1, learn, straight, torch.float64, STEPS)
    on_ranks(before, learn, cut, torch.float64, STEPS // 2)
    (curve, resumed), *_ = on_ranks(after, learn, cut, torch.float64, STEPS)
    assert_close(curve, expected[STEPS // 2 :], 1e-9)
    for name, value in one.items():
        torch.testing.assert_close(resumed[name], value, rtol=0, atol=1e-9)


ADAPTERS = {"lora": {"rank": 3}, "activation_checkpointing": 1}


@pytest.mark.parametrize(("ranks", "context"), [(2, 1), (3, 1), (2, 2)])
def test_several_ranks_train_the_adapters_that_one_trains(
    exact_model: Path, tmp_path: Path, ranks: int, context: int
) -> None:
    algorithm = ALGORITHMS["with a reference"]
    settings = [
        settings_of(exact_model, tmp_path / str(n), algorithm, more=ADAPTERS, context=shared)
        for n, shared in ((1, 1), (ranks, context))
    ]
    ((expected, one),) = on_ranks(1, learn, settings[0], torch.float64, STEPS)
    (curve, several), *_ = on_ranks(ranks, learn, settings[1], torch.float64, STEPS)
    assert_close(curve, expected, 1e-9)
    for name, value in one.items():
        torch.testing.assert_close(several[name], value, rtol=0, atol=1e-9)
    assert expected[-1]["kl_reference_k3"] > 0


def test_adapters_in_bf16_are_alike_on_two_ranks_but_for_rounding(exact_model: Path, tmp_path: Path) -> None:
    settings = [settings_of(exact_model, tmp_path / str(n), {}, "bfloat16", ADAPTERS) for n in (1, 2)]
    ((expected, _),) = on_ranks(1, learn, settings[0], torch.float32, STEPS)
    (curve, _), _ = on_ranks(2, learn, settings[1], torch.float32, STEPS)
    for name in ("loss", "grad_norm", "kl_recorded_k3"):
        found = [point[name] for point in curve]
        assert found == pytest.approx([point[name] for point in expected], rel=0.02, abs=0.02), name


@pytest.mark.parametrize(("before", "after"), [(2, 1), (1, 2)])
def test_a_run_of_adapters_goes_on_with_another_number_of_ranks(
    exact_model: Path, tmp_path: Path, before: int, after: int
) -> None:
    straight, cut = (
        settings_of(exact_model, tmp_path / name, {}, more=ADAPTERS) for name in ("straight", "cut")
    )
    ((expected, one),) = on_ranks(1, learn, straight, torch.float64, STEPS)
    on_ranks(before, learn, cut, torch.float64, STEPS // 2)
    (curve, resumed), *_ = on_ranks(after, learn, cut, torch.float64, STEPS)
    assert_close(curve, expected[STEPS // 2 :], 1e-9)
    for name, value in one.items():
        torch.testing.assert_close(resumed[name], value, rtol=0, atol=1e-9)


def lose(settings: Settings, victim: int) -> str:
    """Rank `victim` kills itself in its second micro-batch; what the other says of it."""
    learner = Learner.open(settings)
    inner, calls = learner._accumulate, iter(range(9))

    def accumulate(batch: Batch, *arguments: Any) -> None:
        if next(calls) == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        inner(batch, *arguments)

    if learner.ranks.rank == victim:
        learner._accumulate = accumulate  # type: ignore[method-assign]
    work = partial(learner.train, groups_of(0)) if learner.ranks.leads else partial(follow, learner)
    with pytest.raises(RankLost) as lost:
        work()
    return str(lost.value)


@pytest.mark.parametrize("victim", [0, 1])
def test_a_rank_that_dies_ends_the_others_step(exact_model: Path, tmp_path: Path, victim: int) -> None:
    said = on_ranks(2, lose, settings_of(exact_model, tmp_path, {}), victim)
    assert said[victim] == DIED
    assert f"rank {1 - victim} lost rank {victim} in step 'train': it ended" in said[1 - victim]


def beat_on(learner: Learner) -> None:
    """Heartbeats without end."""
    while True:
        beat(learner)


def idle(settings: Settings, victim: int, ends: bool, over: Path) -> str:
    """The error of a rank that has no order to give or to follow when `victim`, after two heartbeats, ends or falls
    silent."""
    learner = Learner.open(settings)
    ranks, mine = learner.ranks, learner.ranks.rank
    for _ in range(2):
        beat(learner) if ranks.leads else ranks.order()
    if mine == victim and ends:
        os.kill(os.getpid(), signal.SIGKILL)
    if mine == victim:
        return over.read_text()  # a pipe: silent, and there, until the others are done
    if not ends:
        ranks._settings = ranks._settings.model_copy(update={"timeout_s": 0.5})
    try:
        with pytest.raises(RankLost) as lost:
            beat_on(learner) if ranks.leads else follow(learner)
    finally:
        if not ends:
            over.write_text("over")
    return str(lost.value)


@pytest.mark.parametrize("victim", [0, 1])
def test_a_rank_that_dies_while_all_wait_ends_the_others(
    exact_model: Path, tmp_path: Path, victim: int
) -> None:
    said = on_ranks(2, idle, settings_of(exact_model, tmp_path, {}), victim, True, tmp_path / "over")
    step = ("heartbeat", "waiting for an order of rank 0")[1 - victim]
    assert said[victim] == DIED
    assert f"rank {1 - victim} lost rank {victim} in step '{step}': it ended" in said[1 - victim]


@pytest.mark.parametrize("victim", [0, 1])
def test_a_rank_that_is_silent_while_all_wait_ends_the_others(
    exact_model: Path, tmp_path: Path, victim: int
) -> None:
    os.mkfifo(tmp_path / "over")
    said = on_ranks(2, idle, settings_of(exact_model, tmp_path, {}), victim, False, tmp_path / "over")
    step = ("heartbeat", "waiting for an order of rank 0")[1 - victim]
    assert said[victim] == "over"
    assert (
        f"rank {1 - victim} lost rank {victim} in step '{step}': it ended, or was silent" in said[1 - victim]
    )
