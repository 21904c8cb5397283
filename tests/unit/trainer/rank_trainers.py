"""Learners on batches that a test made, in any precision and on any number of ranks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from headgate.kept import Kept
from headgate.types import Episode, Group
from tests.unit.trainer.runs import offline_settings
from tests.unit.trainer.trees import prompt, sampled
from trainer.config.settings import Settings
from trainer.model import pretrained
from trainer.rank_rpc import serve_commands, shutdown_ranks
from trainer.rank_trainer import RankTrainer

STEPS = 4
Curve = list[dict[str, float]]


def settings_of(
    model: Path,
    work: Path,
    algorithm: dict[str, Any],
    dtype: str = "float32",
    more: Mapping[str, Any] | None = None,
    **parallel: int,
) -> Settings:
    """Settings of a short run; `more` of `[model]`."""
    given = {"batch": {"tokens": 40}, "parallel": {"timeout_s": 60, **parallel}}
    optimizer = {"schedule": "cosine", "warmup_steps": 2}
    tables = {"model": {"dtype": dtype, **(more or {})}, "optimizer": optimizer, "algorithm": algorithm}
    return offline_settings(model, work, **tables, **given)


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
            if e == 1:  # some of its tokens are of truncated distributions
                turn = replace(
                    turn, kept=Kept.of({i: (250 + i, int(turn.ids[i])) for i in (0, 2)}, len(turn.ids))
                )
            episodes.append(Episode(f"{g}-{e}", float(rng.normal()), (start, turn)))
        groups.append(Group(f"g{g}", f"g{g}", version, tuple(episodes)))
    return groups


@contextmanager
def in_precision(dtype: torch.dtype) -> Iterator[None]:
    """`[model] dtype = "float32"` stands for a precision that no setting gives."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(pretrained.DTYPES, "float32", dtype)
        yield


def learn(settings: Settings, dtype: torch.dtype, until: int) -> tuple[Curve, dict[str, Tensor]] | None:
    """Trains from the newest checkpoint to a version, with a checkpoint at the end: the metrics and the weights."""
    with in_precision(dtype):
        trainer = RankTrainer.open(settings)
        if not trainer.ranks.is_rank_zero:
            serve_commands(trainer)
            return None
        curve = []
        while trainer.version < until:
            batch = trainer.begin_batch()
            for group in groups_of(trainer.version):
                trainer.add_groups(batch, [group])
            curve.append(trainer.step(batch))
        trainer.save_checkpoint()
        weights = trainer.gather_weights()
        shutdown_ranks(trainer)
        return curve, weights


def assert_close(
    found: Sequence[dict[str, float]], expected: Sequence[dict[str, float]], limit: float
) -> None:
    for ours, theirs in zip(found, expected, strict=True):
        assert ours.keys() == theirs.keys()
        # An empty micro-batch is computed for the other ranks' sake.
        for name in ours.keys() - {"computed_tokens"}:
            assert ours[name] == pytest.approx(theirs[name], rel=limit, abs=limit), name
