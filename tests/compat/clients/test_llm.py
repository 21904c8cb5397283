"""llm, the command line of Datasette: a prompt, a stream, and a tool, by its own configuration file."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import llm  # noqa: F401 (a client that is not installed is not collected)
import pytest

from tests.compat.clients.gate import HELLO, MODEL, SUNNY, WEATHER, Episode

TOOL = f'''
def get_weather(city: str) -> str:
    """The weather in a city."""
    return "{SUNNY}" if city == "Tokyo" else "?"
'''


def prompt(episode: Episode, folder: Path, *options: str) -> str:
    """Return what the program prints; `folder`: its configuration."""
    (folder / "extra-openai-models.yaml").write_text(
        f"- model_id: {MODEL}\n  model_name: {MODEL}\n  api_base: {episode.base_url}\n  api_key_name: headgate\n"
        "  supports_tools: true\n"
    )
    argv = [sys.executable, "-m", "llm", "prompt", "-m", MODEL, "--key", episode.api_key, *options]
    env = {**os.environ, "LLM_USER_PATH": str(folder)}
    done = subprocess.run(
        argv, env=env, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.mark.parametrize("options", [["--no-stream"], []], ids=["whole", "streamed"])
def test_a_reply(episode: Episode, tmp_path: Path, options: list[str]) -> None:
    assert prompt(episode, tmp_path, "hello", *options) == HELLO
    episode.check(turns=1)


@pytest.mark.parametrize("options", [["--no-stream"], []], ids=["whole", "streamed"])
def test_a_tool_is_one_trajectory(episode: Episode, tmp_path: Path, options: list[str]) -> None:
    reply = prompt(episode, tmp_path, WEATHER, "--functions", TOOL, *options)
    assert reply == f"The answer is {SUNNY}."
    episode.check(turns=2)
    assert [node["parent"] for node in episode.nodes()] == [-1, 0, 1, 2]
