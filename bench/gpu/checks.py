"""The tests marked `gpu`: runs them in a process of their own, and reads how each ended."""

from __future__ import annotations

import os
import subprocess
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from bench.gpu.workload import ROOT

ENGINE_PYTHON = "HEADGATE_GPU_ENGINE_PYTHON"
"""The variable that names the interpreter of vLLM's environment to the tests."""
_ENDED = {"failure": "failed", "error": "failed", "skipped": "skipped"}
"""Elements of pytest's report, and the count that each belongs to."""


def run_tests(
    folder: Path, engine_python: Path, options: Sequence[str] = ("tests/gpu", "-m", "gpu")
) -> dict[str, Any]:
    """Run pytest, its output on stderr; return the counts, and what failed or was skipped, with the reason."""
    report = (folder / "tests.xml").absolute()
    argv = [sys.executable, "-m", "pytest", "-q", *options, "--junitxml", str(report)]
    env = os.environ | {ENGINE_PYTHON: str(engine_python.absolute())}
    status = subprocess.run(argv, cwd=ROOT, stdout=sys.stderr, env=env, check=False).returncode
    if not report.exists():
        return {
            "status": status,
            "passed": 0,
            "failed": 1,
            "skipped": 0,
            "not_passed": {"pytest": f"ended with {status}"},
        }
    return {"status": status, **outcomes(report)}


def outcomes(report: Path) -> dict[str, Any]:
    """Read pytest's XML report."""
    counts, reasons = Counter[str](), dict[str, str]()
    for case in ElementTree.parse(report).iter("testcase"):
        ended = next((child for child in case if child.tag in _ENDED), None)
        outcome = "passed" if ended is None else _ENDED[ended.tag]
        counts[outcome] += 1
        if ended is not None:
            reasons[f"{case.get('classname')}::{case.get('name')}"] = (
                f"{outcome}: {ended.get('message', '')}"[:500]
            )
    return {**{name: counts[name] for name in ("passed", "failed", "skipped")}, "not_passed": reasons}
