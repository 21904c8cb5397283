"""The streamed gradient is that of the whole batch, in float64, and is the same to the bit however the groups came."""

from __future__ import annotations

import copy
import random
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from headgate.kept import Kept
from headgate.types import Episode, Group, Node, TokenFlag
from tests.harness.plain_model import plain_logits
from tests.unit.trainer.runs import offline_settings
from tests.unit.trainer.trees import context_of, prompt, sampled
from trainer.algorithms.ppo import PpoSettings
from trainer.errors import FeedBroken
from trainer.model.policy import Policy
from trainer.rank_trainer import RankTrainer

CAP, LOW, HIGH, ENTROPY, KL, KL_CAP = 1.5, 0.2, 0.28, 0.03, 0.05, 3.0
EPSILON = 1e-4
"""What the standard deviation of rewards is raised by."""


def trainer_of(
    model: Path,
    work: Path,
    normalizer: str,
    tokens: int,
    entropy: float = ENTROPY,
    kl: float = KL,
    form: str = "k3",
) -> RankTrainer:
    """A trainer in float64 whose reference, if it needs one, is not its policy."""
    algorithm = {
        "type": "grpo", "average": normalizer, "importance_cap": CAP, "clip_low": LOW, "clip_high": HIGH,
        "entropy_coef": entropy, "kl_coef": kl, "kl": form, "kl_cap": KL_CAP,
    }  # fmt: skip
    given = {"optimizer": {"grad_clip": float("inf")}, "algorithm": algorithm, "batch": {"tokens": tokens}}
    trainer = RankTrainer.open(offline_settings(model, work, **given))
    torch.manual_seed(7)
    trainer.model.double()
    if isinstance(trainer._reference, Policy):
        trainer._reference.double()
    with torch.no_grad():
        for parameter in trainer.model.parameters():
            parameter.add_(0.01 * torch.randn_like(parameter))
    return trainer


def batch_of() -> list[Group]:
    """Groups of unlike size and length, with branches, temperatures, truncated distributions, masked tokens, and one that teaches
    nothing."""
    rng = np.random.default_rng(3)

    def turn(index: int, parent: int, at: int, n: int, flags: Sequence[int] | None = None) -> Node:
        node = sampled(index, parent, at, rng.integers(0, 250, n).tolist(), flags=flags, temperature=0.7)
        sets = {i: (250, 250 + i + 1, int(node.ids[i])) for i in range(0, n, 3)}
        kept = Kept.of(sets, n) if index == 3 else None
        return replace(node, logprobs=rng.uniform(-7.0, -3.0, n).astype(np.float32), kept=kept)

    groups = []
    for g, members in enumerate((3, 2, 4, 2, 3)):
        episodes = []
        for m in range(members):
            n = int(rng.integers(3, 12))
            flags = [TokenFlag.LATE, TokenFlag.ORPHANED] + [0] * (n - 2) if m == 1 else None
            nodes = (
                prompt(0, -1, 0, rng.integers(0, 250, int(rng.integers(2, 9))).tolist()),
                turn(1, 0, 2, n, flags),
                prompt(2, 1, n, [5, 6]),
                turn(3, 2, 2, 4),
                turn(4, 1, 2, 3),
                replace(turn(5, 0, 1, 2), mask_reason="abandoned"),
            )
            reward = 0.5 if g == 3 else float(rng.normal())
            # One has no token that could be trained: it counts in the baseline and among the episodes, and has no tokens.
            episodes.append(Episode(f"{g}-{m}", reward, nodes[:1] if (g, m) == (2, 3) else nodes))
        groups.append(Group(f"g{g}", f"g{g}", 0, tuple(episodes)))
    return groups


def turns_of(episode: Episode) -> list[Node]:
    return [node for node in episode.nodes if node.sampled and not node.mask_reason]


def with_advantages(groups: Sequence[Group]) -> Iterator[tuple[Episode, float]]:
    """Each episode that has turns, with the advantage that its group gives it."""
    for group in groups:
        rewards = np.array([episode.reward for episode in group.episodes])
        for episode, reward in zip(group.episodes, rewards, strict=True):
            if turns_of(episode):
                yield episode, float((reward - rewards.mean()) / (rewards.std() + EPSILON))


def gradient_of_the_sum(
    trainer: RankTrainer, groups: Sequence[Group], sequence: bool, terms: bool = True
) -> list[Tensor]:
    """Plain autograd over all trained tokens together, each node in the context that it was sampled in."""
    total = torch.zeros((), dtype=torch.float64)
    for episode, advantage in with_advantages(groups):
        losses = torch.cat(
            [token_losses(trainer, episode, node, advantage, terms) for node in turns_of(episode)]
        )
        total = total + (losses.mean() if sequence else losses.sum())
    return list(torch.autograd.grad(total, list(trainer.model.parameters())))


