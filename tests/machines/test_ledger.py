"""Episodes and their ledger under faults. See `ledgers`."""

from __future__ import annotations

from tests.machines.ledgers import LedgerMachine
from tests.machines.virtual import profile

TestLedger = LedgerMachine.TestCase
TestLedger.settings = profile(40, 50)
