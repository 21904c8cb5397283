"""Advantages of calls, against the formulas written as loops, and against the exact gradient of a small problem."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from headgate.types import ABANDONED, CRASHED_ATTEMPT, Episode, Group, Node
from tests.unit.trainer.runs import offline_settings
from tests.unit.trainer.trees import prompt, sampled
from trainer.algorithms import Rewards, State
from trainer.algorithms.gdpo import GdpoSettings
from trainer.algorithms.grpo import GrpoSettings
from trainer.config.batch import CreditSettings
from trainer.config.settings import Settings
from trainer.data import credit
from trainer.data.batch import Batch
from trainer.data.tree import Credit
from trainer.errors import ConfigError, FeedBroken

NORMALIZED = GrpoSettings().create()
CENTERED = GrpoSettings(normalize_std=False).create()


def episode(
    name: str, own: float, *calls: tuple[float | None, int, str], masks: Sequence[str] = ()
) -> Episode:
    """An episode of calls, each (posted, tokens, finish reason), which alternate with prompts; its nodes have indices 0, 1, ...

    Its reward is what was posted on it and on its calls, as the gateway adds it.
    """
    nodes: list[Node] = []
    for i, (posted, tokens, finish) in enumerate(calls):
        parent = len(nodes) - 1
        nodes.append(prompt(len(nodes), parent, len(nodes[parent].ids) if nodes else 0, [1, 2]))
        node = sampled(
            len(nodes), len(nodes) - 1, 2, [3] * tokens, mask_reason=masks[i] if i < len(masks) else ""
        )
        nodes.append(replace(node, reward=posted, finish_reason=finish))
    return Episode(name, own + sum(posted or 0.0 for posted, _, _ in calls), tuple(nodes))


def turns(*posted: float | None) -> Iterator[tuple[float | None, int, str]]:
    return ((value, 2, "stop") for value in posted)


def credits_of(
    groups: Sequence[Group], algorithm: Any, settings: CreditSettings, divergences: Any = None
) -> list[list[Credit]]:
    """The advantages of nodes, by index, for each episode of each group."""
    found = credit.compare(groups, algorithm.reward_kl, settings, divergences)
    return found.credits(algorithm.advantages(found.rewards, {}))


def group(*episodes: Episode) -> Group:
    return Group("g", "t", 0, episodes)


def by_call(members: Group, algorithm: Any = CENTERED, **settings: Any) -> list[list[float]]:
    """The advantages of each episode's calls, in order."""
    given = CreditSettings.model_validate({"level": "call", **settings})
    (found,) = credits_of([members], algorithm, given)
    return [
        [credits[n.index] for n in credit.calls(e)]
        for e, credits in zip(members.episodes, found, strict=True)
    ]


# By episode


def test_by_default_all_of_an_episode_has_the_advantage_of_its_reward() -> None:
    rng = np.random.default_rng(1)
    members = [
        group(*(episode(f"{i}", float(rng.normal()), *turns(0.1, None)) for i in range(5))),
        group(episode("none", 0.3), *(episode(f"{i}", float(i), *turns(0.7)) for i in range(2))),
    ]
    found = credits_of(members, NORMALIZED, CreditSettings())
    for one, advantages in zip(members, found, strict=True):
        rewards = torch.tensor([e.reward for e in one.episodes], dtype=torch.float64)
        whole = torch.ones(len(rewards))
        (expected,) = NORMALIZED.advantages([Rewards(rewards, whole, whole)], {})
        assert advantages == [
            dict.fromkeys((n.index for n in e.nodes), value)
            for e, value in zip(one.episodes, expected.tolist(), strict=True)
        ]
        assert credit.masked(one, CreditSettings()) is one


class WholeBatch:
    """An algorithm that must see the rewards of all groups together: centered over the batch."""

    reward_kl = 0.0

    def advantages(self, groups: Sequence[Rewards], state: State) -> list[torch.Tensor]:
        mean = torch.cat([group.values for group in groups]).mean()
        return [group.values - mean for group in groups]


