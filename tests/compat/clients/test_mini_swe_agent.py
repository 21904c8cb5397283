"""mini-swe-agent, over litellm: its default agent with a shell, on this machine's files."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

os.environ["MSWEA_SILENT_STARTUP"] = "1"
os.environ["MSWEA_MODEL_RETRY_STOP_AFTER_ATTEMPT"] = "1"
os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # nothing is fetched at import

import litellm
import yaml
from minisweagent.agents.default import DefaultAgent
from minisweagent.config import builtin_config_dir
from minisweagent.environments.local import LocalEnvironment
from minisweagent.models.litellm_model import LitellmModel
from minisweagent.models.litellm_response_model import LitellmResponseModel

from tests.compat.clients.gate import MODEL, Episode

TASK = """Write a file.
SCRIPT: bash {"command": "echo written > made.txt"}
SCRIPT: bash {"command": "cat made.txt"}
SCRIPT: bash {"command": "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT && cat made.txt"}
"""


def model_of(kind: type, episode: Episode, name: str = MODEL) -> Any:
    arguments = {"api_base": episode.base_url, "api_key": episode.api_key, "num_retries": 0}
    return kind(model_name=f"openai/{name}", model_kwargs=arguments, cost_tracking="ignore_errors")


@pytest.mark.parametrize("kind", [LitellmModel, LitellmResponseModel], ids=["chat", "responses"])
def test_an_agent_with_a_shell_is_one_trajectory(kind: type, episode: Episode, tmp_path: Path) -> None:
    config = yaml.safe_load((builtin_config_dir / "default.yaml").read_text())["agent"]
    agent = DefaultAgent(
        model_of(kind, episode),
        LocalEnvironment(cwd=str(tmp_path)),
        system_template=config["system_template"],
        instance_template=config["instance_template"],
        step_limit=6,
    )
    done = agent.run(TASK)
    assert done["exit_status"] == "Submitted"
    assert done["submission"].strip() == "written"
    assert (tmp_path / "made.txt").read_text() == "written\n"
    episode.check(turns=3)
    assert [node["parent"] for node in episode.nodes()] == [-1, 0, 1, 2, 3, 4]


def test_errors_are_litellms_own(episode: Episode) -> None:
    with pytest.raises(litellm.exceptions.NotFoundError):
        model_of(LitellmModel, episode, "no-such-model").query([{"role": "user", "content": "hello"}])
