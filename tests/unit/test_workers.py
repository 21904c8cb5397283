"""Tests run in forked workers: each once, whatever happens to a worker."""

from __future__ import annotations

import subprocess
import sys
from collections import Counter
from pathlib import Path
from xml.etree import ElementTree

from hypothesis import given
from hypothesis import strategies as st

from tests.workers import Shares

ROOT = Path(__file__).parents[2]
FIXTURE = """
import pytest

@pytest.fixture(scope="session")
def shared():
    print("printed")
    yield
    open("ended", "a").write("x")
"""
MODULE = """
import os
import pytest

@pytest.mark.parametrize("number", range(10))
def test_number(number, shared):
    if number == 3 and __name__ == "test_a":
        os._exit(7)
    if number == 5:
        pytest.skip("five")
    assert number != 7
"""


@given(st.lists(st.integers(1, 9), max_size=9), st.lists(st.integers(0, 3)))
def test_every_test_is_taken_once(sizes: list[int], turns: list[int]) -> None:
    numbers = iter(range(sum(sizes)))
    shares = Shares([[next(numbers) for _ in range(size)] for size in sizes], 4)
    taken = [test for worker in turns if (test := shares.take(worker)) is not None]
    while (test := shares.take(1)) is not None:
        taken.append(test)
    assert sorted(taken) == [*range(sum(sizes))]


def test_a_worker_that_dies_fails_its_test_and_no_other(tmp_path: Path) -> None:
    (tmp_path / "conftest.py").write_text(FIXTURE)
    for name in "abc":
        (tmp_path / f"test_{name}.py").write_text(MODULE)
    argv = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "tests.workers",
        "--workers",
        "2",
        "--junitxml=report",
    ]
    argv += ["-c", str(ROOT / "pyproject.toml"), "--rootdir", "."]
    environment = {"PYTHONPATH": str(ROOT)}
    process = subprocess.run(
        [*argv, "."], cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
    )
    assert process.returncode == 1, process.stdout + process.stderr
    assert "test_a.py::test_number[3] - its process ended with status 7" in process.stdout
    assert "printed" not in process.stdout.partition("FAILURES")[0]
    cases = ElementTree.parse(tmp_path / "report").iter("testcase")
    assert Counter(child.tag for case in cases for child in case) == {"failure": 4, "skipped": 3}
    assert (tmp_path / "ended").read_text() == "xx"  # of the workers that are left


def test_the_first_tests_are_of_one_worker() -> None:
    shares = Shares([[0], [3]], 2, [1, 2])
    assert [shares.take(worker) for worker in (0, 1, 1, 1, 0, 0)] == [1, 3, 0, None, 2, None]
