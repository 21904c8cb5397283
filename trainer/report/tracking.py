"""Sends a run's figures to its trackers: a thread for each tracker follows `metrics.jsonl`, woken through a queue.

Owns the bookmarks `[run] dir/trackers/NAME.json`: the tracker's run, and how far in the file it is.
Invariants: a tracker that fails or hangs never delays a step, and delays the end of the run by at most `FINISH_S`; a line is sent
once the lines before it were accepted, and sent again until then; a later start never repeats what an earlier one had begun to
send; steps never go backwards.
"""

from __future__ import annotations

import json
import os
import queue
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from headgate.used_settings import without_secrets
from trainer.config.settings import TrainingSettings
from trainer.report.files import samples_file
from trainer.report.samples import episodes_of, read
from trainer.report.trackers import REGISTRY, About, Tracker

FINISH_S = 30.0
"""Seconds that the end of a run waits for all trackers; the next start sends the rest."""
_NOT_FIGURES = frozenset({"time", "version", "batch"})
_THREAD = "tracker "
Notify = Callable[[str], None]


class Trackers:
    """The trackers of one run."""

    def __init__(self, settings: TrainingSettings) -> None:
        self._settings = settings
        self._threads: list[TrackerThread] = []

    def start(self, notify: Notify) -> None:
        """Start the threads, which report warnings by `notify`."""
        directory = self._settings.run.dir.resolve()
        config = without_secrets(self._settings.model_dump(mode="json"))
        for name in dict.fromkeys(self._settings.report.trackers):
            tracker = REGISTRY[name][0](About(directory, self._settings.report, config))
            self._threads.append(TrackerThread(name, tracker, directory, notify))

    def wake(self) -> None:
        """Make the trackers read new lines of `metrics.jsonl`."""
        for thread in self._threads:
            thread.wake()

    def finish(self, failed: bool) -> None:
        """Wait up to `FINISH_S` for all trackers, and report those that are not finished."""
        for thread in self._threads:
            thread.end(failed)
        deadline = time.monotonic() + FINISH_S
        for thread in self._threads:
            thread.join(deadline)


class TrackerThread:
    """The thread of one tracker."""

    def __init__(self, name: str, tracker: Tracker, directory: Path, notify: Notify) -> None:
        self._name = name
        self._notify = notify
        metrics, bookmark = directory / "metrics.jsonl", directory / "trackers" / f"{name}.json"
        bookmark.parent.mkdir(parents=True, exist_ok=True)
        Bookmark.begin(bookmark, metrics.stat().st_size if metrics.exists() else 0)
        self._follower = Follower(tracker, metrics, bookmark, self._warn)
        self._commands: queue.SimpleQueue[bool | None] = queue.SimpleQueue()
        """None: new lines; else the end of the run: true if it failed."""
        self._thread = threading.Thread(
            target=self._follower.follow,
            args=(iter(self._commands.get, object()),),
            name=f"{_THREAD}{name}",
            daemon=True,
        )
        self._thread.start()

    def wake(self) -> None:
        """Make the thread read new lines, unless it has not received an earlier call yet."""
        if self._commands.empty():
            self._commands.put(None)

    def end(self, failed: bool) -> None:
        """Send the rest, and close the tracker's run."""
        self._commands.put(failed)

    def join(self, deadline: float) -> None:
        """Wait until `deadline` (`time.monotonic()`) for the end, and report if the tracker has not received everything."""
        self._thread.join(max(0.0, deadline - time.monotonic()))
        if not self._follower.finished:
            self._warn("it has not received all figures; the next start of this run sends the rest")

    def _warn(self, text: str) -> None:
        self._notify(f"warning: {self._name}: {text}")


def exit_if_stuck(status: int) -> None:
    """End this process if a tracker still hangs: its package could delay the normal exit without bound."""
    if any(thread.name.startswith(_THREAD) for thread in threading.enumerate()):
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


