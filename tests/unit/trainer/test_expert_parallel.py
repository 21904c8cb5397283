"""Ranks that share the experts of a mixture learn what one rank learns, and what cannot be shared is refused by name."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import safe_open
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.integrations import moe

from bench.families.configs import FAMILIES
from headgate.routes import PackedRoutes, pack
from headgate.types import Episode, Node
from tests.harness.ranks import on_ranks
from tests.unit.trainer.rank_trainers import STEPS, Curve, assert_close, groups_of, learn, settings_of
from trainer.config.parallel import ParallelSettings
from trainer.config.settings import Settings
from trainer.errors import ConfigError
from trainer.model import loading, pretrained
from trainer.model.expert_parallel import balance_metrics, modules_of
from trainer.model.process_group import check
from trainer.rank_rpc import serve_commands, shutdown_ranks
from trainer.rank_trainer import RankTrainer

ALGORITHM = {"type": "grpo", "kl_coef": 0.1, "entropy_coef": 0.01}
LOADS = {"busiest_expert_share", "busiest_expert_rank_share"}
Learned = tuple[Curve, dict[str, Tensor]]


@pytest.fixture(scope="module", params=["qwen3_moe", pytest.param("gpt_oss", marks=pytest.mark.long)])
def model(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Path:
    """A random mixture of experts."""
    return written(request.param, tmp_path_factory.mktemp("model"))


def written(name: str, directory: Path) -> Path:
    torch.manual_seed(5)
    family = FAMILIES[name]
    config = AutoConfig.for_model(family.model_type, **family.sizes)
    AutoModelForCausalLM.from_config(config).save_pretrained(directory)
    return directory


@pytest.fixture(scope="module")
def alone(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Learned:
    """What one rank learns."""
    (found,) = on_ranks(1, learn_looped, settings_of(model, tmp_path_factory.mktemp("1"), ALGORITHM), STEPS)
    assert found is not None
    return found


def learn_looped(settings: Settings, until: int) -> Learned | None:
    """`learn` in float64, for which there is no grouped product, so the experts are computed one after another."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(moe, "_can_use_grouped_mm", lambda *_: False)
        return learn(settings, torch.float64, until)


def assert_learned(found: Learned, expected: Learned, limit: float = 1e-6) -> None:
    """Loss, clip norm and all other figures of each step, and the weights that are published."""
    points: Any = [{key: point[key] for key in point.keys() - LOADS} for point in found[0]]
    assert_close(points, expected[0], limit)
    assert found[1].keys() == expected[1].keys()
    for name, value in expected[1].items():
        torch.testing.assert_close(found[1][name], value, rtol=0, atol=limit)


def test_two_ranks_that_share_experts_learn_what_one_learns(
    model: Path, tmp_path: Path, alone: Learned
) -> None:
    found, _ = on_ranks(2, learn_looped, settings_of(model, tmp_path, ALGORITHM, expert=2), STEPS)
    assert_learned(found, alone)


@pytest.mark.parametrize(
    "sizes",
    [
        {"expert": 2, "context": 2},
        *(
            pytest.param(each, marks=pytest.mark.long)
            for each in ({"expert": 4}, {"expert": 2, "replicate": 2})
        ),
    ],
    ids=str,
)
def test_four_ranks_share_shard_and_copy_experts(
    model: Path, tmp_path: Path, alone: Learned, sizes: dict[str, int]
) -> None:
    more = {"activation_checkpointing": 1}
    settings = settings_of(model, tmp_path, ALGORITHM, more=more, **sizes)
    found, *_ = on_ranks(4, learn_looped, settings, STEPS)
    assert_learned(found, alone)
    assert found[0][0].keys() >= LOADS


