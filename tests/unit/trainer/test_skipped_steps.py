"""A step whose loss or gradient is not finite changes no weight, and too many in a row end the run."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any, NoReturn

import pytest
import torch
from safetensors.torch import load_file

from tests.harness.gateways import RunningGateway
from tests.harness.waiting import within
from tests.unit.trainer.rollouts import episodes
from tests.unit.trainer.runs import loop_of, offline_settings, settings_of
from tests.unit.trainer.trees import group
from trainer.errors import NotFinite
from trainer.rank_trainer import RankTrainer


def break_gradients(trainer: RankTrainer) -> Any:
    """Makes one gradient of every backward pass infinite; returns what ends it."""
    return next(trainer.model.parameters()).register_hook(lambda gradient: gradient * math.inf)


def state(trainer: RankTrainer) -> list[torch.Tensor]:
    moments = [value for entry in trainer.optimizer.moments().values() for value in entry.values()]
    return [value.clone() for value in [*trainer.model.state_dict().values(), *moments]]


@pytest.mark.parametrize("broken", ["gradient", "loss"])
def test_a_step_that_is_not_finite_makes_the_next_version_of_the_same_weights(
    tiny_model: Path, tmp_path: Path, broken: str
) -> None:
    trainer = RankTrainer.open(offline_settings(tiny_model, tmp_path, algorithm={"normalize_std": False}))
    good = [group("good", [0.0, 1.0])]
    assert trainer.train(good)["skipped_steps"] == 0
    before = state(trainer)
    # The larger reward does not fit float32, in which losses are computed.
    hook = break_gradients(trainer) if broken == "gradient" else None
    bad = good if hook else [group("bad", [0.0, 1e100])]
    assert [trainer.train(bad)["skipped_steps"] for _ in range(2)] == [1, 2]
    assert (trainer.version, trainer.parent, trainer.steps) == (3, 2, 3)
    assert all(map(torch.equal, state(trainer), before))
    assert trainer.probe is not None
    assert trainer.probe.new_logprobs == trainer.probe.parent_logprobs, (
        "nothing distinguishes it from its parent"
    )
    if hook:
        hook.remove()
    assert trainer.train(good)["skipped_steps"] == 0
    assert not all(map(torch.equal, state(trainer), before))


def refuse(literal: str) -> NoReturn:
    raise AssertionError(f"{literal} is not JSON")


async def test_a_run_stops_after_too_many_and_the_next_start_goes_on(
    gateway: RunningGateway, tiny_model: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    settings = settings_of(gateway, tiny_model, tmp_path, steps=4)
    async with episodes(gateway), within("the trainer is through"):
        async with loop_of(gateway, settings) as loop:
            break_gradients(loop.trainer)
            with pytest.raises(NotFinite, match="3 steps in a row"):
                await loop.train()
        assert (await gateway.admin.status())["version"] == 3
        first, second = (
            load_file(settings.run.dir / "weights" / f"v00000{version}" / "model.safetensors")
            for version in (1, 2)
        )
        assert all(torch.equal(value, second[name]) for name, value in first.items())
        assert "version 1 has the weights of version 0" in capfd.readouterr().err
        async with loop_of(gateway, settings) as loop:
            await loop.train()
    assert (await gateway.admin.status())["consumed"] == 4
    lines = (settings.run.dir / "metrics.jsonl").read_text().splitlines()
    records = [json.loads(line, parse_constant=refuse) for line in lines]
    assert [record["skipped_steps"] for record in records] == [1, 2, 3, 0]
    assert ["grad_norm" in record for record in records] == [False, False, False, True]
