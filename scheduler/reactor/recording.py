"""Recordings of runs: the inputs from outside and the decisions, as lines of JSON in a file.

Owns the format, and appending to it. A file holds one or more runs; each begins with a header. A file that is full is put away
under the name with `.1` at its end, in place of the last one there, and the run goes on in a new file, whose header has the
program's state (`snapshot.py`). So a recording is at most two files, each of which replays by itself. The lines of a tag are
written when the tag ends, in the order in which things happened, and handed to the operating system without fsync: a process
that is killed loses nothing that was acted on, a machine that loses power may. A *decision* is a value set on an output port,
whichever, connected or not: so the record does not depend on who looks.

    {"format": 6, "program": "control", "settings": {...}, "graph": "<sha256>", "start": ns, "build": "...", "state": null}
    {"tag": [ns, microstep], "action": "fleet.lost", "type": "Lost", "value": {"engine": ..., ...}}
    {"tag": ..., "port": "fleet.commands", "type": "Do", "value": [...],
     "reaction": "fleet.on_trouble", "triggers": [...], "why": "..."}
    {"tag": ..., "failed": "fleet.on_trouble", "error": "KeyError"}     it raised, and the run ended
    {"tag": ..., "end": true}                                       closed after this tag, which is complete
    {"tag": ..., "full": bytes}                                     this long: the run goes on in the next file

Format 5 is read too. It has neither `build` nor `state`, and its runs went on unrecorded when they were `full`.

A run without its `end` was killed; a last line may then be cut anywhere, and a writer that appends begins a new line.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cache, partial
from importlib.metadata import version
from io import BytesIO, FileIO
from json.encoder import encode_basestring_ascii
from pathlib import Path
from typing import Any, Protocol

from scheduler.reactor.clock import SECOND, Tag
from scheduler.reactor.elements import Output, PhysicalAction, Reaction
from scheduler.reactor.topology import Program

FORMAT = 6
_PARTS = ("policies", "program", "reactor")


@cache
def build() -> str:
    """Return which build this is: headgate's version, and a digest of the code that decides."""
    code = hashlib.sha256()
    for part in _PARTS:
        for path in sorted((Path(__file__).parents[1] / part).glob("*.py")):
            code.update(path.read_bytes())
    return f"{version('headgate')}, {code.hexdigest()[:12]}"


# Lines


@dataclass(frozen=True, slots=True)
class Header:
    """The begin of a run, or of a file in which it goes on."""

    program: str
    settings: dict[str, Any]
    graph: str
    start: int
    build: str = ""
    """The build that recorded it; empty: one that did not report it."""
    state: str | None = None
    """The program's state, if the run began in an earlier file."""

    def to_json(self) -> dict[str, Any]:
        """Return the line."""
        return {
            "format": FORMAT,
            "program": self.program,
            "settings": self.settings,
            "graph": self.graph,
            "start": self.start,
            "build": self.build,
            "state": self.state,
        }


@dataclass(frozen=True, slots=True)
class Event:
    """An event from outside; `value` in JSON, and the name of its class."""

    tag: Tag
    action: str
    type: str
    value: Any

    def to_json(self) -> dict[str, Any]:
        """Return the line."""
        return {"tag": _tag(self.tag), "action": self.action, "type": self.type, "value": self.value}


@dataclass(frozen=True, slots=True)
class Decision:
    """A value that a reaction set on a port, the name of its class, which of its triggers were present, and the reason."""

    tag: Tag
    port: str
    type: str
    value: Any
    reaction: str
    triggers: tuple[str, ...]
    why: str

    def to_json(self) -> dict[str, Any]:
        """Return the line."""
        return {
            "tag": _tag(self.tag),
            "port": self.port,
            "type": self.type,
            "value": self.value,
            "reaction": self.reaction,
            "triggers": list(self.triggers),
            "why": self.why,
        }


