"""Hub, followers and engines under faults. See `links`."""

from __future__ import annotations

from tests.machines.links import LinkMachine
from tests.machines.virtual import profile

TestLink = LinkMachine.TestCase
TestLink.settings = profile(30, 40)
