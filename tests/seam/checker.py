"""Decides to which request an answer belongs, by the tags that requests name and answers repeat. Knows nothing of the gateway.

Every request has a tag of its own in its path, its model or its metadata. A tag that is `hidden` is in a request that nobody
sent: it stands in the body of another one.
"""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass, field
from itertools import pairwise

COUNTS = ("crossed", "smuggled", "disordered", "unchecked", "wrong", "lost")
"""The kinds of findings; of each there must be none."""
_TAG = re.compile(rb"(tag|hidden)-([a-z]+[0-9]+)-([0-9]+)-end")
_KEPT = 20


def tag(owner: str, number: int) -> str:
    """The name of a request."""
    return f"tag-{owner}-{number}-end"


def hidden(owner: str, number: int) -> str:
    """The name of a request that is part of a body."""
    return f"hidden-{owner}-{number}-end"


@dataclass
class Report:
    """Counts, and the first findings."""

    counts: Counter[str] = field(default_factory=Counter)
    answers: Counter[str] = field(default_factory=Counter)
    """Counts of ordinary clients by kind, and of hostile connections by status."""
    findings: list[str] = field(default_factory=list)
    requests: int = 0
    """Counts of ordinary clients."""
    connections: int = 0
    """Hostile ones."""
    forwarded: int = 0
    """Requests that the coordinator got from the process in front of it."""

    @property
    def found(self) -> int:
        """The number of findings."""
        return sum(self.counts[count] for count in COUNTS)

    def find(self, count: str, said: str) -> None:
        """Something is wrong."""
        self.counts[count] += 1
        if len(self.findings) < _KEPT:
            self.findings.append(f"{count}: {said}")

    def ordinary(self, kind: str, own: str, statuses: tuple[int, ...], status: int, answer: bytes) -> None:
        """An ordinary client got an answer; it repeats its tag, unless it is a refusal for want of a key (401)."""
        self.requests += 1
        self.answers[kind] += 1
        self._foreign(f"{kind} {own}", own.split("-")[1], answer)
        others = {match.group(0).decode() for match in _TAG.finditer(answer)} - {own}
        if others:
            self.find("crossed", f"{kind} {own} was answered with {sorted(others)}: {answer[:300]!r}")
        elif status not in statuses or (status != 401 and own.encode() not in answer):
            self.find("wrong", f"{kind} {own} was answered {status}: {answer[:300]!r}")

    def unanswered(self, kind: str, own: str, error: str) -> None:
        """An ordinary client got none."""
        self.requests += 1
        self.find("lost", f"{kind} {own}: {error}")

    def hostile(self, owner: str, answers: bytes) -> None:
        """All that came on a hostile connection: nobody else's answer, and its own in their order."""
        self.connections += 1
        self.answers.update(
            f"hostile {code.decode()}" for code in re.findall(rb"HTTP/1\.1 (\d{3}) ", answers)
        )
        self._foreign(f"the connection {owner}", owner, answers)
        numbers = [int(match.group(3)) for match in _TAG.finditer(answers) if match.group(1) == b"tag"]
        if any(after < before for before, after in pairwise(numbers)):
            self.find("disordered", f"the connection {owner} was answered in the order {numbers}")

    def reached(self, method: str, path: str, key_is_good: bool) -> None:
        """A request came to the coordinator."""
        self.forwarded += 1
        if "hidden-" in path:
            self.find("smuggled", f"the coordinator got {method} {path}")
        elif not key_is_good:
            self.find("unchecked", f"the coordinator got {method} {path} without a key for it")

    def _foreign(self, what: str, owner: str, answers: bytes) -> None:
        for match in _TAG.finditer(answers):
            if match.group(1) == b"hidden":
                self.find("smuggled", f"{what} was answered with {match.group(0).decode()}")
            elif match.group(2) != owner.encode():
                self.find("crossed", f"{what} was answered with {match.group(0).decode()}")
