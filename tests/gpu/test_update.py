"""A weight update on vLLM's GPU build: the probe takes the right weights for what they are, and notices wrong ones.

The same on vLLM's CPU build: `tests/acceptance`.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from bench.gpu.checks import ENGINE_PYTHON
from tests.harness.gateways import run_gateway, settings_for
from tests.harness.models import probe_of, save_model
from tests.harness.weights import publish


@pytest.mark.gpu
@pytest.mark.usefixtures("gpu")
async def test_the_probe_distinguishes_versions(tmp_path: Path) -> None:
    python = os.environ.get(ENGINE_PYTHON)
    if python is None:
        pytest.fail(
            f"set {ENGINE_PYTHON} to the Python of vLLM's GPU build, as `make bench NAME=gpu` does",
            pytrace=False,
        )
    for seed, name in enumerate("abc"):
        save_model(tmp_path / name, seed, scale=2.0)
    a, b, c = (tmp_path / name for name in "abc")
    engine = {
        "launch": "vllm",
        "python": python,
        "args": ["--dtype", "bfloat16", "--enforce-eager", "--gpu-memory-utilization", "0.2"],
        "start_s": 900.0,
    }
    async with run_gateway(settings_for(a, tmp_path, engine=engine), in_process=False) as gateway:
        right = await gateway.admin.publish(
            1, str(publish(b, tmp_path / "v1", 1, 0, probe_of(b, a))), wait_s=600
        )
        assert right["state"] == "live", right
        assert [report["probe"]["verdict"] for report in right["report"]] == ["passed"]
        # The manifest names `c`, and the files are those of `a`.
        wrong = await gateway.admin.publish(
            2, str(publish(a, tmp_path / "v2", 2, 1, probe_of(c, b))), wait_s=600
        )
        assert wrong["state"] != "live"
        assert (await gateway.admin.status())["version"] == 1
