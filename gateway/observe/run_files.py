"""The files of a run that the console shows: the settings of its programs, and the ends of their logs.

Nothing else can be read: a log is one of those that `logs` lists (regular files `*.log` directly in a folder of the run, and the
logs of `[engine] log`), links are not followed, and no reading is longer than its limit.
"""

from __future__ import annotations

import json
import os
import re
import stat
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from glob import escape
from itertools import islice
from pathlib import Path
from typing import Any

from gateway.config.settings import Settings
from headgate.used_settings import used_file

MOST_BYTES = 512 * 1024
_MOST_LOGS, _MOST_SETTINGS_BYTES = 200, 4 * 2**20
_TRAINERS = ("trainer-settings.json", "metrics.jsonl")
"""A folder that a trainer reports is one of a run if it has one of these files."""
_ESCAPES = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)|[@-Z\\-_])")
"""What a terminal would read as a command: colors, positions, titles."""


@dataclass(frozen=True, slots=True)
class Log:
    """A log of the run."""

    path: Path
    bytes: int
    changed_at: float
    """Seconds since 1970."""


@dataclass(frozen=True, slots=True)
class RunFiles:
    """Where the files of a run are."""

    folders: tuple[Path, ...]
    """Absolute, each once."""
    engine_logs: tuple[Path, ...] = ()
    """`[engine] log` of each model, with the model's name before the suffix: the engines' logs begin so."""

    @classmethod
    def of(cls, own: Iterable[Path], reported: Iterable[Path], settings: Settings | None) -> RunFiles:
        """Return the files in folders of the run. `reported`: by trainers. `settings`: the gateway's, if it runs."""
        trainers = [path for path in reported if any((path / name).is_file() for name in _TRAINERS)]
        folders = dict.fromkeys(path.resolve() for path in (*own, *trainers) if path.is_dir())
        logs = () if settings is None else _engine_logs(settings)
        return cls(tuple(folders), tuple(logs))

    def logs(self) -> list[Log]:
        """Return the logs of the run, at most 200. Blocks."""
        found = dict.fromkeys(islice(self._paths(), _MOST_LOGS))
        return [log for path in found if (log := _log(path)) is not None]

    def _paths(self) -> Iterator[Path]:
        for folder in self.folders:
            yield from sorted(folder.glob("*.log"))
        for start in self.engine_logs:
            yield from sorted(start.parent.glob(f"{escape(start.stem)}-*{escape(start.suffix)}"))

    def tail(self, name: str, limit: int) -> tuple[Log, str] | None:
        """Return the listed log with this path, and its last `limit` bytes in whole lines; None if it is not listed. Blocks.

        Raise OSError.
        """
        log = next((log for log in self.logs() if str(log.path) == name), None)
        return None if log is None else (log, _tail(log.path, min(limit, MOST_BYTES)))

    def settings_of(self, program: str) -> tuple[dict[str, Any] | None, str]:
        """Return what a program wrote of its settings at its last start, and why there is nothing. Blocks."""
        for folder in self.folders:
            path = used_file(folder, program)
            try:
                written = json.loads(_read(path, 0, _MOST_SETTINGS_BYTES))
                return {"at": written["at"], "settings": written["settings"], "path": str(path)}, ""
            except FileNotFoundError:
                continue
            except (OSError, ValueError, KeyError, TypeError) as error:
                return None, f"{path} cannot be read: {error}"
        looked = ", ".join(map(str, self.folders)) or "no folder of the run is known"
        return None, f"no {used_file(Path(), program)} on this machine; looked in {looked}"


def missing_logs(logs: Sequence[Log], files: RunFiles) -> list[dict[str, str]]:
    """Return the programs without a log, each with what would make one."""
    folder = files.folders[0] if files.folders else Path("FOLDER")
    trainers = folder / "trainer.log"
    why = {
        "gateway": f"it writes to its terminal. To keep it: gateway serve ... 2>> {folder / 'gateway.log'}",
        "trainer": f"it writes to its terminal. To keep it: trainer run ... 2>&1 | tee -a {trainers}",
        "engine": "it was started elsewhere, or it writes to the folder of [engine] log",
    }
    found = {program for log in logs for program in why if log.path.name.startswith(program)}
    prefixes = tuple(f"{start.stem}-" for start in files.engine_logs)
    if prefixes and any(log.path.name.startswith(prefixes) for log in logs):
        found.add("engine")
    return [{"program": program, "why": text} for program, text in why.items() if program not in found]


def _engine_logs(settings: Settings) -> Iterator[Path]:
    for name, model in settings.models.items():
        engine = settings.engine_of(name)
        if model.upstream is None and engine.launch != "external":
            path = engine.log.absolute()
            yield path.parent.resolve() / f"{path.stem}-{name}{path.suffix}"


def _log(path: Path) -> Log | None:
    try:
        found = path.lstat()
    except OSError:
        return None
    return Log(path, found.st_size, found.st_mtime) if stat.S_ISREG(found.st_mode) else None


def _tail(path: Path, limit: int) -> str:
    start = max(0, path.lstat().st_size - limit)
    text = _read(path, start, limit)
    if start:
        text = text.partition(b"\n")[2] or text
    return _ESCAPES.sub("", text.decode(errors="replace"))


def _read(path: Path, start: int, limit: int) -> bytes:
    """Read a regular file, which must not be a link. Raise OSError."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    with os.fdopen(descriptor, "rb") as file:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise OSError(f"{path} is not a regular file")
        file.seek(start)
        return file.read(limit)
