"""Ranks that share each matrix product learn what one rank learns, and what cannot be shared is refused by name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaConfig, Qwen3Config
from transformers.models.llama.modeling_llama import LlamaRMSNorm
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm

from tests.harness.ranks import on_ranks
from tests.unit.trainer.rank_trainers import STEPS, Curve, assert_close, learn, settings_of
from trainer.config.settings import Settings
from trainer.errors import ConfigError
from trainer.model import loading
from trainer.model.tensor_parallel import plan_of

ARCHITECTURES = {"llama": LlamaConfig, "qwen3": Qwen3Config}


MODELS = [
    ("qwen3", True),
    *(
        pytest.param(model, marks=pytest.mark.long)
        for model in (("llama", False), ("llama", True), ("qwen3", False))
    ),
]


@pytest.fixture(scope="module", params=MODELS)
def model(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Path:
    """A random model: its architecture, and whether its embeddings are tied."""
    architecture, tied = request.param
    torch.manual_seed(5)
    config = ARCHITECTURES[architecture](
        vocab_size=256, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=8, max_position_embeddings=64, tie_word_embeddings=tied,
        bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    directory = tmp_path_factory.mktemp("model")
    AutoModelForCausalLM.from_config(config).save_pretrained(directory)
    return directory


ALGORITHM = {"type": "grpo", "kl_coef": 0.1, "entropy_coef": 0.01}
Learned = tuple[Curve, dict[str, Tensor]]


@pytest.fixture(scope="module")
def alone(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Learned:
    """What one rank learns."""
    (found,) = on_ranks(1, learn_exactly, settings_of(model, tmp_path_factory.mktemp("1"), ALGORITHM), STEPS)
    assert found is not None
    return found


def learn_exactly(settings: Settings, until: int) -> Learned | None:
    """`learn` in float64 throughout: these architectures normalize in float32 whatever their weights are."""

    def norm(self: Any, x: Tensor) -> Tensor:
        scaled: Tensor = (
            self.weight * x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.variance_epsilon)
        )
        return scaled

    with pytest.MonkeyPatch.context() as patch:
        for kind in (LlamaRMSNorm, Qwen3RMSNorm):
            patch.setattr(kind, "forward", norm)
        return learn(settings, torch.float64, until)


def assert_equal(found: Learned, expected: Learned) -> None:
    """Loss, clip norm and all other figures of each step, and the weights that are published."""
    assert_close(found[0], expected[0], 1e-9)
    assert found[1].keys() == expected[1].keys()
    for name, value in expected[1].items():
        assert value.dtype == torch.float64
        torch.testing.assert_close(found[1][name], value, rtol=0, atol=1e-9)


def is_tied(weights: dict[str, Tensor]) -> bool:
    return weights["lm_head.weight"].data_ptr() == weights["model.embed_tokens.weight"].data_ptr()


def test_two_ranks_that_share_matrices_learn_what_one_learns(
    model: Path, tmp_path: Path, alone: Learned
) -> None:
    found, _ = on_ranks(2, learn_exactly, settings_of(model, tmp_path, ALGORITHM, tensor=2), STEPS)
    assert_equal(found, alone)
    assert is_tied(found[1]) == is_tied(alone[1])
    assert max(point["grad_norm"] for point in alone[0]) > 1.0, "gradients are cut"


@pytest.mark.long
@pytest.mark.parametrize("model", [("qwen3", True)], indirect=True)
@pytest.mark.parametrize("sizes", [{"shard": 2}, {"replicate": 2}])
def test_matrices_that_ranks_share_are_sharded_and_copied_as_well(
    model: Path, tmp_path: Path, alone: Learned, sizes: dict[str, int]
) -> None:
    found, *_ = on_ranks(4, learn_exactly, settings_of(model, tmp_path, ALGORITHM, tensor=2, **sizes), STEPS)
    assert_equal(found, alone)


@pytest.mark.long
@pytest.mark.parametrize(
    ("model", "before", "after"),
    [(("qwen3", True), 1, 2), (("llama", False), 2, 1)],
    indirect=["model"],
)
def test_a_run_goes_on_with_shared_matrices_and_without(
    model: Path, tmp_path: Path, alone: Learned, before: int, after: int
) -> None:
    for ranks, until in ((before, STEPS // 2), (after, STEPS)):
        settings = settings_of(model, tmp_path, ALGORITHM, tensor=ranks)
        found, *_ = on_ranks(ranks, learn_exactly, settings, until)
    assert_equal(found, (alone[0][STEPS // 2 :], alone[1]))


def test_a_model_without_a_plan_is_refused(exact_model: Path) -> None:
    with pytest.raises(
        ConfigError, match=r"\[parallel\] tensor = 2: transformers has no plan for GPT2LMHeadModel"
    ):
        plan_of(loading.empty(exact_model, torch.float32), 2)


@pytest.mark.parametrize("model", [("llama", False)], indirect=True)
def test_heads_that_cannot_be_divided_are_refused(model: Path) -> None:
    message = "LlamaForCausalLM has 2 num_key_value_heads, which cannot be divided by it"
    with pytest.raises(ConfigError, match=message):
        plan_of(loading.empty(model, torch.float32), 4)
    assert plan_of(loading.empty(model, torch.float32), 2)


def test_adapters_are_refused(exact_model: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"cannot be trained with \[parallel\] tensor"):
        settings_of(exact_model, tmp_path, {}, more={"lora": {"rank": 3}}, tensor=2)