def test_an_algorithm_of_the_whole_batch_receives_all_groups() -> None:
    members = [
        group(episode("a", 1.0, *turns(0.0)), episode("b", 2.0)),
        group(episode("c", 6.0, *turns(0.0))),
    ]
    found = credits_of(members, WholeBatch(), CreditSettings())
    assert found == [[{0: -2.0, 1: -2.0}, {}], [{0: 3.0, 1: 3.0}]]


# By call


@pytest.mark.parametrize("discount", [1.0, 0.9, 0.0])
@pytest.mark.parametrize("normalize", [True, False])
def test_the_returns_of_k_th_calls_are_compared(discount: float, normalize: bool) -> None:
    """Loops over the formulas: rewards to go, then mean and standard deviation over those episodes that came so far."""
    rng = np.random.default_rng(7)
    own = [float(rng.normal()) for _ in range(6)]
    posted = [
        [float(rng.normal()) if rng.random() < 0.7 else None for _ in range(rng.integers(0, 5))] for _ in own
    ]
    members = group(
        *(episode(f"{i}", o, *turns(*p)) for i, (o, p) in enumerate(zip(own, posted, strict=True)))
    )
    rewards = [[value or 0.0 for value in p] for p in posted]
    for i, values in enumerate(rewards):
        if values:
            values[-1] += own[i]
    expected: list[list[float]] = []
    for i, values in enumerate(rewards):
        expected.append([])
        for k in range(len(values)):
            to_go = [
                sum(discount ** (j - k) * other[j] for j in range(k, len(other)))
                for other in rewards
                if len(other) > k
            ]
            mine = sum(discount ** (j - k) * values[j] for j in range(k, len(values)))
            mean = math.fsum(to_go) / len(to_go)
            spread = math.sqrt(math.fsum((x - mean) ** 2 for x in to_go) / len(to_go))
            scale = spread + 1e-4 if normalize else 1.0
            expected[i].append((mine - mean) / scale if len(to_go) > 1 else 0.0)
    found = by_call(members, NORMALIZED if normalize else CENTERED, discount=discount)
    assert sorted(map(len, found)) != [0] * 6
    for one, other in zip(found, expected, strict=True):
        assert one == pytest.approx(other, rel=1e-9, abs=1e-12)


def test_rewards_that_cancel_but_for_rounding_give_no_advantage() -> None:
    """The gateway adds rewards from the first call on, returns are added from the last: 0.6000000000000001 and 0.6."""
    posted = [0.1, 0.2, 0.3]
    assert sum(posted) != sum(reversed(posted))
    one = episode("a", 0.0, *turns(*posted, 0.0))
    other = episode("b", 0.0, *turns(0.1, 0.2, 0.2, 0.0, 0.0))
    found = by_call(group(one, other), NORMALIZED)
    full = 0.05 / (0.05 + 1e-4)
    assert found[0] == pytest.approx([full, full, full, 0.0], abs=1e-9)
    assert found[1] == pytest.approx([-full, -full, -full, 0.0, 0.0], abs=1e-9)


def test_unused_turns_are_not_calls_and_rewards_posted_elsewhere_count_at_the_end() -> None:
    """An abandoned turn and a crashed attempt are not counted; a turn of a doubtful version is. A reward on a call to another
    model is in the episode's sum alone."""
    one = episode(
        "a", 0.0, *turns(0.0, 0.0, 1.0, 2.0), masks=[CRASHED_ATTEMPT, ABANDONED, "unconfirmed_version"]
    )
    other = replace(episode("b", 0.0, *turns(5.0, 1.0)), reward=16.0)
    assert by_call(group(one, other)) == [[-6.5, -4.5], [6.5, 4.5]]