@dataclass(frozen=True, slots=True)
class Failure:
    """A reaction raised; `error` is the exception's class, since messages may hold addresses of memory."""

    tag: Tag
    reaction: str
    error: str

    def to_json(self) -> dict[str, Any]:
        """Return the line."""
        return {"tag": _tag(self.tag), "failed": self.reaction, "error": self.error}


@dataclass(frozen=True, slots=True)
class End:
    """The run was closed after this tag."""

    tag: Tag

    def to_json(self) -> dict[str, Any]:
        """Return the line."""
        return {"tag": _tag(self.tag), "end": True}


@dataclass(frozen=True, slots=True)
class Full:
    """The file had `size` bytes after this tag; the run went on in the next one."""

    tag: Tag
    size: int

    def to_json(self) -> dict[str, Any]:
        """Return the line."""
        return {"tag": _tag(self.tag), "full": self.size}


Entry = Event | Decision | Failure | End | Full


def objects(entry: Event | Decision) -> list[dict[str, Any]]:
    """Return the objects of an entry, each with the name of its class as `type`."""
    values = entry.value if isinstance(entry.value, list) else [entry.value]
    return [{"type": entry.type, **value} for value in values if isinstance(value, dict)]


def _tag(tag: Tag) -> list[int]:
    return [tag.time, tag.microstep]


def entry_from_json(line: dict[str, Any]) -> Entry:
    """Return the inverse of the entries' `to_json`. Raise KeyError, TypeError or ValueError."""
    time, microstep = line["tag"]
    tag = Tag(int(time), int(microstep))
    if "action" in line:
        return Event(tag, line["action"], line["type"], line["value"])
    if "port" in line:
        triggers = tuple(line["triggers"])
        return Decision(
            tag, line["port"], line["type"], line["value"], line["reaction"], triggers, line["why"]
        )
    if "failed" in line:
        return Failure(tag, line["failed"], line["error"])
    if "end" in line:
        return End(tag)
    if "full" in line:
        return Full(tag, int(line["full"]))
    raise ValueError(f"no line of a recording: {line}")


# Writing. It happens at every tag, so lines are written as text, not by the objects above


def event_line(tag: str, action: PhysicalAction[Any], value: str) -> str:
    """Return the line of an `Event`; `tag` and `value` are JSON."""
    return f'{{"tag":{tag},"action":{action.quoted},"type":{action.form.name},"value":{value}}}'


def add_decisions(
    lines: list[str],
    tag: str,
    reaction: Reaction,
    triggers: str,
    sent: Iterable[tuple[Output[Any], Any, str, str]],
) -> None:
    """Add the lines of what a reaction sent at one tag: port, value, its JSON, and why; `tag` and `triggers` are JSON."""
    head, tail = f'{{"tag":{tag},"port":', f',"reaction":{reaction.quoted},"triggers":{triggers},"why":'
    for port, _, text, why in sent:
        lines.append(
            f'{head}{port.quoted},"type":{port.form.name},"value":{text}{tail}{encode_basestring_ascii(why)}}}'
        )


class Recorder(Protocol):
    """The callbacks by which a runtime reports its run."""

    def begin(self, program: Program, start: int) -> None:
        """Record the start of the run."""

    def write(self, tag: Tag, lines: Sequence[str]) -> bool:
        """Record a complete or failed tag, with its inputs and decisions. Return whether to go on recording."""

    def due(self, now: int) -> bool:
        """Return true if the run is to go on in a new file, at this time in ns."""

    def go_on(self, program: Program, state: str) -> None:
        """Begin a new file, after a complete tag, with the program's state."""


File = FileIO | BytesIO


@dataclass(frozen=True, slots=True)
class Limit:
    """When a file is full: at `size` bytes, but not before it has `kept_s` seconds of the run, unless it has `_MOST` times the
    size by then."""

    size: int
    kept_s: float = 0.0

    def reached(self, size: int, seconds: float) -> bool:
        """Return true if a file of `size` bytes and this many seconds of a run is full."""
        return size >= self.size and (seconds >= self.kept_s or size >= _MOST * self.size)