def divisor_of(groups: Sequence[Group], sequence: bool) -> int:
    return sum(len(group.episodes) if sequence else trained_tokens(group) for group in groups)


def trained_tokens(group: Group) -> int:
    return sum(int((node.flags == 0).sum()) for episode in group.episodes for node in turns_of(episode))


def distribution(model: Any, episode: Episode, node: Node) -> Tensor:
    """The log-probabilities of the whole vocabulary at each token of a node, by a plain forward pass."""
    ids = torch.tensor([context_of(episode, node) + node.ids.tolist()])
    rows = slice(ids.shape[1] - len(node.ids) - 1, ids.shape[1] - 1)
    scaled = plain_logits(model, ids)[0, rows] / np.float32(0.7)
    if node.kept is not None:
        ends = np.cumsum(node.kept.counts)
        for i in np.flatnonzero(node.kept.counts):
            others = torch.ones(scaled.shape[1], dtype=torch.bool)
            others[node.kept.ids[ends[i] - node.kept.counts[i] : ends[i]].tolist()] = False
            scaled = scaled.masked_fill(others & (torch.arange(len(scaled)) == i)[:, None], -torch.inf)
    return scaled.log_softmax(-1)


def picked(every: Tensor, node: Node) -> Tensor:
    return every[torch.arange(len(node.ids)), torch.from_numpy(node.ids.astype(np.int64))]


def recorded_of(node: Node) -> Tensor:
    return torch.from_numpy(node.logprobs.astype(np.float64))


def token_losses(trainer: RankTrainer, episode: Episode, node: Node, advantage: float, terms: bool) -> Tensor:
    """The policy's loss by trained token, with or without the KL term and the entropy bonus."""
    every = distribution(trainer.model, episode, node)
    logprobs, recorded = picked(every, node), recorded_of(node)
    ratio = (logprobs.detach() - recorded).exp()
    outside = ratio > 1 + HIGH if advantage > 0 else (ratio < 1 - LOW) & (advantage < 0)
    loss = -torch.where(outside, 0.0, ratio.clamp(max=CAP)) * advantage * logprobs
    if terms:
        with torch.no_grad():
            reference = picked(distribution(trainer._reference.model, episode, node), node)
        gap = reference - logprobs
        # The KL term is times the token's ratio, which is differentiated, and scaled down where it is beyond its own cap.
        kl = (ratio.clamp(max=KL_CAP) / ratio) * (logprobs - recorded).exp() * (gap.exp() - gap - 1)
        loss = loss + ENTROPY * (every.exp() * every.masked_fill(every.isinf(), 0.0)).sum(-1) + KL * kl
    return loss[torch.from_numpy(node.flags == 0)]


def streamed(
    trainer: RankTrainer, portions: Sequence[Sequence[Group]]
) -> tuple[list[Tensor], dict[str, float]]:
    """The gradient that the optimizer is given, and the step's metrics."""
    seen: list[Tensor] = []

    def look(*_: Any) -> None:
        seen.extend(p.grad.clone() for p in trainer.model.parameters())

    (adamw,) = trainer.optimizer.parts
    adamw.register_step_pre_hook(look)
    batch = trainer.begin_batch()
    for portion in portions:
        trainer.add_groups(batch, portion)
    return seen, trainer.step(batch)


def portions_of(groups: list[Group], how: str) -> list[list[Group]]:
    if how == "whole":
        return [groups]
    if how == "one by one":
        return [[group] for group in groups]
    cuts = random.Random(how)
    portions: list[list[Group]] = [[]]
    for group in groups:
        portions += [[] for _ in range(cuts.randrange(3))]
        portions[-1].append(group)
    return [*portions, []]