def test_the_divergence_of_a_call_is_taken_off_its_reward() -> None:
    """`kl = "k1"`: 0.5 times the divergence of the call and of later ones; of an episode, that of all its nodes."""
    algorithm = GrpoSettings(normalize_std=False, kl="k1", kl_coef=0.5).create()
    members = group(episode("a", 0.0, *turns(1.0, 1.0)), episode("b", 0.0, *turns(1.0, 1.0)))
    divergences = [[{1: 2.0, 3: 4.0}, {1: 0.5}]]
    # Returns: a has 2 - 3 and 1 - 2, b has 2 - 0.25 and 1.
    (found,) = credits_of([members], algorithm, CreditSettings(level="call"), divergences)
    assert found == [{1: -1.375, 3: -1.0}, {1: 1.375, 3: 1.0}]
    (found,) = credits_of([members], algorithm, CreditSettings(), divergences)
    assert found == [dict.fromkeys(range(4), -1.375), dict.fromkeys(range(4), 1.375)]


# The bias of baselines by turn

CONTINUES, FIRST = 0.6, 0.3
"""The policy: after the first call it goes on with this probability; then its second call takes the first of two actions."""
GOES_ON, STOPS, SECOND = 0.4, 1.0, (2.0, 0.5)
"""Rewards: of the first call if the episode goes on, of the episode if it stops, and of the second call's two actions."""
LIVES = {  # what a member does: its probability and the rewards of its calls
    "stop": (1 - CONTINUES, [STOPS]),
    "first": (CONTINUES * FIRST, [GOES_ON, SECOND[0]]),
    "second": (CONTINUES * (1 - FIRST), [GOES_ON, SECOND[1]]),
}


def expected_gradients(advantages_of: Any) -> tuple[float, float]:
    """The expected gradient of sum over members and calls of advantage x log-probability, by the logits of the two choices.

    Over all groups of three members, each with its probability: no sampling.
    """
    total = [0.0, 0.0]
    for lives in itertools.product(LIVES, repeat=3):
        chance = math.prod(LIVES[life][0] for life in lives)
        for life, advantages in zip(lives, advantages_of([LIVES[life][1] for life in lives]), strict=True):
            total[0] += chance * advantages[0] * ((life != "stop") - CONTINUES)
            if life != "stop":
                total[1] += chance * advantages[1] * ((life == "first") - FIRST)
    return total[0], total[1]


def test_a_baseline_for_each_turn_does_not_pay_for_going_on_or_for_stopping() -> None:
    """Against the derivatives of the expected reward by hand. Of a member's n - 1 others, only those that came so far count.

    If each call's own reward were centered by its turn first and then summed (verl#7244), who goes on would be charged with one
    more baseline: the test sees that, too.
    """
    second = FIRST * SECOND[0] + (1 - FIRST) * SECOND[1]
    by_continuing = CONTINUES * (1 - CONTINUES) * (GOES_ON + second - STOPS)
    by_first = FIRST * (1 - FIRST) * (SECOND[0] - SECOND[1])
    with_baseline = sum(  # of those that come so far, all but one
        math.comb(3, n) * CONTINUES**n * (1 - CONTINUES) ** (3 - n) * max(0, n - 1) for n in range(4)
    )

    def ours(rewards: list[list[float]]) -> list[list[float]]:
        return by_call(group(*(episode(f"{i}", 0.0, *turns(*r)) for i, r in enumerate(rewards))))

    assert expected_gradients(ours) == pytest.approx((2 * by_continuing, with_baseline * by_first), abs=1e-12)

    def centered_first(rewards: list[list[float]]) -> list[list[float]]:
        means = [float(np.mean([r[k] for r in rewards if len(r) > k] or [0.0])) for k in range(2)]
        return [
            [sum(x - m for x, m in list(zip(r, means, strict=False))[k:]) for k in range(len(r))]
            for r in rewards
        ]

    wrong, _ = expected_gradients(centered_first)
    assert wrong < -0.1 < 0.1 < 2 * by_continuing


# Truncated and overlong episodes


