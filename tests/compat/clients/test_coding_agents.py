"""Coding agents from npm, unmodified: each fixes a repository with its own tools, by the script of its page.

The script in a page is the agent, as the driver would start it: base URL, key and task in its environment. The scripted engine
speaks the agent's tools. The repository's test fails before and passes afterwards, so the reward is the agent's work.
"""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest

from tests.compat.clients.gate import AGENT, AGENT_KEY, Episode, Gate
from tests.compat.suites import CODING, ROOT
from tests.harness.fences import fences

TIMEOUT_S = 240
ENDED_S = 120
"""Seconds within which the processes that an agent started must have ended: some end a moment after the agent."""
REPLY = "Fixed: Grüße, 世界."
HERE = "<<[Ww]orking (?:in the )?[Dd]irectory: (/[A-Za-z0-9/._-]+)>>"
"""The folder that the agent names to its model."""
SED = {"cmd": "sed -i s/-/+/ sums.py"}
HEADERS = 'ANTHROPIC_CUSTOM_HEADERS="X-Headgate-Episode: $EPISODE"'
COMPACT = "claude --print --continue --verbose --output-format stream-json /compact >&2"
OLD_NEW = {"old_string": "a - b", "new_string": "a + b"}
CAMEL = {"oldString": "a - b", "newString": "a + b"}
TEXTS = {"old_text": "a - b", "new_text": "a + b"}
CALLS: dict[str, list[tuple[str, dict[str, object]]]] = {
    "claude-code": [
        ("Read", {"file_path": "sums.py"}),
        ("Edit", {"file_path": "sums.py", **OLD_NEW}),
        ("Bash", {"command": "cat sums.py", "description": "Show the file"}),
    ],
    "codex": [("exec_command", {"cmd": "cat sums.py"}), ("exec_command", SED)],
    "opencode": [
        ("read", {"filePath": "sums.py"}),
        ("edit", {"filePath": "sums.py", **CAMEL}),
        ("bash", {"command": "cat sums.py", "description": "Show the file"}),
    ],
    "qwen-code": [
        ("read_file", {"file_path": f"{HERE}/sums.py"}),
        ("edit", {"file_path": f"{HERE}/sums.py", **OLD_NEW}),
        ("run_shell_command", {"command": "cat sums.py", "is_background": False}),
    ],
    "pi": [
        ("read", {"path": "sums.py"}),
        ("edit", {"path": "sums.py", "edits": [{"oldText": "a - b", "newText": "a + b"}]}),
        ("bash", {"command": "cat sums.py"}),
    ],
    "cline": [
        ("read_files", {"files": [{"path": f"{HERE}/sums.py"}]}),
        ("editor", {"path": f"{HERE}/sums.py", **TEXTS}),
        ("run_commands", {"commands": ["cat sums.py"]}),
    ],
    "continue": [
        ("Read", {"filepath": "sums.py"}),
        ("Edit", {"file_path": "sums.py", **OLD_NEW}),
        ("Bash", {"command": "cat sums.py"}),
    ],
}
"""The tools that the model calls, in its turns before the last."""


@pytest.mark.parametrize("name", CALLS)
def test_it_fixes_a_file_and_its_record_is_one_path(
    name: str, gate: Gate, episode: Episode, tmp_path: Path
) -> None:
    refused = gate.errors()
    output = worked(script(name), name, episode, tmp_path)
    assert REPLY in output, output
    assert gate.errors() == refused, output
    episode.check(turns=len(CALLS[name]) + 1)
    nodes = episode.nodes()
    assert [node["parent"] for node in nodes] == list(range(-1, len(nodes) - 1))
    assert all(node["at"] == len(nodes[node["parent"]]["ids"]) for node in nodes[1:])


@pytest.mark.parametrize("name", ["claude-code"])
def test_it_names_its_episode_by_a_header(name: str, gate: Gate, tmp_path: Path) -> None:
    """For one key that several episodes share: nothing else in its requests identifies them."""
    episode = gate.open("named", AGENT)
    text = script(name).replace("claude --print", f"export {HEADERS}\nclaude --print")
    shared = replace(episode, api_key=AGENT_KEY)
    assert REPLY in worked(text.replace("$EPISODE", episode.id), name, shared, tmp_path)
    episode.check(turns=len(CALLS[name]) + 1)


