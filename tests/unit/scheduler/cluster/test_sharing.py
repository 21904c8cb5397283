"""Engines and ranks on one GPU: the sums, and what `scheduler run --check` refuses by them."""

from __future__ import annotations

from pathlib import Path

import pytest

from scheduler.cluster.command import run
from scheduler.cluster.errors import BadFile, OutOfMemory
from scheduler.cluster.sharing import Need, fit

GATEWAY = '[models.demo]\npath = "{folder}"\n[engine]\nlaunch = "fake"\ncount = 0\n'
TRAINER = '[gateway]\nurl = "http://127.0.0.1:1"\n'
CLUSTER = """
[gateway]
config = "{folder}/gateway.toml"
[trainer]
config = "{folder}/trainer.toml"
gpus = 1
{trainer}
[engine]
gpus = 1
{engine}
[nodes.a]
tags = ["rollout", "train"]
gpus = 1
{node}
"""


@pytest.mark.parametrize(
    ("engine", "trainer", "kind"),
    [
        (Need(40.0), Need(40.0), "together"),
        (Need(40.0), Need(40.1), "in turn"),
        (Need(78.5), Need(78.5), "in turn"),
        (Need(78.6), Need(40.0), "not at all"),
        (Need(40.0), Need(78.6), "not at all"),
        (Need(60.0, 60.0), Need(30.0), "not at all"),
        (Need(60.0), Need(30.0, 30.0), "not at all"),
    ],
)
def test_two_fit_together_or_in_turn_if_one_leaves_enough_to_the_other(
    engine: Need, trainer: Need, kind: str
) -> None:
    assert fit(80.0, engine, trainer).kind == kind


def check(folder: Path, gateway: str = "", gateway_of_trainer: str = "", **tables: str) -> None:
    """`scheduler run --check` of one node with one GPU."""
    (folder / "gateway.toml").write_text(GATEWAY.format(folder=folder) + gateway)
    (folder / "config.json").write_text("{}")  # a checkpoint's
    (folder / "trainer.toml").write_text(TRAINER + gateway_of_trainer)
    given = {"node": "gpu_memory_gb = 80", "trainer": "gpu_memory_gb = 60", "engine": ""} | tables
    (folder / "cluster.toml").write_text(CLUSTER.format(folder=folder, **given))
    assert run(folder / "cluster.toml", check=True) == 0


def test_a_check_reports_how_engine_and_trainer_fit(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    check(tmp_path)
    assert "a: engine and trainer fit in turn: engine 73.6 + trainer 60.0 = 133.6 GiB of 80.0 together;" in (
        capsys.readouterr().out
    )
    check(tmp_path, gateway='args = ["--gpu-memory-utilization=0.2"]')
    assert "a: engine and trainer fit together: engine 16.0 + trainer 60.0 = 76.0 GiB of 80.0" in (
        capsys.readouterr().out
    )
    check(tmp_path, trainer="")
    assert "set [trainer] gpu_memory_gb" in capsys.readouterr().out
    check(tmp_path, node="")
    assert "a: no gpu_memory_gb is given" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"gateway": 'sleep = "pause"'}, r"trainer does 60.0 \+ 73.6 = 133.6 GiB, of 80.0; let engines sleep"),
        ({"gateway_of_trainer": 'offload = "none"'}, r"73.6 \+ 60.0 = 133.6 GiB, .*; offload the trainer's weights"),
        ({"trainer": "gpu_memory_gb = 60\nclaims = false"}, r"have the trainer claim its nodes"),
        ({"trainer": "gpu_memory_gb = 79"}, r"79.0 \+ 1.5 = 80.5 GiB, of 80.0; give the engine less"),
        ({"trainer": "gpu_memory_gb = 81"}, r"a rank of the trainer needs 81.0 GiB of a GPU"),
        ({"engine": "gpu_memory_gb = 90"}, r"an engine needs 90.0 GiB of a GPU"),
    ],
)  # fmt: skip
def test_a_check_refuses_what_would_run_out_of_memory(
    tmp_path: Path, given: dict[str, str], message: str
) -> None:
    with pytest.raises(OutOfMemory, match=message):
        check(tmp_path, **given)


def test_a_share_that_is_not_a_number_is_named(tmp_path: Path) -> None:
    with pytest.raises(BadFile, match="--gpu-memory-utilization half is not a number"):
        check(tmp_path, gateway='args = ["--gpu-memory-utilization", "half"]')
