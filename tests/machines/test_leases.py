"""Leases of buffers, on SQLite and PostgreSQL. See `leases`."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.machines.leases import LeaseMachine, PostgresLeaseMachine
from tests.machines.stores import Postgres
from tests.machines.virtual import profile


@pytest.fixture(scope="module", autouse=True)
def _postgres() -> Iterator[None]:
    with Postgres.running():
        yield


TestLeases = LeaseMachine.TestCase
TestLeases.settings = profile(60, 40)
TestLeasesOnPostgres = PostgresLeaseMachine.TestCase
TestLeasesOnPostgres.settings = profile(10, 40)
