"""What is missing on this machine for the file of `gateway init`."""

from __future__ import annotations

import importlib.util
import subprocess

from gateway.cli.init.project import RANK, Project
from headgate.extras import install_command

_TRAINED_BYTES, _ADAPTED_BYTES = 16, 2
"""Bytes of memory of a weight that is trained (with its gradient and moments), and of one below adapters."""


def warnings(project: Project) -> list[str]:
    """Return what keeps the file from working on this machine now."""
    found = []
    python = project.engine.get("python")
    if python is not None and not _has_vllm(python):
        found.append(
            f"[engine] python = {python!r} has no vLLM: `make engine` (GPU=1 for CUDA) in headgate's repository installs it;"
            " name its interpreter with --engine-python"
        )
    if project.lora and project.engine["launch"] == "external":
        found.append(
            f"start the engine with `--enable-lora --max-lora-rank {RANK}`; docs/topics/weights.md has the other options"
        )
    if importlib.util.find_spec("torch") is None:
        found.append(f"the trainer is not installed: {install_command('trainer')}")
    needed = _gib_of_training(project)
    if project.machine.gpus and project.machine.gib and needed > project.machine.gib:
        found.append(
            f"the trainer needs more than {needed:.0f} GiB of GPU memory for this model, and a GPU here has"
            f" {project.machine.gib:.0f}: {'use several ranks' if project.lora else 'train adapters'} (docs/guide/lora.md)"
        )
    return found


def _gib_of_training(project: Project) -> float:
    """Return the least memory of a training step, by the size of the checkpoint in 16 bits."""
    return project.weights_gib / 2 * (_ADAPTED_BYTES if project.lora else _TRAINED_BYTES)


def _has_vllm(python: str) -> bool:
    script = "import importlib.util, sys; sys.exit(importlib.util.find_spec('vllm') is None)"
    try:
        return subprocess.run([python, "-c", script], capture_output=True, check=False).returncode == 0
    except OSError:
        return False