def test_a_truncated_episode_is_masked_whole() -> None:
    members = group(
        episode("cut", 1.0, (None, 3, "length"), (0.5, 2, "stop")),
        episode("whole", 2.0, (None, 3, "stop"), (None, 2, "tool_calls")),
        episode("crashed", 2.0, (None, 3, "length"), (None, 2, "stop"), masks=[CRASHED_ATTEMPT]),
        episode("old", 2.0, (None, 3, "")),
    )
    masked = credit.masked(members, CreditSettings(truncated="mask"))
    assert [[n.mask_reason for n in e.nodes if n.sampled] for e in masked.episodes] == [
        ["overlong", "overlong"], ["", ""], [CRASHED_ATTEMPT, ""], [""],
    ]  # fmt: skip
    assert all(n.mask_reason == "" for e in masked.episodes for n in e.nodes if not n.sampled)
    advantages = [credits_of([g], NORMALIZED, CreditSettings()) for g in (members, masked)]
    assert advantages[0] == advantages[1], "its reward still counts in the baseline"


def test_by_call_only_the_truncated_call_is_masked() -> None:
    members = group(episode("cut", 1.0, (None, 3, "length"), (0.5, 2, "stop")))
    masked = credit.masked(members, CreditSettings(level="call", truncated="mask"))
    assert [n.mask_reason for n in masked.episodes[0].nodes] == ["", "overlong", "", ""]


def test_a_truncated_episode_is_penalized_once_and_a_truncated_call_by_itself() -> None:
    members = group(
        episode("cut", 1.0, (None, 3, "length"), (None, 2, "length")),
        episode("whole", 1.0, *turns(None, None)),
    )
    given = CreditSettings(truncated="penalize", penalty=0.5)
    (found,) = credits_of([members], CENTERED, given)
    assert found == [dict.fromkeys(range(4), -0.25), dict.fromkeys(range(4), 0.25)]
    assert by_call(members, truncated="penalize", penalty=0.5) == [[-0.5, -0.25], [0.5, 0.25]]
    assert by_call(members) == [[0.0, 0.0], [0.0, 0.0]]


@pytest.mark.parametrize(
    ("tokens", "off"),
    [(0, 0.0), (12, 0.0), (13, 0.25), (14, 0.5), (15, 0.75), (16, 1.0), (17, 1.0), (99, 1.0)],
)
def test_dapos_soft_overlong_punishment(tokens: int, off: float) -> None:
    """L_max 16, L_cache 4: 0 until 12, then ((16 - 4) - tokens) / 4, and -1 above 16."""
    given = CreditSettings(overlong_buffer=4, overlong_limit=16)
    assert credit.overlong(tokens, given) == off
    assert credit.overlong(tokens, replace_settings(given, penalty=3.0)) == 3 * off
    assert credit.overlong(tokens, CreditSettings()) == 0.0


def replace_settings(settings: CreditSettings, **values: Any) -> CreditSettings:
    return CreditSettings.model_validate(settings.model_dump() | values)


def test_the_length_that_is_punished_is_an_episodes_or_a_calls() -> None:
    """Without prompts, and without turns that no client received."""
    members = group(
        episode(
            "long", 0.0, (None, 9, "stop"), (None, 6, "stop"), (None, 50, "stop"), masks=["", "", ABANDONED]
        ),
        episode("short", 0.0, (None, 6, "stop"), (None, 6, "stop")),
    )
    (found,) = credits_of([members], CENTERED, CreditSettings(overlong_buffer=4, overlong_limit=16))
    assert {*found[0].values()} == {-0.375}
    assert {*found[1].values()} == {0.375}
    assert by_call(members, overlong_buffer=4, overlong_limit=10) == [[-0.375, 0.0], [0.375, 0.0]]


def test_a_batch_trains_calls_by_their_own_advantages_and_counts_what_it_masks() -> None:
    members = group(
        episode("a", 0.0, (3.0, 2, "stop"), (1.0, 3, "stop")),
        episode("b", 0.0, (1.0, 2, "stop"), (2.0, 4, "length")),
    )
    batch = Batch(0, CENTERED, 64, credit=CreditSettings(level="call", truncated="mask"))
    (micro,) = [*batch.add_groups([members]), *(m for mini in batch.minibatches() for m in mini.micros)]
    # Returns: 4 and 1 of a, 3 and 2 of b, whose second call is masked.
    assert sorted(micro.advantages.tolist()) == [-0.5] * (2 + 3) + [0.5] * 2
    measured = batch.measured()
    assert (measured["masked_tokens/overlong"], measured["trained_tokens"]) == (4, 7)
    assert (measured["truncated_episodes"], measured["equal_reward_groups"]) == (0.5, 0.0)


