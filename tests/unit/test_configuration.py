"""The error for an unknown key names the nearest known one, in every file that a person writes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from gateway.config.settings import ConfigError, Settings
from headgate.configuration import TABLES
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


SHARED = """
[run]
dir = "runs/x"
steps = 1
[model]
path = "models/demo"
[optimizer]
lr = 1e-5
[models.demo]
path = "models/demo"
[weights]
keep = 5
[publish]
keep = 6
"""


def test_the_programs_tables_have_distinct_names() -> None:
    assert {"gateway": Settings.model_fields.keys(), "trainer": TrainerSettings.model_fields.keys()} == TABLES
    assert not TABLES["gateway"] & TABLES["trainer"]


def test_one_file_configures_both_programs_and_the_trainer_starts_the_gateway_with_it(tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    file.write_text(SHARED)
    gateway, trainer = Settings.load(file), TrainerSettings.load(file)
    assert (gateway.weights.keep, trainer.publish.keep, trainer.gateway.config) == (5, 6, file)
    file.write_text(f"{SHARED}[gateway]\nurl = 'http://127.0.0.1:8000'\n")
    assert TrainerSettings.load(file).gateway.config is None, "the gateway may run on another machine"


@pytest.mark.parametrize("load", [Settings.load, TrainerSettings.load])
def test_a_table_of_neither_program_is_refused_in_one_file(
    load: Callable[[Path], object], tmp_path: Path
) -> None:
    (file := tmp_path / "run.toml").write_text(f"{SHARED}[surprise]\n")
    with pytest.raises((ConfigError, TrainerConfigError), match="surprise: there is no such key"):
        load(file)


def test_a_file_of_one_program_refuses_the_tables_of_the_other(tmp_path: Path) -> None:
    (file := tmp_path / "gateway.toml").write_text(
        "[models.demo]\npath = 'models/demo'\n[model]\npath = 'x'\n"
    )
    with pytest.raises(ConfigError, match="did you mean `models`"):
        Settings.load(file)


def test_the_command_line_of_the_trainer_changes_no_table_of_the_gateway(tmp_path: Path) -> None:
    (file := tmp_path / "run.toml").write_text(SHARED)
    with pytest.raises(TrainerConfigError, match=r"the gateway reads this table: change it in .*run\.toml"):
        TrainerSettings.load(file, ["staleness.eta=2"])
