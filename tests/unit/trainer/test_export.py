"""`trainer export`: a directory that transformers loads by itself, with the weights of the checkpoint."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
from typer.testing import CliRunner

from tests.unit.trainer.runs import CONFIG
from tests.unit.trainer.trees import group
from trainer.cli import app
from trainer.config.settings import Settings
from trainer.rank_trainer import RankTrainer


@pytest.fixture
def config(tiny_model: Path, tmp_path: Path) -> Path:
    path = tmp_path / "trainer.toml"
    path.write_text(CONFIG.format(work=tmp_path, model=tiny_model))
    return path


def invoke(*arguments: object) -> tuple[int, str]:
    result = CliRunner().invoke(app, ["export", *map(str, arguments)])
    return result.exit_code, result.output


def test_an_export_is_the_checkpoint_as_transformers_reads_it(config: Path, tmp_path: Path) -> None:
    trainer = RankTrainer.open(Settings.load(config))
    weights = []
    for version in range(2):
        trainer.train([group(f"g{version}", [1.0, 0.0, 0.5], version=version)])
        trainer.save_checkpoint()
        weights.append({name: value.clone() for name, value in trainer.model.state_dict().items()})
    for arguments, expected in (([], weights[1]), (["--version", 1], weights[0])):
        out = tmp_path / f"out{len(arguments)}"
        code, output = invoke(config, "--out", out, *arguments)
        assert code == 0, output
        found = AutoModelForCausalLM.from_pretrained(out).state_dict()
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[name], value) for name, value in expected.items())
        assert "headgate" not in (out / "config.json").read_text(), "nothing of ours is needed to load it"
        assert AutoTokenizer.from_pretrained(out)("hello")["input_ids"]
    assert not torch.equal(*(w["model.embed_tokens.weight"] for w in weights))


def test_what_cannot_be_exported_is_an_error_with_its_reason(config: Path, tmp_path: Path) -> None:
    assert invoke(config, "--out", tmp_path)[0] == 2
    code, output = invoke(config, "--out", tmp_path / "out")
    assert (code, "has no checkpoint" in output) == (1, True)
    trainer = RankTrainer.open(Settings.load(config))
    trainer.train([group("g", [1.0, 0.0])])
    trainer.save_checkpoint()
    code, output = invoke(config, "--out", tmp_path / "out", "--version", 7)
    assert (code, "no checkpoint of version 7; existing: 1" in output) == (1, True)
    trainer.train([group("h", [1.0, 0.0], version=1)])
    (trainer.save_checkpoint() / "state.json").write_text("")
    code, output = invoke(config, "--out", tmp_path / "out")
    assert (code, "v000002 is damaged: state.json" in output) == (1, True), (
        "the older one is not taken for it"
    )
    assert not (tmp_path / "out").exists()
    assert invoke(config, "--out", tmp_path / "out", "--version", 1)[0] == 0
    (tmp_path / "file").write_text("")
    code, output = invoke(config, "--out", tmp_path / "file" / "out", "--version", 1)
    assert (code, output.count("\n"), "file/out cannot be written: File exists" in output) == (1, 1, True), (
        output
    )
