"""The state machines: links and engines, the ledger, and leases on SQLite and PostgreSQL. `test_election` has one more."""

from __future__ import annotations

from collections.abc import Iterator
from unittest.mock import patch

import pytest

from gateway.generation import call_runner
from tests.faults.virtual.clock import profile
from tests.faults.virtual.cluster import Tally
from tests.faults.virtual.leases import LeaseMachine, PostgresLeaseMachine
from tests.faults.virtual.ledgers import LedgerMachine
from tests.faults.virtual.links import LinkMachine
from tests.faults.virtual.stores import Postgres


@pytest.fixture(scope="module", autouse=True)
def _postgres() -> Iterator[None]:
    with Postgres.running():
        yield


TestLedger = LedgerMachine.TestCase
TestLedger.settings = profile(25, 50)
TestLeases = LeaseMachine.TestCase
TestLeases.settings = profile(30, 40)
TestLeasesOnPostgres = PostgresLeaseMachine.TestCase
TestLeasesOnPostgres.settings = profile(10, 40)


class TestLink(LinkMachine.TestCase):  # type: ignore[misc, name-defined]
    settings = profile(30, 40)

    def runTest(self) -> None:
        """Require that most turns had a version that can be checked, and that there were faults."""
        counts = LinkMachine.tally = Tally()
        with patch.object(call_runner, "MAX_FAILURES", 100):
            super().runTest()
        assert counts.turns > 80 and counts.disputed <= counts.turns / 10, counts
        assert counts.updates > 100 and counts.coordinators > 60, counts