@dataclass(slots=True)
class Bookmark:
    """How far a tracker is, for the next start."""

    run: str | None
    """The tracker's id of the run; None before the first."""
    position: int
    """The end of the newest line whose sending was begun, in bytes."""
    step: int = 0
    """The step of that line."""

    @classmethod
    def load(cls, path: Path) -> Bookmark:
        """Return the bookmark of a file."""
        return cls(**json.loads(path.read_text()))

    @classmethod
    def begin(cls, path: Path, position: int) -> None:
        """Write a bookmark at `position`, unless the file exists."""
        if not path.exists():
            cls(None, position).save(path)

    def save(self, path: Path) -> None:
        """Replace the file atomically."""
        temporary = path.with_suffix(".tmp")
        temporary.write_text(json.dumps(asdict(self)))
        temporary.replace(path)


class Follower:
    """One tracker, and what it has received."""

    def __init__(self, tracker: Tracker, metrics: Path, bookmark: Path, warn: Notify) -> None:
        self.finished = False
        """True once everything was sent and the tracker's run is closed."""
        self._tracker = tracker
        self._metrics = metrics
        self._path = bookmark
        self._bookmark = Bookmark.load(bookmark)
        self._accepted = self._bookmark.position
        """The end of the newest line that the tracker accepted."""
        self._warn = warn
        self._warned = self._opened = False

    def follow(self, commands: Iterable[bool | None]) -> None:
        """Send new lines at each None, and finish at a boolean: true if the run failed."""
        failed = True
        self._attempt(self._catch_up)
        for command in commands:
            if command is not None:
                failed = command
                break
            self._attempt(self._catch_up)
        self.finished = self._attempt(lambda: self._finish(failed))

    def _attempt(self, work: Callable[[], None]) -> bool:
        """Return true if `work` raised nothing."""
        try:
            work()
        except Exception as error:  # whatever a tracker's package raises: training must continue
            if not self._warned:
                self._warned = True
                why = (str(error).strip() or repr(error)).splitlines()[0]
                self._warn(f"{type(error).__name__}: {without_secrets(why)}; figures are sent again later")
            return False
        return True

    def _catch_up(self) -> None:
        if not self._opened:
            self._bookmark.run = self._tracker.open(self._bookmark.run)
            self._bookmark.save(self._path)
            self._opened = True
        for end, record in lines_of(self._metrics, self._accepted):
            if record["version"] >= self._bookmark.step:
                self._bookmark.step, self._bookmark.position = record["version"], end
                self._bookmark.save(self._path)
                self._send(record)
            self._accepted = end

    def _send(self, record: dict[str, Any]) -> None:
        try:
            step, at = record["version"], record["time"]
            self._tracker.figures(step, at, figures_of(record))
            if rows := samples_of_line(self._metrics.parent, record):
                self._tracker.samples(step, at, rows)
                self._tracker.episodes(step, at, episodes_of(rows))
        except Exception:
            self._bookmark.position = self._accepted
            self._bookmark.save(self._path)
            raise

    def _finish(self, failed: bool) -> None:
        try:
            self._catch_up()
        finally:
            if self._opened:
                self._tracker.close(failed)


def lines_of(metrics: Path, position: int) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield the complete lines of a file after `position`, each with its end; from the start if the file is shorter."""
    if not metrics.exists():
        return
    with metrics.open("rb") as file:
        if position > file.seek(0, os.SEEK_END):
            position = 0
        file.seek(position)
        for line in file:
            if not line.endswith(b"\n"):
                return
            position += len(line)
            yield position, json.loads(line)


def figures_of(record: dict[str, Any]) -> dict[str, float]:
    """Return the numbers of a line of `metrics.jsonl`."""
    return {
        name: float(value)
        for name, value in record.items()
        if name not in _NOT_FIGURES and isinstance(value, int | float)
    }


def samples_of_line(directory: Path, record: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the sample of a step's calls; empty if it has none. An evaluation's line has none."""
    if not {"batch", "step"} <= record.keys():
        return []
    path = samples_file(directory, int(record["step"]))
    return read(path) if path.exists() else []
