"""The trainer on a tiny model: temperature, accumulation, resumption, and what a version's directory holds."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from blake3 import blake3
from safetensors.torch import load_file
from transformers import GPT2Config, GPT2LMHeadModel

from headgate.types import Episode, Group
from tests.harness.plain_model import plain_logprobs
from tests.unit.trainer.runs import offline_settings
from tests.unit.trainer.trees import group, prompt, sampled
from trainer.config.settings import Settings
from trainer.errors import CheckpointError
from trainer.model import host_gradients
from trainer.model import pretrained as model
from trainer.publish.filesystem import WeightsDirectory
from trainer.rank_trainer import RankTrainer
from trainer.state import checkpoint


@pytest.fixture
def settings(tiny_model: Path, tmp_path: Path) -> Settings:
    algorithm = {"type": "grpo", "kl_coef": 0.01, "entropy_coef": 0.01}
    given = {"optimizer": {"warmup_steps": 3}, "algorithm": algorithm, "batch": {"tokens": 64}}
    return offline_settings(tiny_model, tmp_path / "run", **given)


def batch_of(version: int) -> list[Group]:
    return [group(f"g{version}", [1.0, 0.0, 0.5], version=version), group("other", [0.0, 1.0])]


def train(trainer: RankTrainer) -> dict[str, float]:
    return trainer.train(batch_of(trainer.version))


def parameters(trainer: RankTrainer) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in trainer.model.state_dict().items()}


def test_gap_is_zero_for_tokens_that_the_trainers_own_weights_sampled(settings: Settings) -> None:
    trainer = RankTrainer.open(settings)
    ids, temperature = [9, 3, 4, 5, 6], 0.7
    with torch.no_grad():
        values = plain_logprobs(trainer.model, torch.tensor(ids), temperature)
    turn = replace(sampled(1, 0, 1, ids[1:], temperature=temperature), logprobs=values.numpy())
    old = sampled(1, 0, 1, ids[1:], version=0, logprob=-30.0)
    new = Group("g", "t", 0, (
        Episode("a", 1.0, (prompt(0, -1, 0, ids[:1]), turn)),
        Episode("b", 0.0, (prompt(0, -1, 0, ids[:1]), replace(old, versions=np.full(4, -1, np.int32)))),
    ))  # fmt: skip
    measured = trainer.train([new])
    assert measured["logprob_gap_max"] < 1e-5
    assert measured["same_version_tokens"] == 4
    assert measured["staleness_max"] == 1
    assert measured["staleness_mean"] == 0.5


@pytest.mark.parametrize(
    "changed", [{}, {"moments": "bfloat16", "offload": "host", "offload_gradients": True}]
)
def test_a_resumed_run_has_bit_equal_parameters(settings: Settings, changed: dict[str, Any]) -> None:
    optimizer = settings.optimizer.model_copy(update=changed)
    settings = settings.model_copy(update={"optimizer": optimizer})
    straight = RankTrainer.open(settings)
    for _ in range(2):
        train(straight)
    straight.save_checkpoint()
    for _ in range(2):
        train(straight)
    resumed = RankTrainer.open(settings)
    assert resumed.version == 2
    assert resumed.probe is not None
    for _ in range(2):
        train(resumed)
    assert resumed.version == straight.version == 4
    for name, value in parameters(straight).items():
        assert torch.equal(value, parameters(resumed)[name]), name
    assert resumed.probe == straight.probe


@pytest.mark.parametrize(("dtype", "clip"), [("float32", 1e-3), ("bfloat16", math.inf)])
def test_gradients_in_the_hosts_memory_make_the_same_steps_to_the_bit(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dtype: str, clip: float
) -> None:
    """Over several micro-batches a step; bf16 reduces gradients by FSDP."""
    monkeypatch.setattr(host_gradients, "_PIECE", 100)
    found = []
    for optimizer in ({}, {"offload": "host", "offload_gradients": True}):
        tables = {"model": {"dtype": dtype}, "optimizer": {"grad_clip": clip, **optimizer}}
        settings = offline_settings(tiny_model, tmp_path / "run", batch={"tokens": 16}, **tables)
        trainer = RankTrainer.open(settings)
        norms = []
        for _ in range(2):
            batch = trainer.begin_batch()
            trainer.add_groups(batch, batch_of(trainer.version))
            made = [weight.grad is None for weight in trainer.model.parameters()]
            assert all(made) if optimizer else not any(made)
            norms.append(trainer.step(batch)["grad_norm"])
        found.append((norms, trainer.gather_weights()))
        trainer.ranks.close()
    (norms, weights), (same_norms, same_weights) = found
    assert same_norms == norms
    assert all(torch.equal(value, same_weights[name]) for name, value in weights.items())


def test_a_resumed_run_takes_the_optimizers_settings_of_today(settings: Settings) -> None:
    trainer = RankTrainer.open(settings)
    train(trainer)
    trainer.save_checkpoint()
    changed = {"lr": 0.5, "betas": (0.5, 0.6), "eps": 1e-3, "weight_decay": 0.25}
    resumed = RankTrainer.open(
        settings.model_copy(update={"optimizer": settings.optimizer.model_copy(update=changed)})
    )
    (options,) = resumed.optimizer.param_groups
    assert {name: options[name] for name in changed} == changed
    assert resumed.optimizer.moments(), "and the moments of the checkpoint"


def test_a_resumed_run_converts_moments_of_another_precision(settings: Settings) -> None:
    trainer = RankTrainer.open(settings)
    train(trainer)
    trainer.save_checkpoint()
    optimizer = settings.optimizer.model_copy(update={"moments": "bfloat16"})
    resumed = RankTrainer.open(settings.model_copy(update={"optimizer": optimizer})).optimizer.moments()
    for name, entry in trainer.optimizer.moments().items():
        assert torch.equal(resumed[name]["exp_avg_sq"], entry["exp_avg_sq"].bfloat16()), name


@pytest.mark.parametrize("change", ["dtype", "path"])
def test_what_may_not_change_between_runs_is_refused_by_its_setting(
    settings: Settings, tmp_path: Path, change: str
) -> None:
    trainer = RankTrainer.open(settings)
    train(trainer)
    trainer.save_checkpoint()
    wider = GPT2Config(vocab_size=256, n_positions=64, n_embd=32, n_layer=1, n_head=2)
    GPT2LMHeadModel(wider).save_pretrained(tmp_path / "wider")
    update = {"dtype": "bfloat16"} if change == "dtype" else {"path": tmp_path / "wider"}
    others = settings.model_copy(update={"model": settings.model.model_copy(update=update)})
    with pytest.raises(CheckpointError, match=rf"v000001.*\[model\] {change}"):
        RankTrainer.open(others)


@pytest.mark.parametrize("algorithm", ["reinforce++", "grpo"])
def test_every_version_has_a_probe(tiny_model: Path, tmp_path: Path, algorithm: str) -> None:
    """Also one that has the first version's weights, and one whose algorithm needs the whole batch."""
    trainer = RankTrainer.open(offline_settings(tiny_model, tmp_path, algorithm={"type": algorithm}))
    trainer.renumber(1)
    assert trainer.probe is not None
    assert trainer.probe.parent_logprobs == trainer.probe.new_logprobs
    train(trainer)
    assert trainer.probe.parent_logprobs != trainer.probe.new_logprobs
    assert {len(sequence) for sequence in trainer.probe.sequences} != {16}, (
        "they are the batch's, not the default ones"
    )


