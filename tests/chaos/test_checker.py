"""The checker finds nothing in the evidence of a run that was right, and each mutant of it."""

from __future__ import annotations

import ast
import copy
import sys
import zipfile
from pathlib import Path

import pytest

from tests.chaos.checker import COUNTS, check
from tests.chaos.evidence import Evidence, lines, read
from tests.chaos.mutants import MUTANTS, Mutant, untrain
from tests.chaos.report import page, summary

_RECORDED = Path(__file__).with_name("recorded.zip")
"""A run of one gateway, two engines and four agents, without faults (`python -m tests.chaos.record` makes it)."""


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Evidence:
    folder = tmp_path_factory.mktemp("evidence")
    with zipfile.ZipFile(_RECORDED) as archive:
        archive.extractall(folder)
    return read(folder)


def test_a_run_that_was_right_is_right(recorded: Evidence) -> None:
    report = check(recorded)
    assert report.right, report.findings
    facts = ("finished_replies", "hung_up_replies", "tokens", "turns", "trained_groups", "tries")
    assert all(report.facts[fact] > 0 for fact in facts), report.facts


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_each_mutant_is_found(recorded: Evidence, mutant: Mutant) -> None:
    spoilt = copy.deepcopy(recorded)
    mutant.change(spoilt)
    report = check(spoilt)
    assert report.counts[mutant.wrong] > 0
    assert report.findings[mutant.wrong]


def test_labels_that_the_record_itself_disowns_are_no_lie(recorded: Evidence) -> None:
    spoilt = copy.deepcopy(recorded)
    row = max((r for r in spoilt.tables["nodes"] if r["sampled"]), key=lambda r: len(r["ids"]))
    row["spans"] = [[span[0] + 1, *span[1:]] for span in row["spans"]]
    assert check(spoilt).counts["wrong_version"] == len(row["ids"]) // 4
    row["mask_reason"] = "unconfirmed_version"
    report = check(spoilt)
    assert report.right, report.findings
    assert report.facts["disowned"] == len(row["ids"]) // 4


def test_every_count_has_a_mutant() -> None:
    assert {mutant.wrong for mutant in MUTANTS} == set(COUNTS)


def test_a_full_batch_behind_one_that_lacks_a_group_waits(recorded: Evidence) -> None:
    spoilt = copy.deepcopy(recorded)
    last = max(spoilt.checkpoints)
    lost, full = spoilt.checkpoints[last - 1][0], len(spoilt.checkpoints[last])
    for buffer in (last - 1, last):
        untrain(spoilt, buffer)
    assert check(spoilt).counts["never_trained"] == 2 * full, "both were full"
    for row in spoilt.tables["decisions"]:
        if row["group_id"] == lost and row["kind"] == "occupied":
            row.update(kind="dropped", reason="too_few_rewards", buffer=None)
    report = check(spoilt)
    assert report.counts["never_trained"] == 0
    assert report.facts["waiting_groups"] >= 2 * full - 1


def test_marks_that_were_given_twice_are_no_evidence(recorded: Evidence) -> None:
    spoilt = copy.deepcopy(recorded)
    spoilt.remarked = 1
    with pytest.raises(ValueError, match="no evidence"):
        check(spoilt)


def test_the_checker_imports_nothing_of_headgate() -> None:
    allowed = {*sys.stdlib_module_names, "numpy", "psycopg", "tests"}
    for name in ("checker", "evidence", "tokens"):
        tree = ast.parse(Path(__file__).with_name(f"{name}.py").read_text())
        for node in ast.walk(tree):
            modules = [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            modules += [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            for module in modules:
                assert module.split(".")[0] in allowed
                if module.startswith("tests"):
                    assert module in ("tests.chaos.evidence", "tests.chaos.tokens")


def test_a_line_that_a_death_cut_off_is_none(tmp_path: Path) -> None:
    file = tmp_path / "journal.jsonl"
    file.write_text('{"kind": "a"}\n{"kind": "b"')
    assert list(lines(file)) == [{"kind": "a"}]


def test_the_page_says_what_was_found(recorded: Evidence) -> None:
    spoilt = copy.deepcopy(recorded)
    MUTANTS[0].change(spoilt)
    for evidence, verdict in ((recorded, "Nothing was lost"), (spoilt, "Something is wrong")):
        shown = page(evidence, summary(evidence, check(evidence)))
        assert verdict in shown
        assert "http" not in shown.replace("http://www.w3.org", "")
