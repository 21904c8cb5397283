"""The configuration refuses what it does not know."""

from __future__ import annotations

import math
import sys
import tomllib
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from tests.harness.fences import ROOT
from trainer.algorithms import Rewards
from trainer.algorithms.grpo import GrpoSettings
from trainer.cli import app
from trainer.config.settings import Settings
from trainer.errors import ConfigError
from trainer.loop.agreement import warn_uncorrected

MINIMAL = """
[run]
dir = "runs/x"
steps = 3
[gateway]
url = "http://127.0.0.1:8000"
[model]
path = "model"
[optimizer]
lr = 1e-4
"""


def parse(extra: str = "") -> Settings:
    return Settings.parse(tomllib.loads(MINIMAL + extra))


@pytest.mark.parametrize(
    ("extra", "key"),
    [
        ("[batch]\ntoken = 1", "batch.token"),
        ("[surprise]", "surprise"),
        ("[algorithm]\ntype = 'grpo'\nclip = 0.1", "clip"),
        ("[algorithm]\ntype = 'unknown'", "none of a3po, cispo, clip_cov, dapo"),
        ("[algorithm]\ntype = 'no.module:Name'", "cannot be imported: ModuleNotFoundError"),
        (
            "[algorithm]\ntype = 'trainer.algorithms:Loss'",
            "not a subclass of trainer.algorithms.AlgorithmSettings",
        ),
        ("[algorithm]\ntype = 'trainer.algorithms:AlgorithmSettings'", "has no method `create`"),
        ("[algorithm]\nkl_coef = -1", "kl_coef"),
        ("[publish]\nkeep = 1", "publish.keep"),
        ("[publish]\ntransport = 'collective'\ndelta = true", "sends versions whole"),
        ("[publish]\ntransport = 'lora'", "set \\[model.lora\\]"),
        ("[publish]\ntransport = 'lora'\ndelta = true", "leave `delta` out"),
        ("[publish]\ntransport = 'collective'\nlisten = '0.0.0.0:8100'", "needs `url`"),
        (
            "[rollout]\nagent = 'no function'\ntasks = 'x'",
            "rollout.agent: 'no function' is not an agent: module:function or",
        ),
        ("[model.lora]\ntargets = 'q_proj'", r'lora.targets: "all-linear" or a list of names'),
    ],
)
def test_wrong_keys_are_named(extra: str, key: str) -> None:
    with pytest.raises(ConfigError, match=key):
        parse(extra)


def test_an_algorithm_of_ones_own_is_found_in_the_folder_of_the_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    page = (ROOT / "docs/topics/algorithms.md").read_text()
    source = page.partition("```python\n")[2].partition("```")[0]
    (tmp_path / "mine_of_a_test.py").write_text(source)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    algorithm = parse("[algorithm]\ntype = 'mine_of_a_test:ShortSettings'\nfloor = 16").algorithm.create()
    rewards = Rewards(
        torch.tensor([1.0, 1.0], dtype=torch.float64), torch.tensor([2, 100]), torch.tensor([0, 1])
    )
    (found,) = algorithm.advantages([rewards], {})
    scaled = [1 / math.log(16), 1 / math.log(100)]
    assert found.tolist() == pytest.approx([scaled[0] - fmean(scaled), scaled[1] - fmean(scaled)])
    with pytest.raises(ConfigError, match=r"algorithm.*floors"):
        parse("[algorithm]\ntype = 'mine_of_a_test:ShortSettings'\nfloors = 16")


def test_exactly_one_gateway() -> None:
    values: dict[str, Any] = tomllib.loads(MINIMAL)
    for gateway in ({}, {"url": "http://a", "config": "b"}):
        with pytest.raises(ConfigError, match="exactly one"):
            Settings.parse({**values, "gateway": gateway})