@pytest.mark.parametrize(
    ("before", "after"), [(2, 1), *(pytest.param(*case, marks=pytest.mark.long) for case in ((1, 2), (2, 4)))]
)
def test_a_run_continues_with_another_number_of_expert_ranks(
    model: Path, tmp_path: Path, alone: Learned, before: int, after: int
) -> None:
    for ranks, until in ((before, STEPS // 2), (after, STEPS)):
        settings = settings_of(model, tmp_path, ALGORITHM, expert=ranks)
        found, *_ = on_ranks(ranks, learn_looped, settings, until)
    assert_learned(found, (alone[0][STEPS // 2 :], alone[1]))


@pytest.mark.parametrize("more", [{"lora": {"rank": 3}}, pytest.param({}, marks=pytest.mark.long)], ids=str)
@pytest.mark.parametrize("model", ["qwen3_moe"], indirect=True)
def test_two_ranks_learn_what_one_learns_but_for_rounding(
    model: Path, tmp_path: Path, more: dict[str, Any]
) -> None:
    """In bfloat16, by grouped products; adapters of all linear layers leave the experts as they are."""
    alone, shared = (
        settings_of(model, tmp_path / str(n), {"type": "grpo"}, "bfloat16", more, expert=n) for n in (1, 2)
    )
    ((expected, before),) = on_ranks(1, learn, alone, torch.float32, 2)
    (curve, weights), _ = on_ranks(2, learn, shared, torch.float32, 2)
    for name in ("loss", "grad_norm", "kl_recorded_k3"):
        found = [point[name] for point in curve]
        assert found == pytest.approx([point[name] for point in expected], rel=0.02, abs=0.02), name
    assert weights.keys() == before.keys()
    if more:
        assert all(torch.equal(weights[name], before[name]) for name in weights if ".experts." in name)


def learn_on_one_owner(settings: Settings) -> tuple[dict[str, float], dict[str, Tensor]] | None:
    """A step in float32, by grouped products, whose tokens all go through the first two experts of each layer."""
    trainer = RankTrainer.open(settings)
    if not trainer.ranks.is_rank_zero:
        serve_commands(trainer)
        return None

    assert trainer.policy.replay is not None
    layers = len(trainer.policy.replay.shape.layers)

    def routed(node: Node) -> Node:
        routes = pack(np.tile(np.arange(2, dtype=np.int32), (len(node.ids), layers, 1)), 4)
        return replace(node, routes=PackedRoutes(routes, layers, 2, "uint8"))

    def with_routes(each: Episode) -> Episode:
        return replace(each, nodes=tuple(map(routed, each.nodes)))

    groups = [replace(g, episodes=tuple(map(with_routes, g.episodes))) for g in groups_of(0)]
    found = trainer.train(groups), trainer.gather_weights()
    shutdown_ranks(trainer)
    return found


def test_replayed_tokens_may_all_go_to_one_rank(model: Path, tmp_path: Path) -> None:
    more = {"router_replay": True, "activation_checkpointing": 1}
    alone, shared = (
        settings_of(model, tmp_path / str(n), {"type": "grpo"}, more=more, expert=n) for n in (1, 2)
    )
    (expected,) = on_ranks(1, learn_on_one_owner, alone)
    (metrics, weights), _ = on_ranks(2, learn_on_one_owner, shared)
    assert_learned(([metrics], weights), ([expected[0]], expected[1]), 1e-5)
    # The tokens of empty micro-batches have no routes.
    assert 0.45 < metrics["busiest_expert_share"] <= 0.5
    assert 0.9 < metrics["busiest_expert_rank_share"] <= 1


def published(settings: Settings) -> dict[str, Tensor] | None:
    """The untrained weights by the checkpoint's names."""
    trainer = RankTrainer.open(settings)
    if not trainer.ranks.is_rank_zero:
        serve_commands(trainer)
        return None
    found = pretrained.as_stored(trainer.model, trainer.gather_weights())
    shutdown_ranks(trainer)
    return found


@pytest.mark.parametrize(
    "model",
    ["qwen3_moe", "kimi_linear", pytest.param("gpt_oss", marks=pytest.mark.long)],
    indirect=True,
)
def test_ranks_that_share_experts_publish_the_checkpoint_that_they_read(model: Path, tmp_path: Path) -> None:
    """Also a convolution that transformers joins of three stored tensors (Kimi-Linear)."""
    found, *_ = on_ranks(4, published, settings_of(model, tmp_path, {}, expert=2))
    with safe_open(model / "model.safetensors", framework="pt") as file:
        stored = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (no mapping)
    assert found.keys() == stored.keys()
    assert all(torch.equal(found[name], stored[name]) for name in stored)


def test_loads_are_of_the_most_uneven_layer() -> None:
    counted = [(0, [[5, 5], [1, 7]]), (2, [[6, 4], [1, 0]]), (0, [[0, 0], [0, 1]])]
    assert balance_metrics(counted) == {"busiest_expert_share": 8 / 10, "busiest_expert_rank_share": 9 / 10}
    assert balance_metrics([(0, [[0, 0], [0, 0]])]) == {}, "no micro-batch was computed"


@pytest.mark.parametrize(
    ("family", "ranks", "why"),
    [
        ("qwen3", 2, "Qwen3ForCausalLM is not a mixture of experts"),
        ("qwen3_moe", 3, "Qwen3MoeForCausalLM has 4 experts, which cannot be divided by it"),
        ("llama4_text", 2, "the experts of Llama4ForCausalLM are not tensors with one part for each expert"),
    ],
)
def test_a_model_whose_experts_cannot_be_shared_is_refused(
    family: str, ranks: int, why: str, tmp_path: Path
) -> None:
    model = loading.empty(written(family, tmp_path), torch.float32)
    with pytest.raises(ConfigError, match=rf"\[parallel\] expert = {ranks}: {why}"):
        modules_of(model, ranks)


@pytest.mark.parametrize(
    ("sizes", "why"),
    [
        ({"expert": 2, "tensor": 2}, "tensor = 2 and expert = 2 cannot be combined"),
        ({"expert": 4, "shard": 6}, "expert = 4 is not a divisor of shard = 6"),
    ],
)
def test_sizes_that_do_not_fit_are_refused(sizes: dict[str, int], why: str) -> None:
    with pytest.raises(ValueError, match=why):
        ParallelSettings(**sizes)  # type: ignore[arg-type]


def test_more_expert_ranks_than_ranks_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"expert = 4 needs a multiple of 4 ranks, but 2 run"):
        check(ParallelSettings(expert=4), 2)
