"""Pages, lengths and histograms of episodes agree with a look at every row, on both databases."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from random import Random
from statistics import fmean, pstdev
from typing import Any

import numpy as np
import pytest
from sqlalchemy import Connection, Engine, insert

from gateway.store import episode_pages, tallies
from gateway.store.decisions import Decision, insert_decisions
from gateway.store.episode_pages import EpisodeFilter, Sort
from gateway.store.models import CallRow, EpisodeRow, NodeRow
from gateway.store.previews import TOKENS, previews
from tests.unit.gateway.store.rows import call, episode

Row = dict[str, Any]
EPISODES = 300


def rows() -> list[Row]:
    """Episodes of two models; some were opened in the same moment, some are open, some have no reward."""
    random, found = Random(17), []
    for i in range(EPISODES):
        over = i % 7 != 0
        values = {
            "model": random.choice("ab"),
            "task_id": f"task-{i % 10}",
            "group_id": f"group-{i // 4}",
            "mode": random.choice(("train", "eval")),
            "version": random.randrange(5),
            "state": "closed" if over else "open",
            "reason": random.choice(("rewarded", "agent_failed")) if over else "",
            "reward": random.choice((0.0, 0.25, 1.0, None)) if over else None,
            "created_at": 100.0 + i // 3,
            "closed_at": 101.0 + i // 3 + i % 5 if over else None,
            "agent": random.choice(("", "coder")),
            "error": random.choice(("", "Traceback: 100%_broken")),
        }
        found.append(episode(f"ep-{random.getrandbits(40):x}", **values))
    return found


ROWS = sorted(rows(), key=lambda row: (row["created_at"], row["id"]), reverse=True)
TRAINED = {("a", "group-1"), ("b", "group-2")}
"""The groups of batch 4."""
PIN = ROWS[40]["created_at"], ROWS[40]["id"]
CASES: list[tuple[EpisodeFilter, Callable[[Row], bool]]] = [
    (EpisodeFilter(), lambda row: True),
    (EpisodeFilter(models=("a", "b", "other")), lambda row: True),
    (EpisodeFilter(models=("a",)), lambda row: row["model"] == "a"),
    (EpisodeFilter(models=("a",), model="b"), lambda row: False),
    (EpisodeFilter(models=(), reward_min=0.0), lambda row: False),
    (EpisodeFilter(model="b", mode="eval"), lambda row: (row["model"], row["mode"]) == ("b", "eval")),
    (EpisodeFilter(reason="agent_failed", state="closed"), lambda row: row["reason"] == "agent_failed"),
    (EpisodeFilter(state="open", models=("a", "b")), lambda row: row["state"] == "open"),
    (EpisodeFilter(task_id="task-3", agent="coder"), lambda row: (row["task_id"], row["agent"]) == ("task-3", "coder")),
    (EpisodeFilter(group_id="group-7"), lambda row: row["group_id"] == "group-7"),
    (EpisodeFilter(version_min=1, version_max=3), lambda row: 1 <= row["version"] <= 3),
    (EpisodeFilter(reward_min=0.25), lambda row: row["reward"] is not None and row["reward"] >= 0.25),
    (EpisodeFilter(reward_max=0.25), lambda row: row["reward"] is not None and row["reward"] <= 0.25),
    (EpisodeFilter(since=120.0, until=150.0), lambda row: 120.0 <= row["created_at"] < 150.0),
    (EpisodeFilter(text="100%_"), lambda row: bool(row["error"])),
    (EpisodeFilter(text="group-1"), lambda row: row["group_id"].startswith("group-1")),
    (EpisodeFilter(text="CODER"), lambda row: False),
    (EpisodeFilter(batch=4), lambda row: (row["model"], row["group_id"]) in TRAINED),
    (EpisodeFilter(batch=4, models=("b",)), lambda row: (row["model"], row["group_id"]) == ("b", "group-2")),
    (EpisodeFilter(pin=PIN), lambda row: (row["created_at"], row["id"]) <= PIN),
    (EpisodeFilter(pin=PIN, models=("b",)), lambda row: (row["created_at"], row["id"]) <= PIN and row["model"] == "b"),
]  # fmt: skip


@pytest.fixture
def filled(engine: Engine) -> Engine:
    with engine.begin() as connection:
        connection.execute(insert(EpisodeRow), ROWS)
        tallies.recount(connection)
        for batch, model, group in [(4, *one) for one in sorted(TRAINED)] + [(5, "a", "group-3")]:
            insert_decisions(connection, model, [Decision("trained", group, batch=batch)])
    return engine


def ids(some: list[Row]) -> list[str]:
    return [row["id"] for row in some]


def pages(connection: Connection, wanted: EpisodeFilter, limit: int) -> list[str]:
    """Return the whole list, read by the place of the last one."""
    found: list[str] = []
    after = None
    while rows := episode_pages.list_episodes(connection, wanted, limit, after):
        found += ids(rows)
        after = rows[-1]["created_at"], rows[-1]["id"]
    return found


def test_every_filter_and_every_way_to_page_give_the_same_episodes(filled: Engine) -> None:
    with filled.connect() as connection:
        for wanted, matches in CASES:
            expected = ids([row for row in ROWS if matches(row)])
            assert pages(connection, wanted, 37) == expected, wanted
            assert episode_pages.count(connection, wanted) == len(expected), wanted
            for offset in (1, 50, len(expected)):
                found = episode_pages.list_episodes(connection, wanted, 20, offset=offset)
                assert ids(found) == expected[offset : offset + 20], (wanted, offset)


def test_a_histogram_has_every_episode_in_its_bin(filled: Engine) -> None:
    with filled.connect() as connection:
        for wanted, matches in CASES:
            chosen = [row for row in ROWS if matches(row)]
            found = episode_pages.histogram(connection, wanted, 13)
            if found is None:
                assert not chosen
                continue
            width = (found.last - found.first) / 13
            places = [min(int((row["created_at"] - found.first) / width), 12) for row in chosen]
            assert found.counts == [Counter(places)[i] for i in range(13)], wanted
            for i in range(13):
                own = [row for row, place in zip(chosen, places, strict=True) if place == i]
                rewards = [row["reward"] for row in own if row["reward"] is not None]
                assert found.closed[i] == sum(row["state"] == "closed" for row in own)
                assert found.rewarded[i] == len(rewards)
                mean = sum(rewards) / len(rewards) if rewards else None
                assert found.reward_mean[i] == (None if mean is None else pytest.approx(mean))


def test_a_histogram_of_one_moment_has_one_bin_that_counts(filled: Engine) -> None:
    with filled.connect() as connection:
        found = episode_pages.histogram(connection, EpisodeFilter(group_id="group-0", since=100.0), 4)
    assert found is not None
    assert sum(found.counts) == 4


def test_the_calls_of_a_page_are_summed_by_episode(filled: Engine) -> None:
    first, second = ids(ROWS[:2])
    ends = [("stop", 5), ("length", 7), ("length", 1)]
    calls = [
        call(f"c{i}", first, finish_reason=end, completion_tokens=n, reward=None, tool_faults=None)
        for i, (end, n) in enumerate(ends)
    ]
    with filled.begin() as connection:
        connection.execute(insert(CallRow), calls)
        found = episode_pages.calls_of(connection, [first, second])
    assert found == {
        first: {"calls": 3, "sampled_tokens": 13, "truncated": 2},
        second: {"calls": 0, "sampled_tokens": 0, "truncated": 0},
    }


def test_evaluations_are_the_rewarded_eval_episodes_by_version(filled: Engine) -> None:
    with filled.connect() as connection:
        found = episode_pages.evaluations(connection, "a")
    assert [one["version"] for one in found] == [0, 1, 2, 3, 4]
    for one in found:
        chosen = [
            row for row in ROWS
            if (row["model"], row["mode"], row["version"]) == ("a", "eval", one["version"]) and row["reward"] is not None
        ]  # fmt: skip
        rewards = [row["reward"] for row in chosen]
        assert one["episodes"] == len(rewards)
        assert one["reward_mean"] == pytest.approx(fmean(rewards))
        assert one["reward_std"] == pytest.approx(pstdev(rewards))
        assert one["at"] == max(row["created_at"] for row in chosen)


SORTS: dict[Sort, Callable[[Row], Any]] = {
    "best": lambda row: (row["reward"] is None, -(row["reward"] or 0.0)),
    "worst": lambda row: (row["reward"] is None, row["reward"] or 0.0),
    "longest": lambda row: (row["closed_at"] is None, row["created_at"] - (row["closed_at"] or 0.0)),
}


@pytest.mark.parametrize("sort", SORTS)
def test_a_sorted_list_has_equal_rows_newest_first(filled: Engine, sort: Sort) -> None:
    wanted = EpisodeFilter(mode="train", models=("a",))
    chosen = [row for row in ROWS if (row["mode"], row["model"]) == ("train", "a")]
    with filled.connect() as connection:
        found = episode_pages.list_episodes(connection, wanted, 20, offset=10, sort=sort)
    assert ids(found) == ids(sorted(chosen, key=SORTS[sort]))[10:30]


def test_the_rewards_of_groups_are_those_of_their_training_episodes(filled: Engine) -> None:
    with filled.connect() as connection:
        found = episode_pages.group_rewards(connection, ["group-1", "group-2"])
    for (model, group), one in found.items():
        rewards = [
            row["reward"] for row in ROWS
            if (row["model"], row["group_id"], row["mode"]) == (model, group, "train") and row["reward"] is not None
        ]  # fmt: skip
        assert one == {
            "rewards": len(rewards),
            "mean": pytest.approx(fmean(rewards)),
            "std": pytest.approx(pstdev(rewards)),
        }
    assert found


def test_a_preview_is_the_end_of_the_first_prompt_and_the_beginning_of_the_last_reply(filled: Engine) -> None:
    one, other, empty = ids(ROWS[:3])
    trees = {
        one: [(False, range(1_000)), (True, range(7)), (False, range(9)), (True, range(5_000, 6_000))],
        other: [(False, range(3)), (True, range(4))],
    }
    nodes = [
        {
            "episode_id": episode_id, "model": "m", "index": index, "parent": index - 1, "at": 0, "sampled": sampled,
            "ids": np.arange(tokens.start, tokens.stop, dtype="<i4").tobytes(), "logprobs": b"", "spans": [], "flags": b"",
            "temperature": 1.0, "mask_reason": "", "call_id": "",
        }
        for episode_id, tree in trees.items()
        for index, (sampled, tokens) in enumerate(tree)
    ]  # fmt: skip
    with filled.begin() as connection:
        connection.execute(insert(NodeRow), nodes)
        found = previews(connection, "m", [one, other, empty])
    assert found == {
        one: ([*range(1_000 - TOKENS, 1_000)], [*range(5_000, 5_000 + TOKENS)]),
        other: ([0, 1, 2], [0, 1, 2, 3]),
        empty: ([], []),
    }
