"""Each algorithm and correction against its paper's formula, written as loops over episodes and tokens, in float64."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from decimal import Decimal, localcontext
from statistics import fmean, pstdev
from typing import Any

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch import Tensor

from trainer.algorithms import REGISTRY, Algorithm, Rewards, State, StepTokens, TokenBatch
from trainer.algorithms.baselines import group_mean
from trainer.algorithms.clip_cov import ClipCovSettings
from trainer.algorithms.kl_cov import CUTOFF as COVARIANCE_CUTOFF
from trainer.algorithms.m2po import CUTOFF

LENGTHS = (7, 1, 4, 6, 3)
ADVANTAGES = (1.2, 0.7, -0.4, -1.1, 0.9)
STALENESS = (0, 3, 1, 2, 1)
UNBOUNDED = math.inf
NONE_OUTSIDE = {
    CUTOFF: UNBOUNDED,
    COVARIANCE_CUTOFF: UNBOUNDED,
    "mean_logprob": 0.0,
    "mean_advantage": 0.0,
    "hash_cutoff": -1.0,
}
"""Statistics of a step without outliers."""
Episodes = list[Tensor]


def algorithm_of(**settings: Any) -> Algorithm:
    return REGISTRY[settings["type"]].model_validate(settings).create()


def samples() -> tuple[Episodes, Episodes, Episodes]:
    """Log-probabilities by episode: under the trained, the proximal and the sampling weights."""
    generator = torch.Generator().manual_seed(11)

    def noise(n: int, scale: float) -> Tensor:
        return scale * torch.randn(n, dtype=torch.float64, generator=generator)

    recorded = [-1.5 + noise(n, 0.3) for n in LENGTHS]
    proximal = [r + noise(len(r), 0.25) for r in recorded]
    trained = [(p + noise(len(p), 0.15)).requires_grad_() for p in proximal]
    return trained, proximal, recorded


def by_token(values: Sequence[float]) -> Tensor:
    return torch.tensor(values, dtype=torch.float64).repeat_interleave(torch.tensor(LENGTHS))


def gradient_of(
    algorithm: Algorithm,
    with_proximal: bool = False,
    split: int | None = None,
    reference: Episodes | None = None,
    entropy: Tensor | None = None,
) -> list[Tensor]:
    """The gradient that the trainer would be given: that of the sum over micro-batches, over the normalizer."""
    trained, proximal, recorded = samples()
    statistics = algorithm.statistics(
        StepTokens(
            torch.cat(trained).detach(), torch.cat(recorded), by_token(ADVANTAGES), by_token(STALENESS).long()
        )
    )
    order = range(len(LENGTHS))
    parts = [list(order)] if split is None else [list(order[:split]), list(order[split:])]
    for part in parts:
        counts = torch.tensor([LENGTHS[i] for i in part])
        weights = 1 / counts.double() if algorithm.sequence_mean else torch.ones(len(part))
        loss = algorithm.loss(
            TokenBatch(
                logprobs=torch.cat([trained[i] for i in part]),
                entropy=torch.zeros(int(counts.sum())) if entropy is None else entropy,
                recorded=torch.cat([recorded[i] for i in part]),
                advantages=torch.tensor([ADVANTAGES[i] for i in part], dtype=torch.float64).repeat_interleave(
                    counts
                ),
                weights=weights.double().repeat_interleave(counts),
                sequences=torch.arange(len(part)).repeat_interleave(counts),
                episodes=len(part),
                reference=torch.cat([reference[i] for i in part]) if reference else None,
                proximal=torch.cat([proximal[i] for i in part]) if with_proximal else None,
                ids=torch.zeros(int(counts.sum()), dtype=torch.int64),
                staleness=torch.tensor([STALENESS[i] for i in part]).repeat_interleave(counts),
                statistics=statistics,
            )
        )
        loss.total.backward()
    divisor = algorithm.normalizer(sum(LENGTHS), len(LENGTHS))
    return [t.grad / divisor for t in trained if t.grad is not None]


def clip(ratio: Tensor, low: float, high: float) -> Tensor:
    return ratio.clamp(1 - low, 1 + high)


def surrogate(ratio: Tensor, advantage: float, low: float, high: float) -> Tensor:
    """PPO's min(r A, clip(r) A)."""
    return torch.minimum(ratio * advantage, clip(ratio, low, high) * advantage)