def test_an_episode_that_ended_because_the_context_was_full_is_truncated_at_its_last_call() -> None:
    full = replace(episode("a", 0.0, (None, 2, "stop"), (None, 3, "stop")), context_full=True)
    whole = episode("b", 1.0, (None, 2, "stop"))
    members = group(full, whole)
    batch = Batch(0, CENTERED, 64, credit=CreditSettings(truncated="mask"))
    list(batch.add_groups([members]))
    assert batch.truncated == 1
    masks = [
        [n.mask_reason for n in credit.calls(e)]
        for e in credit.masked(members, CreditSettings(truncated="mask")).episodes
    ]
    assert masks == [["overlong", "overlong"], [""]]
    by_turn = credit.masked(members, CreditSettings(level="call", truncated="mask"))
    assert [n.mask_reason for n in credit.calls(by_turn.episodes[0])] == ["", "overlong"]
    punished = CreditSettings(truncated="penalize", penalty=2.0)
    (found,) = credits_of([members], CENTERED, punished)
    assert {*found[0].values()} == {-1.5}


@pytest.mark.parametrize(
    ("values", "named"),
    [
        ({"discount": 0.9}, "level"),
        ({"overlong_buffer": 4}, "overlong_limit"),
        ({"overlong_buffer": 4, "overlong_limit": 3}, "overlong_limit"),
        ({"truncated": "drop"}, "truncated"),
        ({"penalty": -1.0}, "penalty"),
    ],
)
def test_settings_that_do_not_go_together_are_refused(values: dict[str, Any], named: str) -> None:
    base = {
        "run": {"dir": "d", "steps": 1},
        "gateway": {"url": "http://x"},
        "model": {"path": "m"},
        "optimizer": {"lr": 0},
    }
    assert Settings.parse(base).credit == CreditSettings()
    with pytest.raises(ConfigError, match=named):
        Settings.parse({**base, "credit": values})


def test_an_algorithm_sees_components_and_the_age_of_the_oldest_token() -> None:
    old = replace(sampled(1, 0, 2, [3, 3]), versions=np.array([5, 2], np.int32))
    members = group(
        Episode("a", 1.0, (prompt(0, -1, 0, [1, 2]), old), components={"right": 1.0}),
        Episode("b", 0.5, (), components={"right": 0.0, "short": 0.5}),
    )
    (found,) = credit.compare([members], 0.0, CreditSettings(), version=5).rewards
    assert found.staleness.tolist() == [3, 0]
    assert found.components["right"].tolist() == [1.0, 0.0]
    assert found.components["short"].isnan().tolist() == [True, False]
    (by_call,) = credit.compare([members], 0.0, CreditSettings(level="call"), version=5).rewards
    assert (by_call.staleness.tolist(), by_call.components) == ([3], {})


def test_an_episode_without_a_component_that_is_compared_is_refused() -> None:
    algorithm = GdpoSettings(components={"right": 1.0, "short": 0.5}).create()
    members = group(Episode("a", 1.0, (), components={"right": 1.0}))
    with pytest.raises(FeedBroken, match=r"episode a .* 'short' .*reported: right"):
        list(Batch(0, algorithm, 64).add_groups([members]))


@pytest.mark.parametrize(
    "more",
    [
        {"credit": {"level": "call"}},
        {"credit": {"truncated": "penalize"}},
        {"credit": {"overlong_buffer": 1, "overlong_limit": 2}},
        {"algorithm": {"kl": "k1", "kl_coef": 0.1}},
    ],
)
def test_what_changes_a_reward_is_refused_where_components_are_compared(more: dict[str, Any]) -> None:
    algorithm = {"type": "gdpo", "components": {"right": 1.0}, **more.get("algorithm", {})}
    with pytest.raises(ConfigError, match="changes the reward"):
        offline_settings(Path("m"), Path("w"), **{**more, "algorithm": algorithm})