def test_algorithm_bounds_may_be_turned_off() -> None:
    algorithm = parse("[algorithm]\nimportance_cap = inf\nclip_high = inf\nclip_low = 1").algorithm
    assert isinstance(algorithm, GrpoSettings)
    assert algorithm.importance_cap == float("inf")


def test_the_key_comes_from_the_environment_and_is_never_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HEADGATE_ADMIN_KEY", "very-secret")
    settings = parse()
    assert settings.gateway.key == "very-secret"
    assert "very-secret" not in repr(settings) + settings.model_dump_json()


def test_the_nodes_come_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    assert parse().gateway.nodes == ()
    monkeypatch.setenv("HEADGATE_TRAIN_NODES", "a,b")
    assert parse().gateway.nodes == ("a", "b")
    named = MINIMAL.replace("[model]", 'nodes = ["c"]\n[model]')
    assert Settings.parse(tomllib.loads(named)).gateway.nodes == ("c",), "the file has precedence"


def test_the_demo_is_a_valid_configuration() -> None:
    Settings.load(Path(__file__).parents[3] / "examples" / "demo" / "trainer.toml")


@pytest.mark.parametrize(("files", "message"), [((), "no config.json"), (("config.json",), "cannot be used")])
def test_a_folder_without_a_model_is_an_error_that_names_the_setting(
    tmp_path: Path, files: tuple[str, ...], message: str
) -> None:
    model = tmp_path / "model"
    model.mkdir()
    for name in files:
        (model / name).write_text("{}")
    config = tmp_path / "trainer.toml"
    config.write_text(MINIMAL.replace('"model"', f"'{model}'").replace("runs/x", str(tmp_path / "run")))
    result = CliRunner().invoke(app, ["run", str(config)])
    assert result.exit_code == 2, result.output
    assert f"[model] path = '{model}'" in result.output and message in result.output


def test_settings_of_the_command_line_stand_in_the_place_of_the_files(tmp_path: Path) -> None:
    config = tmp_path / "trainer.toml"
    config.write_text(MINIMAL)
    changes = [
        "optimizer.lr=1e-6",
        "run.dir=runs/y",
        "algorithm.mask_token=[0.5, 2.0]",
        "gateway.nodes=['a']",
    ]
    settings = Settings.load(config, changes)
    assert (settings.optimizer.lr, settings.run.dir, settings.run.steps) == (1e-6, Path("runs/y"), 3)
    assert isinstance(settings.algorithm, GrpoSettings)
    assert (settings.algorithm.mask_token, settings.gateway.nodes) == ((0.5, 2.0), ("a",))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("optimizer.epss=1", "did you mean `eps`?"),
        ("optimizer.lr=fast", "optimizer.lr: Input should be a valid number"),
        ("lr=1", "--set lr=1: table.key=value is needed"),
        ("optimizer.lr", "--set optimizer.lr: table.key=value is needed"),
        ("run.steps.more=1", "steps is not a table"),
    ],
)
def test_a_wrong_setting_of_the_command_line_is_named(tmp_path: Path, change: str, message: str) -> None:
    config = tmp_path / "trainer.toml"
    config.write_text(MINIMAL)
    result = CliRunner().invoke(app, ["run", str(config), "--set", change])
    assert result.exit_code == 2
    assert message in result.output
    assert change in result.output, "the file alone does not contain it"


@pytest.mark.parametrize(
    ("algorithm", "warned"),
    [
        ('type = "grpo"', False),
        ('type = "grpo"\ncorrection = "none"', True),
        ('type = "grpo"\ncorrection = "none"\nmask_token = [0.5, 2.0]', False),
        ('type = "gspo"', False),
    ],
)
def test_a_run_on_rounded_weights_without_correction_is_warned(algorithm: str, warned: bool) -> None:
    settings = parse(f"[algorithm]\n{algorithm}\n")
    assert bool(warn_uncorrected(settings, "fp8_per_channel")) is warned
    assert not warn_uncorrected(settings, None)
