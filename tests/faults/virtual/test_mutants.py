"""The virtual cluster catches mutants of the gateway, and reports nothing without one."""

from __future__ import annotations

import pytest

from tests.faults import mutants
from tests.faults.checker import Report
from tests.faults.mutants import Mutant
from tests.faults.virtual.links import LinkMachine


def run_update() -> Report:
    """Let calls at a follower cross an update while their tokens are on the way."""
    machine = LinkMachine()
    try:
        machine.begin("keep", "rolling", 1, accounts=True)
        machine.engines_are_slow(0, 0.0, 0.15, 0.0)
        for _ in range(3):
            machine.call(1, 40, False, True)
        machine.advance(1.0)
        machine.publish()
        machine.advance(20.0)
        return machine.c.report
    finally:
        machine.c.close()


def test_nothing_is_found_without_a_mutant() -> None:
    report = run_update()
    assert report.right, report.findings


@pytest.mark.parametrize("mutant", mutants.of("virtual"), ids=lambda mutant: mutant.name)
def test_each_mutant_is_caught(mutant: Mutant) -> None:
    with mutant.put_in():
        report = run_update()
    assert mutant.caught_by(report), (report.first, report.findings)
