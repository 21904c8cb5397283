"""`gateway episodes run` that cannot start: the mistake is named before anything is opened."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from gateway.cli import app

TASK = '{"task_id": "t1"}\n'


@pytest.mark.parametrize(
    ("tasks", "agent", "words"),
    [
        (TASK, [], "name an agent: a command after"),
        (TASK, ["--agent", "a:b", "--", "true"], "there are two agents"),
        (TASK, ["--", "pyhton", "agent.py"], "pyhton: no such program"),
        (None, ["--", "true"], "tasks.jsonl: no such file"),
        ("\n", ["--", "true"], "tasks.jsonl: the file has no tasks"),
        ('[{"task_id": "t1"}]', ["--", "true"], "one object a line is needed, not a list: `jq -c"),
        (TASK + '{"task_id": x}', ["--", "true"], """line 2: not JSON at column 13, near '{"task_id": x}'"""),
    ],
)
def test_a_mistake_is_named(tmp_path: Path, tasks: str | None, agent: list[str], words: str) -> None:
    file = tmp_path / "tasks.jsonl"
    if tasks is not None:
        file.write_text(tasks)
    wide = {"COLUMNS": "500", "TERM": "dumb"}
    done = CliRunner().invoke(app, ["episodes", "run", "--tasks", str(file), *agent], env=wide)
    assert (done.exit_code, words in done.output) == (2, True), done.output
