"""`trainer run --dry-run`: its report, that it writes nothing, and that it fails where a run would."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from tests.harness.models import MARKS, SPECIALS
from tests.unit.trainer.trees import group
from trainer.cli import app
from trainer.config.settings import Settings
from trainer.rank_trainer import RankTrainer

CONFIG = """
[run]
dir = "{work}/run"
steps = 3
device = "cpu"
threads = 1
[gateway]
url = "http://127.0.0.1:1"
[model]
path = "{model}"
[optimizer]
lr = 1e-2
[batch]
tokens = 256
"""
Invoke = Callable[..., tuple[int, dict[str, Any], str]]


@pytest.fixture
def config(tiny_model: Path, tmp_path: Path) -> Path:
    path = tmp_path / "trainer.toml"
    path.write_text(CONFIG.format(work=tmp_path, model=tiny_model))
    return path


@pytest.fixture
def invoke(config: Path) -> Invoke:
    def run(*arguments: str) -> tuple[int, dict[str, Any], str]:
        result = CliRunner().invoke(app, ["run", str(config), *arguments])
        last = result.output.strip().splitlines()[-1]
        return result.exit_code, json.loads(last) if last.startswith("{") else {}, result.output

    return run


def everything_in(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_a_dry_run_computes_a_full_micro_batch_and_writes_nothing(
    invoke: Invoke, config: Path, tmp_path: Path
) -> None:
    code, report, text = invoke("--dry-run")
    assert code == 0, text
    assert [path.name for path in tmp_path.iterdir()] == ["trainer.toml"]
    assert report["tokenizer"] == 256 + len(SPECIALS) + len(MARKS) and report["memory"]["fits"] is None
    assert "http://127.0.0.1:1 does not respond" in report["gateway"]
    done = report["pass"]
    assert (done["version"], done["tokens"], done["peak"]) == (0, 256, None)
    assert done["grad_norm"] > 0 and done["seconds"] > 0 and done["optimizer_s"] > 0
    trainer = RankTrainer.open(Settings.load(config))
    trainer.train([group("g", [1.0, 0.0])])
    trainer.save_checkpoint()
    before = everything_in(tmp_path)
    code, report, _ = invoke("--dry-run")
    assert (code, report["pass"]["version"]) == (0, 1), "the run would go on from its checkpoint"
    assert everything_in(tmp_path) == before


@pytest.mark.parametrize(
    "changes",
    [
        ("algorithm.type=ppo", "credit.level=episode"),
        ("algorithm.type=gspo", "credit.level=call"),
        ("algorithm.type=reinforce++", "credit.level=branch"),
        ("algorithm.type=gdpo", "algorithm.components={right=1.0}"),
    ],
)
def test_every_kind_of_batch_is_rehearsed(invoke: Invoke, changes: tuple[str, ...]) -> None:
    """Minibatches, whole episodes, a whole batch, components, and a reference: each has a gradient of random tokens."""
    given = [part for change in (*changes, "algorithm.kl_coef=0.1") for part in ("--set", change)]
    code, report, text = invoke("--dry-run", *given)
    assert code == 0, text
    assert report["pass"]["grad_norm"] > 0 and report["memory"]["device"]["reference model"] > 0


def test_shapes_alone_need_no_weights(invoke: Invoke, tiny_model: Path, tmp_path: Path) -> None:
    bare = tmp_path / "bare"
    bare.mkdir()
    (bare / "config.json").write_text((tiny_model / "config.json").read_text())
    for arguments in (("--dry-run", "--meta"), ("--dry-run", "--set", f"model.path={bare}")):
        code, report, text = invoke(*arguments)
        assert (code, report["pass"], report["tokenizer"]) == (0, None, None), text
        assert report["memory"]["weights"] > 0 and "only shapes" in text
    assert invoke("--dry-run", "--meta", "--memory", "1MiB")[0] == 1


@pytest.mark.parametrize("shapes_alone", [False, True])
def test_the_disk_is_compared_with_what_checkpoints_take(
    invoke: Invoke, config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, shapes_alone: bool
) -> None:
    trainer = RankTrainer.open(Settings.load(config))
    trainer.train([group("g", [1.0, 0.0])])
    written = sum(path.stat().st_size for path in trainer.save_checkpoint().rglob("*") if path.is_file())
    arguments = ("--dry-run", "--meta") if shapes_alone else ("--dry-run",)
    code, report, text = invoke(*arguments)
    space = report["checkpoints"]
    assert (code, space["fits"]) == (0, True), text
    assert space["checkpoint"] == pytest.approx(written, rel=0.15), (
        "its header, and random numbers, are in no plan"
    )
    assert space["needed"] == 2 * space["checkpoint"], "three, [checkpoint] keep and one, and one is there"
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=space["needed"] - 1))
    code, report, text = invoke(*arguments)
    assert (code, report["checkpoints"]["fits"]) == (
        0 if shapes_alone else 1,
        False,
    ) and "make room, lower [checkpoint] keep" in text


def test_what_would_stop_a_run_stops_the_dry_one(invoke: Invoke, tiny_model: Path, tmp_path: Path) -> None:
    bare = tmp_path / "bare"
    bare.mkdir()
    for name in ("config.json", "model.safetensors"):
        (bare / name).symlink_to(tiny_model / name)
    code, _, text = invoke("--dry-run", "--set", f"model.path={bare}")
    assert code == 2 and "its tokenizer cannot be read" in text
    code, _, text = invoke("--meta")
    assert code == 2 and "--dry-run" in text
    code, _, text = invoke("--dry-run", "--memory", "80")
    assert code == 2 and "80GiB" in text, "80 bytes are not meant"
