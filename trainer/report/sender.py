"""The process that sends a run's figures to one tracker: it follows `metrics.jsonl`, which is all that it needs of the trainer.

`python -m trainer.report.sender DIRECTORY NAME`, started by `trainer.report.senders`. Its standard input is one line of JSON
(settings, configuration), then a line whenever there is something new, and `end STATUS`; its standard output are
warnings for the terminal.
Owns the bookmark `DIRECTORY/trackers/NAME.json`: the tracker's run, and how far in the file it is. The trainer writes the first
one before it starts this process, which may be slower than the next trainer.
Invariants: a line is sent once the lines before it were taken, and tried again until then; a new process never sends what an
earlier one had begun to send; steps never go backwards.
"""

from __future__ import annotations

import fcntl
import json
import os
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from trainer.report.episodes import episodes_of
from trainer.report.files import samples_file
from trainer.report.markdown import read
from trainer.report.secrets import without_secrets
from trainer.report.trackers import REGISTRY, About, Tracker
from trainer.sections.report import ReportSettings

_NO_FIGURES = frozenset({"time", "version", "buffer"})


@dataclass(slots=True)
class Bookmark:
    """How far a tracker is, for the next process."""

    run: str | None
    """The tracker's id of the run; None before the first."""
    position: int
    """The end of the newest line that was begun to be sent, in bytes."""
    step: int = 0
    """That line's."""

    @classmethod
    def load(cls, path: Path) -> Bookmark:
        """The one that is written."""
        return cls(**json.loads(path.read_text()))

    @classmethod
    def begin(cls, path: Path, position: int) -> None:
        """Writes a new one at `position`, unless there is one."""
        if not path.exists():
            cls(None, position).save(path)

    def save(self, path: Path) -> None:
        """Replaces the file at once."""
        aside = path.with_suffix(".tmp")
        aside.write_text(json.dumps(asdict(self)))
        aside.replace(path)


class Follower:
    """One tracker, and what it has been sent."""

    def __init__(self, tracker: Tracker, metrics: Path, bookmark: Path, warn: Callable[[str], None]) -> None:
        self._tracker = tracker
        self._metrics = metrics
        self._path = bookmark
        self._bookmark = Bookmark.load(bookmark)
        self._done = self._bookmark.position
        """The end of the newest line that was taken."""
        self._warn = warn
        self._warned = self._opened = False

    def follow(self, told: Iterable[str]) -> None:
        """Sends what is new whenever it is told, until `end STATUS` or the end of what is told."""
        failed = True
        self._attempt(self._catch_up)
        for line in told:
            if line.startswith("end"):
                failed = line.split()[1] != "0"
                break
            self._attempt(self._catch_up)
        self._attempt(lambda: self._finish(failed))

    def _attempt(self, work: Callable[[], None]) -> None:
        try:
            work()
        except Exception as error:  # whatever a tracker's package raises: training must go on
            if not self._warned:
                self._warned = True
                why = (str(error).strip() or repr(error)).splitlines()[0]
                self._warn(f"{type(error).__name__}: {without_secrets(why)}; figures are sent again later")

    def _catch_up(self) -> None:
        if not self._opened:
            self._bookmark.run = self._tracker.open(self._bookmark.run)
            self._bookmark.save(self._path)
            self._opened = True
        for end, record in lines_of(self._metrics, self._done):
            if record["version"] >= self._bookmark.step:
                self._bookmark.step, self._bookmark.position = record["version"], end
                self._bookmark.save(self._path)
                self._send(record)
            self._done = end

    def _send(self, record: dict[str, Any]) -> None:
        try:
            step, at = record["version"], record["time"]
            self._tracker.figures(step, at, figures_of(record))
            if rows := samples_beside(self._metrics.parent, record):
                self._tracker.samples(step, at, rows)
                self._tracker.episodes(step, at, episodes_of(rows))
        except Exception:
            self._bookmark.position = self._done
            self._bookmark.save(self._path)
            raise

    def _finish(self, failed: bool) -> None:
        try:
            self._catch_up()
        finally:
            if self._opened:
                self._tracker.close(failed)


def lines_of(metrics: Path, position: int) -> Iterator[tuple[int, dict[str, Any]]]:
    """The whole lines of a file from a position on, each with its end; from the beginning if the file is shorter."""
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
    """The numbers of a line of `metrics.jsonl`."""
    return {
        name: float(value)
        for name, value in record.items()
        if name not in _NO_FIGURES and isinstance(value, int | float)
    }


def samples_beside(directory: Path, record: dict[str, Any]) -> list[dict[str, Any]]:
    """The sample of a step's calls, if it has one; an evaluation's line has none."""
    if not {"buffer", "step"} <= record.keys():
        return []
    path = samples_file(directory, int(record["step"]))
    return read(path) if path.exists() else []


def main() -> None:
    """Follows until it is told that the run is over, or the trainer is gone; then it has `finish_s` left."""
    directory, name = Path(sys.argv[1]), sys.argv[2]
    task = json.loads(sys.stdin.readline())
    settings = ReportSettings.model_validate(task["settings"])
    folder = directory / "trackers"
    with (folder / f"{name}.lock").open("w") as lock:
        # The sender of a trainer that was killed may still be at work.
        fcntl.flock(lock, fcntl.LOCK_EX)
        tracker = REGISTRY[name][0](About(directory, settings, task["config"]))
        metrics, bookmark = directory / "metrics.jsonl", folder / f"{name}.json"
        follower = Follower(tracker, metrics, bookmark, _own_output())
        follower.follow(_until_the_end(settings.finish_s))


def _own_output() -> Callable[[str], None]:
    """Writes lines to the standard output, which from now on is the log for everybody else."""
    own = os.fdopen(os.dup(sys.stdout.fileno()), "w", buffering=1)
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())

    def warn(text: str) -> None:
        own.write(f"{text}\n")

    return warn


def _until_the_end(finish_s: float) -> Iterator[str]:
    """The lines of the standard input; from the last one on the process has so many seconds left."""
    for line in sys.stdin:
        if line.startswith("end"):
            break
        yield line
    else:
        line = "end 1"
    limit = threading.Timer(finish_s, os._exit, (1,))
    limit.daemon = True
    limit.start()
    yield line


if __name__ == "__main__":
    main()
