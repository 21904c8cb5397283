"""LoRA on a mixture's experts: gradients from those of whole tensors, what ranks share, publish and keep, and what peft reads."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.integrations import moe

from bench.families.configs import FAMILIES
from tests.harness.plain_model import plain_logprobs
from tests.harness.ranks import on_ranks
from tests.unit.trainer.rank_trainers import assert_close, learn, settings_of
from trainer.config.model import LoraSettings, ModelSettings
from trainer.config.parallel import ParallelSettings
from trainer.config.settings import Settings
from trainer.data.packing import lay_out
from trainer.data.tree import row_of_tokens
from trainer.errors import ConfigError
from trainer.model import build, parallel, pretrained, shapes
from trainer.model.policy import Policy
from trainer.rank_trainer import RankTrainer

TARGETS = ("o_proj", "gate_up_proj", "down_proj")
"""Layers, tensors of experts, and a name of both in DeepSeek-V3."""
RANK, ALPHA = 3, 7.0
SCALE = ALPHA / RANK
ROWS = [[*range(9), 20 + i, *range(30, 60)] for i in range(3)]


def written(family: str, directory: Path) -> Path:
    torch.manual_seed(5)
    config = AutoConfig.for_model(FAMILIES[family].model_type, **FAMILIES[family].sizes)
    AutoModelForCausalLM.from_config(config).save_pretrained(directory)
    return directory


@pytest.fixture(scope="module", params=["qwen3_moe", "gpt_oss", "deepseek_v3"])
def path(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Path:
    return written(request.param, tmp_path_factory.mktemp("model"))


@pytest.fixture
def float64(monkeypatch: pytest.MonkeyPatch) -> None:
    """There is no grouped product in float64: experts are computed one after another."""
    monkeypatch.setitem(pretrained.DTYPES, "float32", torch.float64)
    monkeypatch.setattr(moe, "_can_use_grouped_mm", lambda *_: False)


def adapted(path: Path) -> Policy:
    """A policy whose adapters are no longer zero."""
    wanted = ModelSettings(path=path, lora=LoraSettings(rank=RANK, alpha=ALPHA, targets=TARGETS))
    policy = build.trained(wanted, parallel.join(ParallelSettings(), "cpu"), seed=1)
    with torch.no_grad():
        for name, weight in policy.model.named_parameters():
            if "lora_B" in name:
                assert bool((weight == 0).all()), "at the start, nothing is added"
                weight.copy_(torch.randn(weight.shape, generator=torch.Generator().manual_seed(2)) * 0.2)
    return policy


def factor_names(weight: str) -> tuple[str, str]:
    if weight.endswith(".weight"):
        place = weight.removesuffix(".weight")
        return f"{place}.lora_A.default.weight", f"{place}.lora_B.default.weight"
    return f"{weight}_lora_A", f"{weight}_lora_B"


def factors(policy: Policy) -> dict[str, tuple[Tensor, Tensor]]:
    """A and B of each adapted weight, of shape (rank, in) and (rank, out), by a plain model's names."""
    named = dict(policy.model.named_parameters())
    weights = [
        name.replace(".lora_A.default", "").removesuffix("_lora_A") for name in named if "lora_A" in name
    ]
    found = {name: tuple(named[each] for each in factor_names(name)) for name in weights}
    return {name: (a, b if b.ndim == 3 else b.mT) for name, (a, b) in found.items()}


def is_transposed(model: Any, name: str) -> bool:
    return bool(getattr(model.get_submodule(name.rpartition(".")[0]), "is_transposed", False))


def by_hand(path: Path, policy: Policy) -> Any:
    """A plain model with W + alpha / rank * B A, all to be trained, that computes its experts in a loop of its own."""
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float64, experts_implementation="eager")
    with torch.no_grad():
        for name, (a, b) in factors(policy).items():
            weight = model.get_parameter(name)
            product = SCALE * torch.einsum("...ro,...ri->...oi", b, a)
            weight += product.mT if is_transposed(model, name) else product
    return model


@pytest.mark.usefixtures("float64")
def test_experts_factors_have_the_gradient_of_the_whole_tensor_through_each_other(path: Path) -> None:
    policy = adapted(path)
    model = by_hand(path, policy)
    expected = torch.cat([plain_logprobs(model, torch.tensor(row)) for row in ROWS])
    expected.pow(2).sum().backward()
    micro = lay_out([row_of_tokens(row) for row in ROWS]).to("cpu", torch.float64)
    with policy.at_work(micro):
        found = policy(micro)[0]
        found.pow(2).sum().backward()
    # Norms and routers compute in float32, whatever the weights are.
    near: dict[str, Any] = {"rtol": 1e-4, "atol": 1e-5}
    torch.testing.assert_close(found.detach(), expected.detach(), **near)
    assert {name.rpartition(".")[2] for name in factors(policy)} == {"weight", "gate_up_proj", "down_proj"}
    for name, (a, b) in factors(policy).items():
        gradient = model.get_parameter(name).grad
        gradient = gradient.mT if is_transposed(model, name) else gradient
        own_a, own_b = (policy.model.get_parameter(each).grad for each in factor_names(name))
        torch.testing.assert_close(own_a, SCALE * b.detach() @ gradient, **near)
        torch.testing.assert_close(
            own_b if own_b.ndim == 3 else own_b.mT, SCALE * a.detach() @ gradient.mT, **near
        )
    assert sum(p.grad is not None for p in policy.parameters()) == 2 * len(factors(policy))