def dapo_objective(new: Episodes, _: Episodes, old: Episodes) -> Tensor:
    """DAPO, equation 8."""
    total = torch.zeros((), dtype=torch.float64)
    for n, o, a in zip(new, old, ADVANTAGES, strict=True):
        for j in range(len(n)):
            total = total + surrogate((n[j] - o[j]).exp(), a, 0.2, 0.28)
    return total / sum(LENGTHS)


def grpo_objective(new: Episodes, _: Episodes, old: Episodes) -> Tensor:
    """DeepSeekMath, equation 3, without its KL term."""
    each = [
        torch.stack([surrogate((n[j] - o[j]).exp(), a, 0.2, 0.2) for j in range(len(n))]).mean()
        for n, o, a in zip(new, old, ADVANTAGES, strict=True)
    ]
    return torch.stack(each).mean()


def dr_grpo_objective(new: Episodes, _: Episodes, old: Episodes) -> Tensor:
    """Dr. GRPO: the sum over an episode's tokens over a constant."""
    each = [
        torch.stack([surrogate((n[j] - o[j]).exp(), a, 0.2, 0.2) for j in range(len(n))]).sum() / 9
        for n, o, a in zip(new, old, ADVANTAGES, strict=True)
    ]
    return torch.stack(each).mean()


def rloo_objective(new: Episodes, _: Episodes, __: Episodes) -> Tensor:
    """RLOO: the episode is one action."""
    return torch.stack([a * n.sum() for n, a in zip(new, ADVANTAGES, strict=True)]).mean()


def gspo_objective(new: Episodes, _: Episodes, old: Episodes) -> Tensor:
    """GSPO, equations 5 and 7."""
    each = [
        surrogate(((n - o).sum() / len(n)).exp(), a, 0.005, 0.005)
        for n, o, a in zip(new, old, ADVANTAGES, strict=True)
    ]
    return torch.stack(each).mean()


def cispo_objective(new: Episodes, _: Episodes, old: Episodes) -> Tensor:
    """MiniMax-M1, equations 4 and 5."""
    total = torch.zeros((), dtype=torch.float64)
    for n, o, a in zip(new, old, ADVANTAGES, strict=True):
        for j in range(len(n)):
            total = total + min(math.exp(float((n[j] - o[j]).detach())), 1.3) * a * n[j]
    return total / sum(LENGTHS)


def decoupled_objective(new: Episodes, proximal: Episodes, old: Episodes) -> Tensor:
    """AReaL, equation 5: pi_prox / pi_behav times PPO's surrogate around the proximal policy."""
    total = torch.zeros((), dtype=torch.float64)
    for n, p, o, a in zip(new, proximal, old, ADVANTAGES, strict=True):
        for j in range(len(n)):
            total = total + (p[j] - o[j]).exp() * surrogate((n[j] - p[j]).exp(), a, 0.1, 0.1)
    return total / sum(LENGTHS)


def sapo_objective(new: Episodes, _: Episodes, old: Episodes) -> Tensor:
    """SAPO, equations 5 and 6: 4 / temperature x sigmoid(temperature (r - 1)) in place of r."""
    each = []
    for n, o, a in zip(new, old, ADVANTAGES, strict=True):
        temperature = 2.0 if a > 0 else 3.0
        gates = [torch.sigmoid(temperature * ((n[j] - o[j]).exp() - 1)) for j in range(len(n))]
        each.append(torch.stack(gates).mean() * 4 / temperature * a)
    return torch.stack(each).mean()


def gmpo_objective(new: Episodes, _: Episodes, old: Episodes) -> Tensor:
    """GMPO, equation 4: the geometric mean of |min(r A, clip(r) A)|, with the advantage's sign, and its size once."""
    each = []
    for n, o, a in zip(new, old, ADVANTAGES, strict=True):
        product, sign = torch.ones((), dtype=torch.float64), math.copysign(1.0, a)
        for j in range(len(n)):
            ratio = (n[j] - o[j]).exp()
            product = (
                product * torch.minimum(ratio * sign, ratio.clamp(math.exp(-0.3), math.exp(0.2)) * sign).abs()
            )
        each.append(product ** (1 / len(n)) * a)
    return torch.stack(each).mean()


