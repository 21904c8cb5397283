"""vLLM is started so that its sleep frees memory, unless a setting decides how it sleeps."""

from __future__ import annotations

from pathlib import Path

import pytest

from gateway.config import EngineSettings, ModelSettings
from gateway.engines.process import command, has_accelerator

FLAG = "--enable-sleep-mode"


def python_with(vllm: str, folder: Path) -> str:
    """Return an interpreter whose vLLM is of this version."""
    path = folder / "python"
    path.write_text(f"#!/bin/sh\necho {vllm}\n")
    path.chmod(0o755)
    return str(path)


@pytest.mark.parametrize(
    ("sleep", "gpu", "vllm", "expected"),
    [
        ("auto", True, "0.32.0", True),
        ("auto", True, "0.32.0+cpu", False),
        ("auto", False, "0.32.0", False),
        ("pause", True, "0.32.0", False),
        ("level2", False, "0.32.0", True),
    ],
)
def test_an_engine_is_started_to_sleep_where_it_can(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, sleep: str, gpu: bool, vllm: str, expected: bool
) -> None:
    monkeypatch.setattr("gateway.engines.process.has_accelerator", lambda env: gpu)
    python = python_with(vllm, tmp_path)
    settings = EngineSettings.model_validate({"sleep": sleep, "python": python})
    argv, _ = command(settings, ModelSettings(path="m"), "policy", "m", "127.0.0.1", 1)
    assert (FLAG in argv) == expected


def test_a_gpu_that_the_process_may_not_see_is_none(tmp_path: Path) -> None:
    assert not has_accelerator({}, tmp_path)
    (tmp_path / "nvidiactl").touch()
    assert has_accelerator({}, tmp_path)
    assert not has_accelerator({"CUDA_VISIBLE_DEVICES": ""}, tmp_path)
