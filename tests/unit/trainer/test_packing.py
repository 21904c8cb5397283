"""Rows to micro-batches: every trained token once, in the context of its row, whatever is shared."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Sequence

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from trainer.data.packing import MicroBatch, Packer
from trainer.data.tree import Row

ALPHABET = st.integers(1, 3)
"""Few different tokens, so that rows often begin alike."""


@st.composite
def rows(draw: st.DrawFn) -> list[Row]:
    """The rows of a group: a few episodes, each with some paths, and random tokens of them trained."""
    found = []
    for number in range(draw(st.integers(0, 6))):
        ids = draw(st.lists(ALPHABET, min_size=2, max_size=12))
        train = np.array(
            [False, *draw(st.lists(st.booleans(), min_size=len(ids) - 1, max_size=len(ids) - 1))]
        )
        train[-1] = True
        found.append(row(f"episode {number % 3}", ids, train))
    return found


def row(episode: str, ids: Sequence[int], train: np.ndarray) -> Row:
    """A row whose columns are distinguishable."""
    n = len(ids)
    columns = np.arange(n) + 100 * len(ids)
    return Row(
        episode_id=episode,
        ids=np.array(ids, np.int32),
        train=train,
        logprobs=(-columns).astype(np.float32),
        versions=columns.astype(np.int32),
        temperature=(columns / 7).astype(np.float32),
        advantages=columns / 3,
        weight=1 / n,
        nodes=columns.astype(np.int32),
    )


def trained(rows: Sequence[Row]) -> Counter[tuple[object, ...]]:
    """The trained tokens of rows, each with its context."""
    return Counter(
        (r.episode_id, *map(int, r.ids[: j + 1]), float(r.logprobs[j]), int(r.versions[j]),
         float(r.temperature[j]), float(r.advantages[j]), r.weight)
        for r in rows for j in r.train.nonzero()[0]
    )  # fmt: skip


def trained_of(micro: MicroBatch) -> Counter[tuple[object, ...]]:
    """The same of a micro-batch: a token's context are the tokens that it sees, by the definition of `ends`."""
    found: Counter[tuple[object, ...]] = Counter()
    for i, at in enumerate(micro.at.tolist()):
        seen = [k for k in range(at + 1) if at < micro.ends[k]]
        assert micro.positions[seen].tolist() == list(range(len(seen)))
        assert seen[-2] == micro.context[i]
        columns = (micro.temperature, micro.advantages, micro.weights)
        found[
            micro.episodes[int(micro.sequences[i])], *micro.ids[seen].tolist(),
            float(micro.recorded[i]), int(micro.versions[i]), *(float(column[i]) for column in columns),
        ] += 1  # fmt: skip
    return found


def cut(groups: Sequence[Sequence[Row]], packer: Packer) -> list[MicroBatch]:
    return [micro for rows in groups for micro in packer.add(rows)] + [*packer.flush()]


@given(groups=st.lists(rows(), max_size=4), tokens=st.integers(4, 40))
def test_every_trained_token_is_there_once_in_its_context_and_the_budget_is_kept(
    groups: list[list[Row]], tokens: int
) -> None:
    """Or a micro-batch is one row; with `whole_episodes` it may be longer too."""
    expected = sum(map(trained, groups), Counter())
    every = [tuple(map(int, r.ids)) for rows in groups for r in rows]
    for share, whole in itertools.product((True, False), repeat=2):
        micros = cut(groups, Packer(tokens, share_prefixes=share, whole_episodes=whole))
        assert sum(map(trained_of, micros), Counter()) == expected, (share, whole)
        assert whole or all(len(m) <= tokens or tuple(m.ids.tolist()) in every for m in micros), share
        assert share or sum(map(len, micros)) == sum(map(len, itertools.chain(*groups)))


def test_what_neighbors_share_is_computed_once() -> None:
    last = np.array([False, False, False, True])
    group = [row("b", [1, 2, 3, 5], last), row("a", [1, 2, 3, 4], last), row("c", [1, 2, 3, 4], last)]
    (micro,) = cut([group], Packer(100))
    assert micro.ids.tolist() == [1, 2, 3, 4, 5]
    assert micro.ends.tolist() == [5, 5, 5, 4, 5]
    assert micro.at.tolist() == [3, 3, 4]
    assert [micro.episodes[i] for i in micro.sequences] == ["a", "c", "b"]


@given(rows(), st.integers(4, 40))
def test_an_episode_stays_in_one_micro_batch(group: list[Row], tokens: int) -> None:
    seen = [
        episode for micro in cut([group], Packer(tokens, whole_episodes=True)) for episode in micro.episodes
    ]
    assert len(seen) == len(set(seen))


def test_a_micro_batch_leaves_as_soon_as_the_next_row_does_not_fit() -> None:
    packer, last = Packer(10), np.array([False, False, False, True])
    assert [*packer.add([row("a", [1, 2, 3, 4], last), row("b", [5, 6, 7, 8], last)])] == []
    (full,) = packer.add([row("c", [9, 9, 9, 9], last)])
    assert (len(full), full.episodes) == (8, ("a", "b"))
    assert [len(micro) for micro in packer.flush()] == [4]
    assert [*packer.flush()] == []


@given(groups=st.lists(rows(), max_size=6), tokens=st.integers(4, 40), data=st.data())
def test_the_cut_does_not_depend_on_the_portions(
    groups: list[list[Row]], tokens: int, data: st.DataObject
) -> None:
    packer, parts = Packer(tokens), []
    ends = sorted(data.draw(st.lists(st.integers(0, len(groups)), max_size=5)))
    for a, b in itertools.pairwise([0, *ends, len(groups)]):
        parts += [micro for group in groups[a:b] for micro in packer.add(group)]
    parts += packer.flush()
    whole = cut(groups, Packer(tokens))
    assert [micro.ids.tolist() for micro in parts] == [micro.ids.tolist() for micro in whole]
