"""The interface of trackers: programs of others that keep and draw a run's figures.

A tracker runs in a process of its own (`trainer.report.sender`), so its methods may block, hang or raise whatever they like.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from trainer.sections.report import ReportSettings


@dataclass(frozen=True, slots=True)
class About:
    """The run that is reported."""

    directory: Path
    """`[run] dir`, absolute."""
    settings: ReportSettings
    config: Mapping[str, Any]
    """The trainer's configuration without secrets, a mapping for each table."""

    @property
    def name(self) -> str:
        """The run's name in trackers."""
        return self.settings.name or self.directory.name


class Tracker(Protocol):
    """One tracker of one run. Register it in `trainer.report.trackers`."""

    def open(self, run: str | None) -> str:
        """Goes on with the tracker's run of that id, or begins a new one for None; returns its id."""

    def figures(self, step: int, at: float, figures: Mapping[str, float]) -> None:
        """Takes finite figures of a step, which never is below the one before; `at` is in seconds since 1970."""

    def samples(self, step: int, at: float, rows: Sequence[Mapping[str, Any]]) -> None:
        """Takes a step's sample of calls (`trainer.report.samples.Sample`), right behind its figures."""

    def episodes(self, step: int, at: float, rows: Sequence[Mapping[str, Any]]) -> None:
        """Takes the episodes of that sample (`trainer.report.episodes`), right behind its calls."""

    def close(self, failed: bool) -> None:
        """Hands over what is left, and says how the run ended."""
