"""vLLM on the CPU, as small as it gets, for benches and tests that measure something else than the model."""

from __future__ import annotations

from typing import Any

VLLM_CPU: dict[str, Any] = {
    "args": ["--enforce-eager", "--dtype", "float32", "--block-size", "32"],
    "env": {
        "VLLM_CPU_CI_ENV": "1",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "OMP_NUM_THREADS": "1",
    },
}
