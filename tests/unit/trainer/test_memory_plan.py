"""Predicted memory against what torch's allocator handed out in a step, and against sums by hand."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile
from transformers import AutoConfig, AutoModelForCausalLM
from typer.testing import CliRunner

from headgate.types import Episode, Group
from tests.unit.trainer.trees import prompt, sampled
from trainer.cli import app
from trainer.commands.plan_memory import plan
from trainer.config.settings import Settings
from trainer.errors import ConfigError
from trainer.memory_plan import Shapes, Weights, advise, predict
from trainer.rank_trainer import RankTrainer

TOLERANCE = 0.1
"""As docs/topics/trainer.md states."""
SIZES = {
    "hidden_size": 128, "intermediate_size": 384, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 32, "max_position_embeddings": 1024, "vocab_size": 1024,
}  # fmt: skip
WIDE = {"hidden_size": 512, "intermediate_size": 2048, "num_hidden_layers": 2, "vocab_size": 256}
HEADED = {"hidden_size": 256, "vocab_size": 32768, "tie_word_embeddings": False}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 192}
BF16 = {"dtype": "bfloat16"}


def settings_of(path: Path, tokens: int = 512, **tables: Any) -> Settings:
    return Settings.parse({
        "run": {"dir": path / "run", "steps": 3, "threads": 1, "device": "cpu"},
        "gateway": {"url": "http://127.0.0.1:1"},
        "optimizer": {"lr": 1e-3, **tables.pop("optimizer", {})},
        "batch": {"tokens": tokens},
        "model": {"path": path, **tables.pop("model", {})},
        **tables,
    })  # fmt: skip


def save_model(path: Path, name: str, **sizes: Any) -> None:
    config = AutoConfig.for_model(name, **SIZES | sizes)
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(path)


def full_group(name: str, version: int, vocabulary: int, tokens: int) -> Group:
    """One micro-batch, all of it trained."""
    episodes = []
    for i, reward in enumerate((1.0, 0.0)):
        ids = np.random.default_rng(100 * version + i).integers(0, vocabulary, tokens // 2).tolist()
        nodes = (prompt(0, -1, 0, ids[:1]), sampled(1, 0, 1, ids[1:], version=version))
        episodes.append(Episode(f"{name}-{i}", reward, nodes))
    return Group(name, name, version, tuple(episodes))


def peak_of_a_step(settings: Settings, vocabulary: int) -> int:
    """Bytes: what is held between steps, and the most that the allocator added in a step of two micro-batches."""
    trainer = RankTrainer.open(settings)
    tokens = settings.batch.tokens
    trainer.train([full_group("first", 0, vocabulary, tokens)])
    held: dict[int, int] = {}

    def hold(tensor: Tensor) -> None:
        whole: Any = tensor.detach()
        storage = (whole.to_local() if hasattr(whole, "to_local") else whole).untyped_storage()
        held[storage.data_ptr()] = storage.nbytes()

    for tensor in (
        *trainer.model.parameters(),
        *(t for e in trainer.optimizer.moments().values() for t in e.values()),
    ):
        hold(tensor)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        trainer.train([full_group(name, 1, vocabulary, tokens) for name in ("second", "third")])
    trainer.ranks.close()
    now = most = 0
    events = profiled.profiler.kineto_results.events()  # type: ignore[union-attr]
    for event in sorted((e for e in events if e.name() == "[memory]"), key=lambda e: e.start_ns()):
        now += event.nbytes()
        most = max(most, now)
    return sum(held.values()) + most


@pytest.mark.parametrize(
    ("name", "tokens", "sizes", "model", "moment"),
    [
        ("qwen3", 512, {}, {}, "head"),
        ("qwen3", 512, {}, BF16 | {"lora": {"rank": 8}}, "head"),
        ("qwen3_moe", 512, EXPERTS, BF16, "head"),
        pytest.param("qwen3", 512, {}, {"activation_checkpointing": 2}, "head", marks=pytest.mark.long),
        pytest.param("mistral", 512, {}, BF16, "head", marks=pytest.mark.long),
        pytest.param("llama", 128, HEADED, BF16, "end", marks=pytest.mark.long),
        pytest.param(
            "qwen3", 512, WIDE, BF16 | {"activation_checkpointing": 1}, "sums", marks=pytest.mark.long
        ),
        pytest.param(
            "qwen3", 1024, WIDE, BF16 | {"activation_checkpointing": 1}, "layers", marks=pytest.mark.long
        ),
        pytest.param("qwen3_moe", 512, EXPERTS, {}, "head", marks=pytest.mark.long),
    ],
)
def test_the_prediction_is_what_a_step_takes(
    tmp_path: Path, name: str, tokens: int, sizes: dict[str, Any], model: dict[str, Any], moment: str
) -> None:
    """Each moment of a pass is the fullest for one of these models."""
    save_model(tmp_path, name, **sizes)
    settings = settings_of(tmp_path, tokens, model=model)
    predicted = plan(settings).prediction
    measured = peak_of_a_step(settings, (SIZES | sizes)["vocab_size"])
    assert (predicted.moment, predicted.total) == (moment, pytest.approx(measured, rel=TOLERANCE))


SHAPES = Shapes(
    weights=Weights(1000, 500),
    layer=Weights(100, 50),
    experts=Weights(80, 40),
    outer=Weights(200, 100),
    matrices=600,
    largest=80,
    kept=10_000,
    kept_on_host=300,
    head=2000,
    layers=100,
    routed=5000,
)


def test_parts_are_sums_of_shapes_shared_by_the_ranks(tmp_path: Path) -> None:
    """By hand, in bytes: 4 for what is trained, 2 for what is not; of eight ranks, two hold copies of each shard."""
    tables = {"model": {"dtype": "bfloat16"}, "parallel": {"replicate": 2}}
    found = predict(SHAPES, settings_of(tmp_path, **tables), 8, reference=True)
    assert found.moment == "head"
    assert found.device == {
        "weights": (4000 + 1000) // 4,
        "gradients": 1000,
        "moments": 2000,
        "reference model": 3000 // 4,
        "activations kept": 10_000,
        "output head": 2000,
        "gathered weights": 600,
        "gradients to be summed": 0,
    }
    plain = predict(SHAPES, settings_of(tmp_path), 1, reference=False)
    assert plain.device["weights"] == 6000 and "gathered weights" not in plain.device
    muon = predict(SHAPES, settings_of(tmp_path, optimizer={"type": "muon"}), 1, reference=False)
    assert muon.device["moments"] == 4 * (2 * 400 + 600)
    halved = settings_of(tmp_path, optimizer={"moments": "bfloat16"})
    assert predict(SHAPES, halved, 1, reference=False).device["moments"] == 2 * 2 * 1000


def test_a_rank_gathers_its_own_experts_alone(tmp_path: Path) -> None:
    """By hand: of 100 and 50 weights of a layer, half of 80 and 40 are another rank's; hidden states are sent in three copies."""
    tables = {"model": {"dtype": "bfloat16"}, "parallel": {"expert": 2}}
    found = predict(SHAPES, settings_of(tmp_path, **tables), 4, reference=False)
    assert found.moment == "layers"
    assert found.device | {"weights": 0, "gradients": 0, "moments": 0} == {
        "weights": 0,
        "gradients": 0,
        "moments": 0,
        "reference model": 0,
        "activations kept": 10_000,
        "one layer's pass": 100,
        "tokens sent to experts": 15_000,
        "gathered weights": 2 * (300 + 2 * (60 + 30)),
        "gradients to be summed": 2 * 200 + 2 * 60 + 4 * 60,
    }


