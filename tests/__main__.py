"""Runs the tests of `make test`, `make test-fast`, and the long ones of `make test-all`; prints the slowest and a summary."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import IO
from xml.etree import ElementTree

REPORTS = Path("runs/tests")
SLOWEST = 15
OUTCOMES = {"failure": "failed", "error": "failed", "skipped": "skipped"}
"""The elements of pytest's XML reports, and the count that each belongs to."""

# Tests wait for other processes now and then, so two workers more than cores.
AT_ONCE = ("-q", "-p", "tests.workers", "--workers", str(min(4, len(os.sched_getaffinity(0)) + 2)))

# Those with vLLM share one engine, so they come one after the other; the others use the cores that it leaves idle.
TARGETS: dict[str, dict[str, tuple[str, ...]]] = {
    "test": {
        "without-vllm": ("tests", "-m", "not vllm and not long", *AT_ONCE),
        "vllm": ("tests/acceptance", "-m", "vllm and not long"),
    },
    "test-fast": {
        "fast": (
            *("tests/unit", "-m", "not vllm and not long", *AT_ONCE),
            *(
                "--ignore",
                "tests/unit/gateway/store",
                "--ignore",
                "tests/unit/gateway/bus",
                "--ignore",
                "tests/unit/bench",
            ),
        )
    },
    "test-all": {"long": ("tests", "-m", "long")},  # make runs `test` and `test-compat` before
}


@dataclass(frozen=True)
class Test:
    """A test that was run: its seconds with those of its fixtures, and how it ended."""

    seconds: float
    name: str
    outcome: str


def run(parts: dict[str, tuple[str, ...]]) -> list[int]:
    """Runs pytest for each part, side by side; returns their exit statuses. The output of all but the first comes at the end."""
    running = list[tuple[subprocess.Popen[bytes], IO[bytes] | None]]()
    for name, options in parts.items():
        argv = [sys.executable, "-m", "pytest", *options, "--junitxml", str(REPORTS / f"{name}.xml")]
        output = tempfile.TemporaryFile() if running else None  # noqa: SIM115
        running.append((subprocess.Popen(argv, stdout=output, stderr=output, env=_environment()), output))
    for process, output in running:
        process.wait()
        if output is not None:
            output.seek(0)
            sys.stdout.flush()
            shutil.copyfileobj(output, sys.stdout.buffer)
    return [process.returncode for process, _ in running]


def _environment() -> dict[str, str]:
    """This process's, but bytecode is kept: or each of hundreds of processes would compile what it imports."""
    return {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}


def tests_of(report: Path) -> list[Test]:
    """The tests of a report that pytest wrote; none where it did not get that far."""
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
    """The last line: how many tests ended how, in which time, and where to look."""
    counts = Counter(test.outcome for test in tests)
    ended = ", ".join(f"{counts[o]:,} {o}" for o in ("passed", "failed", "skipped") if counts[o])
    return f"make {target}: {ended or 'no tests'} in {minutes:.1f} min; all tests with their seconds: {REPORTS}/*.xml"


def main(target: str) -> int:
    """Runs a target's parts, and reports how it went; returns the exit status."""
    began = time.monotonic()
    REPORTS.mkdir(parents=True, exist_ok=True)
    for report in REPORTS.glob("*.xml"):
        report.unlink()
    parts = TARGETS[target]
    status = max(run(parts), key=abs)
    tests = [test for name in parts for test in tests_of(REPORTS / f"{name}.xml")]
    print(f"\nThe slowest {SLOWEST} tests, in seconds:")
    for test in sorted(tests, key=lambda test: -test.seconds)[:SLOWEST]:
        print(f"{test.seconds:8.1f}  {test.name}")
    print(summary(target, tests, (time.monotonic() - began) / 60))
    return status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1] if len(sys.argv) > 1 else "test"))
