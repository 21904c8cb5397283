"""The error for an unknown key names the nearest known one, in every file that a person writes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from gateway.config.settings import ConfigError, Settings
from lab.simulate.errors import ScenarioError
from lab.simulate.scenario import Scenario
from scheduler.cluster.errors import BadFile
from scheduler.cluster.file import ClusterFile
from trainer.commands.warmstart import Recipe
from trainer.config.settings import Settings as TrainerSettings
from trainer.errors import ConfigError as TrainerConfigError

MODEL = {"path": "models/demo"}


@pytest.mark.parametrize(
    ("values", "line"),
    [
        ({"stalenes": {}}, "stalenes: there is no such key; did you mean `staleness`?"),
        ({"server": {"prot": 1}}, "server.prot: there is no such key; did you mean `port`?"),
        ({"sampling": {"temperature": {"overide": 1.0}}}, "did you mean `override`?"),
        (
            {"models": {"demo": {**MODEL, "engine": {"lanch": "fake"}}}},
            "models.demo.engine.lanch: there is no such key; did you mean `launch`?",
        ),
        ({"queue": {"zzz": 1}}, "queue.zzz: there is no such key; there are: max_wait_s, max_waiting"),
    ],
)
def test_the_gateway_names_the_nearest_key(values: dict[str, object], line: str) -> None:
    with pytest.raises(ConfigError) as caught:
        Settings.parse({"models": {"demo": MODEL}, **values})
    assert line in str(caught.value)


def test_every_mistake_of_a_file_is_in_one_error() -> None:
    values = {
        "models": {"demo": {**MODEL, "family": "qwen33"}},
        "store": {"url": "mysql://x"},
        "queue": {"zzz": 1},
        "sampling": {"top_p": 1.0},
    }
    with pytest.raises(ConfigError) as caught:
        Settings.parse(values)
    for line in (
        "Did you mean 'qwen3'?",
        "store.url: ",
        "mysql:// is not supported",
        "queue.zzz",
        "override = 1.0",
    ):
        assert line in str(caught.value)


def test_the_trainer_does_so_too_also_below_its_algorithm() -> None:
    values = {
        "run": {"dir": "r", "stepz": 1},
        "gateway": {}, "model": {"path": "m"}, "optimizer": {"lr": 1e-4},
        "algorithm": {"type": "grpo", "clip_lo": 1},
    }  # fmt: skip
    with pytest.raises(TrainerConfigError) as caught:
        TrainerSettings.parse(values)
    assert "run.stepz: there is no such key; did you mean `steps`?" in str(caught.value)
    assert "algorithm: clip_lo: there is no such key; did you mean `clip_low`?" in str(caught.value)


@pytest.mark.parametrize(
    ("load", "error", "text", "key", "meant"),
    [
        (ClusterFile.load, BadFile, '[cluster]\nlaunchr = "local"\n', "cluster.launchr", "launcher"),
        (Scenario.load, ScenarioError, "gpuss = 8\n", "gpuss", "gpus"),
        (Recipe.load, TrainerConfigError, 'data = "a:b"\nlayer = 2\n', "layer", "layers"),
    ],
)
def test_so_do_the_other_files(
    load: Callable[[Path], object], error: type[Exception], text: str, key: str, meant: str, tmp_path: Path
) -> None:
    path = tmp_path / "file.toml"
    path.write_text(text)
    with pytest.raises(error) as caught:
        load(path)
    assert f"{key}: there is no such key; did you mean `{meant}`?" in str(caught.value)
