"""Commands that contain agents, and the errors where they cannot be contained."""

from __future__ import annotations

import itertools
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from gateway.cli import app
from headgate.client.sandboxes import sandbox_of
from headgate.client.sandboxes.base import MIB, Contained, Limits
from headgate.client.sandboxes.usage import Process, excess, tree

LIMITS = Limits(memory_mib=100, cpu_s=10, disk_mib=7, processes=5)
AGENT = Contained("headgate-1", ["agent", "--fast"], ("OPENAI_API_KEY", "HEADGATE_TASK"), Path("/door"))


def test_docker_gets_every_limit_and_no_value_of_a_key(tmp_path: Path) -> None:
    docker = sandbox_of("docker:registry/agent:1.2", LIMITS, [tmp_path])
    argv = docker.command(AGENT)
    assert argv[:2] == ["docker", "run"]
    pairs = list(itertools.pairwise(argv))
    for pair in (
        ("--name", "headgate-1"),
        ("--network", "none"),
        ("--cap-drop", "ALL"),
        ("--memory", "100m"),
        ("--memory-swap", "100m"),
        ("--pids-limit", "5"),
        ("--ulimit", "cpu=10"),
        ("--tmpfs", "/tmp:rw,exec,mode=1777,size=7m"),
        ("--mount", "type=bind,source=/door,target=/run/headgate,readonly"),
        ("--mount", f"type=bind,source={tmp_path},target={tmp_path},readonly"),
        ("--env", "OPENAI_API_KEY"),
        ("--env", "HEADGATE_TASK"),
        ("--entrypoint", "python3"),
    ):
        assert pair in pairs, pair
    assert {"--rm", "--init", "--read-only"} <= {*argv}
    command = ["/run/headgate/entrypoint.py", "/run/headgate/gateway.sock", "agent", "--fast"]
    assert argv[argv.index("registry/agent:1.2") + 1 :] == command
    assert docker.removal("headgate-1") == ["docker", "rm", "--force", "headgate-1"]
    assert [docker.reason(status) for status in (0, 1, 125, 137, 152)] == [
        "", "", "sandbox_failed", "memory_limit", "cpu_limit"
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("sandbox", "words"),
    [
        ("bwrap", "there is no bwrap in PATH: install the package bubblewrap"),
        ("docker:image", "there is no docker in PATH"),
    ],
)
def test_a_missing_sandbox_is_one_error_before_any_episode(
    sandbox: str, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    (tmp_path / "tasks.jsonl").write_text('{"task_id": "t"}\n')
    argv = ["episodes", "run", "--tasks", str(tmp_path / "tasks.jsonl"), "--gateway", "http://127.0.0.1:9"]
    result = CliRunner().invoke(app, [*argv, "--sandbox", sandbox, "--", sys.executable, "-V"])
    assert result.exit_code == 1
    assert words in result.stderr


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--sandbox", "podman"], "a sandbox is bwrap or docker:IMAGE"),
        (["--sandbox", "bwrap", "--worker"], "a command that is run once per episode"),
        (["--sandbox", "bwrap", "--sandbox-read", "/nowhere"], "there is no /nowhere"),
    ],
)
def test_what_cannot_be_contained_is_refused(options: list[str], words: str, tmp_path: Path) -> None:
    (tmp_path / "tasks.jsonl").write_text('{"task_id": "t"}\n')
    argv = ["episodes", "run", "--tasks", str(tmp_path / "tasks.jsonl"), *options, "--", "true"]
    result = CliRunner().invoke(app, argv, env={"COLUMNS": "300", "TERMINAL_WIDTH": "300"})
    assert result.exit_code == 2
    assert words in result.stderr


def test_usage_is_that_of_all_descendants_together() -> None:
    processes = {
        pid: Process(pid, parent, 2.0, 30 * MIB) for pid, parent in {7: 1, 8: 7, 9: 8, 10: 1}.items()
    }
    members = tree(processes, 7)
    assert {process.pid for process in members} == {7, 8, 9}
    assert excess(members, LIMITS) is None
    for limits, reason in (
        (Limits(memory_mib=89, cpu_s=10, processes=5), "memory_limit"),
        (Limits(memory_mib=90, cpu_s=5, processes=5), "cpu_limit"),
        (Limits(memory_mib=90, cpu_s=6, processes=2), "process_limit"),
    ):
        found = excess(members, limits)
        assert found is not None
        assert found.reason == reason
