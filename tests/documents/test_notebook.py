"""The notebook of examples/notebooks runs on an export, and its tables have the export's figures."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import nbformat
import numpy as np
import pyarrow.parquet as pq
import pytest
from nbclient import NotebookClient

from headgate.arrow import groups_to_arrow
from headgate.types import Episode, Group, Node

NOTEBOOKS = Path(__file__).parents[2] / "examples" / "notebooks"
RUN_S = 300


def episode(name: str, reward: float, versions: list[int]) -> Episode:
    """A prompt of two tokens, and a sampled token of each of these versions."""
    count = len(versions)
    prompt = Node(
        *(0, -1, 0, False),
        ids=np.array([5, 6], np.int32),
        logprobs=np.zeros(2, np.float32),
        versions=np.full(2, -1, np.int32),
        flags=np.zeros(2, np.uint8),
    )
    turn = Node(
        *(1, 0, 2, True),
        ids=np.arange(count, dtype=np.int32),
        logprobs=np.full(count, -0.5, np.float32),
        versions=np.array(versions, np.int32),
        flags=np.zeros(count, np.uint8),
        temperature=1.0,
        call_id=f"call-{name}",
        finish_reason="stop",
    )
    return Episode(name, reward, (prompt, turn))


@pytest.fixture(scope="module")
def export(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two batches: rewards of 0 and 1 by version 0, then of 1 and 1 by versions 0 and 1."""
    groups = [
        Group("g0", "t0", 0, (episode("a", 0.0, [0, 0]), episode("b", 1.0, [0, 0])), 0),
        Group("g1", "t1", 0, (episode("c", 1.0, [0, 1]), episode("d", 1.0, [0, 1, 1, 1])), 1),
    ]
    path = tmp_path_factory.mktemp("export") / "trained.parquet"
    pq.write_table(groups_to_arrow(groups), path)
    return path


@pytest.fixture(scope="module")
def ran(export: Path) -> Any:
    """The notebook with what its cells gave, in the folder of the export."""
    notebook = nbformat.read(NOTEBOOKS / "export.ipynb", as_version=4)
    # What a cell gave comes apart from the word that it has ended, and is not waited for long of itself.
    limits = {"timeout": RUN_S, "startup_timeout": RUN_S, "iopub_timeout": RUN_S}
    client = NotebookClient(notebook, **limits, resources={"metadata": {"path": str(export.parent)}})
    return client.execute()


def outputs(notebook: Any, kind: str) -> list[str]:
    """The outputs of one kind that all cells gave, in order."""
    given = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    return [output["data"][kind] for output in given if kind in output.get("data", {})]


def shown(notebook: Any) -> list[str]:
    """The tables and texts that cells end with; figures have a text too, with their size."""
    return [text for text in outputs(notebook, "text/plain") if not text.startswith("<Figure")]


def test_the_tables_have_the_figures_of_the_export(ran: Any) -> None:
    printed = "".join(output.get("text", "") for cell in ran.cells for output in cell.get("outputs", []))
    assert "2 groups, 4 episodes, 4 calls" in printed
    rewards, ages, *_, longest = shown(ran)
    assert [line.split() for line in rewards.splitlines()[2:]] == [
        ["0", "0.5", "0.0", "1.0", "2"],
        ["1", "1.0", "1.0", "1.0", "2"],
    ]
    # 2 of 10 tokens are of version 0 in batch 1
    assert [line.split() for line in ages.splitlines() if line[0].isdigit()] == [["0", "0.8"], ["1", "0.2"]]
    assert longest.splitlines()[2].split()[0] == "d"


def test_it_plots(ran: Any) -> None:
    assert len(outputs(ran, "image/png")) == 3


def test_it_is_committed_without_what_a_run_gave() -> None:
    for path in NOTEBOOKS.glob("*.ipynb"):
        cells = json.loads(path.read_text())["cells"]
        assert not any(cell.get("outputs") or cell.get("execution_count") for cell in cells), path
