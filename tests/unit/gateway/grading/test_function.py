"""Functions in worker processes: what they print, how they fail, how they die."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from gateway.grading import function as module
from gateway.grading.base import GradingFailed
from gateway.grading.function import FunctionGrader
from tests.harness.pids import alive
from tests.harness.waiting import TimeLimits, until


def episode(**metadata: Any) -> dict[str, Any]:
    return {"episode_id": "e", "metadata": metadata}


@asynccontextmanager
async def grader(name: str, workers: int = 1, timeout_s: float = 60.0) -> AsyncIterator[FunctionGrader]:
    made = FunctionGrader(f"tests.harness.graders:{name}", workers, timeout_s)
    yield made
    await made.close()


@pytest.mark.parametrize("name", ["constant", "slowly", "noisy"])
async def test_the_response_is_what_the_function_returns_whatever_it_prints(name: str) -> None:
    async with grader(name) as one:
        for value in (0.25, -3.0, 2):
            assert (await one.grade(episode(value=value))).reward == float(value)


async def test_a_worker_serves_many_episodes_and_ends_with_the_grader() -> None:
    async with grader("process") as one:
        pids = {(await one.grade(episode())).reward for _ in range(5)}
        (pid,) = (int(pid) for pid in pids)
        assert alive(pid)
    await until(lambda: not alive(pid), "the worker is gone")


async def test_workers_share_the_episodes_and_their_number_is_bounded(tmp_path: Path) -> None:
    async with grader("together", workers=2) as one:
        given = episode(folder=str(tmp_path), workers=2)
        pids = {response.reward for response in await asyncio.gather(*(one.grade(given) for _ in range(12)))}
    assert len(pids) == 2


@pytest.mark.parametrize(
    ("do", "words", "replaced"),
    [
        ("raise", "LookupError: no idea", False),
        ("cancel", "CancelledError", False),
        ("text", "a number, not '1.0'", False),
        ("nothing", "a number, not None", False),
        ("nan", "a finite number, not nan", False),
        ("exit", r"(?s)ended with.*last words", True),
        ("die", "ended with -9", True),
    ],
)
async def test_a_worker_survives_what_the_function_does_wrong_and_is_replaced_when_it_dies(
    do: str, words: str, replaced: bool, tmp_path: Path
) -> None:
    async with grader("behave") as one:
        first, second = tmp_path / "first", tmp_path / "second"
        with pytest.raises(GradingFailed, match=words) as error:
            await one.grade(episode(do=do, pid=str(first)))
        assert not error.value.final
        assert (await one.grade(episode(do="work", pid=str(second)))).reward == 1.0
        assert (first.read_text() != second.read_text()) is replaced


async def test_a_function_that_hangs_is_killed_and_its_worker_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    limits = TimeLimits(monkeypatch, module)
    async with grader("behave", timeout_s=5.0) as one:
        first, second = tmp_path / "first", tmp_path / "second"
        grading = asyncio.create_task(one.grade(episode(do="hang", pid=str(first))))
        await until(lambda: first.exists() and bool(first.read_text()), "the worker is at work")
        limits.end()
        with pytest.raises(GradingFailed, match="not done within 5 s"):
            await grading
        await until(lambda: not alive(int(first.read_text())), "the worker is gone")
        assert (await one.grade(episode(do="work", pid=str(second)))).reward == 1.0
        assert first.read_text() != second.read_text()


async def test_cancelling_a_grade_kills_its_worker_so_that_no_response_is_taken_for_another(
    tmp_path: Path,
) -> None:
    async with grader("behave") as one:
        pid = tmp_path / "pid"
        grading = asyncio.create_task(one.grade(episode(do="hang", pid=str(pid))))
        await until(lambda: pid.exists() and bool(pid.read_text()), "the worker is at work")
        grading.cancel()
        with pytest.raises(asyncio.CancelledError):
            await grading
        await until(lambda: not alive(int(pid.read_text())), "the worker is gone")
        assert (await one.grade(episode(do="work"))).reward == 1.0


async def test_a_worker_ends_when_its_parent_is_killed(tmp_path: Path) -> None:
    pid = tmp_path / "pid"
    code = (
        "import asyncio\n"
        "from gateway.grading.function import FunctionGrader\n"
        "grader = FunctionGrader('tests.harness.graders:behave', 1, 600.0)\n"
        f"asyncio.run(grader.grade({{'metadata': {{'do': 'hang', 'pid': {str(pid)!r}}}}}))\n"
    )
    parent = await asyncio.create_subprocess_exec(sys.executable, "-c", code)
    await until(lambda: pid.exists() and bool(pid.read_text()), "the worker is at work")
    parent.kill()
    await parent.wait()
    await until(lambda: not alive(int(pid.read_text())), "the worker is gone")


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("tests.no_such_module:f", "No module named 'tests.no_such_module'"),
        ("tests.harness.graders:missing", "there is no function missing in tests.harness.graders"),
        ("tests.harness.graders:Path.missing", "there is no function"),
    ],
)
async def test_a_function_that_cannot_be_imported_is_an_error_of_the_check(name: str, words: str) -> None:
    one = FunctionGrader(name, 1, 60.0)
    with pytest.raises(GradingFailed, match=words):
        await one.check()
    await one.close()
