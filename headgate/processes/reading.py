"""How many bytes the processes of a group have read: what shows whether one that is silent advances."""

from __future__ import annotations

import os
from pathlib import Path

_PROC = Path("/proc")


def bytes_read(group: int) -> int | None:
    """Return the bytes that the living processes of a group have read; None if the system does not count them.

    Those of `read` and its kin, and those that came from a disk into mapped memory; mapped bytes of the page cache do not count.
    """
    counts = [found for pid in _members(group) if (found := _read_by(pid)) is not None]
    return sum(counts) if counts else None


def _members(group: int) -> list[int]:
    found = []
    for entry in _PROC.glob("[0-9]*"):
        try:
            if os.getpgid(int(entry.name)) == group:
                found.append(int(entry.name))
        except (ProcessLookupError, PermissionError):
            continue
    return found


def _read_by(pid: int) -> int | None:
    try:
        lines = (_PROC / str(pid) / "io").read_text().splitlines()
    except OSError:  # it has ended, or is another user's
        return None
    counts = dict(line.split(": ") for line in lines)
    return max(int(counts["rchar"]), int(counts["read_bytes"]))