def test_offloaded_moments_are_the_hosts_but_those_of_one_tensor(tmp_path: Path) -> None:
    slim = Shapes(Weights(1000, 0), Weights(100, 0), Weights(0, 0), Weights(0, 0), 0, 400, 0, 300, 0, 0, 0)
    found = predict(slim, settings_of(tmp_path, optimizer={"offload": "host"}), 1, reference=False)
    assert (found.moment, found.total) == ("step", 8000 + 3200)
    assert found.host == {
        "moments": 8000, "gradients": 0, "inputs of layers": 300, "weights to publish": 4000, "copy for checkpoints": 12_000,
    }  # fmt: skip
    both = settings_of(tmp_path, optimizer={"offload": "host", "offload_gradients": True})
    found = predict(slim, both, 1, reference=False)
    assert (found.moment, found.total, found.host["gradients"]) == ("step", 4000 + 3200 + 1600, 4000)
    shared = predict(SHAPES, settings_of(tmp_path, parallel={"replicate": 2}), 8, reference=False)
    assert shared.host["copy for checkpoints"] == 12_000 // 4, "of this rank's shards"


MEASURED = {
    "qwen3-0.6b": ("Qwen3-0.6B", 1, 14.74),
    "qwen3-8b-lora": ("Qwen3-8B", 1, 28.80),
    "qwen3-8b": ("Qwen3-8B", 4, 54.79),
    "qwen3-32b": ("Qwen3-32B", 8, 67.79),
}
"""GiB that the allocator reserved on a null GPU (docs/topics/trainer.md): the recipes' models and ranks."""


@pytest.mark.long
@pytest.mark.parametrize("recipe", MEASURED)
def test_the_reserved_memory_of_a_recipe_is_that_of_a_null_gpu(recipe: str) -> None:
    shape, ranks, gib = MEASURED[recipe]
    path = f"model.path=recipes/shapes/{shape}"
    predicted = plan(Settings.load(Path("recipes", recipe, "trainer.toml"), [path]), ranks).prediction
    assert predicted.reserved / 2**30 == pytest.approx(gib, rel=0.05)


