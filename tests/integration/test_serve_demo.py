"""The first step after a clone of the repository: no model, no configuration, a real client."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import openai

from gateway.cli.demo import WORDS
from gateway.engines.fake import VOCABULARY
from headgate.client import GatewayClient
from headgate.processes.child import LocalProcess
from headgate.processes.ports import free_port
from tests.harness.gateway_command import Served


async def test_a_fresh_clone_replies_records_and_prints_the_next_steps(tmp_path: Path) -> None:
    port, log = free_port(), tmp_path / "demo.log"
    argv = [
        "sh",
        "-c",
        f'cd "{tmp_path}" && exec "$0" -m gateway.cli serve --demo --port {port}',
        sys.executable,
    ]
    root = str(Path(__file__).parents[2])
    process = await LocalProcess.start(
        "demo", argv, log, {"PYTHONPATH": root + os.pathsep + os.environ.get("PYTHONPATH", "")}
    )
    served = Served(process, f"http://127.0.0.1:{port}")
    try:
        await served.ready()
        async with GatewayClient(served.url) as admin:
            opened = await admin.open_episode("t1")
            async with openai.AsyncOpenAI(base_url=opened.base_url, api_key=opened.api_key) as client:
                response = await client.chat.completions.create(
                    model="any",
                    messages=[
                        {"role": "system", "content": "A coding agent describes its tools. " * 1_500},
                        {"role": "user", "content": "Grüße, 水!"},
                    ],
                    max_tokens=12,
                )
            words = (response.choices[0].message.content or "").split()
            assert words
            assert set(words) <= set(WORDS.split())
            await admin.reward(opened.episode_id, 1.0)
            nodes = (await admin.trajectory(opened.episode_id))["nodes"]
            assert (
                sum(len(node["ids"]) for node in nodes if node["sampled"]) == response.usage.completion_tokens
            )
    finally:
        await process.stop()
    assert f"http://127.0.0.1:{port}/v1" in served.log
    assert f"http://127.0.0.1:{port}/console" in served.log
    assert "gateway init" in served.log


def test_every_token_of_the_fake_engine_is_a_word() -> None:
    assert len(set(WORDS.split())) == VOCABULARY


def test_a_taken_port_is_one_sentence(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        argv = [sys.executable, "-m", "gateway.cli", "serve", "--demo", "--port", str(taken.getsockname()[1])]
        root = str(Path(__file__).parents[2])
        ended = subprocess.run(
            argv,
            cwd=tmp_path,
            env={**os.environ, "PYTHONPATH": root},
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
    assert (ended.returncode, ended.stdout) == (2, "")
    (line,) = ended.stderr.splitlines()
    assert "cannot listen at" in line
