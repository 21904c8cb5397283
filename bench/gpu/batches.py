"""Trainers on one small batch of episodes that branch, on any device, and the distance between two of their states."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bench.gpu.workload import tiny, write_model
from bench.trainer import load
from bench.trainer.headgate import groups_of
from headgate.types import Group
from trainer.config.settings import Settings
from trainer.rank_rpc import shutdown_ranks
from trainer.rank_trainer import RankTrainer

State = dict[str, Tensor]


def tiny_model(folder: Path) -> Path:
    """Write a tiny model with random weights in float32."""
    write_model(folder, tiny())
    return folder


def branching() -> list[Group]:
    """Return two groups of two episodes, of four paths that share half of their tokens."""
    sizes = load.Sizes(groups=2, members=2, vocabulary=tiny().config["vocab_size"])
    return groups_of(load.branches(sizes, 1, path=80, shared=0.5, fan=4))


def settings_of(model: Path, folder: Path, device: str, /, **tables: dict[str, Any]) -> Settings:
    """Return about one micro-batch per group. With eps = 1 a step follows the gradient's size, and not only its sign."""
    values: dict[str, dict[str, Any]] = {
        "run": {"dir": folder, "steps": 9, "device": device, "threads": 1},
        "gateway": {"url": "http://127.0.0.1:9"},
        "model": {"path": model, "compile": False},
        "optimizer": {"lr": 1e-2, "eps": 1.0},
        "batch": {"tokens": 512},
    }
    for name, given in tables.items():
        values[name] = {**values.get(name, {}), **given}
    return Settings.parse(values)


def learn(settings: Settings, steps: int, look: Callable[[RankTrainer], None] = lambda _: None) -> State:
    """Train some steps on one batch. Return the weights. Call `look` before the optimizer's step."""
    trainer = RankTrainer.open(settings)
    for part in trainer.optimizer.parts[:1]:
        part.register_step_pre_hook(lambda *_: look(trainer))
    for _ in range(steps):
        trainer.train(branching())
    state = state_of(trainer, lambda weight: weight)
    shutdown_ranks(trainer)
    return state


def state_of(trainer: RankTrainer, of: Callable[[Tensor], Any]) -> State:
    """Return the result of `of` for each weight, whole, as float32 on the CPU."""
    found = {}
    for name, weight in trainer.model.named_parameters():
        tensor = of(weight).detach()
        whole = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
        found[name] = whole.float().cpu().clone()
    return found


def distance(found: State, expected: State, over: State | None = None) -> float:
    """Return the norm of the difference, as a share of the norm of `expected`, or of its difference to `over`."""
    assert found.keys() == expected.keys()
    zero = torch.zeros(())
    gaps = sum(float((found[name] - expected[name]).double().square().sum()) for name in expected)
    norm = sum(
        float((expected[name] - (over[name] if over else zero)).double().square().sum()) for name in expected
    )
    return float((gaps / norm) ** 0.5)
