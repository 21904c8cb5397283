"""The fuzzer for some seconds, and what it finds of gateways that are wrong."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.harness.clusters import Cluster
from tests.harness.servers import PostgresServer
from tests.harness.stores import postgres_store
from tests.seam.checker import COUNTS, Report, hidden, tag
from tests.seam.mutants import MUTANTS, Mutant
from tests.seam.world import fuzz, seam


@pytest.fixture
async def cluster(postgres: PostgresServer, tiny_model: Path, tmp_path: Path) -> AsyncIterator[Cluster]:
    """Two gateways."""
    async with seam(postgres_store(postgres), tiny_model, tmp_path) as running:
        yield running


async def test_no_answer_reaches_another_request(cluster: Cluster) -> None:
    def enough(report: Report) -> bool:
        return report.found > 0 or min(report.requests, report.connections, report.forwarded) > 20

    report = await fuzz(cluster, seed=1, seconds=240.0, until=enough)
    assert not report.found, report.findings
    assert enough(report), (report.requests, report.connections, report.forwarded)


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name.replace(" ", "-"))
async def test_a_gateway_that_is_wrong_is_noticed(cluster: Cluster, mutant: Mutant) -> None:
    with mutant.put_in():
        report = await fuzz(cluster, seed=1, seconds=240.0, until=mutant.caught_by)
    assert mutant.caught_by(report), (report.counts, report.requests, report.connections)


def test_answers_are_their_requests() -> None:
    report, own = Report(), tag("c1", 7)
    report.ordinary("get", own, (404,), 404, f"no episode '{own}'".encode())
    report.ordinary("get", own, (401,), 401, b"no key")
    report.hostile("h2", "".join(f"HTTP/1.1 404 x\r\n\r\n{tag('h2', n)}" for n in (0, 0, 2)).encode())
    report.reached("GET", f"/admin/v1/{own}", True)
    assert not report.found

    report.ordinary("get", own, (404,), 404, tag("c1", 8).encode())
    report.ordinary("get", own, (404,), 200, own.encode())
    report.ordinary("get", own, (404,), 404, b"nobody's")
    report.unanswered("get", own, "it took too long")
    report.hostile("h2", f"{tag('h2', 1)} {tag('h2', 0)}".encode())
    report.hostile("h2", hidden("h2", 1).encode())
    report.hostile("h2", tag("c1", 1).encode())
    report.reached("GET", f"/admin/v1/{hidden('h2', 1)}", True)
    report.reached("GET", f"/admin/v1/{own}", False)
    found = [report.counts[count] for count in COUNTS]
    assert found == [2, 2, 1, 1, 2, 1]
