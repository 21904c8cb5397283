"""The lengths bench runs, small; its workloads are what it says they are."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench.lengths import scored, synthetic, unseen
from tests.unit.bench.reports import report_of


@pytest.mark.long
def test_it_ends_with_its_keys(tmp_path: Path) -> None:
    missing = str(tmp_path / "none.db")
    report = report_of(
        "lengths", tmp_path / "lengths.json", "--tasks", "6", "--seeds", "2", "--store", missing
    )
    assert report["recall_recorded"] == {}
    assert 0 < report["recall_structured"] <= 1
    least, most = report["recall_structured_range"]
    assert least < report["recall_structured"] < most, "seeds differ"
    assert {"recall_oracle", "recall_none", "predict_us", "learn_us"} <= report.keys()
    assert 0 < report["recall_unseen"] <= 1
    assert report["recall_structured_warm"] is None, "so few calls are not 2,000"


def test_every_call_begins_once_and_is_over_once_and_the_same_seed_is_the_same_workload() -> None:
    events = list(synthetic(8, structure=True, seed=0))
    begun = [event.features.call for event in events if event.begins]
    assert len(set(begun)) == len(begun) == 8 * 4 * 8 * 3
    assert sorted(begun) == sorted(event.features.call for event in events if not event.begins)
    again = list(synthetic(8, structure=True, seed=0))
    assert [event.length for event in events] == [event.length for event in again]


def test_an_oracle_knows_nothing_of_what_has_no_structure() -> None:
    begun = [event for event in synthetic(60, structure=False, seed=0) if event.begins]
    recall = scored([event.oracle for event in begun], [event.length for event in begun]).recall
    assert recall is not None
    assert abs(recall - 0.2) < 1e-9


def test_unseen_tasks_are_others_of_the_same_topics_and_nothing_of_them_is_over() -> None:
    old, new = list(synthetic(8, structure=True, seed=0)), list(unseen(8, seed=0))
    assert all(event.begins for event in new)
    assert len(new) == 8 * 8
    assert not {event.features.task for event in old} & {event.features.task for event in new}
    assert list(unseen(8, seed=0))[5].length == new[5].length != list(unseen(8, seed=1))[5].length


def test_recall_is_told_from_the_first_call_on_and_after_as_many_as_a_gateway_reads() -> None:
    lengths = [i % 10 for i in range(4000)]
    scores = [0.0] * 2000 + [float(length) for length in lengths[2000:]]
    outcome = scored(scores, lengths)
    assert [outcome.recall, outcome.warm, *outcome.curve] == pytest.approx([0.6, 1, 0.2, 1])