def test_opencodes_request_for_a_title_is_a_conversation_of_its_own(
    gate: Gate, episode: Episode, tmp_path: Path
) -> None:
    refused = gate.errors()
    text = script("opencode").replace(" --title episode", "")
    assert REPLY in worked(text, "opencode", episode, tmp_path)
    assert gate.errors() == refused
    episode.check(turns=len(CALLS["opencode"]) + 2)
    nodes = episode.nodes()
    last = max(node["index"] for node in nodes if node["sampled"] and REPLY in node["text"])
    path = [last]
    while nodes[path[-1]]["parent"] >= 0:
        path.append(nodes[path[-1]]["parent"])
    others = [node for node in nodes if node["sampled"] and node["index"] not in path]
    assert len(others) == 1


@pytest.mark.parametrize("name", ["claude-code"])
def test_its_request_for_a_summary_is_a_branch_of_what_it_sums_up(
    name: str, gate: Gate, episode: Episode, tmp_path: Path
) -> None:
    refused = gate.errors()
    text = script(name).replace("python3 -m pytest", f"{COMPACT}\npython3 -m pytest")
    worked(text, name, episode, tmp_path)
    assert gate.errors() == refused
    episode.check()
    nodes = episode.nodes()
    work, summary = nodes[: 2 * (len(CALLS[name]) + 1)], nodes[2 * (len(CALLS[name]) + 1) :]
    assert [node["parent"] for node in work] == list(range(-1, len(work) - 1))
    assert 0 < summary[0]["parent"] < len(work)
    assert "<summary>" in summary[0]["text"]


def script(name: str) -> str:
    """The agent, as its page has it."""
    (found,) = [fence for fence in fences(ROOT / "docs" / "guide" / "agents" / f"{name}.md") if fence.title]
    return found.body


def worked(text: str, name: str, episode: Episode, work: Path) -> str:
    """Run an agent's script on a repository with a mistake, and return its output. Fails if the repository's test then fails."""
    repository = work / "repository"
    repository.mkdir()
    (repository / "sums.py").write_text("def add(a, b):\n    return a - b\n")
    (repository / "test_sums.py").write_text(
        "from sums import add\n\n\ndef test_add():\n    assert add(2, 3) == 5\n"
    )
    lines = [f"SCRIPT: {tool} {json.dumps(arguments)}" for tool, arguments in CALLS[name]]
    task = "\n".join(["Fix the sum.", *lines, f"SCRIPT: {REPLY}"])
    path = [CODING / "node_modules" / ".bin", ROOT / ".venv" / "bin", Path(sys.executable).parent]
    env = {
        "PATH": os.pathsep.join([*map(str, path), os.environ["PATH"]]),
        "HOME": str(work),
        "TMPDIR": str(work),
        "REPOSITORY": str(repository),
        "HEADGATE_TASK": json.dumps({"question": task}),
        "OPENAI_BASE_URL": episode.base_url,
        "OPENAI_API_KEY": episode.api_key,
        "ANTHROPIC_BASE_URL": episode.root,
        "ANTHROPIC_API_KEY": episode.api_key,
    }
    done = subprocess.run(
        ["sh", "-c", text], env=env, cwd=work, capture_output=True, text=True, timeout=TIMEOUT_S
    )
    assert done.returncode == 0, done.stdout + done.stderr
    gone(work)
    return done.stdout + done.stderr


def gone(work: Path) -> None:
    """Fail if an agent leaves a process behind: in a training run there would be one more for every episode."""
    for process, command in started_in(work):
        with suppress(ProcessLookupError):  # it has ended
            handle = os.pidfd_open(process)
            ended, _, _ = select.select([handle], [], [], ENDED_S)
            os.close(handle)
            assert ended, command


def started_in(work: Path) -> Iterator[tuple[int, str]]:
    """The processes that have the folder in their arguments or their environment, with their commands."""
    for process in Path("/proc").glob("[0-9]*"):
        try:
            command, environment = [(process / name).read_bytes() for name in ("cmdline", "environ")]
        except OSError:  # it has ended, or is another user's
            continue
        if str(work).encode() in command + environment:
            yield int(process.name), command.replace(b"\0", b" ").decode()
