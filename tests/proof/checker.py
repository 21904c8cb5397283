"""Reads which version sampled a token from the token itself, and holds it against what was recorded and what clients received.

It imports nothing of headgate, knows nothing of how an update works, and takes plain JSON: an episode's trajectory as
`GET /admin/v1/episodes/{id}/trajectory` gives it, and for every request that a client made

    {"episode": id, "call": id of the response, "text": what came, "finish": finish reason, "asked": tokens, "error": ""}

What must hold, for every call:
- it did not fail, and ended because it had as many tokens as it asked for;
- it was recorded, once, and is not masked; nothing was recorded that nobody asked for;
- the text that was received is the recorded tokens, one character each;
- the digits of the tokens count up by one: a gap is tokens lost, a step back is tokens doubled;
- every token's version is the one it names; where an interval was recorded, it lies inside and the token is flagged.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

SHOWN = 20
Json = Mapping[str, Any]
COUNTS = ("wrong_version", "lost", "doubled", "failed_requests", "differing", "masked")
"""The kinds of findings: tokens mislabelled, lost, doubled; requests that failed; calls whose record is not what the client
received; calls that were recorded and masked."""


@dataclass(frozen=True, slots=True)
class Code:
    """The code by which tokens name their version."""

    blocks: Sequence[Sequence[int]]
    """Each version's token ids, by digit."""
    characters: Mapping[str, int]
    """The token of each character."""
    by_position: bool
    """A reply's first digit is its position, modulo the block's size; otherwise it is 0."""

    def read(self) -> dict[int, tuple[int, int]]:
        """(version, digit) of every token."""
        return {token: (v, d) for v, block in enumerate(self.blocks) for d, token in enumerate(block)}

    @property
    def size(self) -> int:
        """Digits of a block."""
        return len(self.blocks[0])


@dataclass(frozen=True, slots=True)
class Violation:
    """Something that is wrong with one token, or (token -1) with one call."""

    kind: str
    episode: str
    call: str
    token: int
    detail: str

    def __str__(self) -> str:
        return f"{self.kind}: episode {self.episode}, call {self.call}, token {self.token}: {self.detail}"


@dataclass(slots=True)
class Report:
    """The checker's findings."""

    tokens_checked: int = 0
    calls: int = 0
    unconfirmed: int = 0
    """Tokens that were recorded with an interval, and rightly so."""
    counts: Counter[str] = field(default_factory=lambda: Counter(dict.fromkeys(COUNTS, 0)))
    crossings: Counter[int] = field(default_factory=Counter)
    """The number of calls that crossed to each version in their middle."""
    violations: list[Violation] = field(default_factory=list)
    """The first `SHOWN`."""
    first: Counter[str] = field(default_factory=Counter)
    """The first calls with each kind of finding."""
    _last_call: str | None = None

    @property
    def right(self) -> bool:
        """Returns whether nothing at all is wrong."""
        return not any(self.counts.values())

    def wrong(self, kind: str, episode: str, call: str, token: int, detail: str, count: int = 1) -> None:
        """Counts what is wrong, and keeps the first of it."""
        self.counts[kind] += count
        if call != self._last_call:
            self.first[kind] += 1
        self._last_call = call
        if len(self.violations) < SHOWN:
            self.violations.append(Violation(kind, episode, call, token, detail))

    def to_json(self) -> dict[str, Any]:
        """A JSON object."""
        return {
            "tokens_checked": self.tokens_checked,
            "calls": self.calls,
            "unconfirmed": self.unconfirmed,
            **self.counts,
            "crossings": {str(version): count for version, count in sorted(self.crossings.items())},
            "violations": [str(violation) for violation in self.violations],
        }


def check(code: Code, trajectories: Sequence[Json], received: Sequence[Json]) -> Report:
    """Holds everything that was recorded against everything that was received."""
    report = Report()
    turns = _by_call(trajectories)
    for request in received:
        episode, call = request["episode"], request["call"]
        found = turns.pop((episode, call), [])
        report.calls += 1
        if request["error"] or request["finish"] != "length":
            why = request["error"] or f"it ended with {request['finish']!r}"
            report.wrong("failed_requests", episode, call, -1, why)
        if not found and not request["error"]:
            report.wrong("lost", episode, call, -1, "it was not recorded", request["asked"])
        for nodes, node in found[:1]:
            _Turn(code, report, episode, nodes, node).check(request)
        _not_asked_for(report, found[1:])
    for found in turns.values():
        _not_asked_for(report, found)
    return report


