"""Ctrl-C of an example program: what it started ends, and it prints one sentence and no traceback."""

from __future__ import annotations

import signal
import sys
from pathlib import Path

import pytest

from headgate.processes.child import LocalProcess
from headgate.processes.ports import free_port
from tests.harness.gateway_command import command_line, descendants, write_toml
from tests.harness.gateways import settings_for
from tests.harness.waiting import result_of, until

PROGRAM = """
import sys
from pathlib import Path
from examples.demo.run import Demo, run_demos

class Small(Demo):
    async def prepare(self):
        pass

    def configure(self):
        Path(self.path("gateway.toml")).write_text(Path(sys.argv[1]).read_text())

    async def evaluate(self, name):
        await self.command("http.server", "0", "--bind", "127.0.0.1")

run_demos([Small(Path(sys.argv[2]), port=int(sys.argv[3]))] * 2)
"""


@pytest.mark.long
async def test_a_demo_that_is_interrupted_leaves_no_process_and_no_traceback(
    tiny_model: Path, tmp_path: Path
) -> None:
    port = free_port()
    values = settings_for(tiny_model, tmp_path, server={"port": port})
    config = write_toml(values, tmp_path / "small.toml")
    argv = [sys.executable, "-c", PROGRAM, str(config), str(tmp_path / "run"), str(port)]
    process = await LocalProcess.start("demo", argv, tmp_path / "demo.log")
    try:

        def evaluating() -> bool:
            assert process.returncode is None, process.tail(100)
            return "http.server" in " ".join(map(command_line, descendants(process.pid)))

        await until(evaluating, "the demo evaluates")
        children = descendants(process.pid)
        assert "gateway.engines.fake" in " ".join(map(command_line, children))
        process._process.send_signal(signal.SIGINT)
        assert await result_of(process.wait(), "the demo has ended") == 130
        assert [line for line in map(command_line, children) if line] == []
        assert "stopping the trainer, the gateway and vLLM" in process.output()
        assert "Traceback" not in process.output()
    finally:
        await process.stop()
