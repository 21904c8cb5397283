"""Learners on several ranks: what one learns, from where another number stopped, and a rank that dies ends the others' step."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from datetime import timedelta
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, distributed

from tests.harness.ranks import DIED, on_new_ranks, on_ranks
from tests.unit.trainer.rank_trainers import STEPS, Curve, assert_close, groups_of, learn, settings_of
from trainer.config.settings import Settings
from trainer.data.batch import Batch
from trainer.errors import RankLost
from trainer.rank_rpc import heartbeat, serve_commands
from trainer.rank_trainer import RankTrainer

ALGORITHMS = {
    "grpo": {"type": "grpo"},
    "with a reference": {"type": "grpo", "kl_coef": 0.1, "entropy_coef": 0.01, "average": "sequence"},
    "kl in the reward": {"type": "grpo", "kl_coef": 0.1, "kl": "k1"},
    "statistics": {"type": "m2po", "second_moment": 0.005},
    "state": {"type": "reinforce"},
}


ADAPTERS: dict[str, Any] = {"lora": {"rank": 3}, "activation_checkpointing": 1}
Learned = tuple[Curve, dict[str, Tensor]]
Alone = Callable[..., Learned]


@pytest.fixture(scope="module")
def alone(exact_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Alone:
    """Trains on one rank in float64, once for each algorithm, adapters or the whole model; returns what was learned."""

    @cache
    def learned(algorithm: str = "grpo", adapters: bool = False) -> Learned:
        more = ADAPTERS if adapters else None
        settings = settings_of(exact_model, tmp_path_factory.mktemp("1"), ALGORITHMS[algorithm], more=more)
        (found,) = on_ranks(1, learn, settings, torch.float64, STEPS)
        assert found is not None
        return found

    return learned


def assert_learned(found: Learned, expected: Learned) -> None:
    assert_close(found[0], expected[0], 1e-9)
    assert found[1].keys() == expected[1].keys()
    for name, value in expected[1].items():
        torch.testing.assert_close(found[1][name], value, rtol=0, atol=1e-9)


@pytest.mark.parametrize(
    ("algorithm", "ranks", "context"),
    [
        ("grpo", 2, 1),
        ("statistics", 4, 2),
        *(
            pytest.param(*case, marks=pytest.mark.long)
            for case in (
                ("with a reference", 4, 2),
                ("kl in the reward", 3, 1),
                ("with a reference", 3, 1),
                ("grpo", 2, 2),
                ("kl in the reward", 4, 2),
            )
        ),
    ],
)
def test_several_ranks_learn_what_one_learns(
    exact_model: Path, tmp_path: Path, alone: Alone, algorithm: str, ranks: int, context: int
) -> None:
    settings = settings_of(exact_model, tmp_path, ALGORITHMS[algorithm], context=context)
    found, *others = on_ranks(ranks, learn, settings, torch.float64, STEPS)
    assert others == [None] * (ranks - 1)
    assert_learned(found, alone(algorithm))
    assert {point["skipped_steps"] for point in found[0]} == {0.0}
    if algorithm == "statistics":
        assert all(0 < point["clip_fraction"] < 1 for point in found[0])


def test_ranks_take_turns_whose_micro_batches_have_unlike_numbers_of_rows(
    exact_model: Path, tmp_path: Path, alone: Alone
) -> None:
    """Each row is a pass, for which all ranks gather the layers' weights."""
    settings = settings_of(exact_model, tmp_path, ALGORITHMS["grpo"], more={"attention": "rows"})
    found, _ = on_ranks(2, learn, settings, torch.float64, STEPS)
    assert_learned(found, alone("grpo"))


@pytest.mark.parametrize(
    ("dtype", "more", "limit"),
    [
        ("bfloat16", ADAPTERS, 0.02),
        pytest.param("float32", None, 1e-5, marks=pytest.mark.long),
        pytest.param("bfloat16", None, 0.02, marks=pytest.mark.long),
    ],
)
def test_two_ranks_learn_what_one_learns_but_for_rounding(
    exact_model: Path, tmp_path: Path, dtype: str, more: dict[str, Any] | None, limit: float
) -> None:
    settings = [settings_of(exact_model, tmp_path / str(n), {}, dtype, more) for n in (1, 2)]
    ((expected, _),) = on_ranks(1, learn, settings[0], torch.float32, STEPS)
    (curve, _), _ = on_ranks(2, learn, settings[1], torch.float32, STEPS)
    for name in ("loss", "grad_norm", "kl_recorded_k3"):
        found = [point[name] for point in curve]
        assert found == pytest.approx([point[name] for point in expected], rel=limit, abs=limit), name


