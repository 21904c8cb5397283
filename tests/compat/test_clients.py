"""mini-swe-agent, the coding agent of `make test`, in its own environment (`make clients`); `make test-compat` runs every client.

The openai and anthropic SDKs are in headgate's environment, which collects their tests. What is known not to pass, and why, is in
`known.py`.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.compat.clients.gate import Gate
from tests.compat.report import Row, read
from tests.compat.stage import stage
from tests.compat.suites import SUITES, run


@pytest.mark.clients
def test_a_coding_agent_has_no_unexplained_failure(tmp_path: Path) -> None:
    [suite] = [suite for suite in SUITES if suite.name == "mini-swe-agent"]
    with stage(tmp_path / "stage") as running:
        cases = read(run(suite, Gate(running.gateway, running.engine), tmp_path))
    unknown = [why for why, _, known in Row(suite.name, "", suite.group, cases).reasons() if not known]
    assert not unknown, "\n".join(unknown)
    assert any(case.outcome == "passed" for case in cases)
