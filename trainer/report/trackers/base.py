"""The interface of trackers: programs that keep and draw a run's figures.

A tracker runs in a thread of its own (`trainer.report.tracking`), so its methods may block, hang or raise any exception.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from trainer.config.report import ReportSettings


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
        """Continue the tracker's run of that id, or begin a new one for None; return its id."""

    def figures(self, step: int, at: float, figures: Mapping[str, float]) -> None:
        """Report finite figures of a step, which is never below the previous one; `at` is in seconds since 1970."""

    def samples(self, step: int, at: float, rows: Sequence[Mapping[str, Any]]) -> None:
        """Report a step's sample of calls (`trainer.report.samples.Sample`), directly after its figures."""

    def episodes(self, step: int, at: float, rows: Sequence[Mapping[str, Any]]) -> None:
        """Report the episodes of that sample (`trainer.report.samples.episodes_of`), directly after its calls."""

    def close(self, failed: bool) -> None:
        """Send what is left, and report how the run ended."""
