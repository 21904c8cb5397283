"""Reads recordings: the runs of a file, and of the file before it (`recording.py` has the format)."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from scheduler.reactor.clock import Tag
from scheduler.reactor.recording import FORMAT, End, Entry, Full, Header, earlier, entry_from_json

_FORMATS = (5, FORMAT)


class BadRecording(Exception):
    """The file is not a recording, or is damaged elsewhere than at the end of a run."""


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
        """True if the run went on after this file."""
        return bool(self.entries) and isinstance(self.entries[-1], Full)

    @property
    def last(self) -> Tag:
        """The last tag that was recorded."""
        return self.entries[-1].tag if self.entries else Tag(self.header.start)


def read(source: Path | Iterable[str]) -> list[Run]:
    """Return the runs of a recording, those of its earlier file first: its file, or its lines. Raise BadRecording, or OSError."""
    if isinstance(source, Path):
        before = earlier(source)
        text = _text(before) if before.exists() else ""
        source = (text + (_text(source) if source.exists() or not text else "")).split("\n")
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


def _text(path: Path) -> str:
    """Return a file's text. A line that was cut may end within a character; strings may hold any separator of lines but one."""
    return path.read_text(encoding="utf-8", errors="replace")


def _parse(line: str) -> dict[str, Any] | None:
    try:
        value = json.loads(line)
    except ValueError:
        return None
    return value if isinstance(value, dict) else None


def _header(value: dict[str, Any], number: int) -> Header:
    if value["format"] not in _FORMATS:
        raise BadRecording(f"line {number}: format {value['format']!r}; this program reads {_FORMATS}")
    try:
        return Header(
            *(value["program"], dict(value["settings"]), value["graph"], int(value["start"])),
            *(value.get("build", ""), value.get("state")),
        )
    except (KeyError, TypeError, ValueError) as error:
        raise BadRecording(f"line {number} is not a header: {error!r}") from error


def _entry(value: dict[str, Any], number: int) -> Entry:
    try:
        return entry_from_json(value)
    except (KeyError, TypeError, ValueError) as error:
        raise BadRecording(f"line {number} is not a line of a recording: {error!r}") from error