def test_a_new_line_has_the_same_weights_their_version_as_parent_and_survives_a_restart(
    settings: Settings,
) -> None:
    trainer = RankTrainer.open(settings)
    train(trainer)
    before = parameters(trainer)
    trainer.renumber(7)
    trainer.save_checkpoint()
    resumed = RankTrainer.open(settings)
    assert (resumed.version, resumed.parent, resumed.steps) == (7, 1, 1)
    assert resumed.probe is not None
    assert resumed.probe.parent_logprobs == resumed.probe.new_logprobs, (
        "nothing distinguishes it from its parent"
    )
    for name, value in parameters(resumed).items():
        assert torch.equal(value, before[name]), name
    measured = train(resumed)
    assert (resumed.version, resumed.parent, resumed.steps) == (8, 7, 2)
    assert measured["lr"] == pytest.approx(1e-3 * 2 / 3), "warming up counts steps, not numbers"


def test_a_checkpoint_of_another_format_is_refused(settings: Settings) -> None:
    trainer = RankTrainer.open(settings)
    state = trainer.save_checkpoint() / "state.json"
    state.write_text(json.dumps(json.loads(state.read_text()) | {"format": 2}))
    with pytest.raises(CheckpointError, match="v000000: format 2, this build reads 4"):
        RankTrainer.open(settings)


