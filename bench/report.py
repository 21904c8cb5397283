"""The output of every bench and proof: progress on stderr, a table on stdout, one JSON object as the last line.

Owns the two consoles and the file under `runs/`; knows nothing about what is measured.
"""

from __future__ import annotations

import os
import platform
import statistics
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import orjson
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn
from rich.table import Table

from gateway.cli.progress import TerminalBar

_WIDTH = 150
"""Columns of a table where stdout is not a terminal."""

Spread = dict[str, float]


def spread(values: Iterable[float | None]) -> Spread | None:
    """Return the median, least and greatest of repeated measurements; None when there is none."""
    known = [value for value in values if value is not None]
    if not known:
        return None
    return {"median": statistics.median(known), "min": min(known), "max": max(known)}


def percentile(values: Sequence[float], percent: float) -> float | None:
    """Return the smallest value that is at least as great as `percent` % of them (nearest rank); None without values."""
    if not values:
        return None
    rank = -(-len(values) * percent // 100)
    return sorted(values)[max(int(rank), 1) - 1]


def number(value: float | None, digits: int = 3) -> str:
    """Return a number for people: `digits` significant digits, thousands set apart; `-` for None."""
    if value is None:
        return "-"
    whole = len(f"{abs(value):.0f}") if abs(value) >= 1 else 0
    return f"{value:,.{max(digits - whole, 0)}f}"


def ranged(values: Spread | None, digits: int = 3) -> str:
    """Return `median (min..max)` for people."""
    if values is None:
        return "-"
    low, high = number(values["min"], digits), number(values["max"], digits)
    return f"{number(values['median'], digits)} ({low}..{high})"


def machine() -> dict[str, Any]:
    """Describe the machine that the figures were measured on."""
    return {
        "cpus": os.cpu_count(),
        "load_average": [round(load, 2) for load in os.getloadavg()],
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
    }


def show(title: str, header: Sequence[str], rows: Iterable[Sequence[str]], note: str = "") -> None:
    """Print a table on stdout."""
    console = Console(width=None if sys.stdout.isatty() else _WIDTH)
    table = Table(title=title, caption=note or None, title_justify="left", caption_justify="left")
    for i, column in enumerate(header):
        table.add_column(column, justify="left" if i == 0 else "right")
    for row in rows:
        table.add_row(*row)
    console.print(table)


def finish(report: dict[str, Any], out: Path) -> None:
    """Write the report to `out` and print it as one line: call it last."""
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_bytes(orjson.dumps(report, option=orjson.OPT_INDENT_2 | orjson.OPT_APPEND_NEWLINE))
    print(orjson.dumps(report).decode(), flush=True)


class Steps(TerminalBar):
    """Progress through `total` steps: a bar on a terminal, a line a step elsewhere."""

    def __init__(self, total: int) -> None:
        description = TextColumn("{task.description}", markup=False)
        super().__init__(BarColumn(), MofNCompleteColumn(), description, total=total)
        self._total = total
        self._begun = -1

    def begin(self, what: str) -> None:
        """Show the begin of the next step, which ends the one before."""
        self._begun += 1
        self._bar.update(self._task, completed=self._begun, description=what)
        if not self._console.is_terminal:
            self.log(f"[{self._begun + 1}/{self._total}] {what}")

    def log(self, line: str) -> None:
        """Print a line above the bar."""
        self._console.print(line, markup=False, highlight=False)
