"""Running a bench as a command and reading its last line."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[3]


def report_of(name: str, out: Path, *options: str, timeout_s: float = 400.0) -> dict[str, Any]:
    argv = [sys.executable, "-m", f"bench.{name}", *options, "--out", str(out)]
    done = subprocess.run(argv, cwd=ROOT, capture_output=True, text=True, timeout=timeout_s)
    assert done.returncode == 0, done.stderr
    report: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    assert report == json.loads(out.read_text())
    assert report["bench"] == name
    assert report.get("failed_requests", 0) == 0
    return report