def test_a_kill_before_the_rename_leaves_the_old_checkpoint(
    settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = RankTrainer.open(settings)
    train(trainer)
    trainer.save_checkpoint()
    train(trainer)

    class Killed(BaseException):
        pass

    def die(*_: object) -> None:
        raise Killed

    # As SIGKILL would: the new directory exists under its temporary name, and no clean-up runs.
    with monkeypatch.context() as patch:
        patch.setattr(Path, "rename", die)
        with pytest.raises(Killed):
            trainer.save_checkpoint()
    assert list(trainer.checkpoints.glob(".v000002.tmp-*"))
    assert RankTrainer.open(settings).version == 1
    trainer.save_checkpoint()
    assert RankTrainer.open(settings).version == 2
    assert not list(trainer.checkpoints.glob(".v000002.tmp-*"))


def test_old_checkpoints_are_removed(settings: Settings) -> None:
    trainer = RankTrainer.open(settings)
    for version in range(4):
        trainer.version = version
        trainer.save_checkpoint()
    trainer.prune_checkpoints()
    assert sorted(d.name for d in trainer.checkpoints.glob("v*")) == ["v000002", "v000003"]


def test_published_weights_have_a_true_manifest_and_load(settings: Settings) -> None:
    trainer = RankTrainer.open(settings)
    train(trainer)
    weights = WeightsDirectory(settings.run.dir / "weights", settings.model.path)
    path = weights.write(1, 0, trainer.model, trainer.probe)
    manifest: dict[str, Any] = json.loads((path / "manifest.json").read_text())
    assert (manifest["format"], manifest["version"], manifest["parent"]) == (2, 1, 0)
    assert set(manifest["files"]) == {f.name for f in path.iterdir()} - {"manifest.json"}
    assert {"config.json", "model.safetensors", "tokenizer.json"} <= set(manifest["files"])
    for name, entry in manifest["files"].items():
        content = (path / name).read_bytes()
        assert entry["size"] == len(content)
        if name != "model.safetensors":
            assert entry["blake3"] == blake3(content).hexdigest()
    hashes = manifest["files"]["model.safetensors"]["tensors"]
    stored = load_file(path / "model.safetensors")
    assert {name: run["blake3"] for name, run in hashes.items()} == {
        name: [blake3(t.numpy().tobytes()).hexdigest()] for name, t in stored.items()
    }
    assert_probe_distinguishes(manifest["probe"], model.load(path), model.load(settings.model.path))
    with pytest.raises(FileExistsError):
        weights.write(1, 0, trainer.model, trainer.probe)


def assert_probe_distinguishes(probe: dict[str, Any], new: Any, parent: Any) -> None:
    """The probe's numbers are those of the two models, and they differ."""
    assert 1 <= len(probe["sequences"]) <= 4
    for i, sequence in enumerate(probe["sequences"]):
        ids = torch.tensor(sequence)
        for loaded, key in ((new, "new_logprobs"), (parent, "parent_logprobs")):
            with torch.no_grad():
                values = plain_logprobs(loaded, ids)
            torch.testing.assert_close(values, torch.tensor(probe[key][i]), atol=1e-4, rtol=1e-4)
        assert probe["new_logprobs"][i] != probe["parent_logprobs"][i]


def test_old_weights_go_but_never_the_current_version_nor_its_parent(tmp_path: Path) -> None:
    weights = WeightsDirectory(tmp_path, tmp_path)
    for version in (1, 2, 3, 4, 5):
        weights.path(version).mkdir()
    weights.prune(2, 3, 2)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["v000002", "v000003", "v000004", "v000005"]
    weights.prune(2, 5, 2)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["v000002", "v000004", "v000005"]
    weights.prune(2, 5, 4)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["v000004", "v000005"]
    assert weights.newest() == 5
    assert WeightsDirectory(tmp_path / "absent", tmp_path).newest() == 0


def test_newest_checkpoint_is_the_highest_version(tmp_path: Path) -> None:
    assert checkpoint.newest_first(tmp_path / "absent") == []
    for name in ("v000002", "v000010", ".v000011.tmp-1", "v000012.damaged"):
        (tmp_path / name).mkdir()
    assert [path.name for path in checkpoint.newest_first(tmp_path)] == ["v000010", "v000002"]
