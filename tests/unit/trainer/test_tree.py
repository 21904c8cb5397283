"""Token trees to rows: every sampled token is trained at most once, and what is not is counted."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headgate.types import Episode, ImageSpan, Node, TokenFlag
from tests.unit.trainer.trees import context_of, prompt, sampled
from trainer.data.images import ImageSupport
from trainer.data.packing import lay_out
from trainer.data.tree import rows_of
from trainer.errors import FeedBroken


@st.composite
def trees(draw: st.DrawFn) -> Episode:
    """Trees in which token ids are unique, so that a token can be followed through the rows."""
    nodes: list[Node] = []
    fresh = 0
    for index in range(draw(st.integers(1, 8))):
        parent = draw(st.integers(-1, index - 1))
        at = draw(st.integers(0, len(nodes[parent].ids))) if parent >= 0 else 0
        ids = list(range(fresh, fresh + draw(st.integers(1, 4))))
        fresh += len(ids)
        if draw(st.booleans()):
            flags = draw(st.lists(st.sampled_from([0, 1, 4, 16]), min_size=len(ids), max_size=len(ids)))
            reason = draw(st.sampled_from(["", "", "abandoned"]))
            node = sampled(index, parent, at, ids, flags=flags, mask_reason=reason)
            node.logprobs[draw(st.lists(st.integers(0, len(ids) - 1), max_size=2))] = np.nan
            nodes.append(node)
        else:
            nodes.append(prompt(index, parent, at, ids))
    return Episode("e", 1.0, tuple(nodes))


@given(trees())
def test_every_sampled_token_is_trained_once_or_counted_once(episode: Episode) -> None:
    rows = rows_of([(episode, {})])
    trained = [int(i) for row in rows.rows for i in row.ids[row.train]]
    assert len(trained) == len(set(trained)) == rows.trained
    total = sum(len(node.ids) for node in episode.nodes if node.sampled)
    assert rows.trained + sum(rows.masked.values()) == total


@given(trees())
def test_trained_tokens_stand_after_the_context_that_they_were_sampled_in(episode: Episode) -> None:
    owner = {int(i): (node, j) for node in episode.nodes for j, i in enumerate(node.ids)}
    for row in rows_of([(episode, {})]).rows:
        for position in np.flatnonzero(row.train):
            node, j = owner[int(row.ids[position])]
            context = context_of(episode, node) + node.ids[:j].tolist()
            assert row.ids[:position].tolist() == context
            assert node.sampled
            assert not node.mask_reason
            assert row.logprobs[position] == node.logprobs[j]
        assert row.train[-1], "nothing after the last trained token"


def test_a_branch_trains_the_shared_prefix_in_the_first_row_only() -> None:
    nodes = (
        prompt(0, -1, 0, [1, 2]),
        sampled(1, 0, 2, [3, 4]),
        prompt(2, 1, 2, [5]),
        sampled(3, 2, 1, [6]),
        sampled(4, 1, 1, [7]),
    )
    rows = rows_of([(Episode("e", 1.0, nodes), {1: 0.5, 3: 0.25, 4: -1.0})]).rows
    assert [row.ids.tolist() for row in rows] == [[1, 2, 3, 4, 5, 6], [1, 2, 3, 7]]
    assert [row.ids[row.train].tolist() for row in rows] == [[3, 4, 6], [7]]
    assert rows[0].versions.tolist() == [-1, -1, 0, 0, -1, 0]
    assert [row.advantages.tolist() for row in rows] == [[0, 0, 0.5, 0.5, 0, 0.25], [0, 0, 0, -1]]


def test_untrained_tokens_are_counted_by_reason() -> None:
    nodes = (
        prompt(0, -1, 0, [1]),
        sampled(1, 0, 1, [2, 3, 4, 5], flags=[0, TokenFlag.CONSTRAINED, TokenFlag.GREEDY, TokenFlag.LATE]),
        sampled(2, 0, 1, [6, 7], mask_reason="abandoned"),
        sampled(3, 0, 1, [8], logprob=float("nan")),
        sampled(4, -1, 0, [9]),
    )
    rows = rows_of([(Episode("e", 1.0, nodes), {})])
    assert rows.trained == 1
    masked = {"constrained": 1, "greedy": 1, "late": 1, "abandoned": 2}
    expected = {**masked, "invalid_logprob": 1, "no_context": 1}
    assert dict(rows.masked) == expected


@pytest.mark.parametrize("temperature", [0.0, 1e-50, 1e-30, 9e-7, -1.0, float("nan"), float("inf")])
def test_tokens_of_an_impossible_temperature_are_refused_unless_they_are_masked(temperature: float) -> None:
    """Divided by it, logits would have gradients that are infinite, or those of another distribution."""
    before = sampled(1, 0, 2, [3], temperature=temperature, flags=[TokenFlag.GREEDY])
    after = sampled(2, 1, 1, [4], temperature=1e-6)
    (row,) = rows_of([(Episode("e", 1.0, (prompt(0, -1, 0, [1, 2]), before, after)), {})]).rows
    assert row.temperature.tolist() == [1, 1, 1, np.float32(1e-6)]
    trained = replace(before, flags=np.zeros(1, np.uint8))
    with pytest.raises(FeedBroken, match=r"episode e, node 1: .*1e-06 is the least"):
        rows_of([(Episode("e", 1.0, (prompt(0, -1, 0, [1, 2]), trained, after)), {})])


def test_sequence_mean_weighs_episodes_the_same() -> None:
    episodes = [
        (Episode(str(n), 1.0, (prompt(0, -1, 0, [1]), sampled(1, 0, 1, range(n)))), {}) for n in (2, 5)
    ]
    rows = rows_of(episodes, sequence_mean=True).rows
    assert [float(row.weight * row.train.sum()) for row in rows] == [1.0, 1.0]


def test_no_token_of_an_episode_with_images_is_trained_and_all_are_counted() -> None:
    seen = replace(prompt(0, -1, 0, [1, 2, 3]), images=(ImageSpan("ab" * 32, 1, 2),))
    with_image = Episode("e", 1.0, (seen, sampled(1, 0, 3, [4, 5])))
    without = Episode("f", 1.0, (prompt(0, -1, 0, [1, 2, 3]), sampled(1, 0, 3, [4, 5])))
    found = rows_of([(with_image, {1: 1.0}), (without, {1: 1.0})])
    assert [row.episode_id for row in found.rows] == ["f"]
    assert (found.trained, dict(found.masked)) == (2, {"images_unseen": 2})


PAD = 9
ONE, TWO = "ab" * 32, "cd" * 32


def seeing(index: int, parent: int, at: int, name: str) -> Node:
    """A prompt with an image of two tokens."""
    return replace(prompt(index, parent, at, [1, PAD, PAD, 3]), images=(ImageSpan(name, 1, 2),))


def test_a_row_has_the_images_before_its_last_token_where_they_stand() -> None:
    nodes = (
        seeing(0, -1, 0, ONE),
        sampled(1, 0, 4, [4, 5]),
        seeing(2, 1, 2, TWO),
        sampled(3, 2, 4, [6]),
        seeing(4, 1, 2, ONE),
    )
    rows = rows_of([(Episode("e", 1.0, nodes), {})], image_support=ImageSupport(PAD)).rows
    assert [row.images for row in rows] == [(ImageSpan(ONE, 1, 2), ImageSpan(TWO, 7, 2))]
    again = lay_out([*rows, *rows], share_prefixes=False)
    assert [image.offset for image in again.images] == [1, 7, 12, 18]
    assert all(again.ids[image.offset] == PAD for image in again.images)


@pytest.mark.parametrize(
    ("nodes", "reason"),
    [
        ((seeing(0, -1, 0, ONE), sampled(1, 0, 4, [4, 5])), None),
        ((seeing(0, -1, 0, TWO), sampled(1, 0, 4, [4, 5])), "image_missing"),
        ((seeing(0, -1, 0, ONE), sampled(1, 0, 4, [4, PAD])), "image_placeholder"),
        ((prompt(0, -1, 0, [1, PAD]), sampled(1, 0, 2, [4, 5])), "image_placeholder"),
        ((replace(seeing(0, -1, 0, ONE), ids=np.array([1, PAD, 2, 3])), sampled(1, 0, 4, [4, 5])), "image_placeholder"),
        ((seeing(0, -1, 0, ONE), sampled(1, 0, 2, [4, 5])), "image_placeholder"),
    ],
    ids=["seen", "missing", "sampled", "written", "another token in its place", "a branch within it"],
)  # fmt: skip
def test_an_episode_is_left_out_that_the_model_cannot_be_given(
    nodes: tuple[Node, ...], reason: str | None
) -> None:
    image_support = ImageSupport(PAD).without({TWO})
    found = rows_of([(Episode("e", 1.0, nodes), {})], image_support=image_support)
    assert (found.trained, dict(found.masked)) == ((2, {}) if reason is None else (0, {reason: 2}))
