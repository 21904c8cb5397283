"""Shows a person how episodes run (a table with rewards, failures and what is waited for, or lines where there is no terminal),
and how groups are written."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Self

from rich.console import Console, Group
from rich.live import Live
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    TextColumn,
    TimeElapsedColumn,
)
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from headgate.client.failures import Crashes, in_a_line
from headgate.client.outcomes import EpisodeOutcome
from headgate.processes.interrupts import Interrupted

_LINE_EVERY_S = 5.0
_WAIT_EVERY_S = 30.0
_SMOOTHING = 0.05
ENDING = "interrupted: giving up open episodes"
CANCELLED = (
    "the run has ended early: code in this process, such as an agent, cancelled the driver's own tasks"
)
_BAR = 30


class EpisodeProgress:
    """Counts outcomes and shows them; `total` is None for a run without an end.

    A crash of an agent is printed when it is the first of its kind; at the end, the numbers of its episodes and attempts are.
    """

    def __init__(self, total: int | None, console: Console | None = None) -> None:
        self._console = console or Console(stderr=True)
        self._total = total
        self._started = time.monotonic()
        self._last_line = self._last_wait = self._started
        self._done = self._failed = self._aborted = self._untrainable = 0
        self._sum = 0.0
        self._recent: float | None = None
        self.interrupted = False
        """True once a signal has ended the run."""
        self.cancelled = False
        """True once an agent has ended the run by cancelling its tasks."""
        self._crashes = Crashes()
        self._notices, self._waits = Crashes(), Crashes()
        self._last_error = self._waits_for = ""
        self._live = Live(console=self._console, get_renderable=self.view, refresh_per_second=2)

    def __enter__(self) -> Self:
        if self._console.is_terminal:
            self._live.start()
        return self

    def __exit__(
        self, _kind: type[BaseException] | None, _error: BaseException | None, _trace: TracebackType | None
    ) -> None:
        self._live.stop()
        for crash, episodes, attempts in self._crashes.counts():
            if attempts > 1:
                noun = "episode" if episodes == 1 else "episodes"
                self._print(f"{episodes} {noun} ({attempts} attempts): {crash}")

    def add(self, outcome: EpisodeOutcome) -> None:
        """Count an ended episode."""
        self._done += 1
        if outcome.aborted is not None:
            self._aborted += 1
        elif outcome.reward is None:
            self._failed += 1
            self._last_error = in_a_line(outcome.error or "")
        else:
            self._sum += outcome.reward
            self._untrainable += bool(outcome.notice)
            recent = outcome.reward if self._recent is None else self._recent
            self._recent = recent + _SMOOTHING * (outcome.reward - recent)
        for attempt, crash in enumerate(outcome.crashes or ((outcome.error,) if outcome.error else ()), 1):
            if self._crashes.is_new(crash, outcome):
                what = f"episode {outcome.episode_id or 'of ' + outcome.task_id}"
                if outcome.error is None:
                    what = f"attempt {attempt} of {outcome.attempts} at {what}"
                self._print(f"{what} failed: {crash}")
        if outcome.notice and self._notices.is_new(outcome.notice):
            self._print(f"warning: nothing of episode {outcome.episode_id} is trained: {outcome.notice}")
        self._line()

    @contextmanager
    def interrupts(self) -> Iterator[None]:
        """Take an interruption, or a cancellation by an agent, for the end of the run, which the summary then reports.

        For the main task of a program, which only foreign code in the process cancels.
        """
        try:
            yield
        except Interrupted:
            self.interrupted = True
        except asyncio.CancelledError:
            if (main := asyncio.current_task()) is not None:
                main.uncancel()
            self.cancelled = True
            self._print(CANCELLED)

    def report(self, text: str) -> None:
        """Print a line that stays."""
        self._print(text)

    def wait(self, what: str) -> None:
        """Show what the run waits for; empty: for nothing. Without a terminal, a known reason is repeated after a while."""
        self._waits_for = what
        now = time.monotonic()
        if not what or self._console.is_terminal:
            return
        if self._waits.is_new(what) or now - self._last_wait >= _WAIT_EVERY_S:
            self._last_wait = now
            self._print(f"waiting: {what}")

    def summary(self) -> dict[str, float | None]:
        """Return the last line of a run.

        `aborted`: episodes for which the gateway had no use any more; `untrainable`: rewarded ones without a token that can be
        trained; `reward_mean`: None if no episode was rewarded.
        """
        rewarded = self._done - self._failed - self._aborted
        return {
            "episodes": self._done,
            "failed": self._failed,
            "aborted": self._aborted,
            "untrainable": self._untrainable,
            "reward_mean": self._sum / rewarded if rewarded else None,
            "seconds": round(time.monotonic() - self._started, 3),
            **({"interrupted": True} if self.interrupted else {}),
            **({"cancelled": True} if self.cancelled else {}),
        }

    def view(self) -> Group:
        """Return the table as it is now, with what is waited for and the last error under it."""
        table = Table("episodes", "", "recent reward", "failed", "not needed", "seconds")
        bar = ProgressBar(self._total, self._done, width=_BAR, pulse=self._total is None)
        done = f"{self._done}" if self._total is None else f"{self._done} of {self._total}"
        reward = "" if self._recent is None else f"{self._recent:.3f}"
        seconds = f"{time.monotonic() - self._started:.0f}"
        table.add_row(done, bar, reward, str(self._failed), str(self._aborted), seconds)
        notes = (("waiting", self._waits_for), ("last error", self._last_error))
        return Group(table, *(Text(f"{name}: {what}") for name, what in notes if what))

    def _line(self) -> None:
        now = time.monotonic()
        if not self._console.is_terminal and now - self._last_line >= _LINE_EVERY_S:
            self._last_line = now
            total = f" of {self._total}" if self._total is not None else ""
            error = f"; the last error: {self._last_error}" if self._last_error else ""
            reward = "-" if self._recent is None else f"{self._recent:.3f}"
            self._print(f"{self._done}{total} episodes, reward {reward}, {self._failed} failed{error}")

    def _print(self, text: str) -> None:
        self._console.print(text, markup=False, highlight=False, soft_wrap=True)


class TerminalBar:
    """A progress bar on standard error; shows nothing where that is not a terminal."""

    def __init__(self, *columns: ProgressColumn, total: int | None = None) -> None:
        self._console = Console(stderr=True)
        shown = (*columns, TimeElapsedColumn())
        self._bar = Progress(*shown, console=self._console, disable=not self._console.is_terminal)
        self._task = self._bar.add_task("", total=total)

    def __enter__(self) -> Self:
        self._bar.start()
        return self

    def __exit__(
        self, _kind: type[BaseException] | None, _error: BaseException | None, _trace: TracebackType | None
    ) -> None:
        self._bar.stop()


class GroupProgress(TerminalBar):
    """Shows how many groups of an export are written."""

    def __init__(self) -> None:
        super().__init__(TextColumn("groups"), BarColumn(), MofNCompleteColumn())

    def show(self, done: int, total: int) -> None:
        """Show how many of all groups are written."""
        self._bar.update(self._task, completed=done, total=total)
