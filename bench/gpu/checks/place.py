"""Where a check runs, and what it returns: the seam between the runner and each check."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.gpu.workload import WORKLOADS, Workload, write_model

Figures = dict[str, Any]
"""What a check measured, as JSON."""


class CheckFailed(Exception):
    """A check found what must not be. Its text names it; `figures` are reported with it."""

    def __init__(self, why: str, figures: Figures | None = None) -> None:
        super().__init__(why)
        self.figures = figures or {}


@dataclass(frozen=True, slots=True)
class Place:
    """The device of a check, its folder, and the engine that it may start."""

    device: str
    """`cuda`, or `cpu` for the dry form: the same code in a tiny shape, whose figures have no meaning for speed."""
    folder: Path
    """The check's own, empty at its start."""
    engine: Mapping[str, Any]
    """The table `[engine]`; empty in the trainer's part."""
    gpu: str = ""
    """The GPU's name; empty on the CPU."""

    @property
    def dry(self) -> bool:
        """True on the CPU."""
        return self.device == "cpu"

    @property
    def workload(self) -> Workload:
        """Qwen3-0.6B, or a tiny model."""
        return WORKLOADS["tiny" if self.dry else "qwen3-0.6b"]()

    def model(self) -> Path:
        """Return a random model of the workload's shape, which all checks of a run share."""
        folder = self.folder.parent / f"model-{self.workload.name}"
        if not folder.exists():
            partial = folder.with_suffix(".partial")
            write_model(partial, self.workload)
            partial.rename(folder)
        return folder


def require(holds: bool, why: str, figures: Figures) -> Figures:
    """Return the figures. Raise CheckFailed, with them, if something does not hold."""
    if not holds:
        raise CheckFailed(why, figures)
    return figures