def test_changes_are_named_until_a_run_fits_and_those_that_do_not_help_are_left_out(tmp_path: Path) -> None:
    def predicted(settings: Settings, ranks: int) -> Any:
        kept = 0 if settings.model.activation_checkpointing else 10_000 * 2**20
        weights, none = Weights(2**30, 0), Weights(0, 0)
        shapes = Shapes(weights, none, none, none, 0, 0, kept, 0, 0, 0, 0)
        return predict(shapes, settings, ranks, reference=False)

    settings = settings_of(tmp_path, model={"dtype": "bfloat16"})
    assert advise(predicted, settings, 1, 100 * 2**30) == []
    found = advise(predicted, settings, 1, 6 * 2**30)
    assert [change.name for change in found] == [
        "[model] activation_checkpointing = 1",
        '[optimizer] moments = "bfloat16"',
        '[optimizer] offload = "host"',
        "[optimizer] offload_gradients = true",
        "2 ranks",
    ]
    assert [change.prediction.needed <= 6 * 2**30 for change in found] == [False, False, False, False, True]
    assert found[-1].ranks == 2 and found[-1].settings.model.activation_checkpointing == 1


def test_adapters_of_the_head_alone_are_planned(tmp_path: Path) -> None:
    save_model(tmp_path, "qwen3", tie_word_embeddings=False)
    lora = {"rank": 8, "targets": ["lm_head"]}
    assert plan(settings_of(tmp_path, model={"lora": lora})).prediction.device["output head"] > 0


def test_ranks_that_share_matrices_are_refused(tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError, match=r"\[parallel\] tensor = 2: the memory of tensor-parallel layers is not predicted"
    ):
        plan(settings_of(tmp_path, parallel={"tensor": 2}))


def test_experts_that_ranks_cannot_share_are_refused(tmp_path: Path) -> None:
    save_model(tmp_path, "qwen3_moe", **EXPERTS)
    with pytest.raises(ConfigError, match="has 4 experts, which cannot be divided by it"):
        plan(settings_of(tmp_path, parallel={"expert": 3}))
    found = plan(settings_of(tmp_path, parallel={"expert": 2}))
    assert found.ranks == 2
    assert found.prediction.needed < plan(settings_of(tmp_path), 2).prediction.needed


@pytest.fixture
def invoke(tmp_path: Path) -> Callable[..., tuple[int, dict[str, Any], str]]:
    """Plans the memory of a model that is nothing but its `config.json`."""
    (tmp_path / "model").mkdir()
    AutoConfig.for_model("qwen3", **SIZES).save_pretrained(tmp_path / "model")
    config = tmp_path / "trainer.toml"
    config.write_text(
        f'[run]\ndir = "{tmp_path}/run"\nsteps = 1\n[gateway]\nurl = "http://127.0.0.1:1"\n'
        f'[model]\npath = "{tmp_path}/model"\n[optimizer]\nlr = 1e-6\n[batch]\ntokens = 4096\n'
    )

    def run(*arguments: object) -> tuple[int, dict[str, Any], str]:
        result = CliRunner().invoke(app, ["plan-memory", str(config), *map(str, arguments)])
        *_, last = result.output.strip().splitlines()
        return result.exit_code, json.loads(last) if last.startswith("{") else {}, result.output

    return run


def test_the_command_reports_what_to_set(
    invoke: Callable[..., tuple[int, dict[str, Any], str]],
) -> None:
    code, plain, output = invoke()
    assert (code, plain["fits"], plain["changes"]) == (0, None, [])
    assert f"{plain['total'] / 2**30:.2f}" in output and plain["total"] == sum(plain["device"].values())
    # The assumed part alone is 1.5 GiB.
    memory = plain["needed"] - 2**20
    code, short, output = invoke("--memory", f"{memory / 2**20}MiB")
    assert (code, short["fits"]) == (1, False) and "does not fit" in output
    assert short["changes"][-1]["needed"] <= memory
    names = [change["set"] for change in short["changes"]]
    assert names == ['[model] dtype = "bfloat16"']
    code, smaller, _ = invoke("--memory", f"{memory / 2**20}MiB", "--set", "model.dtype=bfloat16")
    assert (code, smaller["fits"]) == (0, True)
    assert smaller["needed"] == short["changes"][-1]["needed"]
    code, _, output = invoke("--ranks", 1, "--set", "parallel.replicate=2")
    assert code == 2 and "[parallel] replicate = 2 needs a multiple of" in output
    with_engine = ("--memory", f"{memory / 2**20 + 1}MiB", "--engine", "0.9")
    code, alone, output = invoke(*with_engine)
    assert (code, alone["fits"], alone["engine"]["kind"]) == (
        1,
        False,
        "not at all",
    ) and "not at all: engine" in output
    code, both, output = invoke("--memory", "80GiB", "--engine", "0.4")
    assert (code, both["engine"]["kind"]) == (0, "together")
    # 32 GiB, less 4.5 for context, passes and CUDA graphs, and the weights of a tiny model.
    assert both["engine_args"] == ["--gpu-memory-utilization", "0.4", "--kv-cache-memory-bytes", "27G"]
    assert f"[engine] args = {json.dumps(both['engine_args'])}" in output
    code, _, output = invoke(*with_engine[2:])
    assert code == 2 and "--engine needs --memory" in output
    code, _, output = invoke("--memory", "80 apples")
    assert code == 2 and "such as 80GiB" in output
