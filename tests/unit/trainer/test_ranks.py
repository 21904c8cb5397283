"""Learners on several ranks: what one learns, from where another number stopped, and a rank that dies ends the others' step."""

from __future__ import annotations

import os
import signal
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from gateway.types import Episode, Group
from tests.harness.ranks import DIED, on_ranks
from tests.unit.trainer.trees import prompt, sampled
from trainer.data.batch import Batch
from trainer.errors import RankLost
from trainer.learner import Learner
from trainer.model import pretrained
from trainer.orders import beat, dismiss, follow
from trainer.settings import Settings

STEPS = 4
Curve = list[dict[str, float]]


def settings_of(
    model: Path, work: Path, algorithm: dict[str, Any], dtype: str = "float32", context: int = 1, **more: Any
) -> Settings:
    return Settings.parse({
        "run": {"dir": work, "steps": 9, "device": "cpu", "threads": 1, "deterministic": True},
        "gateway": {"url": "http://127.0.0.1:1"},
        "model": {"path": model, "dtype": dtype, **more},
        "optimizer": {"lr": 1e-3, "schedule": "cosine", "warmup_steps": 2},
        "algorithm": algorithm,
        "batch": {"tokens": 40},
        "parallel": {"timeout_s": 60, "context": context},
    })  # fmt: skip


def groups_of(version: int) -> list[Group]:
    """Groups of unlike length whose log-probabilities are about those of an untrained model."""
    rng = np.random.default_rng(version)
    groups = []
    for g in range(3):
        episodes = []
        for e in range(3):
            start = prompt(0, -1, 0, [g + 1, 7, 9])
            turn = sampled(
                1, 0, 3, rng.integers(0, 250, 4 + 3 * e + g).tolist(), logprob=-5.5, version=version
            )
            episodes.append(Episode(f"{g}-{e}", float(rng.normal()), (start, turn)))
        groups.append(Group(f"g{g}", f"g{g}", version, tuple(episodes)))
    return groups


def learner_of(settings: Settings, dtype: torch.dtype) -> Learner:
    """A learner whose weights have a precision that no setting gives."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(pretrained.DTYPES, "float32", dtype)
        return Learner.open(settings)


def learn(settings: Settings, dtype: torch.dtype, until: int) -> tuple[Curve, dict[str, Tensor]] | None:
    """Trains from the newest checkpoint to a version, with a checkpoint at the end: the metrics and the weights."""
    learner = learner_of(settings, dtype)
    if not learner.ranks.leads:
        follow(learner)
        return None
    curve = []
    while learner.version < until:
        batch = learner.begin()
        for group in groups_of(learner.version):
            learner.take(batch, [group])
        curve.append(learner.step(batch))
    learner.save_checkpoint()
    weights = learner.published()
    dismiss(learner)
    return curve, weights


def assert_close(
    found: Sequence[dict[str, float]], expected: Sequence[dict[str, float]], limit: float
) -> None:
    for ours, theirs in zip(found, expected, strict=True):
        assert ours.keys() == theirs.keys()
        # An empty micro-batch is computed for the other ranks' sake.
        for name in ours.keys() - {"computed_tokens"}:
            assert ours[name] == pytest.approx(theirs[name], rel=limit, abs=limit), name


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
        settings_of(exact_model, tmp_path / str(n), algorithm, context=shared, **ADAPTERS)
        for n, shared in ((1, 1), (ranks, context))
    ]
    ((expected, one),) = on_ranks(1, learn, settings[0], torch.float64, STEPS)
    (curve, several), *_ = on_ranks(ranks, learn, settings[1], torch.float64, STEPS)
    assert_close(curve, expected, 1e-9)
    for name, value in one.items():
        torch.testing.assert_close(several[name], value, rtol=0, atol=1e-9)
    assert expected[-1]["kl_reference_k3"] > 0


def test_adapters_in_bf16_are_alike_on_two_ranks_but_for_rounding(exact_model: Path, tmp_path: Path) -> None:
    settings = [settings_of(exact_model, tmp_path / str(n), {}, "bfloat16", **ADAPTERS) for n in (1, 2)]
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
        settings_of(exact_model, tmp_path / name, {}, **ADAPTERS) for name in ("straight", "cut")
    )
    ((expected, one),) = on_ranks(1, learn, straight, torch.float64, STEPS)
    on_ranks(before, learn, cut, torch.float64, STEPS // 2)
    (curve, resumed), *_ = on_ranks(after, learn, cut, torch.float64, STEPS)
    assert_close(curve, expected[STEPS // 2 :], 1e-9)
    for name, value in one.items():
        torch.testing.assert_close(resumed[name], value, rtol=0, atol=1e-9)


def lose(settings: Settings, victim: int) -> str:
    """Rank `victim` kills itself in its second micro-batch; what the other says of it."""
    learner = learner_of(settings, torch.float32)
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
    """What a rank that has no order to give or to follow says when `victim`, after two heartbeats, ends or says nothing more."""
    learner = learner_of(settings, torch.float32)
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
