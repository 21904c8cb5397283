"""Runs `make bench NAME=gpu` on a machine with GPUs: tests, the trainer alone, training next to vLLM.

1. The tests marked `gpu` (`tests/gpu`): kernels, precision, offload, NCCL, and the probe of a weight update.
2. The trainer alone on long rows, as prime-rl's published figure was measured.
3. Five steps of a Qwen3-0.6B-shaped random model with vLLM on the same machine, through the gateway.

It leaves `gpu-report.json` and `gpu-report.html`; status 1: a test or a part failed, or a version is not live.
"""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from bench.gpu import figures, page
from bench.gpu.checks import run_tests
from bench.gpu.machine import Gpu, look, missing, refusal
from bench.gpu.training import Engine, Run, train
from bench.gpu.workload import ROOT, WORKLOADS, Workload, write_model
from bench.report import Steps, finish, machine, show

ENGINE_PYTHON = Path(".venv-engine-gpu/bin/python")
_ALONE_STEPS = 3


@dataclass(frozen=True, slots=True)
class Check:
    """The options of a run."""

    folder: Path
    workload: Workload
    engine: Engine
    device: str
    steps: int
    gpus: tuple[Gpu, ...] = ()

    @property
    def peak(self) -> float | None:
        """The first GPU's operations a second in bf16."""
        return figures.peak_of(self.gpus[0].name) if self.gpus else None

    def measure(self, steps: Steps) -> dict[str, Any]:
        """Return the trainer alone, and training; null for what failed, whose reason is in `errors`, so that the rest is
        reported."""
        model, errors = self.folder / "model", dict[str, str]()
        steps.begin(f"a random model of the shape {self.workload.name}")
        write_model(model, self.workload)
        steps.begin(f"the trainer alone: {self.workload.rows} rows of {self.workload.row:,} tokens")
        found: dict[str, Any] = {"alone": None, "training": None, "updates": None, "errors": errors}
        config = self.workload.config
        try:
            found["alone"] = figures.alone(config, self._alone(model), self.workload.row, self.peak)
        except Exception as error:
            errors["alone"] = f"{type(error).__name__}: {error}"
        steps.begin(f"{self.steps} steps next to the engine (logs: {self.folder})")
        try:
            run = asyncio.run(self._train(model))
            found["training"] = figures.next_to_engine(config, run.steps, self.peak)
            found["updates"] = figures.updates(run.updates)
        except Exception as error:
            errors["training"] = f"{type(error).__name__}: {error}"
        return found

    async def _train(self, model: Path) -> Run:
        return await train(
            self.workload, model, self.folder, self.engine, device=self.device, steps=self.steps
        )

    def _alone(self, model: Path) -> list[dict[str, float]]:
        """Return a process of its own, whose memory is gone before the engine comes."""
        argv = [sys.executable, "-m", "bench.gpu.alone", "--shape", self.workload.name, "--model", str(model)]
        argv += ["--dir", str(self.folder / "alone"), "--device", self.device, "--steps", str(_ALONE_STEPS)]
        process = subprocess.run(argv, capture_output=True, text=True, check=False)
        if process.returncode:
            raise RuntimeError(
                f"the trainer alone ended with {process.returncode}:\n{process.stderr[-3000:]}"
            )
        found: list[dict[str, float]] = json.loads(process.stdout.splitlines()[-1])["steps"]
        return found


def check(options: Check, tests: dict[str, Any], steps: Steps) -> dict[str, Any]:
    """Return the report, but for the machine's."""
    found = options.measure(steps)
    return {
        "bench": "gpu",
        "time": time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime()),
        "commit": _commit(),
        "torch": torch.__version__,
        "shape": options.workload.name,
        "gpus": [asdict(gpu) for gpu in options.gpus],
        "peak_bf16": options.peak,
        "tests": tests,
        **found,
        "published": figures.PUBLISHED,
    }


def passed(report: dict[str, Any]) -> bool:
    """Return true if no test and no part failed, and every version went live."""
    if report["tests"]["status"] or report["tests"]["failed"] or report["errors"]:
        return False
    return bool(report["updates"]["live"] == report["updates"]["versions"])


def write(report: dict[str, Any], folder: Path) -> None:
    """Write both files, and print the tables and, as the last line, the report."""
    (folder / "gpu-report.html").write_text(page.render(report))
    header = ("figure", "here", "prime-rl, one H100")
    show("The trainer alone", header, page.alone_rows(report))
    show("Training next to the engine", header[:2], page.training_rows(report))
    for name in ("training", "updates"):
        show(f"Seconds: {name}, medians", ("part", "s"), page.part_rows(report[name]))
    tests = report["tests"]
    rows = [(name, str(tests[name])) for name in ("passed", "failed", "skipped")]
    show("Tests marked gpu", ("how they ended", "number"), [*rows, *tests["not_passed"].items()])
    finish(report, folder / "gpu-report.json")


def _commit() -> str:
    command = ["git", "describe", "--always", "--dirty"]
    return (
        subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False).stdout.strip()
        or "unknown"
    )


def main(
    steps: Annotated[int, typer.Option(min=1, max=1000, help="Training steps next to the engine.")] = 5,
    engine_python: Annotated[
        Path, typer.Option(help="The interpreter of vLLM's environment (`make bench NAME=gpu` makes it).")
    ] = ENGINE_PYTHON,
    out: Annotated[Path, typer.Option(help="The folder of the report and of the run's files.")] = Path(
        "runs/gpu-check"
    ),
) -> None:
    """Run the tests that need a GPU, measure the trainer alone, and train next to vLLM. Refuse on a machine without a GPU."""
    # The driver counts GPUs by their place on the bus, and CUDA by their speed unless this is set.
    os.environ["CUDA_DEVICE_ORDER"] = "PCI_BUS_ID"
    found = look()
    lacks = missing(found)
    if not lacks and not torch.cuda.is_available():
        lacks = [f"a build of PyTorch that sees the GPU ({torch.__version__} at {sys.executable} does not)"]
    if not lacks and not engine_python.exists():
        lacks = [f"vLLM's environment ({engine_python} is not there; `make bench NAME=gpu` makes it)"]
    if lacks:
        typer.echo(refusal(lacks), err=True)
        raise typer.Exit(1)
    out = out.absolute()
    out.mkdir(parents=True, exist_ok=True)
    options = Check(
        out / time.strftime("%Y%m%d-%H%M%S"),
        WORKLOADS["qwen3-0.6b"](),
        Engine.on_gpu(engine_python, out, found.gpus),
        "cuda",
        steps,
        found.gpus,
    )
    options.folder.mkdir()
    with Steps(4) as progress:
        progress.begin("the tests marked gpu")
        tests = run_tests(options.folder, engine_python)
        report = check(options, tests, progress) | {"machine": machine()}
    write(report, out)
    if not passed(report):
        raise typer.Exit(1)


if __name__ == "__main__":
    typer.run(main)
