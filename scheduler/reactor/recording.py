"""Recordings of runs: the inputs from outside and the decisions, as lines of JSON in a file.

Owns the format, and appending to it. A file holds one or more runs; each begins with a header. The lines of a tag are written
when the tag ends, in the order in which things happened, and handed to the operating system without fsync: a process
that is killed loses nothing that was acted on, a machine that loses power may. A *decision* is a value set on an output port,
whichever, connected or not: so the record does not depend on who looks.

    {"format": 5, "program": "control", "settings": {...}, "graph": "<sha256>", "start": ns}
    {"tag": [ns, microstep], "action": "fleet.lost", "type": "Lost", "value": {"engine": ..., ...}}
    {"tag": ..., "port": "fleet.commands", "type": "Do", "value": [...],
     "reaction": "fleet.on_trouble", "triggers": [...], "why": "..."}
    {"tag": ..., "failed": "fleet.on_trouble", "error": "KeyError"}     it raised, and the run ended
    {"tag": ..., "end": true}                                       closed after this tag, which is complete
    {"tag": ..., "full": bytes}                                     this long, so nothing after this tag is recorded

A run without its `end` was killed; a last line may then be cut anywhere, and a writer that appends begins a new line.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from io import BytesIO, FileIO
from json.encoder import encode_basestring_ascii
from pathlib import Path
from typing import Any, Protocol

from scheduler.reactor.clock import Tag
from scheduler.reactor.elements import Output, PhysicalAction, Reaction
from scheduler.reactor.topology import Program

FORMAT = 5


class BadRecording(Exception):
    """The file is not a recording, or is damaged elsewhere than at the end of a run."""


# Lines


@dataclass(frozen=True, slots=True)
class Header:
    """The begin of a run."""

    program: str
    settings: dict[str, Any]
    graph: str
    start: int

    def to_json(self) -> dict[str, Any]:
        """Return the line."""
        return {
            "format": FORMAT,
            "program": self.program,
            "settings": self.settings,
            "graph": self.graph,
            "start": self.start,
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
    """The recording of the run had `size` bytes after this tag; the run went on without it."""

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


class Recording:
    """A file that a run is appended to. Make it with `Recording.open`; close it when the run has ended."""

    def __init__(
        self,
        file: FileIO | BytesIO,
        settings: dict[str, Any],
        limit: int | None = None,
        on_full: Callable[[], None] = lambda: None,
        on_lost: Callable[[OSError], None] = lambda _error: None,
    ) -> None:
        self._file = file
        self._whole = file.seek(0, os.SEEK_END)
        """The length in bytes of the part of the file that has whole tags."""
        self._settings = settings
        self._limit = limit
        self._on_full = on_full
        self._on_lost = on_lost
        self._size = 0
        self._last: Tag | None = None
        self.full = False
        """True if the recording ended before its run: it reached its limit, or could not be written any more."""

    @classmethod
    def open(
        cls,
        path: Path,
        settings: dict[str, Any],
        limit: int | None = None,
        on_full: Callable[[], None] = lambda: None,
        on_lost: Callable[[OSError], None] = lambda _error: None,
    ) -> Recording:
        """Append to `path`, and make its folder. `settings` are what rebuilds the program; they must be JSON.

        With the tag at which a run has written `limit` bytes or more its recording ends, and `on_full` is called. With one that
        cannot be written (the disk is full) it ends too, and `on_lost` is called: a program goes on without being recorded.
        """
        json.dumps(settings)
        path.parent.mkdir(parents=True, exist_ok=True)
        file = FileIO(path, "a+")
        if file.seek(0, os.SEEK_END) and not _ends_whole(file):
            file.write(b"\n")
        return cls(file, settings, limit, on_full, on_lost)

    def begin(self, program: Program, start: int) -> None:
        self._try([line(Header(program.name, self._settings, program.digest(), start))])

    def write(self, tag: Tag, lines: Sequence[str]) -> bool:
        self._last = tag
        if lines:
            self._try(lines)
        if self._limit is not None and self._size >= self._limit and not self.full:
            self._try([line(Full(tag, self._size))])
            if not self.full:
                self.full = True
                self._on_full()
        return not self.full

    def close(self) -> None:
        """Record the end of the run, and close the file. A second call does nothing."""
        if self._file.closed:
            return
        if self._last is not None:
            self._try([line(End(self._last))])
        self._file.close()

    def _try(self, lines: Sequence[str]) -> None:
        """Save lines, unless the recording has ended; if they cannot be written, ends it with what was whole before."""
        if self.full:
            return
        try:
            self._whole += self._save(lines)
        except OSError as error:
            self.full = True
            self._file.truncate(self._whole)
            self._on_lost(error)

    def _save(self, lines: Sequence[str]) -> int:
        """Write lines; return their length in bytes."""
        content = ("\n".join(lines) + "\n").encode()
        self._size += len(content)
        left = memoryview(content)
        while left:
            left = left[self._file.write(left) :]
        return len(content)


def line(entry: Header | Entry) -> str:
    """One entry as it stands in a recording."""
    return json.dumps(entry.to_json(), separators=(",", ":"))


def _ends_whole(file: FileIO) -> bool:
    file.seek(-1, os.SEEK_END)
    return file.read(1) == b"\n"


# Reading


@dataclass(slots=True)
class Run:
    """One run of a recording, in order."""

    header: Header
    entries: list[Entry] = field(default_factory=list)

    @property
    def ended(self) -> bool:
        """True if the run's last tag is known to be complete."""
        return bool(self.entries) and isinstance(self.entries[-1], End | Full)

    @property
    def full(self) -> bool:
        """True if the run went on after its recording had ended."""
        return bool(self.entries) and isinstance(self.entries[-1], Full)

    @property
    def last(self) -> Tag:
        """The last tag that was recorded."""
        return self.entries[-1].tag if self.entries else Tag(self.header.start)


