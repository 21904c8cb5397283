"""The table `[engine]` of the checks: vLLM next to the trainer. Imports nothing that the trainer's part lacks."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench.gpu.machine import VISIBLE, Gpu
from bench.vllm_cpu import VLLM_CPU


def engine_on(python: Path, folder: Path, gpus: Sequence[Gpu]) -> dict[str, Any]:
    """Return the table `[engine]` with vLLM on the second GPU, or on a part of the only one; the trainer is on the first."""
    args = [] if len(gpus) > 1 else ["--gpu-memory-utilization", "0.35"]
    return _vllm(python, folder) | {"args": args, "env": {VISIBLE: gpus[:2][-1].uuid}}


def dry_engine(python: Path, folder: Path) -> dict[str, Any]:
    """Return the table `[engine]` with vLLM's CPU build."""
    return _vllm(python, folder) | VLLM_CPU


def _vllm(python: Path, folder: Path) -> dict[str, Any]:
    return {
        "launch": "vllm",
        "python": str(python.absolute()),
        "log": str(folder / "engine.log"),
        "start_s": 900.0,
    }