@pytest.mark.usefixtures("float64")
def test_published_experts_compute_what_is_trained(path: Path, tmp_path: Path) -> None:
    policy = adapted(path)
    micro = lay_out([row_of_tokens(row) for row in ROWS])
    apart = policy.logprobs(micro)
    with policy.computing("merged"):
        together = policy.logprobs(micro)
    with policy.computing("initial"):
        initial = policy.logprobs(micro)
    torch.testing.assert_close(together, apart, rtol=1e-4, atol=1e-5)
    assert float((initial - apart).abs().max()) > 1e-2, "the adapters matter"
    state = parallel.gather(policy.published(), parallel.join(ParallelSettings(), "cpu"))
    expected = by_hand(path, policy).state_dict()
    assert state.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(state[name], value, rtol=1e-13, atol=1e-13)
    pretrained.save(policy.model, tmp_path, path, state)
    stored, base = (load_file(each / "model.safetensors") for each in (tmp_path, path))
    assert stored.keys() == base.keys(), "by the checkpoint's own names"
    assert not any(torch.equal(stored[name], base[name].double()) for name in base if name.endswith("_proj"))


@pytest.mark.usefixtures("float64")
def test_expert_ranks_train_the_adapters_that_one_rank_trains(tmp_path: Path) -> None:
    """From a checkpoint of two ranks that one rank continues, too."""
    model, lora = written("qwen3_moe", tmp_path / "model"), {"lora": {"rank": RANK, "targets": TARGETS}}

    def settings(work: str, ranks: int) -> Settings:
        return settings_of(model, tmp_path / work, {"type": "grpo", "kl_coef": 0.1}, more=lora, expert=ranks)

    expected, weights = learn_looped(settings("1", 1), 2)
    (curve, _), _ = on_ranks(2, learn_looped, settings("2", 2), 1)
    continued, published = learn_looped(settings("2", 1), 2)
    curve += continued
    loads = {"busiest_expert_share", "busiest_expert_rank_share"}
    assert_close([{key: each[key] for key in each.keys() - loads} for each in curve], expected, 1e-6)
    for name, value in weights.items():
        torch.testing.assert_close(published[name], value, rtol=0, atol=1e-6)


def learn_looped(settings: Settings, until: int) -> Any:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(moe, "_can_use_grouped_mm", lambda *_: False)
        return learn(settings, torch.float64, until)


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated")
def test_peft_reads_the_factors_of_experts(path: Path, tmp_path: Path) -> None:
    policy = adapted(path)
    assert policy.adapters is not None
    policy.adapters.save(
        tmp_path, {name: value.detach() for name, value in policy.adapters.factors().items()}
    )  # type: ignore[union-attr]
    base = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    loaded = PeftModel.from_pretrained(base, str(tmp_path)).eval()
    row = torch.tensor([ROWS[0]])
    with torch.no_grad():
        theirs = loaded(input_ids=row).logits[0, :-1].log_softmax(-1).gather(-1, row[0, 1:, None])[:, 0]
    found = policy.logprobs(lay_out([row_of_tokens(ROWS[0])]))
    torch.testing.assert_close(found, theirs, rtol=1e-4, atol=1e-4)


def test_adapters_of_experts_alone_learn_by_grouped_products(tmp_path: Path) -> None:
    """In bfloat16, with a rank whose rows such products do not take as they are."""
    model = written("qwen3_moe", tmp_path / "model")
    lora = {"rank": RANK, "targets": ["experts.gate_up_proj", "experts.down_proj"]}
    settings = settings_of(model, tmp_path / "run", {"type": "grpo"}, "bfloat16", {"lora": lora})
    ((curve, weights),) = on_ranks(1, learn, settings, torch.float32, 2)
    assert all(point["grad_norm"] > 0 for point in curve)
    base = pretrained.load(model, "bfloat16").state_dict()
    changed = {name for name, value in base.items() if not torch.equal(value, weights[name])}
    assert changed == {name for name in base if ".experts." in name}


def test_planned_memory_has_the_factors_of_experts(path: Path) -> None:
    wanted = ModelSettings(path=path, lora=LoraSettings(rank=RANK, targets=TARGETS))
    found = shapes.measure(wanted, 64, torch.bfloat16, expert_ranks=2)
    policy = adapted(path)
    counted = {name: w.numel() for name, w in policy.model.named_parameters() if w.requires_grad}
    assert found.weights.trained == sum(counted.values())
    layer = sum(n for name, n in counted.items() if ".experts." in name and ".layers.1." in name)
    assert found.experts.trained == layer > 0


@pytest.mark.parametrize(
    ("family", "targets", "why"),
    [
        ("llama4_text", ["gate_up_proj"], "how model.layers.1.feed_forward.experts computes is not known"),
        (
            "qwen3_moe",
            ["w1"],
            "the model has no layer w1; .*and the tensors of experts down_proj, gate_up_proj",
        ),
    ],
)
def test_experts_that_cannot_be_adapted_are_refused(
    family: str, targets: list[str], why: str, tmp_path: Path
) -> None:
    wanted = ModelSettings(path=written(family, tmp_path), lora=LoraSettings(targets=tuple(targets)))
    with pytest.raises(
        ConfigError, match=rf"\[model.lora\] targets = .*{why}.*name linear layers or tensors"
    ):
        shapes.measure(wanted, 64, torch.float32)


def test_adapters_of_experts_are_not_published_without_the_weights(tmp_path: Path) -> None:
    model = written("qwen3_moe", tmp_path / "model")
    settings = settings_of(model, tmp_path, {}, more={"lora": {"rank": RANK, "targets": TARGETS}})
    alone = settings.publish.model_copy(update={"transport": "lora"})
    with pytest.raises(ConfigError, match="adapters of experts cannot be published without the weights"):
        RankTrainer.open(settings.model_copy(update={"publish": alone}))
