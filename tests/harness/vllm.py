"""Settings for real vLLM on the CPU, as small and exact as it gets. A test that needs it and has it not fails with what to do."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

PYTHON = Path(__file__).parents[2] / ".venv-engine" / "bin" / "python"


def vllm_settings(log: Path) -> dict[str, Any]:
    """An `[engine]` table."""
    if not PYTHON.exists():
        pytest.fail("these tests need vLLM's CPU build: run `make engine`", pytrace=False)
    return {
        "launch": "vllm",
        "python": str(PYTHON),
        "args": ["--enforce-eager", "--dtype", "float32", "--block-size", "32"],
        "env": {
            "VLLM_CPU_CI_ENV": "1",
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "OMP_NUM_THREADS": "1",
        },
        "log": str(log),
    }
