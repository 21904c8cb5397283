"""The files of examples/clusters run as they are, but for the port: fake engines, headgate's trainer and its agent."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import httpx
import pytest

from headgate.processes.child import LocalProcess
from headgate.processes.ports import free_port
from tests.harness.scheduler_process import UP_S, RunningCluster
from tests.harness.waiting import until

ROOT = Path(__file__).parents[2]
CLUSTERS = ROOT / "examples" / "clusters"


@pytest.mark.long
@pytest.mark.parametrize("name", ["mixed", "colocated", "disaggregated"])
async def test_an_example_makes_three_updates_and_ends(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    port = free_port()
    monkeypatch.chdir(tmp_path)  # the paths of the files are relative
    shutil.copytree(CLUSTERS, "examples/clusters")
    for file in ("gateway.toml", "trainer.toml"):
        path = Path("examples/clusters", file)
        path.write_text(path.read_text().replace("8000", str(port)))
    shutil.copytree(tiny_model, "runs/cluster/model")
    argv = [sys.executable, "-m", "scheduler.cli", "run", f"examples/clusters/{name}.toml"]
    async with httpx.AsyncClient(timeout=60.0) as http:
        environment = {"CLUSTER_TEST_FOLDER": str(tmp_path), "PYTHONPATH": str(ROOT)}
        process = await LocalProcess.start("scheduler run", argv, tmp_path / "run.log", environment)
        cluster = RunningCluster(process, f"http://127.0.0.1:{port}", tmp_path)

        async def trained() -> bool:
            assert process.returncode is None, cluster.output
            try:
                response = await http.get(f"{cluster.url}/admin/v1/status")
            except httpx.TransportError:
                return False
            return response.is_success and response.json()["version"] >= 3

        try:
            await until(trained, "three versions are live", UP_S)
            assert await cluster.stop() == 0
            assert cluster.processes() == {}
        finally:
            await cluster.admin.close()
            await process.stop(30.0)
