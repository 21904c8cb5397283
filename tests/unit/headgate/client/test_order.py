"""Orders of tasks: how often each comes, and what a run that is started again still knows."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from headgate.client.agents import Task
from headgate.client.kept_order import KeptOrder
from headgate.client.order import ByDifficulty, Passes, TaskOrder

TASKS = [Task(name, {}) for name in "abcdefgh"]
EASY = set("abcd")


def played(order: TaskOrder, groups: int, teaching: set[str]) -> Counter[str]:
    """How often each task came."""
    visits: Counter[str] = Counter()
    for _ in range(groups):
        task_id = order.next().task_id
        visits[task_id] += 1
        order.ended(task_id, task_id in teaching)
    return visits


@pytest.mark.parametrize(
    "order", [Passes(TASKS, 1), ByDifficulty(TASKS, 1, 0.1)], ids=["passes", "difficulty"]
)
def test_while_all_tasks_teach_each_comes_once_in_every_pass(order: TaskOrder) -> None:
    for _ in range(5):
        assert played(order, len(TASKS), {task.task_id for task in TASKS}) == dict.fromkeys("abcdefgh", 1)


def test_tasks_that_teach_nothing_come_at_the_rate_of_the_floor_and_all_come() -> None:
    order = ByDifficulty(TASKS, 1, 0.25)
    played(order, 200, set("efgh"))
    visits = played(order, 500, set("efgh"))
    assert {visits[name] for name in "efgh"} == {100}
    assert {visits[name] for name in EASY} == {25}
    assert {round(order.weights[name], 3) for name in EASY} == {0.25}


def test_a_task_that_becomes_learnable_comes_often_again() -> None:
    order = ByDifficulty(TASKS, 1, 0.1)
    played(order, 400, set("efgh"))
    played(order, 400, {"a", *"efgh"})
    visits = played(order, 400, {"a", *"efgh"})
    assert visits["a"] > 0.8 * visits["e"]
    assert visits["b"] < 0.2 * visits["e"]


def test_a_run_that_is_started_again_goes_on_as_if_it_had_not_stopped(tmp_path: Path) -> None:
    whole = ByDifficulty(TASKS, 1, 0.1)
    expected = played(whole, 100, set("ef")), played(whole, 100, set("ef"))
    path = tmp_path / "run" / "tasks.json"
    found = tuple(played(KeptOrder(ByDifficulty(TASKS, seed, 0.1), path), 100, set("ef")) for seed in (1, 2))
    assert found == expected


def test_passes_that_are_interrupted_go_on_where_they_were_and_groups_under_way_come_again(
    tmp_path: Path,
) -> None:
    whole, path = Passes(TASKS, 1), tmp_path / "run" / "passes.json"
    expected = [whole.next().task_id for _ in range(24)]
    found: list[str] = []
    for _ in range(8):
        order = KeptOrder(Passes(TASKS, 1), path)
        for task in [order.next() for _ in range(3)]:
            found.append(task.task_id)
            order.ended(task.task_id, None)
        order.next()  # it is under way when the run is killed
    assert found == expected
    other = Passes(TASKS, 2)
    assert [other.next().task_id for _ in range(8)] != expected[:8]


def test_passes_over_other_tasks_than_before_begin_with_those_that_are_new(tmp_path: Path) -> None:
    path = tmp_path / "passes.json"
    played(KeptOrder(Passes(TASKS[:4], 1), path), 10, set())
    visits = played(KeptOrder(Passes(TASKS[2:], 1), path), 60, set())
    assert visits.keys() == set("cdefgh")
    assert max(visits.values()) - min(visits.values()) <= 1


def test_a_group_writes_its_own_task_and_a_line_that_a_crash_cut_is_left_out(tmp_path: Path) -> None:
    """Ten thousand tasks are half a megabyte: too much to be written with each group."""
    path = tmp_path / "tasks.json"
    tasks = [Task(f"task-{n}", {}) for n in range(2000)]
    order = KeptOrder(ByDifficulty(tasks, 1, 0.1), path)
    whole = path.stat().st_size
    visits = played(order, 500, set())
    assert path.stat().st_size - whole < 500 * 80
    path.write_text(path.read_text() + '["task-1", [')
    again = KeptOrder(ByDifficulty(tasks, 2, 0.1), path)
    assert played(again, 1500, set()).keys() == {task.task_id for task in tasks} - visits.keys()
    played(again, 4000, set())
    assert len(path.read_text().splitlines()) <= 2001


def test_a_new_task_joins_where_the_others_are_and_one_that_is_gone_is_forgotten(tmp_path: Path) -> None:
    order = KeptOrder(ByDifficulty(TASKS[:4], 1, 0.1), tmp_path / "tasks.json")
    played(order, 400, set("abcd"))
    more = KeptOrder(ByDifficulty(TASKS[1:], 1, 0.1), tmp_path / "tasks.json")
    visits = played(more, 70, set("bcdefgh"))
    assert visits.keys() == set("bcdefgh")
    assert max(visits.values()) - min(visits.values()) <= 2


def test_a_new_task_owes_no_visits_of_the_time_before_it(tmp_path: Path) -> None:
    """One that taught nothing for long was begun long ago: others do not begin there."""
    path = tmp_path / "tasks.json"
    played(KeptOrder(ByDifficulty(TASKS[:4], 1, 0.1), path), 400, set("bcd"))
    visits = played(KeptOrder(ByDifficulty(TASKS, 1, 0.1), path), 14, set("bcdefgh"))
    assert max(visits[name] for name in "efgh") <= 3


@pytest.mark.parametrize("order", [Passes(TASKS, 1), ByDifficulty(TASKS, 1, 0.1)], ids=["passes", "broken"])
def test_a_file_without_a_state_of_this_order_is_refused(order: TaskOrder, tmp_path: Path) -> None:
    path = tmp_path / "tasks.json"
    played(KeptOrder(ByDifficulty(TASKS, 1, 0.1), path), 8, set())
    if isinstance(order, ByDifficulty):
        path.write_text("[1")
    with pytest.raises(ValueError, match="does not hold the order of tasks"):
        KeptOrder(order, path)
