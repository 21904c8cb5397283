"""Runs `make gpu-check`: checks of the trainer, then of the engine next to it, each in a process with its own time limit.

Prints one JSON line for each check when it ends, so that a hang costs one check; the last line has all of them:
`{"checks": {NAME: {"ok": true, ...}}, ...}`. Exit status 1: a check failed.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from bench.gpu.checks import BY_NAME, CHECKS, Check
from bench.gpu.engines import dry_engine, engine_on
from bench.gpu.machine import Gpu, look, missing, refusal
from bench.gpu.workload import ROOT

Result = dict[str, Any]
_PARTS = {"trainer": ("trainer",), "engine": ("engine",), "all": ("trainer", "engine")}
_TAIL = 2000
"""The most characters of a check's log that its error has."""


@dataclass(frozen=True, slots=True)
class Options:
    """What all checks of a run share."""

    folder: Path
    device: str
    engine: dict[str, Any]
    gpus: tuple[Gpu, ...] = ()

    def run(self, check: Check) -> Result:
        """Return the result of a check in a process of its own."""
        argv = [sys.executable, "-m", "bench.gpu.check", check.name, "--device", self.device]
        argv += ["--folder", str(self.folder / check.name), "--engine", json.dumps(self.engine)]
        argv += ["--gpu", self.gpus[0].name] if self.gpus else []
        path = self.folder / f"{check.name}.log"
        with path.open("w") as log:
            process = subprocess.Popen(
                argv, stdout=subprocess.PIPE, stderr=log, text=True, cwd=ROOT, start_new_session=True
            )
            try:
                output = process.communicate(timeout=check.limit_s)[0]
            except subprocess.TimeoutExpired:
                return {"ok": False, "error": f"not done within {check.limit_s:g} s"}
            finally:
                _end(process)
        if process.returncode:
            error = f"its process ended with {process.returncode}: {path.read_text()[-_TAIL:]}"
            return {"ok": False, "error": error}
        result: Result = json.loads(output.splitlines()[-1])
        return result


def _end(process: subprocess.Popen[str]) -> None:
    """Kill a check, and whatever it started."""
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        return
    process.wait()


def run_checks(options: Options, checks: Iterable[Check]) -> dict[str, Result]:
    """Run checks one after another, and print each result."""
    results: dict[str, Result] = {}
    for check in checks:
        results[check.name] = options.run(check)
        print(json.dumps({"check": check.name, **results[check.name]}), flush=True)
    return results


def report_of(options: Options, results: dict[str, Result]) -> dict[str, Any]:
    """Return the report."""
    describe = ["git", "describe", "--always", "--dirty"]
    commit = subprocess.run(describe, cwd=ROOT, capture_output=True, text=True, check=False).stdout.strip()
    return {
        "checks": results,
        "time": time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime()),
        "commit": commit or "unknown",
        "device": options.device,
        "gpus": [asdict(gpu) for gpu in options.gpus],
    }


def main() -> None:
    """Check in minutes what only a GPU can show: the trainer, then vLLM next to it."""
    parser = argparse.ArgumentParser(prog="make gpu-check", description=main.__doc__)
    parser.add_argument("--part", choices=_PARTS, default="all")
    parser.add_argument("--only", choices=BY_NAME, action="append", help="a check; may be repeated")
    parser.add_argument("--dry", action="store_true", help="run every check on the CPU in a tiny shape")
    parser.add_argument("--engine-python", type=Path, help="the interpreter of vLLM's environment")
    parser.add_argument("--out", type=Path, default=Path("runs/gpu-check"), help="the folder of all files")
    given = parser.parse_args()
    options = _options(given.out.absolute(), given.dry, given.engine_python)
    chosen = [c for c in CHECKS if c.part in _PARTS[given.part] and c.name in (given.only or BY_NAME)]
    report = report_of(options, run_checks(options, chosen))
    (options.folder / "gpu-report.json").write_text(json.dumps(report, indent=2) + "\n")
    print(json.dumps(report), flush=True)
    sys.exit(0 if all(result["ok"] for result in report["checks"].values()) else 1)


def _options(out: Path, dry: bool, engine_python: Path | None) -> Options:
    folder = out / time.strftime("%Y%m%d-%H%M%S")
    gpus: tuple[Gpu, ...] = ()
    if not dry:
        # The driver counts GPUs by their place on the bus, and CUDA by their speed unless this is set.
        os.environ["CUDA_DEVICE_ORDER"] = "PCI_BUS_ID"
        found = look()
        if lacks := missing(found):
            sys.exit(refusal(lacks))
        gpus = found.gpus
    folder.mkdir(parents=True)
    python = engine_python or ROOT / (".venv-engine/bin/python" if dry else ".venv-engine-gpu/bin/python")
    if dry:
        return Options(folder, "cpu", dry_engine(python, folder))
    return Options(folder, "cuda", engine_on(python, folder, gpus), gpus)


if __name__ == "__main__":
    main()