def read(source: Path | Iterable[str]) -> list[Run]:
    """Return the runs of a recording: a file, or its lines. Raise BadRecording, or OSError."""
    if isinstance(source, Path):
        # A line that was cut may end within a character, and a string may hold separators at which `splitlines` divides.
        source = source.read_text(encoding="utf-8", errors="replace").split("\n")
    lines = [(number, line) for number, line in enumerate(source, 1) if line.strip()]
    runs: list[Run] = []
    broken: str | None = None
    for number, line in lines:
        value = _parse(line)
        if value is not None and "format" in value:
            runs.append(Run(_header(value, number)))
            broken = None
        elif broken is not None:
            raise BadRecording(broken)
        elif value is None:
            broken = f"line {number} is not a JSON object: {line[:60]!r}"
        elif not runs:
            raise BadRecording(f"line {number} comes before any header")
        else:
            runs[-1].entries.append(_entry(value, number))
    if not runs:
        raise BadRecording(broken or "no run in it")
    return runs


def _parse(line: str) -> dict[str, Any] | None:
    try:
        value = json.loads(line)
    except ValueError:
        return None
    return value if isinstance(value, dict) else None


def _header(value: dict[str, Any], number: int) -> Header:
    if value["format"] != FORMAT:
        raise BadRecording(f"line {number}: format {value['format']!r}; this program reads {FORMAT}")
    try:
        return Header(value["program"], dict(value["settings"]), value["graph"], int(value["start"]))
    except (KeyError, TypeError, ValueError) as error:
        raise BadRecording(f"line {number} is not a header: {error!r}") from error


def _entry(value: dict[str, Any], number: int) -> Entry:
    try:
        return entry_from_json(value)
    except (KeyError, TypeError, ValueError) as error:
        raise BadRecording(f"line {number} is not a line of a recording: {error!r}") from error
