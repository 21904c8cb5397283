"""Decide to which request a response belongs, by the tags that requests name and responses repeat. Knows nothing of the gateway.

Every request has a tag of its own in its path, its model or its metadata. A `hidden` tag is in a request that no client sent: it
is part of another one's body.
"""

from __future__ import annotations

import re
from itertools import pairwise

from tests.faults.checker import Report

COUNTS = ("crossed", "smuggled", "disordered", "unchecked", "wrong", "lost")
_TAG = re.compile(rb"(tag|hidden)-([a-z]+[0-9]+)-([0-9]+)-end")


def tag(owner: str, number: int) -> str:
    """Return the name of a request."""
    return f"tag-{owner}-{number}-end"


def hidden(owner: str, number: int) -> str:
    """Return the name of a request that is part of a body."""
    return f"hidden-{owner}-{number}-end"


class Tags:
    """Compare the tags of requests and responses.

    Facts of the report: `requests` of ordinary clients, hostile `connections`, requests that were `forwarded` to the
    coordinator, and responses by kind.
    """

    def __init__(self) -> None:
        self.report = Report()

    def check_ordinary(
        self, kind: str, own: str, statuses: tuple[int, ...], status: int, response: bytes
    ) -> None:
        """Check an ordinary client's response: it repeats the tag, unless it is a refusal for want of a key (401)."""
        self._count("requests", f"response {kind}")
        self._check_foreign(f"{kind} {own}", own.split("-")[1], response)
        others = {match.group(0).decode() for match in _TAG.finditer(response)} - {own}
        if others:
            detail = f"{kind} {own} was answered with {sorted(others)}: {response[:300]!r}"
            self.report.wrong("crossed", detail)
        elif status not in statuses or (status != 401 and own.encode() not in response):
            self.report.wrong("wrong", f"{kind} {own} was answered {status}: {response[:300]!r}")

    def check_missing(self, kind: str, own: str, error: str) -> None:
        """Count an ordinary client's request without a response."""
        self._count("requests")
        self.report.wrong("lost", f"{kind} {own}: {error}")

    def check_hostile(self, owner: str, responses: bytes) -> None:
        """Check a hostile connection: it has only its own responses, in the order of its requests."""
        codes = re.findall(rb"HTTP/1\.1 (\d{3}) ", responses)
        self._count("connections", *(f"response to hostile {code.decode()}" for code in codes))
        self._check_foreign(f"the connection {owner}", owner, responses)
        numbers = [int(match.group(3)) for match in _TAG.finditer(responses) if match.group(1) == b"tag"]
        if any(after < before for before, after in pairwise(numbers)):
            detail = f"the connection {owner} was answered in the order {numbers}"
            self.report.wrong("disordered", detail)

    def check_forwarded(self, method: str, path: str, key_is_good: bool) -> None:
        """Check a request that the coordinator received."""
        self._count("forwarded")
        if "hidden-" in path:
            self.report.wrong("smuggled", f"the coordinator received {method} {path}")
        elif not key_is_good:
            self.report.wrong("unchecked", f"the coordinator received {method} {path} without a key for it")

    def _check_foreign(self, what: str, owner: str, responses: bytes) -> None:
        for match in _TAG.finditer(responses):
            detail = f"{what} was answered with {match.group(0).decode()}"
            if match.group(1) == b"hidden":
                self.report.wrong("smuggled", detail)
            elif match.group(2) != owner.encode():
                self.report.wrong("crossed", detail)

    def _count(self, *facts: str) -> None:
        self.report.facts.update(facts)
