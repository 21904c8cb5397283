"""Learning rates by hand, AdamW against its formulas, and what Muon's updates are."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import Qwen3Config, Qwen3ForCausalLM

from trainer.config.optimizer import OptimizerSettings
from trainer.model import optim, rounded_adamw

LR, BETAS, EPS, DECAY = 0.01, (0.8, 0.9), 1e-3, 0.2


def settings_of(**values: Any) -> OptimizerSettings:
    return OptimizerSettings(lr=LR, **values)


def small_model(**config: Any) -> Any:
    torch.manual_seed(3)
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "head_dim": 8}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2}
    return Qwen3ForCausalLM(Qwen3Config(vocab_size=32, **sizes, **heads, **config)).double()


def give_gradients(model: Any, seed: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    for weight in model.parameters():
        weight.grad = torch.randn(weight.shape, generator=generator, dtype=weight.dtype)
    return {name: weight.grad.clone() for name, weight in model.named_parameters()}


@pytest.mark.parametrize(
    ("schedule", "share", "expected"),
    [
        ("constant", 0.0, [0.25, 0.5, 0.75, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0]),
        ("linear", 0.0, [0.25, 0.5, 0.75, 1.0, 1.0, 0.75, 0.5, 0.25, 0.0, 0.0]),
        ("linear", 0.2, [0.25, 0.5, 0.75, 1.0, 1.0, 0.8, 0.6, 0.4, 0.2, 0.2]),
        ("cosine", 0.0, [0.25, 0.5, 0.75, 1.0, 1.0, 0.5 + math.sqrt(0.125), 0.5, 0.5 - math.sqrt(0.125), 0.0, 0.0]),
        ("cosine", 0.5, [0.25, 0.5, 0.75, 1.0, 1.0, 0.75 + math.sqrt(0.03125), 0.75, 0.75 - math.sqrt(0.03125), 0.5, 0.5]),
    ],
)  # fmt: skip
def test_the_learning_rate_warms_up_and_falls_to_its_share(
    schedule: Any, share: float, expected: list[float]
) -> None:
    settings = settings_of(schedule=schedule, final_lr_share=share, warmup_steps=4)
    found = [optim.lr_at(step, settings, 8) / LR for step in range(10)]
    assert found == pytest.approx(expected)


def test_a_warm_up_longer_than_the_run_never_falls() -> None:
    settings = settings_of(schedule="linear", warmup_steps=4)
    assert [optim.lr_at(step, settings, 2) / LR for step in range(5)] == [0.25, 0.5, 0.75, 1.0, 1.0]


def test_adamw_is_its_formulas() -> None:
    """Loshchilov and Hutter, "Decoupled Weight Decay Regularization" (2019), algorithm 2."""
    model = small_model()
    settings = settings_of(betas=BETAS, eps=EPS, weight_decay=DECAY)
    optimizer = optim.create(model, settings)
    expected = {name: weight.detach().clone() for name, weight in model.named_parameters()}
    mean = {name: torch.zeros_like(value) for name, value in expected.items()}
    square = {name: torch.zeros_like(value) for name, value in expected.items()}
    for t in (1, 2, 3):
        lr = LR / t
        for name, gradient in give_gradients(model, t).items():
            mean[name] = BETAS[0] * mean[name] + (1 - BETAS[0]) * gradient
            square[name] = BETAS[1] * square[name] + (1 - BETAS[1]) * gradient**2
            unbiased = mean[name] / (1 - BETAS[0] ** t), square[name] / (1 - BETAS[1] ** t)
            expected[name] = expected[name] * (1 - lr * DECAY) - lr * unbiased[0] / (unbiased[1].sqrt() + EPS)
        optim.set_lr(optimizer, lr)
        optimizer.step()
    for name, weight in model.named_parameters():
        torch.testing.assert_close(weight.detach(), expected[name], rtol=0, atol=1e-12)


@pytest.mark.parametrize("tied", [False, True])
def test_muon_turns_the_layers_matrices_alone_and_by_adamws_size(tied: bool) -> None:
    """The update of a matrix is nearly orthogonal, its entries of root mean square 0.2 times the learning rate."""
    model = small_model(tie_word_embeddings=tied)
    optimizer = optim.create(model, settings_of(type="muon"))
    before = {name: weight.detach().clone() for name, weight in model.named_parameters()}
    gradients = give_gradients(model, 1)
    optimizer.step()
    inner = 0
    for name, weight in model.named_parameters():
        update = weight.detach() - before[name]
        if name.startswith("model.layers") and weight.ndim == 2:
            inner += 1
            size = 0.2 * LR * math.sqrt(max(update.shape))
            singular = torch.linalg.svdvals(update) / size
            assert 0.5 < float(singular.min()) <= float(singular.max()) < 1.3, name
            assert float((update * gradients[name]).sum()) < 0, name
        else:
            gradient = gradients[name]
            torch.testing.assert_close(update, -LR * gradient / (gradient.abs() + 1e-8), rtol=0, atol=1e-12)
    assert inner == 2 * 7
    assert ("lm_head.weight" in before) != tied


def test_moments_taken_over_give_the_same_next_step() -> None:
    first, second = small_model(), small_model()
    settings = settings_of(type="muon", weight_decay=DECAY)
    optimizers = [optim.create(model, settings) for model in (first, second)]
    give_gradients(first, 1)
    optimizers[0].step()
    second.load_state_dict(first.state_dict())
    made = optimizers[1].empty_moments()
    moments = optimizers[0].moments()
    assert {name: {key: value.shape for key, value in entry.items()} for name, entry in made.items()} == {
        name: {key: value.shape for key, value in entry.items()} for name, entry in moments.items()
    }
    optimizers[1].set_moments(
        {name: {k: v.clone() for k, v in entry.items()} for name, entry in moments.items()}
    )
    for model, optimizer in zip((first, second), optimizers, strict=True):
        give_gradients(model, 2)
        optimizer.step()
    assert all(map(torch.equal, first.parameters(), second.parameters()))
    assert optimizers[0].moments()["lm_head.weight"]["step"] == 2


@pytest.mark.parametrize(
    ("kind", "precision"), [("adamw", "float32"), ("adamw", "bfloat16"), ("muon", "float32")]
)
def test_moments_on_the_host_are_copied_for_their_own_weights_step_alone(kind: Any, precision: Any) -> None:
    """The steps are the same to the bit; between them, and while other weights are stepped, moments stay where they are."""
    plain, offloaded = small_model(), small_model()
    settings = settings_of(type=kind, moments=precision, betas=BETAS, weight_decay=DECAY)
    optimizers = [
        optim.create(plain, settings),
        optim.create(offloaded, settings.model_copy(update={"offload": "host"})),
    ]
    weights = {name for name, _ in offloaded.named_parameters()}
    host: dict[str, dict[str, int]] = {}
    at_hand: list[set[str]] = []

    def places() -> dict[str, dict[str, int]]:
        moments = optimizers[1].moments().items()
        return {name: {key: value.data_ptr() for key, value in entry.items()} for name, entry in moments}

    def look(*_: Any) -> None:
        now, before = places(), at_hand[-1] if at_hand else set()
        host.update({name: now[name] for name in before})
        at_hand.append({name for name in weights if now[name].items().isdisjoint(host[name].items())})

    for step in (1, 2, 3):
        for model in (plain, offloaded):
            give_gradients(model, step)
        optimizers[0].step()
        host, at_hand = places(), []
        hooks = [part.register_step_pre_hook(look) for part in optimizers[1].parts] if step > 1 else []
        optimizers[1].step()
        for hook in hooks:
            hook.remove()
        if step > 1:
            assert sorted(map(sorted, at_hand)) == sorted([name] for name in weights)
    assert all(map(torch.equal, plain.parameters(), offloaded.parameters()))
    moments, same = (optimizer.moments() for optimizer in optimizers)
    assert moments.keys() == same.keys() == weights
    assert all(
        torch.equal(value, same[name][key]) for name in weights for key, value in moments[name].items()
    )
    assert {key: value.dtype for key, value in optimizers[1].empty_moments()["lm_head.weight"].items()} == {
        key: value.dtype for key, value in same["lm_head.weight"].items()
    }


@pytest.mark.parametrize(("before", "after"), [("none", "host"), ("host", "none")])
def test_moments_are_taken_over_into_the_other_memory(before: Any, after: Any) -> None:
    """A run may change `offload` between two starts: the next step is that of a run which did not."""
    models = [small_model() for _ in range(2)]
    optimizers = [optim.create(model, settings_of(offload=before, betas=BETAS)) for model in models]
    for model, optimizer in zip(models, optimizers, strict=True):
        give_gradients(model, 1)
        optimizer.step()
    restarted = optim.create(models[1], settings_of(offload=after, betas=BETAS))
    restarted.set_moments(optimizers[1].moments())
    for model, optimizer in zip(models, (optimizers[0], restarted), strict=True):
        give_gradients(model, 2)
        optimizer.step()
    assert all(map(torch.equal, *(list(model.parameters()) for model in models)))
    assert restarted.moments()["lm_head.weight"]["step"] == 2


def test_moments_are_rounded_to_both_neighbors_and_right_in_the_mean() -> None:
    """A value 1/4 between two neighbors of bfloat16 is rounded up in a quarter of the cases, whatever its sign."""
    generator = torch.Generator().manual_seed(1)
    for low, high in ((1.0, 1.0 + 2**-7), (-1.0, -1.0 - 2**-7)):
        found = rounded_adamw.rounded(torch.full((40_000,), low + (high - low) / 4), generator)
        assert found.dtype == torch.bfloat16 and set(found.unique().tolist()) == {low, high}
        assert float((found == high).float().mean()) == pytest.approx(0.25, abs=0.01)
    exact = torch.tensor([0.0, -0.0, 1.5, -3.0, 2.0**-120])
    assert torch.equal(rounded_adamw.rounded(exact, generator).float(), exact)


def test_steps_with_moments_in_bfloat16_follow_those_in_float32() -> None:
    """Of changes by a thousandth a step, none would survive rounding to the nearest: the second moment would stay too large."""
    models = [small_model().float() for _ in range(2)]
    kinds: tuple[Any, ...] = ("float32", "bfloat16")
    optimizers = [
        optim.create(model, settings_of(moments=kind, weight_decay=DECAY))
        for model, kind in zip(models, kinds, strict=True)
    ]
    for step in range(300):
        for model, optimizer in zip(models, optimizers, strict=True):
            give_gradients(model, step)
            if step > 0:
                for weight in model.parameters():
                    weight.grad *= 0.1
            optimizer.step()
    exact, found = (optimizer.moments() for optimizer in optimizers)
    for name, entry in found.items():
        assert entry["exp_avg_sq"].dtype == entry["exp_avg"].dtype == torch.bfloat16
        ratio = entry["exp_avg_sq"].float().mean() / exact[name]["exp_avg_sq"].mean()
        assert float(ratio) == pytest.approx(1, abs=0.02), name
    moved = [torch.cat([w.detach().flatten() for w in model.parameters()]) for model in models]
    start = torch.cat([w.detach().flatten() for w in small_model().float().parameters()])
    assert float((moved[1] - moved[0]).norm() / (moved[0] - start).norm()) < 0.02