def dppo_objective(
    divergence: Callable[[float, float], float],
) -> Callable[[Episodes, Episodes, Episodes], Tensor]:
    """DPPO: r A, where the two outcomes' divergence is within the bound or the step leads back."""

    def objective(new: Episodes, _: Episodes, old: Episodes) -> Tensor:
        total = torch.zeros((), dtype=torch.float64)
        for n, o, a in zip(new, old, ADVANTAGES, strict=True):
            for j in range(len(n)):
                ratio = (n[j] - o[j]).exp()
                outward = (float(ratio.detach()) - 1) * a > 0
                far = divergence(math.exp(float(o[j])), math.exp(float(n[j].detach()))) > 0.02
                total = total + ratio * a * float(not (outward and far))
        return total / sum(LENGTHS)

    return objective


def binary_kl(old: float, new: float) -> float:
    return old * math.log(old / new) + (1 - old) * math.log((1 - old) / (1 - new))


def opo_objective(new: Episodes, _: Episodes, __: Episodes) -> Tensor:
    """OPO: REINFORCE; its baseline is tested with the advantages."""
    return torch.stack([a * n.sum() for n, a in zip(new, ADVANTAGES, strict=True)]).sum() / sum(LENGTHS)


def m2po_objective(new: Episodes, _: Episodes, old: Episodes) -> Tensor:
    """M2PO: the largest squared log-ratios are left out, one after another, until the mean of the others is within the bound."""
    pairs = [
        (float((n[j] - o[j]).detach()) ** 2, (n[j] - o[j]).exp() * a)
        for n, o, a in zip(new, old, ADVANTAGES, strict=True)
        for j in range(len(n))
    ]
    pairs.sort(key=lambda pair: pair[0])
    kept = len(pairs)
    while fmean(square for square, _ in pairs[:kept]) > 0.05:
        kept -= 1
    return torch.stack([term * (i < kept) for i, (_, term) in enumerate(pairs)]).sum() / sum(LENGTHS)


def a3po_objective(new: Episodes, _: Episodes, old: Episodes) -> Tensor:
    """AReaL, equation 5, with log pi_prox = log pi_behav / d + (1 - 1 / d) log pi, where d is the staleness after the step."""
    total = torch.zeros((), dtype=torch.float64)
    for n, o, a, staleness in zip(new, old, ADVANTAGES, STALENESS, strict=True):
        for j in range(len(n)):
            d = staleness + 1
            p = (o[j] / d + (1 - 1 / d) * n[j]).detach()
            total = total + (p - o[j]).exp() * surrogate((n[j] - p).exp(), a, 0.1, 0.1)
    return total / sum(LENGTHS)


