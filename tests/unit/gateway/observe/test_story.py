"""One episode's story, made of rows of decisions alone."""

from __future__ import annotations

from typing import Any

import pytest

from gateway.observe.explain import because, explain, verdict, words
from headgate.client.agents import TIME_LIMIT
from headgate.end_reasons import NO_FAILURE


def row(kind: str, episode: str = "", reason: str = "", /, **details: Any) -> dict[str, Any]:
    """Return a decision about an episode, or about its group where none is named."""
    return {
        "at": 0.0, "kind": kind, "episode_id": episode, "reason": reason, "batch": 3, "entry": 1, "details": details
    }  # fmt: skip


def kinds(rows: list[dict[str, Any]], episode: str) -> list[str]:
    return [step["kind"] for step in explain(about(rows, episode), episode)]


def about(rows: list[dict[str, Any]], episode: str) -> list[dict[str, Any]]:
    """Return the decisions about one episode and about groups."""
    return [row for row in rows if row["episode_id"] in ("", episode)]


def joined(episode: str) -> dict[str, Any]:
    return row("admitted", episode, version=2)


def moved(kind: str = "moved") -> dict[str, Any]:
    return row(kind, **{"from": 2})


EARLIER = [joined("old"), row("dropped")]
OWN = [joined("one"), moved(), joined("two"), row("occupied"), row("trained")]
LATER = [joined("new"), moved("late"), row("skipped")]


def test_a_story_is_the_episodes_own_steps_and_those_of_its_group_while_it_was_in_it() -> None:
    rows = EARLIER + OWN + LATER
    assert kinds(rows, "one") == ["admitted", "moved", "occupied", "trained"]
    assert kinds(rows, "two") == ["moved", "admitted", "occupied", "trained"]
    assert kinds(rows, "old") == ["admitted", "dropped"]
    assert kinds(rows, "new") == ["admitted", "late", "skipped"]
    assert kinds(EARLIER + OWN[:-1], "one") == ["admitted", "moved", "occupied"], "the group is not over yet"
    assert [step["about"] for step in explain(about(rows, "one"), "one")] == [
        "episode",
        "group",
        "group",
        "group",
    ]


def test_decisions_after_the_end_of_the_group_are_in_the_story() -> None:
    assert kinds([*OWN, row("masked", "one", "late", tokens=2)], "one")[-1] == "masked"


@pytest.mark.parametrize("kind", ["refused", "deleted"])
def test_who_is_in_no_group_has_no_story_of_one(kind: str) -> None:
    assert kinds([moved(), row(kind, "one"), row("occupied")], "one") == [kind]


@pytest.mark.parametrize(
    ("decision", "expected"),
    [
        (row("admitted", "e", version=2), "admitted to batch 3, because it has a place for a group of version 2"),
        (row("refused", "e", "no_slot"), "refused, because no slot was free within the staleness bound"),
        (row("finished", "e"), "its run is over, and its reward is being computed"),
        (row("rewarded", "e", value=None), "rewarded"),
        (row("rewarded", "e", value=0.5), "rewarded with 0.5"),
        (row("closed", "", "my own words"), "its group takes no more members, because my own words"),
        (row("dropped", "e", "no_room"), "it was dropped, because every batch within its bound was whole"),
        (row("dropped", "", "no_room"), "its group was dropped, because every batch within its bound was whole"),
        (row("aborted", "e", "requested"), "it was stopped, because that was requested"),
        (moved(), "its group moved from batch 2 to batch 3, which is within its bound too"),
        (moved("late"), "its group moved from batch 2 to batch 3, beyond its bound: old tokens are not trained"),
        (row("occupied"), "its group is whole: number 2 of batch 3"),
        (row("trained"), "its group was trained in batch 3, as number 2"),
        (row("skipped", "", "requested"), "its group was lost with batch 3, because that was requested"),
        (row("masked", "e", "greedy", tokens=5),
         "5 of its tokens were not trained, because they were not drawn: the temperature was 0"),
        (row("deleted", "e", "requested"), "it was deleted with all that was recorded in it, because that was requested"),
    ],
    ids=lambda value: value["kind"] if isinstance(value, dict) else "",
)  # fmt: skip
def test_every_kind_of_decision_has_its_words(decision: dict[str, Any], expected: str) -> None:
    assert words(decision) == expected


def test_an_unknown_kind_is_an_error() -> None:
    with pytest.raises(ValueError, match="no kind of decision: other"):
        words(row("other"))


@pytest.mark.parametrize(
    ("rows", "sampled", "masked", "expected"),
    [
        ([], 0, 0, "not known: it is from before reasons were kept"),
        ([row("admitted", "e")], 0, 0, "still running"),
        ([row("admitted", "e"), row("finished", "e")], 9, 0, "still running: its reward is being computed"),
        ([row("finished", "e"), row("rewarded", "e")], 9, 0,
         "still running: it is rewarded, others of its group are not yet"),
        ([row("rewarded", "e"), row("occupied")], 9, 0, "waiting in batch 3, as number 2"),
        ([row("occupied"), row("skipped", "", "skipped")], 9, 0, f"not trained, because {because('skipped')}"),
        ([row("occupied"), row("dropped", "", "stale")], 9, 0, f"not trained, because {because('stale')}"),
        ([row("occupied"), row("dropped", "e", "crashed"), row("trained", episodes=["f"])], 9, 0,
         "not trained, because crashed"),
        ([row("trained", episodes=["f"])], 9, 0,
         "not trained, because it was not rewarded when its group was trained in batch 3"),
        ([row("occupied"), row("trained", episodes=["e"])], 9, 8, "trained in batch 3 as version 4"),
        ([row("trained", episodes=["e"])], 9, 9, "trained in batch 3 as version 4, but none of its tokens counted"),
        ([row("trained", episodes=["e"])], 0, 0,
         "trained in batch 3 as version 4, but it sampled nothing: only its reward counted"),
        ([row("deleted", "e", was="trained")], 0, 0, "deleted; it was trained in batch 3 as version 4"),
        ([row("deleted", "e", was="eval")], 0, 0, "deleted; it was an evaluation episode"),
        ([row("deleted", "e", was="other", reason="crashed")], 0, 0,
         "deleted; it was not trained, and ended as 'crashed'"),
    ],
)  # fmt: skip
def test_the_verdict_is_the_last_word(
    rows: list[dict[str, Any]], sampled: int, masked: int, expected: str
) -> None:
    story = [{**step, "about": "episode" if step["episode_id"] else "group"} for step in rows]
    assert verdict("e", {"mode": "train"}, story, sampled, masked) == expected
    assert verdict("e", {"mode": "eval"}, story, sampled, masked) == f"not trained, because {because('eval')}"


@pytest.mark.parametrize(
    "reason", [*sorted(NO_FAILURE), TIME_LIMIT, "memory_limit", "cpu_limit", "process_limit"]
)
def test_every_reason_of_gateway_and_driver_has_its_words(reason: str) -> None:
    assert " " in because(reason)
