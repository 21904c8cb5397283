"""The checker finds nothing in the evidence of a run that was right, and each mutant of it."""

from __future__ import annotations

import ast
import copy
import sys
import zipfile
from pathlib import Path

import pytest

from tests.faults import mutants
from tests.faults.checker import COUNTS, check
from tests.faults.evidence import Evidence, Journal, lines, read
from tests.faults.mutants import Mutant
from tests.faults.spoilt_evidence import other_version, untrain
from tests.faults.weights import BLOCK, SHARPNESS, save_counting
from tests.harness.models import logprobs

RECORDED = Path(__file__).with_name("recorded.zip")
"""A run of one gateway, two engines and four agents, without faults (`python -m tests.faults record` writes it)."""


@pytest.fixture(scope="module")
def right(tmp_path_factory: pytest.TempPathFactory) -> Evidence:
    folder = tmp_path_factory.mktemp("evidence")
    with zipfile.ZipFile(RECORDED) as archive:
        archive.extractall(folder)
    return read(folder)


@pytest.fixture
def evidence(right: Evidence) -> Evidence:
    return copy.deepcopy(right)


def test_a_run_that_was_right_is_right(evidence: Evidence) -> None:
    report = check(evidence)
    assert report.right, report.findings
    facts = ("finished_replies", "hung_up_replies", "tokens", "turns", "trained_groups", "tries")
    assert all(report.facts[fact] > 0 for fact in facts), report.facts


@pytest.mark.parametrize("mutant", mutants.of("evidence"), ids=lambda mutant: mutant.name)
def test_each_mutant_is_found(evidence: Evidence, mutant: Mutant) -> None:
    mutant.spoil(evidence)
    report = check(evidence)
    assert mutant.caught_by(report), report.findings
    assert {kind for kind, found in report.findings.items() if found} >= {*mutant.wrong}


def test_every_count_has_a_mutant() -> None:
    for runner in ("evidence", "crashes"):
        assert {kind for mutant in mutants.of(runner) for kind in mutant.wrong} == set(COUNTS)


def test_labels_that_the_record_itself_disowns_are_not_wrong(right: Evidence, evidence: Evidence) -> None:
    other_version(evidence)
    count = check(evidence).counts["wrong_version"]
    assert count > 1
    (changed,) = [row for row in evidence.tables["nodes"] if row not in right.tables["nodes"]]
    changed["mask_reason"] = "unconfirmed_version"
    report = check(evidence)
    assert report.right, report.findings
    assert report.facts["disowned"] == count


def test_an_engine_without_a_log_is_checked_by_the_blocks_of_its_tokens(evidence: Evidence) -> None:
    evidence.plan["unlogged_engines"] = ["engine-0"]
    for row in evidence.tables["nodes"]:
        row["logprobs"] = bytes(len(row["logprobs"]))
    evidence.marks.clear()
    evidence.runs.clear()
    report = check(evidence)
    assert report.right, report.findings
    other_version(evidence)
    assert check(evidence).counts["wrong_version"] > 1


def test_a_full_batch_behind_one_that_lacks_a_group_waits(evidence: Evidence) -> None:
    last = max(evidence.checkpoints)
    lost, full = evidence.checkpoints[last - 1][0], len(evidence.checkpoints[last])
    for batch in (last - 1, last):
        untrain(evidence, batch)
    assert check(evidence).counts["never_trained"] == 2 * full, "both were full"
    for row in evidence.tables["decisions"]:
        if row["group_id"] == lost and row["kind"] == "occupied":
            row.update(kind="dropped", reason="too_few_rewards", batch=None)
    report = check(evidence)
    assert report.counts["never_trained"] == 0
    assert report.facts["waiting_groups"] >= 2 * full - 1


def test_marks_that_occur_twice_are_not_evidence(evidence: Evidence) -> None:
    evidence.remarked = 1
    with pytest.raises(ValueError, match="itself is wrong"):
        check(evidence)


def test_the_checker_imports_nothing_of_headgate() -> None:
    allowed = {*sys.stdlib_module_names, "numpy", "orjson", "psycopg", "tests.faults.evidence"}
    for name in ("checker", "evidence"):
        tree = ast.parse(Path(__file__).with_name(f"{name}.py").read_text())
        for node in ast.walk(tree):
            modules = [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            modules += [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            assert all(module in allowed or module.split(".")[0] in allowed for module in modules), modules


def test_a_line_that_a_crash_cut_off_is_skipped(tmp_path: Path) -> None:
    file = tmp_path / "journal.jsonl"
    with Journal(file) as journal:
        journal.write("a")
    with file.open("a") as opened:
        opened.write('{"kind": "b"')
    assert [line["kind"] for line in lines(file)] == ["a"]


def test_transformers_agrees_that_each_version_counts_in_its_own_block(tmp_path: Path) -> None:
    """Greedy or not, there is one next token; the count continues across versions and begins with zero after anything else."""
    certain, impossible = pytest.approx(0, abs=1e-4), pytest.approx(-SHARPNESS, abs=1e-2)
    for version in (0, 1, 8):
        path = tmp_path / f"block-{version}"
        save_counting(path, version)
        own = [*range(BLOCK * version, BLOCK * (version + 1))]
        other = [token % 80 + 10 for token in own] if version < 8 else [*range(BLOCK)]
        assert logprobs(path, [257, 198, *own, *own]) == [impossible] + [certain] * 2 * BLOCK
        assert logprobs(path, [198, own[0], *other[1:]]) == [certain] + [impossible] * (BLOCK - 1)
        assert logprobs(path, [*other[:4], *own[4:]])[3:] == [certain] * (BLOCK - 4)
