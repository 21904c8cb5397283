"""`python -m tests.compat [NAME ...]`: runs the suites whose name or group holds a NAME (all, if none is given), writes the page.

Ends with 1 if a suite could not be run or a failure is unexplained. With names, the page is printed and not written.
"""

from __future__ import annotations

import sys
import tempfile
import time
from datetime import date
from pathlib import Path

from tests.compat.clients.gate import Gate
from tests.compat.report import Row, read, render
from tests.compat.stage import stage
from tests.compat.suites import ROOT, SUITES, Skipped, Suite, run

PAGE = ROOT / "docs" / "topics" / "compatibility.md"


def main(names: list[str]) -> int:
    """Return the exit status."""
    chosen = [
        suite for suite in SUITES if not names or any(name in f"{suite.name} {suite.group}" for name in names)
    ]
    work = Path(tempfile.mkdtemp(prefix="headgate-compat-"))
    print(f"logs and results: {work}")
    with stage(work / "stage") as there:
        rows = [_row(suite, Gate(there.gateway, there.engine), work) for suite in chosen]
    page = render(rows, date.today())
    if names:
        print(page)
    else:
        PAGE.write_text(page)
    unexplained = sum(row.unexplained for row in rows)
    missing = [row.name for row in rows if row.skipped]
    print(f"{unexplained} unexplained failures; not run: {', '.join(missing) or 'none'}")
    return 1 if unexplained or missing else 0


def _row(suite: Suite, gate: Gate, work: Path) -> Row:
    began = time.monotonic()
    try:
        cases = read(run(suite, gate, work))
        row = Row(suite.name, suite.version(), suite.group, cases)
    except Skipped as skipped:
        row = Row(suite.name, "", suite.group, skipped=str(skipped))
    ended = row.skipped or f"{len(row.cases)} tests, {row.unexplained} unexplained failures"
    print(f"{suite.name}: {ended} ({time.monotonic() - began:.0f} s)", flush=True)
    return row


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
