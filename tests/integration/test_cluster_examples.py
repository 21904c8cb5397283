"""The files of examples/clusters train through the death of every process, and end with Ctrl-C."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.harness.cluster_examples import end_with_ctrl_c, example, train_through_every_death


@pytest.mark.long
@pytest.mark.parametrize("name", ["mixed", "colocated", "disaggregated"])
async def test_an_example_trains_through_every_death_and_ends_with_ctrl_c(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.chdir(tmp_path)
    async with example(name, tiny_model, tmp_path) as cluster:
        await train_through_every_death(cluster)
        await end_with_ctrl_c(cluster)