# By branch


def tree_of(name: str, own: float, *rewards: float) -> Episode:
    """One first call; behind it three choices of one prompt, the second of which two choices of another prompt follow."""
    calls = [
        sampled(1, 0, 2, [3]),
        *(sampled(i, 2, 1, [3]) for i in (3, 4, 5)),
        *(sampled(i, 6, 1, [3]) for i in (7, 8)),
    ]
    prompts = [prompt(0, -1, 0, [1, 2]), prompt(2, 1, 1, [4]), prompt(6, 4, 1, [5])]
    posted = [replace(node, reward=r) for node, r in zip(calls, rewards, strict=True)]
    nodes = sorted([*prompts, *posted], key=lambda node: node.index)
    return Episode(name, own + sum(rewards), tuple(nodes))


def test_a_branch_is_compared_with_its_siblings_and_counts_as_one_of_them() -> None:
    members = group(tree_of("a", 0.0, 1.0, 2.0, 0.0, 6.0, 8.0, 4.0), tree_of("b", 5.0, 0, 0, 0, 0, 0, 0))
    (found,) = credits_of([members], CENTERED, CreditSettings(level="branch", discount=0.5))
    # a: the two of the last prompt return 8 and 4, the three before 2, 0 + (8 + 4) / 4 and 6, and the first 1 + 11 / 6.
    # b: its own reward is its last call's, of which the one before earns a quarter, and the first a twenty-fourth.
    first = (1 + 11 / 6 - 5 / 24) / 2
    assert found[0] == pytest.approx({1: first, 3: 2 - 11 / 3, 4: 3 - 11 / 3, 5: 6 - 11 / 3, 7: 2.0, 8: -2.0})
    assert found[1] == pytest.approx({1: -first, 3: -5 / 12, 4: 5 / 4 - 5 / 12, 5: -5 / 12, 7: -2.5, 8: 2.5})


def compacted(name: str, own: float, quoted: slice) -> Episode:
    """A reply, a summary of it, and a conversation that begins with a part of the summary."""
    summary = sampled(3, 2, 2, list(range(50, 65)))
    nodes = (
        prompt(0, -1, 0, [1, 2]), sampled(1, 0, 2, [3] * 12), prompt(2, 1, 12, [4, 5]), summary,
        prompt(4, 0, 1, [7, *summary.ids[quoted].tolist(), 9]), sampled(5, 4, 1 + len(summary.ids[quoted]), [3]),
    )  # fmt: skip
    return Episode(name, own, nodes)


def test_a_summary_is_credited_with_what_the_conversation_after_it_returns() -> None:
    """The first two calls return what is earned after the seam; without the quotation, only the last one's path does."""
    settings = CreditSettings(level="branch", discount=0.5)
    quoting = group(compacted("a", 8.0, slice(0, -1)), compacted("b", 0.0, slice(0, -1)))
    (found,) = credits_of([quoting], CENTERED, settings)
    assert found == [{1: 1.0, 3: 2.0, 5: 4.0}, {1: -1.0, 3: -2.0, 5: -4.0}]
    assert found == credits_of([quoting], CENTERED, CreditSettings(level="call", discount=0.5))[0]
    other = group(compacted("a", 8.0, slice(0, 5)), compacted("b", 0.0, slice(0, 5)))
    (found,) = credits_of([other], CENTERED, settings)
    assert (found[0][1], found[0][3]) == (-2.0, 0.0), "compared with the other conversation's first call"


def test_a_conversation_without_branches_is_credited_as_by_call() -> None:
    members = group(episode("a", 0.5, *turns(1.0, None, 2.0)), episode("b", 0.0, *turns(0.25, 4.0)))
    found = [
        credits_of([members], CENTERED, CreditSettings(level=level, discount=0.5))
        for level in ("call", "branch")
    ]
    assert found[0] == found[1]