Found = tuple[Sequence[Json], Json]
"""An episode's nodes, and one of them, in which a call was recorded."""


def _by_call(trajectories: Sequence[Json]) -> dict[tuple[str, str], list[Found]]:
    turns: dict[tuple[str, str], list[Found]] = {}
    for trajectory in trajectories:
        for node in trajectory["nodes"]:
            if node["sampled"]:
                key = (trajectory["episode_id"], node["call_id"])
                turns.setdefault(key, []).append((trajectory["nodes"], node))
    return turns


def _not_asked_for(report: Report, found: Sequence[Found]) -> None:
    for _, node in found:
        detail = f"recorded, and not received ({node['mask_reason'] or 'not masked'})"
        report.wrong("doubled", "", node["call_id"], -1, detail, len(node["ids"]))


class _Turn:
    """One recorded turn."""

    def __init__(self, code: Code, report: Report, episode: str, nodes: Sequence[Json], node: Json) -> None:
        self._code = code
        self._report = report
        self._where = (episode, node["call_id"])
        self._node = node
        self._named = code.read()
        start = _length_of_path(nodes, node) if code.by_position else 0
        self._first = start % code.size

    def check(self, request: Json) -> None:
        """Its tokens alone, and then against what the client received."""
        ids, whole = self._node["ids"], not request["error"]
        self._report.tokens_checked += len(ids)
        self._count(ids, request["asked"] if whole else None, "recorded")
        self._versions(ids)
        received = [self._code.characters.get(character, -1) for character in request["text"]]
        if whole and received != ids:
            pairs = enumerate(zip(received, ids, strict=False))
            at = next((i for i, (one, other) in pairs if one != other), min(len(received), len(ids)))
            self._wrong("differing", at, f"{len(received)} tokens were received, {len(ids)} recorded")
            self._count(received, None, "received")
        if self._node["mask_reason"]:
            self._wrong("masked", -1, self._node["mask_reason"])

    def _count(self, ids: Sequence[int], asked: int | None, what: str) -> None:
        """The digits count up, from the first that is due, to as many as were asked for."""
        due, size, there = self._first, self._code.size, len(ids)
        for i, token in enumerate(ids):
            digit = self._named.get(token, (-1, due))[1]
            step = (digit - due) % size
            if 0 < step <= size // 2:
                self._wrong("lost", i, f"{what}: digit {digit} where {due} was due", step)
                there += step
            elif step:
                self._wrong("doubled", i, f"{what}: digit {digit} where {due} was due", size - step)
                there -= size - step
            due = (digit + 1) % size
        if asked is not None and there < asked:
            self._wrong("lost", len(ids), f"{what}: it ends early", asked - there)
        elif asked is not None and there > asked:
            self._wrong("doubled", len(ids), f"{what}: it has more than was asked for", there - asked)

    def _versions(self, ids: Sequence[int]) -> None:
        labels, flags = list(_intervals(self._node["versions"])), self._node["flags"]
        if not len(labels) == len(ids) == len(flags) == len(self._node["logprobs"]):
            detail = f"{len(ids)} tokens, {len(labels)} labels, {len(flags)} flags"
            self._wrong("wrong_version", -1, detail, max(1, abs(len(ids) - len(labels))))
        before = None
        for i, (token, (oldest, newest), flag) in enumerate(zip(ids, labels, flags, strict=False)):
            version = self._named.get(token, (-1, 0))[0]
            open_, flagged = oldest < newest, "UNCONFIRMED" in flag.split("|")
            if not oldest <= version <= newest or open_ != flagged:
                label = f"{oldest} to {newest}" if open_ else f"{oldest}"
                detail = f"recorded as {label} with flags {flag!r}, sampled by {version}"
                self._wrong("wrong_version", i, detail)
            self._report.unconfirmed += open_
            if before not in (None, version):
                self._report.crossings[version] += 1
            before = version

    def _wrong(self, kind: str, token: int, detail: str, count: int = 1) -> None:
        self._report.wrong(kind, *self._where, token, detail, count)


def _intervals(spans: Sequence[Sequence[int]]) -> Iterator[tuple[int, int]]:
    """[version, count] or [oldest, count, newest], token by token."""
    for oldest, count, *newest in spans:
        for _ in range(count):
            yield oldest, newest[0] if newest else oldest


def _length_of_path(nodes: Sequence[Json], node: Json) -> int:
    """Tokens from the root to where a node hangs."""
    length = 0
    while node["parent"] >= 0:
        length += node["at"]
        node = nodes[node["parent"]]
    return length