@pytest.mark.parametrize("tokens", [16, 40, 10_000])
@pytest.mark.parametrize("normalizer", ["token", "sequence"])
def test_the_streamed_gradient_is_that_of_the_whole_batch(
    exact_model: Path, tmp_path: Path, normalizer: str, tokens: int
) -> None:
    trainer = trainer_of(exact_model, tmp_path, normalizer, tokens)
    sequence = normalizer == "sequence"
    expected, divisor = gradient_of_the_sum(trainer, batch_of(), sequence), divisor_of(batch_of(), sequence)
    gradient, _ = streamed(trainer, portions_of(batch_of(), "one by one"))
    for ours, theirs in zip(gradient, expected, strict=True):
        torch.testing.assert_close(ours, theirs / divisor, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("normalizer", ["token", "sequence"])
def test_a_group_without_advantage_is_left_out_of_the_forward_pass_and_counted_in_the_divisor(
    exact_model: Path, tmp_path: Path, normalizer: str
) -> None:
    groups, tokens, seen = batch_of(), 40, []
    trainer = trainer_of(exact_model, tmp_path, normalizer, tokens, 0.0, 0.0)
    expected = gradient_of_the_sum(trainer, groups, normalizer == "sequence", terms=False)
    trainer.model.get_decoder().register_forward_pre_hook(
        lambda _module, _arguments, inputs: seen.append(inputs["input_ids"][0].tolist()), with_kwargs=True
    )
    gradient, measured = streamed(trainer, portions_of(groups, "one by one"))
    assert trained_tokens(groups[3]) == measured["skipped_tokens"] > 0, "the rewards of group 3 are equal"
    assert measured["trained_tokens"] == sum(map(trained_tokens, groups)) - trained_tokens(groups[3])
    divisor = divisor_of(groups, normalizer == "sequence")
    for ours, theirs in zip(gradient, expected, strict=True):
        torch.testing.assert_close(ours * divisor, theirs, rtol=1e-9, atol=1e-12)
    prompts = [groups[3].episodes[m].nodes[0].ids.tolist() for m in range(2)]
    # The probe's passes: of the old weights, of the new ones, and over each of its sequences alone.
    assert trainer.probe is not None
    last = len(seen) - 1 - len(trainer.probe.sequences)
    passes = [",".join(map(str, ["", *ids, ""])) for ids in seen[:last] if ids != seen[last]]
    assert passes
    assert not [p for p in passes for ids in prompts if ",".join(map(str, ["", *ids, ""])) in p]


def test_k1_is_taken_off_the_rewards(exact_model: Path, tmp_path: Path) -> None:
    trainer = trainer_of(exact_model, tmp_path, "token", 40, 0.0, KL, "k1")
    penalized, sums = [], []
    for group in batch_of():
        by_node = [k1_of(trainer, episode) for episode in group.episodes]
        for episode, divergence in zip(group.episodes, by_node, strict=True):
            assert trainer._reference_kl(episode, None) == pytest.approx(divergence, rel=1e-9, abs=1e-12)
        kls = [sum(divergence.values()) for divergence in by_node]
        sums += kls
        penalized.append(replace(group, episodes=tuple(
            replace(episode, reward=episode.reward - KL * kl)
            for episode, kl in zip(group.episodes, kls, strict=True)
        )))  # fmt: skip
    gradient, measured = streamed(trainer, portions_of(batch_of(), "one by one"))
    expected, without = streamed(trainer_of(exact_model, tmp_path, "token", 40, 0.0, 0.0), [penalized])
    for ours, theirs in zip(gradient, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-12)
    assert measured["kl_reference_k1"] == pytest.approx(np.mean(sums), rel=1e-9)
    assert measured["reward_mean"] != without["reward_mean"], (
        "the metric is of the rewards as they were earned"
    )
    assert measured["skipped_tokens"] == 0, "equal rewards are not equal any more"


def k1_of(trainer: RankTrainer, episode: Episode) -> dict[int, float]:
    """The sum of recorded - reference over what is trained of each node of an episode."""
    sums = {node.index: 0.0 for node in episode.nodes}
    for node in turns_of(episode):
        with torch.no_grad():
            gaps = recorded_of(node) - picked(distribution(trainer._reference.model, episode, node), node)
        sums[node.index] = float(gaps[torch.from_numpy(node.flags == 0)].sum())
    return sums


@pytest.mark.parametrize("normalizer", ["token", pytest.param("sequence", marks=pytest.mark.long)])
def test_how_the_feed_is_cut_up_changes_no_bit(tiny_model: Path, tmp_path: Path, normalizer: str) -> None:
    whole, metrics = streamed(trainer_of(tiny_model, tmp_path, normalizer, 40), [batch_of()])
    for how in ("one by one", "a", "b", "c"):
        portions = portions_of(batch_of(), how)
        gradient, again = streamed(trainer_of(tiny_model, tmp_path, normalizer, 40), portions)
        assert all(map(torch.equal, gradient, whole)), how
        assert again == metrics, how


def test_training_begins_before_the_batch_is_whole(tiny_model: Path, tmp_path: Path) -> None:
    trainer = trainer_of(tiny_model, tmp_path, "token", 40)
    batch = trainer.begin_batch()
    trainer.add_groups(batch, batch_of()[:2])
    assert any(p.grad is not None and bool(p.grad.any()) for p in trainer.model.parameters())
    trainer.discard()
    assert all(p.grad is None for p in trainer.model.parameters())


def test_a_group_that_comes_twice_is_refused(tiny_model: Path, tmp_path: Path) -> None:
    trainer = trainer_of(tiny_model, tmp_path, "token", 40)
    batch = trainer.begin_batch()
    trainer.add_groups(batch, batch_of()[:2])
    with pytest.raises(FeedBroken, match="g1"):
        trainer.add_groups(batch, batch_of()[1:])


def test_staleness_is_counted_by_trained_token(tiny_model: Path, tmp_path: Path) -> None:
    trainer = trainer_of(tiny_model, tmp_path, "token", 40)
    trainer.version = 3
    turn = replace(
        sampled(1, 0, 1, [4, 5, 6, 7, 8], flags=[0, 0, 0, 0, TokenFlag.LATE]),
        versions=np.array([1, 3, 3, 2, 0], np.int32),
    )
    group = Group("g", "t", 1, (Episode("a", 1.0, (prompt(0, -1, 0, [3]), turn)), Episode("b", 0.0, ())))
    measured = trainer.train([group])
    counts = {name: n for name, n in measured.items() if name.startswith("staleness_tokens/")}
    assert counts == {"staleness_tokens/0": 2, "staleness_tokens/1": 1, "staleness_tokens/2": 1}
    assert (measured["staleness_mean"], measured["staleness_max"]) == (0.75, 2)
    assert (measured["masked_tokens/late"], measured["trained_tokens"]) == (1, 4)


def test_an_empty_batch_makes_the_next_version_without_a_nan(tiny_model: Path, tmp_path: Path) -> None:
    trainer = trainer_of(tiny_model, tmp_path, "sequence", 80)
    before = [p.clone() for p in trainer.model.parameters()]
    measured = trainer.train([])
    assert (trainer.version, trainer.parent, trainer.steps) == (1, 0, 1)
    assert all(map(torch.equal, trainer.model.parameters(), before))
    assert all(np.isfinite(value) for value in measured.values())
    assert (measured["trained_tokens"], measured["groups"], measured["loss"]) == (0, 0, 0)


@pytest.mark.parametrize(("minibatches", "epochs"), [(2, 1), (1, 2), (2, 2)])
def test_minibatches_and_epochs_are_steps_of_their_own_around_the_weights_at_the_batchs_beginning(
    exact_model: Path, tmp_path: Path, minibatches: int, epochs: int
) -> None:
    trainer = trainer_of(exact_model, tmp_path, "token", 40, 0.0, 0.0)
    settings = PpoSettings(minibatches=minibatches, epochs=epochs, importance_cap=float("inf"))
    trainer.algorithm = settings.create()
    groups, seen = batch_of()[:3], []
    initial = copy.deepcopy(trainer.model)
    (adamw,) = trainer.optimizer.parts
    adamw.register_step_pre_hook(
        lambda *_: seen.append(
            (copy.deepcopy(trainer.model), [p.grad.clone() for p in trainer.model.parameters()])
        )
    )
    batch = trainer.begin_batch()
    for group in groups:
        trainer.add_groups(batch, [group])
        assert all(p.grad is None for p in trainer.model.parameters()), "nothing streams"
    measured = trainer.step(batch)
    assert trainer.version == 1
    assert measured["trained_tokens"] == sum(map(trained_tokens, groups))
    assert sum(batch.staleness.values()) == measured["trained_tokens"], "tokens are counted once"
    parts = [groups] if minibatches == 1 else [groups[:1], groups[1:]]
    for (weights, gradient), part in zip(seen, parts * epochs, strict=True):
        expected = torch.autograd.grad(decoupled_loss(weights, initial, part), list(weights.parameters()))
        for ours, theirs in zip(gradient, expected, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-12)


def decoupled_loss(weights: Any, initial: Any, groups: Sequence[Group]) -> Tensor:
    """AReaL's objective by plain autograd: pi_prox / pi_behav times PPO's surrogate around the initial weights."""
    terms = []
    for episode, advantage in with_advantages(groups):
        for node in turns_of(episode):
            new, proximal = (picked(distribution(model, episode, node), node) for model in (weights, initial))
            stale = (proximal - recorded_of(node)).exp().detach()
            moved = (new - proximal.detach()).exp()
            loss = -stale * torch.minimum(moved * advantage, moved.clamp(0.8, 1.2) * advantage)
            terms.append(loss[torch.from_numpy(node.flags == 0)])
    return torch.cat(terms).mean()
