"""What a person sees while episodes run (a bar with the mean reward and the failures, or lines where there is no terminal), and
while groups are written."""

from __future__ import annotations

import time
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from gateway.client.driver import EpisodeOutcome

_LINE_EVERY_S = 5.0
_SMOOTHING = 0.05


class EpisodeProgress:
    """Counts outcomes and shows them; `total` is None for a run without an end."""

    def __init__(self, total: int | None) -> None:
        self._console = Console(stderr=True)
        self._total = total
        self._started = time.monotonic()
        self._last_line = self._started
        self._done = self._failed = self._aborted = 0
        self._sum = 0.0
        self._recent: float | None = None
        columns = (
            TextColumn("episodes"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[state]}"),
            TimeElapsedColumn(),
        )
        self._bar = Progress(*columns, console=self._console, disable=not self._console.is_terminal)
        self._task = self._bar.add_task("episodes", total=total, state="")

    def __enter__(self) -> Self:
        self._bar.start()
        return self

    def __exit__(
        self, _kind: type[BaseException] | None, _error: BaseException | None, _trace: TracebackType | None
    ) -> None:
        self._bar.stop()

    def add(self, outcome: EpisodeOutcome) -> None:
        """One more episode has ended."""
        self._done += 1
        if outcome.aborted is not None:
            self._aborted += 1
        elif outcome.reward is None:
            self._failed += 1
            self._console.print(f"episode {outcome.episode_id} failed: {outcome.error}", markup=False)
        else:
            self._sum += outcome.reward
            recent = outcome.reward if self._recent is None else self._recent
            self._recent = recent + _SMOOTHING * (outcome.reward - recent)
        self._show()

    def summary(self) -> dict[str, float]:
        """The last line of a run. `aborted`: episodes for which the gateway had no use any more."""
        rewarded = self._done - self._failed - self._aborted
        return {
            "episodes": self._done,
            "failed": self._failed,
            "aborted": self._aborted,
            "reward_mean": self._sum / rewarded if rewarded else 0.0,
            "seconds": round(time.monotonic() - self._started, 3),
        }

    def _show(self) -> None:
        state = f"reward {self._recent or 0.0:.3f}, {self._failed} failed"
        self._bar.update(self._task, advance=1, state=state)
        now = time.monotonic()
        if not self._console.is_terminal and now - self._last_line >= _LINE_EVERY_S:
            self._last_line = now
            total = f" of {self._total}" if self._total is not None else ""
            self._console.print(f"{self._done}{total} episodes, {state}")


class GroupProgress:
    """Shows how many groups of an export are written, on a terminal."""

    def __init__(self) -> None:
        console = Console(stderr=True)
        columns = (TextColumn("groups"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        self._bar = Progress(*columns, console=console, disable=not console.is_terminal)
        self._task = self._bar.add_task("groups", total=None)

    def __enter__(self) -> Self:
        self._bar.start()
        return self

    def __exit__(
        self, _kind: type[BaseException] | None, _error: BaseException | None, _trace: TracebackType | None
    ) -> None:
        self._bar.stop()

    def show(self, done: int, total: int) -> None:
        """So many of so many are written."""
        self._bar.update(self._task, completed=done, total=total)
