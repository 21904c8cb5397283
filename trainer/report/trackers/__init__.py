"""The trackers by name. To add one: write its file, and add its line to `REGISTRY`."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from importlib.util import find_spec

from headgate.extras import install_command
from trainer.errors import ConfigError
from trainer.report.trackers.base import About, Tracker
from trainer.report.trackers.mlflow import Mlflow
from trainer.report.trackers.tensorboard import TensorBoard
from trainer.report.trackers.wandb import Wandb

REGISTRY: dict[str, tuple[Callable[[About], Tracker], str]] = {
    "tensorboard": (TensorBoard, "trainer"),
    "wandb": (Wandb, "trackers"),
    "mlflow": (Mlflow, "trackers"),
}
"""By the name in `[report] trackers`, which is also that of its package: the class, and the extra that has the package."""

__all__ = ["REGISTRY", "About", "Tracker", "check"]


def check(names: Iterable[str]) -> None:
    """Raise ConfigError if the package of a tracker is not installed."""
    for name in names:
        if find_spec(name) is None:
            raise ConfigError(
                f"[report] trackers: {name} is not installed: {install_command(REGISTRY[name][1])}"
            )