@pytest.mark.parametrize(
    ("ranks", "context"), [(2, 2), *(pytest.param(n, 1, marks=pytest.mark.long) for n in (2, 3))]
)
def test_several_ranks_train_the_adapters_that_one_trains(
    exact_model: Path, tmp_path: Path, alone: Alone, ranks: int, context: int
) -> None:
    expected = alone("with a reference", adapters=True)
    algorithm = ALGORITHMS["with a reference"]
    settings = settings_of(exact_model, tmp_path, algorithm, more=ADAPTERS, context=context)
    found, *_ = on_ranks(ranks, learn, settings, torch.float64, STEPS)
    assert_learned(found, expected)
    assert expected[0][-1]["kl_reference_k3"] > 0


@pytest.mark.parametrize(
    ("before", "after", "adapters"),
    [
        (2, 1, False),
        (1, 2, True),
        *(
            pytest.param(*case, marks=pytest.mark.long)
            for case in ((1, 2, False), (2, 1, True), (2, 2, False))
        ),
    ],
)
def test_a_run_goes_on_with_another_number_of_ranks(
    exact_model: Path, tmp_path: Path, alone: Alone, before: int, after: int, adapters: bool
) -> None:
    curve, weights = alone("state", adapters)
    settings = settings_of(exact_model, tmp_path, ALGORITHMS["state"], more=ADAPTERS if adapters else None)
    on_ranks(before, learn, settings, torch.float64, STEPS // 2)
    found, *_ = on_ranks(after, learn, settings, torch.float64, STEPS)
    assert_learned(found, (curve[STEPS // 2 :], weights))


def lose(settings: Settings, victim: int) -> str:
    """Rank `victim` kills itself in its second micro-batch; the error of the other."""
    trainer = RankTrainer.open(settings)
    inner, calls = trainer._accumulate, iter(range(9))

    def accumulate(batch: Batch, *arguments: Any, **more: Any) -> None:
        if next(calls) == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        inner(batch, *arguments, **more)

    if trainer.ranks.rank == victim:
        trainer._accumulate = accumulate  # type: ignore[method-assign]
    work = (
        partial(trainer.train, groups_of(0))
        if trainer.ranks.is_rank_zero
        else partial(serve_commands, trainer)
    )
    with pytest.raises(RankLost) as lost:
        work()
    return str(lost.value)


@pytest.mark.parametrize("victim", [0, 1])
def test_a_rank_that_dies_ends_the_others_step(exact_model: Path, tmp_path: Path, victim: int) -> None:
    errors = on_new_ranks(2, lose, settings_of(exact_model, tmp_path, {}), victim)
    assert errors[victim] == DIED
    assert f"rank {1 - victim} lost rank {victim} in step 'train': it ended" in errors[1 - victim]


def beat_on(trainer: RankTrainer) -> None:
    """Heartbeats without end."""
    while True:
        heartbeat(trainer)


def idle(settings: Settings, victim: int, ends: bool, over: Path) -> str:
    """The error of a rank that has no order to give or to follow when `victim`, after two heartbeats, ends or falls
    silent."""
    trainer = RankTrainer.open(settings)
    ranks, mine = trainer.ranks, trainer.ranks.rank
    for _ in range(2):
        heartbeat(trainer) if ranks.is_rank_zero else ranks.command()
    if not ends:  # a follower waits for as long as its group does, which was settled when the group was made
        assert ranks._object_group._get_backend(torch.device("cpu")).options._timeout == timedelta(seconds=60)
        ranks._object_group = distributed.new_group(backend="gloo", timeout=timedelta(seconds=4))
    if mine == victim and ends:
        os.kill(os.getpid(), signal.SIGKILL)
    if mine == victim:
        return over.read_text()  # a pipe: silent, and there, until the others are done
    if not ends:
        ranks._settings = ranks._settings.model_copy(update={"timeout_s": 0.5})
    try:
        with pytest.raises(RankLost) as lost:
            beat_on(trainer) if ranks.is_rank_zero else serve_commands(trainer)
    finally:
        if not ends:
            over.write_text("over")
    return str(lost.value)


@pytest.mark.parametrize("victim", [0, 1])
def test_a_rank_that_dies_while_all_wait_ends_the_others(
    exact_model: Path, tmp_path: Path, victim: int
) -> None:
    errors = on_new_ranks(2, idle, settings_of(exact_model, tmp_path, {}), victim, True, tmp_path / "over")
    step = ("heartbeat", "waiting for a command of rank 0")[1 - victim]
    assert errors[victim] == DIED
    assert f"rank {1 - victim} lost rank {victim} in step '{step}': it ended" in errors[1 - victim]


@pytest.mark.parametrize("victim", [0, 1])
def test_a_rank_that_is_silent_while_all_wait_ends_the_others(
    exact_model: Path, tmp_path: Path, victim: int
) -> None:
    os.mkfifo(tmp_path / "over")
    errors = on_new_ranks(2, idle, settings_of(exact_model, tmp_path, {}), victim, False, tmp_path / "over")
    step = ("heartbeat", "waiting for a command of rank 0")[1 - victim]
    assert errors[victim] == "over"
    assert (
        f"rank {1 - victim} lost rank {victim} in step '{step}': it ended, or did not respond"
        in errors[1 - victim]
    )