_MOST = 4
_NO_LIMIT = Limit(sys.maxsize)


class Recording:
    """A file that a run is appended to. Make it with `Recording.open`; close it when the run has ended."""

    def __init__(
        self,
        file: File,
        settings: dict[str, Any],
        limit: Limit = _NO_LIMIT,
        put_away: Callable[[], File] = BytesIO,
        on_lost: Callable[[OSError], None] = lambda _error: None,
    ) -> None:
        """`put_away` replaces a file that is full, and returns the new one."""
        self._file = file
        self._whole = file.seek(0, os.SEEK_END)
        """The length in bytes of the part of the file that has whole tags."""
        self._settings = settings
        self._limit = limit
        self._put_away = put_away
        self._on_lost = on_lost
        self._began = 0
        self._last = Tag(-1)
        self.ended = False
        """True if the recording ended before its run, because it could not be written any more."""

    @classmethod
    def open(
        cls,
        path: Path,
        settings: dict[str, Any],
        limit: Limit = _NO_LIMIT,
        on_lost: Callable[[OSError], None] = lambda _error: None,
    ) -> Recording:
        """Append to `path`, and make its folder. `settings` are what rebuilds the program; they must be JSON.

        With a tag that cannot be written (the disk is full) the recording ends, and `on_lost` is called: a program goes on
        without being recorded.
        """
        json.dumps(settings)
        path.parent.mkdir(parents=True, exist_ok=True)
        file = FileIO(path, "a+")
        if file.seek(0, os.SEEK_END) and not _ends_whole(file):
            file.write(b"\n")
        return cls(file, settings, limit, partial(_put_away, path), on_lost)

    def begin(self, program: Program, start: int) -> None:
        self._begin(program, start, None)

    def _begin(self, program: Program, start: int, state: str | None) -> None:
        self._began = start
        self._try([line(Header(program.name, self._settings, program.digest(), start, build(), state))])

    def write(self, tag: Tag, lines: Sequence[str]) -> bool:
        self._last = tag
        if lines:
            self._try(lines)
        return not self.ended

    def due(self, now: int) -> bool:
        return self._limit.reached(self._whole, (now - self._began) / SECOND)

    def go_on(self, program: Program, state: str) -> None:
        self._try([line(Full(self._last, self._whole))])
        if self.ended:
            return
        try:
            file = self._put_away()
        except OSError as error:
            self.ended = True
            self._on_lost(error)
            return
        self._file.close()
        self._file, self._whole = file, 0
        self._begin(program, self._last.time, state)

    def close(self) -> None:
        """Record the end of the run, and close the file. A second call does nothing."""
        if self._file.closed:
            return
        if self._last.time >= 0:
            self._try([line(End(self._last))])
        self._file.close()

    def _try(self, lines: Sequence[str]) -> None:
        """Save lines, unless the recording has ended; if they cannot be written, ends it with what was whole before."""
        if self.ended:
            return
        try:
            self._whole += self._save(lines)
        except OSError as error:
            self.ended = True
            self._file.truncate(self._whole)
            self._on_lost(error)

    def _save(self, lines: Sequence[str]) -> int:
        """Write lines; return their length in bytes."""
        content = ("\n".join(lines) + "\n").encode()
        left = memoryview(content)
        while left:
            left = left[self._file.write(left) :]
        return len(content)


def line(entry: Header | Entry) -> str:
    """One entry as it stands in a recording."""
    return json.dumps(entry.to_json(), separators=(",", ":"))


def _put_away(path: Path) -> File:
    """Rename a file that is full, and return a new one in its place. A process that is killed in between leaves the first."""
    path.replace(earlier(path))
    return FileIO(path, "a+")


def earlier(path: Path) -> Path:
    """Return the name of the file before this one, if the recording has two."""
    return path.with_name(f"{path.name}.1")


def _ends_whole(file: FileIO) -> bool:
    file.seek(-1, os.SEEK_END)
    return file.read(1) == b"\n"
