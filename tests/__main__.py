"""Run the tests of `make test`, `make test-fast`, and the long ones of `make test-all`; print the slowest and a summary."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from xml.etree import ElementTree

REPORT = Path("runs/tests.xml")
SLOWEST = 15
OUTCOMES = {"failure": "failed", "error": "failed", "skipped": "skipped"}
"""The elements of pytest's XML reports, and the count that each belongs to."""

# Tests wait for other processes now and then, so two workers more than cores.
AT_ONCE = ("-q", "-p", "tests.workers", "--workers", str(min(4, len(os.sched_getaffinity(0)) + 2)))
NEEDS_SERVERS = ("tests/unit/gateway/store", "tests/unit/gateway/bus", "tests/unit/bench")

TARGETS: dict[str, tuple[str, ...]] = {
    "test": ("tests", "-m", "not long", *AT_ONCE),
    "test-fast": (
        *("tests/unit", "-m", "not vllm and not long", *AT_ONCE),
        *(f"--ignore={folder}" for folder in NEEDS_SERVERS),
    ),
    "test-all": ("tests", "-m", "long"),  # make runs `test` and `test-compat` before
}


@dataclass(frozen=True)
class Test:
    """A test that was run: its seconds with those of its fixtures, and how it ended."""

    seconds: float
    name: str
    outcome: str


def _environment() -> dict[str, str]:
    """Return this process's, but bytecode is kept: or each of hundreds of processes would compile what it imports.

    torch computes in one thread: several would wait for each other actively while other workers use the cores.
    """
    kept = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    return kept | {"OMP_NUM_THREADS": "1"}


def tests_of(report: Path) -> list[Test]:
    """Return the tests of a report that pytest wrote; none where it did not get that far."""
    if not report.exists():
        return []
    found = []
    for case in ElementTree.parse(report).iter("testcase"):
        outcome = next((OUTCOMES[child.tag] for child in case if child.tag in OUTCOMES), "passed")
        found.append(
            Test(float(case.get("time", 0)), f"{case.get('classname')}::{case.get('name')}", outcome)
        )
    return found


def summary(target: str, tests: list[Test], minutes: float) -> str:
    """Return the last line: how many tests ended how, in which time, and where to look."""
    counts = Counter(test.outcome for test in tests)
    ended = ", ".join(f"{counts[o]:,} {o}" for o in ("passed", "failed", "skipped") if counts[o])
    return (
        f"make {target}: {ended or 'no tests'} in {minutes:.1f} min; all tests with their seconds: {REPORT}"
    )


def main(target: str) -> int:
    """Run a target's tests, and report how it went; return the exit status."""
    began = time.monotonic()
    REPORT.parent.mkdir(exist_ok=True)
    REPORT.unlink(missing_ok=True)
    argv = [sys.executable, "-m", "pytest", *TARGETS[target], f"--junitxml={REPORT}"]
    status = subprocess.run(argv, env=_environment(), check=False).returncode
    tests = tests_of(REPORT)
    print(f"\nThe slowest {SLOWEST} tests, in seconds:")
    for test in sorted(tests, key=lambda test: -test.seconds)[:SLOWEST]:
        print(f"{test.seconds:8.1f}  {test.name}")
    print(summary(target, tests, (time.monotonic() - began) / 60))
    return status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1] if len(sys.argv) > 1 else "test"))