def kl_cov_objective(new: Episodes, _: Episodes, old: Episodes) -> Tensor:
    """KL-Cov, equations 11 and 12, with |log pi - log pi_old|: two of ten tokens have the largest covariances."""
    tokens = [(n[j], o[j], a) for n, o, a in zip(new, old, ADVANTAGES, strict=True) for j in range(len(n))]
    logprob = fmean(float(n.detach()) for n, _, _ in tokens)
    advantage = fmean(a for _, _, a in tokens)
    products = [(float(n.detach()) - logprob) * (a - advantage) for n, _, a in tokens]
    held = set(sorted(range(len(tokens)), key=lambda i: -products[i])[: len(tokens) // 5])
    terms = [(n - o).exp() * a - 0.7 * float(i in held) * (n - o).abs() for i, (n, o, a) in enumerate(tokens)]
    return torch.stack(terms).sum() / sum(LENGTHS)


def clip_cov_objective(new: Episodes, _: Episodes, old: Episodes) -> Tensor:
    """Clip-Cov, equations 9 and 10, with PPO's clip, where all between the bounds are drawn."""
    tokens = [(n[j], o[j], a) for n, o, a in zip(new, old, ADVANTAGES, strict=True) for j in range(len(n))]
    logprob = fmean(float(n.detach()) for n, _, _ in tokens)
    advantage = fmean(a for _, _, a in tokens)
    terms = [
        surrogate((n - o).exp(), a, 0.2, 0.2)
        * (not 0.1 <= (float(n.detach()) - logprob) * (a - advantage) <= 0.5)
        for n, o, a in tokens
    ]
    return torch.stack(terms).sum() / sum(LENGTHS)


OBJECTIVES: dict[str, tuple[dict[str, Any], Callable[[Episodes, Episodes, Episodes], Tensor]]] = {
    "dapo": ({"type": "dapo", "importance_cap": UNBOUNDED}, dapo_objective),
    "reinforce++": ({"type": "reinforce++", "importance_cap": UNBOUNDED, "clip_high": 0.28}, dapo_objective),
    "grpo": (
        {"type": "grpo", "importance_cap": UNBOUNDED, "clip_high": 0.2, "average": "sequence"},
        grpo_objective,
    ),
    "dr_grpo": ({"type": "dr_grpo", "importance_cap": UNBOUNDED, "length": 9}, dr_grpo_objective),
    "rloo": ({"type": "rloo", "correction": "none"}, rloo_objective),
    "gspo": ({"type": "gspo", "clip_low": 0.005, "clip_high": 0.005}, gspo_objective),
    "cispo": ({"type": "cispo", "importance_cap": 1.3}, cispo_objective),
    "ppo": (
        {"type": "ppo", "importance_cap": UNBOUNDED, "clip_low": 0.1, "clip_high": 0.1},
        decoupled_objective,
    ),
    "a3po": (
        {"type": "a3po", "importance_cap": UNBOUNDED, "clip_low": 0.1, "clip_high": 0.1},
        a3po_objective,
    ),
    "sapo": (
        {"type": "sapo", "temperature_positive": 2.0, "temperature_negative": 3.0},
        sapo_objective,
    ),
    "gmpo": ({"type": "gmpo", "clip_low": 0.3, "clip_high": 0.2}, gmpo_objective),
    "dppo": (
        {"type": "dppo", "importance_cap": UNBOUNDED, "bound_low": 0.02, "bound_high": 0.02},
        dppo_objective(lambda old, new: abs(new - old)),
    ),
    "dppo, kl": (
        {
            "type": "dppo",
            "divergence": "kl",
            "importance_cap": UNBOUNDED,
            "bound_low": 0.02,
            "bound_high": 0.02,
        },
        dppo_objective(binary_kl),
    ),
    "opo": ({"type": "opo", "correction": "none"}, opo_objective),
    "m2po": ({"type": "m2po", "second_moment": 0.05}, m2po_objective),
    "gdpo": (
        {
            "type": "gdpo",
            "importance_cap": UNBOUNDED,
            "clip_high": 0.28,
            "components": {"right": 1.0, "short": 0.5},
        },
        dapo_objective,
    ),
    "reinforce": ({"type": "reinforce", "correction": "none", "initial": 0.25}, rloo_objective),
    "kl_cov": (
        {"type": "kl_cov", "importance_cap": UNBOUNDED, "share": 0.2, "coef": 0.7},
        kl_cov_objective,
    ),
    "clip_cov": (
        {"type": "clip_cov", "importance_cap": UNBOUNDED, "share": 1.0, "low": 0.1, "high": 0.5},
        clip_cov_objective,
    ),
}


def test_every_algorithm_has_its_formula_here() -> None:
    assert {settings["type"] for settings, _ in OBJECTIVES.values()} == REGISTRY.keys()


@pytest.mark.parametrize("share", [0.01, 0.2, 1.0])
def test_clip_cov_leaves_out_its_share_of_the_tokens_between_the_bounds(share: float) -> None:
    generator = torch.Generator().manual_seed(1)
    logprobs, advantages = torch.randn(2, 20, dtype=torch.float64, generator=generator)
    products = (logprobs - logprobs.mean()) * (advantages - advantages.mean())
    between = (products >= 0.1) & (products <= 1.0)
    assert 4 < between.sum() < 20
    algorithm = ClipCovSettings(share=share, low=0.1, high=1.0, clip_low=1, clip_high=math.inf).create()
    ints, order = torch.zeros(20, dtype=torch.int64), torch.randperm(20, generator=generator)
    found = algorithm.statistics(StepTokens(logprobs, logprobs, advantages, ints))
    again = (each[order] for each in (logprobs, logprobs, advantages, ints))
    assert algorithm.statistics(StepTokens(*again)) == found
    given = (logprobs, ints.double(), logprobs, advantages, torch.ones(20), ints, ints, ints, 1)
    outside = algorithm.importance(TokenBatch(*given, statistics=found)).outside
    assert not (outside & ~between).any()
    assert int(outside.sum()) == min(int(between.sum()), max(1, int(share * 20)))


UNCLIPPED = ("rloo", "cispo", "sapo", "opo", "reinforce", "kl_cov")


@pytest.mark.parametrize("name", OBJECTIVES)
def test_the_gradient_is_that_of_the_papers_objective(name: str) -> None:
    settings, objective = OBJECTIVES[name]
    trained, proximal, recorded = samples()
    expected = torch.autograd.grad(-objective(trained, proximal, recorded), trained)
    found = gradient_of(algorithm_of(**settings), with_proximal=name == "ppo")
    assert any(bool((e == 0).any()) for e in expected) or name in UNCLIPPED, "something is clipped"
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("name", OBJECTIVES)
def test_the_gradients_of_micro_batches_add_up(name: str) -> None:
    algorithm = algorithm_of(**OBJECTIVES[name][0])
    whole, parts = gradient_of(algorithm), gradient_of(algorithm, split=2)
    for ours, theirs in zip(parts, whole, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-14)


def product(new: Tensor, old: Tensor) -> float:
    return math.exp(sum(float(a - b) for a, b in zip(new, old, strict=True)))


CORRECTED: dict[str, tuple[dict[str, Any], Callable[[Tensor, Tensor, int], float]]] = {
    "none": ({"correction": "none"}, lambda n, o, j: 1.0),
    "tis_token": (
        {"importance_floor": 0.9, "importance_cap": 1.1},
        lambda n, o, j: min(max(math.exp(float(n[j] - o[j])), 0.9), 1.1),
    ),
    "tis_sequence": (
        {"correction": "tis_sequence", "importance_floor": 0.9, "importance_cap": 1.5},
        lambda n, o, j: min(max(product(n, o), 0.9), 1.5),
    ),
    "icepop": (
        {"correction": "icepop", "importance_floor": 0.8, "importance_cap": 1.2},
        lambda n, o, j: r if 0.8 <= (r := math.exp(float(n[j] - o[j]))) <= 1.2 else 0.0,
    ),
    "mask_token": (
        {"correction": "none", "mask_token": [0.8, 1.2]},
        lambda n, o, j: float(0.8 <= math.exp(float(n[j] - o[j])) <= 1.2),
    ),
    "mask_sequence": (
        {"correction": "none", "mask_sequence": [0.7, 1.4]},
        lambda n, o, j: float(0.7 <= product(n, o) <= 1.4),
    ),
    "mask_geometric": (
        {"correction": "none", "mask_geometric": [0.9, 1.1]},
        lambda n, o, j: float(0.9 <= product(n, o) ** (1 / len(n)) <= 1.1),
    ),
}


@pytest.mark.parametrize("name", CORRECTED)
def test_a_correction_weighs_each_token_by_its_formula(name: str) -> None:
    settings, weight = CORRECTED[name]
    trained, _, recorded = samples()
    expected = [
        torch.tensor([-weight(n, o, j) * a / len(LENGTHS) for j in range(len(n))], dtype=torch.float64)
        for n, o, a in zip([t.detach() for t in trained], recorded, ADVANTAGES, strict=True)
    ]
    found = gradient_of(algorithm_of(type="rloo", **settings))
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-12)
    if name != "none":
        plain = gradient_of(algorithm_of(type="rloo", correction="none"))
        assert not all(map(torch.equal, found, plain)), "it acts"


def divided(algorithm: Algorithm, new: Episodes, per_token: Callable[[int, Tensor], Tensor]) -> Tensor:
    """A term of the loss by episode and its log-probabilities, averaged as the algorithm averages."""
    every = [per_token(i, n) for i, n in enumerate(new)]
    if algorithm.sequence_mean:
        return torch.stack([term.mean() for term in every]).mean()
    return torch.cat(every).sum() / algorithm.normalizer(sum(LENGTHS), len(LENGTHS))


TERMS = {name: settings for name, (settings, _) in OBJECTIVES.items()} | {
    f"dapo, {name}": {"type": "dapo", **settings} for name, (settings, _) in CORRECTED.items()
}
"""Everything that weighs or masks the policy term."""


@pytest.mark.parametrize("name", TERMS)
@pytest.mark.parametrize("cap", [1.15, UNBOUNDED])
def test_the_kl_term_has_the_ratio_of_the_token_whatever_weighs_or_masks_the_policy(
    name: str, cap: float
) -> None:
    """Its gradient is that of ratio x k3 with the ratio differentiated, scaled down where the ratio is above the cap."""
    coef, ppo = 0.3, name == "ppo"
    trained, _, recorded = samples()
    shifts = torch.randn(sum(LENGTHS), dtype=torch.float64, generator=torch.Generator().manual_seed(4))
    reference = [r + shift for r, shift in zip(recorded, shifts.split(LENGTHS), strict=True)]
    plain = gradient_of(algorithm_of(**TERMS[name]), with_proximal=ppo)
    algorithm = algorithm_of(**TERMS[name], kl_coef=coef, kl_cap=cap)
    found = gradient_of(algorithm, with_proximal=ppo, reference=reference)

    def term(i: int, new: Tensor) -> Tensor:
        ratio, gap = (new - recorded[i]).exp(), reference[i] - new
        share = ratio.detach().clamp(max=cap) / ratio.detach()
        return coef * share * ratio * (gap.exp() - gap - 1)

    expected = torch.autograd.grad(divided(algorithm, trained, term), trained)
    assert all(bool((e != 0).all()) for e in expected)
    for ours, policy, theirs in zip(found, plain, expected, strict=True):
        torch.testing.assert_close(ours - policy, theirs, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("name", TERMS)
def test_the_expected_kl_gradient_is_that_of_the_divergence_between_the_policies(name: str) -> None:
    """Every episode of two tokens of a vocabulary of five, each as often as the sampler draws it, against
    KL(trained || reference) itself."""
    generator = torch.Generator().manual_seed(8)
    logits, sampler, reference = (
        0.7 * torch.randn(5, dtype=torch.float64, generator=generator) for _ in range(3)
    )
    drawn, initial = sampler.log_softmax(0), reference.log_softmax(0)
    logits.requires_grad_()
    algorithm = algorithm_of(**{**TERMS[name], "kl_coef": 0.3, "kl_cap": UNBOUNDED})
    total = torch.zeros((), dtype=torch.float64)
    weight = 0.5 if algorithm.sequence_mean else 1.0
    for pair in itertools.product(range(5), repeat=2):
        tokens = torch.tensor(pair)
        loss = algorithm.loss(TokenBatch(
            logprobs=logits.log_softmax(0)[tokens], entropy=torch.zeros(2), recorded=drawn[tokens],
            advantages=torch.zeros(2, dtype=torch.float64), weights=torch.full((2,), weight), episodes=1,
            sequences=torch.zeros(2, dtype=torch.int64), reference=initial[tokens], ids=tokens,
            staleness=torch.zeros(2, dtype=torch.int64), statistics=NONE_OUTSIDE,
        ))  # fmt: skip
        total = total + drawn[tokens].sum().exp() * loss.total
    (found,) = torch.autograd.grad(total, logits)
    new = logits.log_softmax(0)
    (expected,) = torch.autograd.grad(0.3 * (new.exp() * (new - initial)).sum(), logits)
    torch.testing.assert_close(found, 2 * weight * expected, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("name", TERMS)
def test_the_entropy_bonus_counts_each_context_once_whatever_weighs_or_masks_the_policy(name: str) -> None:
    algorithm = algorithm_of(**TERMS[name], entropy_coef=0.2)
    entropy = torch.ones(sum(LENGTHS), dtype=torch.float64, requires_grad=True)
    gradient_of(algorithm, with_proximal=name == "ppo", entropy=entropy)
    expected = torch.autograd.grad(
        -0.2 * divided(algorithm, [*entropy.split(LENGTHS)], lambda _, bonus: bonus), entropy
    )[0]
    assert entropy.grad is not None
    torch.testing.assert_close(entropy.grad / algorithm.normalizer(sum(LENGTHS), len(LENGTHS)), expected)


@pytest.mark.parametrize("name", CORRECTED)
def test_corrections_of_sequences_need_whole_episodes(name: str) -> None:
    whole = name in ("tis_sequence", "mask_sequence", "mask_geometric")
    assert algorithm_of(type="dapo", **CORRECTED[name][0]).whole_episodes == whole
    assert algorithm_of(type="gspo").whole_episodes


EPSILON = 1e-4
"""What the deviation of rewards is raised by, as in TRL's GRPOTrainer."""
REWARDS = ((1.0, 0.0, 0.5, 0.5), (2.0, -1.0), (0.3, 0.1 + 0.2), (4.0,))


def lengths_of(group: Sequence[float]) -> list[int]:
    return [3 + 5 * i for i in range(len(group))]


def rewards_of(group: Sequence[float]) -> Rewards:
    values = torch.tensor(group, dtype=torch.float64)
    staleness = torch.zeros(len(group), dtype=torch.int64)
    return Rewards(
        values, torch.tensor(lengths_of(group)), staleness, {"right": values, "short": short_of(values)}
    )


def short_of(values: Tensor) -> Tensor:
    """A component that differs in groups of equal rewards, too."""
    return values.flip(0) * values.new_tensor([1.0, -2.0, 3.0, 0.5]).repeat(3)[: len(values)]


def by_hand(name: str, groups: Sequence[Sequence[float]]) -> list[list[float]]:
    if name == "reinforce++":
        every = [reward for group in groups for reward in group]
        return [[(r - fmean(every)) / (pstdev(every) + EPSILON) for r in group] for group in groups]
    if name == "gdpo":
        parts = [(group, short_of(torch.tensor(group, dtype=torch.float64)).tolist()) for group in groups]
        sums = [
            [w + 0.5 * v for w, v in zip(standard(right), standard(short), strict=True)]
            for right, short in parts
        ]
        every = [value for group in sums for value in group]
        return [[(v - fmean(every)) / (pstdev(every) + EPSILON) for v in group] for group in sums]
    if name == "reinforce":
        return [[r - 0.25 for r in group] for group in groups]
    if name == "opo":
        sums = [sum(r * n for r, n in zip(group, lengths_of(group), strict=True)) for group in groups]
        return [
            [r - total / sum(lengths_of(group)) for r in group]
            for group, total in zip(groups, sums, strict=True)
        ]
    if name == "rloo":
        return [
            [r - fmean([*group[:i], *group[i + 1 :]]) if len(group) > 1 else 0.0 for i, r in enumerate(group)]
            for group in groups
        ]
    if name == "dr_grpo":
        return [[r - fmean(group) for r in group] for group in groups]
    return [standard(group) for group in groups]


def standard(group: Sequence[float]) -> list[float]:
    return [(r - fmean(group)) / (pstdev(group) + EPSILON) for r in group]


@pytest.mark.parametrize("name", OBJECTIVES)
def test_advantages_are_those_of_the_paper(name: str) -> None:
    algorithm = algorithm_of(**OBJECTIVES[name][0])
    found = algorithm.advantages([rewards_of(group) for group in REWARDS], {})
    for ours, theirs in zip(found, by_hand(name, REWARDS), strict=True):
        assert ours.tolist() == pytest.approx(theirs, abs=1e-12)
    if name not in ("reinforce++", "reinforce", "gdpo"):
        assert found[2].tolist() == [0.0, 0.0], "rounding gives no advantage"
    assert algorithm.scope == ("batch" if name in ("reinforce++", "gdpo") else "group")


@pytest.mark.parametrize("horizon", [2.0, UNBOUNDED])
def test_a_running_baseline_is_the_mean_reward_of_earlier_steps(horizon: float) -> None:
    algorithm = algorithm_of(type="reinforce", horizon=horizon)
    state: State = {}
    means, baseline = [], 0.0
    for step in ([REWARDS[0], REWARDS[3]], [REWARDS[1]], [REWARDS[2]]):
        groups = [rewards_of(group) for group in step]
        found = torch.cat(algorithm.advantages(groups, state))
        assert found.tolist() == pytest.approx([r - baseline for group in step for r in group])
        state = algorithm.next_state(groups, state)
        means.append(fmean(r for group in step for r in group))
        baseline = fmean(means) if horizon == UNBOUNDED or len(means) < 3 else (baseline + means[-1]) / 2


def test_equal_rewards_with_other_components_teach() -> None:
    ones, (right, short) = torch.ones(2, dtype=torch.float64), torch.eye(2, dtype=torch.float64)
    rewards = Rewards(ones, ones, ones, {"right": right, "short": short})
    (found,) = algorithm_of(type="gdpo", components={"right": 2.0, "short": 1.0}).advantages([rewards], {})
    assert found.tolist() == pytest.approx([1.0, -1.0], rel=1e-3)


def test_a_group_baseline_is_taken_off_before_the_batch_is_normalized() -> None:
    found = algorithm_of(type="reinforce++", group_baseline=True).advantages(
        [rewards_of(group) for group in REWARDS], {}
    )
    centered = [[r - fmean(group) for r in group] for group in REWARDS]
    deviation = pstdev([value for group in centered for value in group]) + EPSILON
    for ours, theirs in zip(found, centered, strict=True):
        assert ours.tolist() == pytest.approx([value / deviation for value in theirs], abs=1e-12)


SIZES = st.sampled_from([0.0, 1e-300, 1e-200, 5.6e-17, 1e-7, 1e-6, 1e-3, 0.5, 1.0, 1e6, 1e15, 1e150])


@st.composite
def groups_of_every_size(draw: st.DrawFn) -> list[float]:
    """Rewards with an offset, and a spread that may be far below or above it."""
    offset, spread = draw(SIZES), draw(SIZES)
    steps = draw(st.lists(st.integers(-8, 8), min_size=1, max_size=9))
    return [offset + spread * step / 8 for step in steps]


@given(groups_of_every_size())
@example([0.0] * 7 + [5.6e-17])
@example([0.5, 0.5, 0.5, 0.5000006])
@example([0.0, 1e-200])
@example([0.0, 1e200])
@example([1e6, 1e6 + 1.0])
@example([-1e308, 1e308, 1e308])
def test_advantages_are_exact_for_rewards_of_every_size(rewards: list[float]) -> None:
    """Against decimals of 700 digits, in which nothing is rounded, vanishes or overflows."""
    exact = [Decimal(reward) for reward in rewards]
    with localcontext(prec=700):
        size = max(Decimal(1), *map(abs, exact))
        mean = sum(exact) / len(exact)
        centered = [reward - mean for reward in exact]
        deviation = (sum(value * value for value in centered) / len(exact)).sqrt()
        equal = len(exact) < 2 or max(exact) - min(exact) <= size / 2**20
        expected = [0.0 if equal else float(value / (deviation + Decimal("1e-4"))) for value in centered]
    (found,) = group_mean([rewards_of(rewards)], {}, normalize_std=True)
    # An offset of 2**20 times the spread leaves 33 of the 53 bits.
    assert found.tolist() == pytest.approx(expected, rel=2**-30, abs=2**-30)
    assert (found == 0).all() or not equal


@pytest.mark.parametrize("name", OBJECTIVES)
@pytest.mark.parametrize("wrong", [math.nan, math.inf])
def test_a_reward_that_is_not_finite_is_not_hidden_among_equal_ones(name: str, wrong: float) -> None:
    algorithm = algorithm_of(**OBJECTIVES[name][0])
    (found,) = algorithm.advantages([rewards_of([1.0, wrong, 1.0])], {})
    assert not found.isfinite().all()
