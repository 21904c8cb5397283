"""Processes, links and engines under faults. See `links`."""

from __future__ import annotations

from unittest.mock import patch

from gateway.rollout import call_runner
from tests.machines.cluster import Tally
from tests.machines.links import LinkMachine
from tests.machines.virtual import profile


class TestLink(LinkMachine.TestCase):  # type: ignore[misc, name-defined]
    settings = profile(30, 40)

    def runTest(self) -> None:
        """The runs as a whole say something: most turns have a version that can be checked, and there was trouble."""
        seen = LinkMachine.tally = Tally()
        with patch.object(call_runner, "MAX_FAILURES", 100):
            super().runTest()
        assert seen.turns > 80 and seen.disputed <= seen.turns / 10, seen
        assert seen.updates > 100 and seen.coordinators > 60, seen
