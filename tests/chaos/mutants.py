"""Evidence that is wrong in one way each, which the checker must notice: a count that no mutant can raise proves nothing.

Each changes the evidence of a run in which nothing was wrong, as a gateway that is wrong would have left it.
`tests/chaos/spoilt.py` has gateways that are wrong.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from tests.chaos.evidence import Evidence, Row


@dataclass(frozen=True, slots=True)
class Mutant:
    """One way to be wrong."""

    name: str
    wrong: str
    """The count that must rise."""
    change: Callable[[Evidence], None]
    """Changes the evidence in place."""


def _finished(evidence: Evidence) -> list[Row]:
    """Ends of replies that were whole, longest first."""
    found = [e for e in evidence.agents if e["kind"] == "end" and e["how"] == "finished"]
    return sorted(found, key=lambda event: -len(event["text"]))


def _node(evidence: Evidence, call: str) -> Row:
    return next(row for row in evidence.tables["nodes"] if row["call_id"] == call and row["sampled"])


def _cut(row: Row, keep: int) -> None:
    """Keeps the first tokens of a turn."""
    width = {"ids": 4, "logprobs": 4, "flags": 1}
    row.update({name: row[name][: keep * size] for name, size in width.items()})
    spans, left = [], keep
    for span in row["spans"]:
        if left > 0:
            spans.append([span[0], min(span[1], left), *span[2:]])
            left -= span[1]
    row["spans"] = spans


def _reply_not_stored(evidence: Evidence) -> None:
    call = _finished(evidence)[0]["id"]
    evidence.tables["nodes"] = [row for row in evidence.tables["nodes"] if row["call_id"] != call]


def _last_token_not_stored(evidence: Evidence) -> None:
    row = _node(evidence, _finished(evidence)[0]["id"])
    _cut(row, len(row["ids"]) // 4 - 1)


def _stored_as_abandoned(evidence: Evidence) -> None:
    _node(evidence, _finished(evidence)[0]["id"])["mask_reason"] = "abandoned"


def _token_lost(evidence: Evidence) -> None:
    """Removes a token from reply and record: clients cannot see that, the token's place shows it."""
    event = next(e for e in _finished(evidence) if len(e["text"]) > 4)
    row = _node(evidence, event["id"])
    for name, size in {"ids": 4, "logprobs": 4, "flags": 1}.items():
        row[name] = row[name][: 2 * size] + row[name][3 * size :]
    first = row["spans"][0]
    row["spans"] = (
        [[first[0], first[1] - 1, *first[2:]], *row["spans"][1:]] if first[1] > 1 else row["spans"][1:]
    )
    event["text"] = event["text"][:2] + event["text"][3:]


def _breaks_off_otherwise(evidence: Evidence, stored: bool) -> None:
    """A client received another token than the one that came to be; with a record or without one."""
    event = next(e for e in _finished(evidence) if len(e["text"]) > 4)
    call, text = event["id"], event["text"]
    if not stored:
        evidence.tables["nodes"] = [row for row in evidence.tables["nodes"] if row["call_id"] != call]
    evidence.agents[:] = [e for e in evidence.agents if e["kind"] != "chunk" or e["id"] != call]
    said = {"ask": event["ask"], "attempt": event["attempt"], "id": call, "at": event["at"]}
    at = evidence.agents.index(event)
    event["how"] = "broken"
    del event["text"]
    evidence.agents.insert(at, {"kind": "chunk", **said, "text": text[:2] + text[1:3]})


def _turn_twice(evidence: Evidence) -> None:
    """The same sampling, stored as another call's."""
    row = _node(evidence, _finished(evidence)[0]["id"])
    index = 1 + max(r["index"] for r in evidence.tables["nodes"] if r["episode_id"] == row["episode_id"])
    evidence.tables["nodes"].append({**row, "index": index, "call_id": "another"})


def _sampled_twice(evidence: Evidence) -> None:
    """One question, two trained turns with tokens of their own."""
    row = _node(evidence, _finished(evidence)[0]["id"])
    index = 1 + max(r["index"] for r in evidence.tables["nodes"] if r["episode_id"] == row["episode_id"])
    first = 1 + max(evidence.marks)
    copy = {**row, "index": index, "call_id": "another"}
    marks = range(first, first + len(row["ids"]) // 4)
    for mark, token, label in zip(
        marks, np.frombuffer(row["ids"], "<i4").tolist(), _labels(row), strict=True
    ):
        evidence.marks[mark] = (token, label)
    copy["logprobs"] = (-np.asarray(marks, np.float64) / 2**20).astype("<f4").tobytes()
    evidence.tables["nodes"].append(copy)


def _labels(row: Row) -> list[int]:
    return [span[0] for span in row["spans"] for _ in range(span[1])]


def _other_version(evidence: Evidence) -> None:
    row = _node(evidence, _finished(evidence)[0]["id"])
    row["spans"] = [[span[0] + 1, *span[1:]] for span in row["spans"]]


def _interval_not_flagged(evidence: Evidence) -> None:
    row = _node(evidence, _finished(evidence)[0]["id"])
    row["spans"] = [[span[0], span[1], span[0] + 1] for span in row["spans"]]


def _interval_without_truth(evidence: Evidence) -> None:
    row = _node(evidence, _finished(evidence)[0]["id"])
    row["spans"] = [[span[0] + 1, span[1], span[0] + 2] for span in row["spans"]]
    row["flags"] = bytes([32]) * len(row["flags"])


def _sampled_by_nobody(evidence: Evidence) -> None:
    row = _node(evidence, _finished(evidence)[0]["id"])
    mark = round(-float(np.frombuffer(row["logprobs"], "<f4")[0]) * 2**20)
    del evidence.marks[mark]


def _trained(evidence: Evidence) -> tuple[int, str]:
    buffer = min(evidence.checkpoints)
    return buffer, evidence.checkpoints[buffer][0]


def _in_two_batches(evidence: Evidence) -> None:
    buffer, group = _trained(evidence)
    row = next(r for r in evidence.tables["decisions"] if r["kind"] == "trained" and r["group_id"] == group)
    evidence.tables["decisions"].append({**row, "buffer": buffer + 1, "seq": row["seq"] + 10**6})


def _in_two_checkpoints(evidence: Evidence) -> None:
    buffer, group = _trained(evidence)
    evidence.checkpoints[max(evidence.checkpoints)].append(group)
    assert max(evidence.checkpoints) > buffer


def _acknowledged_twice(evidence: Evidence) -> None:
    row = next(r for r in evidence.tables["leases"] if r["state"] == "acked")
    evidence.tables["leases"].append({**row, "fence": row["fence"] + 10**6})


def _acknowledged_untrained(evidence: Evidence) -> None:
    _, group = _trained(evidence)
    for groups in evidence.checkpoints.values():
        if group in groups:
            groups.remove(group)


def _forgotten_by_the_ledger(evidence: Evidence) -> None:
    """Rewarded, its agents were told, and the ledger knows of no end."""
    _, group = _trained(evidence)
    for groups in evidence.checkpoints.values():
        if group in groups:
            groups.remove(group)
    kept = [r for r in evidence.tables["decisions"] if r["group_id"] != group or r["kind"] == "admitted"]
    evidence.tables["decisions"] = kept


def untrain(evidence: Evidence, buffer: int) -> None:
    """The batch was full, and nobody has trained it."""
    evidence.checkpoints.pop(buffer)
    kept = [r for r in evidence.tables["decisions"] if (r["kind"], r["buffer"]) != ("trained", buffer)]
    evidence.tables["decisions"] = kept
    evidence.tables["leases"] = [row for row in evidence.tables["leases"] if row["buffer"] != buffer]


def _reward_lost(evidence: Evidence) -> None:
    _, group = _trained(evidence)
    for row in evidence.tables["episodes"]:
        if row["group_id"] == group:
            row.update(state="open", reason="", reward=None)


def _foreign_read(evidence: Evidence) -> None:
    said: dict[str, Any] = {"own": "ep-a", "foreign": "ep-b", "what": "path", "status": 200, "body": ""}
    evidence.agents.append({"kind": "try", "at": 0.0, **said})


def _another_reply(evidence: Evidence) -> None:
    """Two clients with each other's replies."""
    events = _finished(evidence)
    one, other = events[0], next(e for e in events if e["episode"] != events[0]["episode"])
    chunks = {
        id(e): e for e in evidence.agents if e["kind"] == "chunk" and e["id"] in (one["id"], other["id"])
    }
    evidence.agents[:] = [e for e in evidence.agents if id(e) not in chunks]
    one["id"], other["id"] = other["id"], one["id"]
    one["text"], other["text"] = other["text"], one["text"]


MUTANTS: Sequence[Mutant] = (
    Mutant("a reply is not stored", "absent", _reply_not_stored),
    Mutant("the last token is not stored", "absent", _last_token_not_stored),
    Mutant("a whole reply is stored as abandoned", "absent", _stored_as_abandoned),
    Mutant("a token is lost for all", "absent", _token_lost),
    Mutant(
        "a reply broke off otherwise than it is stored",
        "not_prefix",
        lambda e: _breaks_off_otherwise(e, True),
    ),
    Mutant(
        "a reply broke off otherwise than it was sampled",
        "not_prefix",
        lambda e: _breaks_off_otherwise(e, False),
    ),
    Mutant("a turn is stored twice", "doubled", _turn_twice),
    Mutant("a question is answered twice", "doubled", _sampled_twice),
    Mutant("another version's label", "wrong_version", _other_version),
    Mutant("an interval that is not flagged", "wrong_version", _interval_not_flagged),
    Mutant("an interval without the truth in it", "wrong_version", _interval_without_truth),
    Mutant("a token that nobody sampled", "wrong_version", _sampled_by_nobody),
    Mutant("a group in two batches", "trained_twice", _in_two_batches),
    Mutant("a group in two checkpoints", "trained_twice", _in_two_checkpoints),
    Mutant("a batch acknowledged twice", "trained_twice", _acknowledged_twice),
    Mutant("a batch acknowledged without one of its groups", "never_trained", _acknowledged_untrained),
    Mutant("a group that the ledger forgot", "never_trained", _forgotten_by_the_ledger),
    Mutant("a full batch that was not trained", "never_trained", lambda e: untrain(e, max(e.checkpoints))),
    Mutant("a reward that was lost", "never_trained", _reward_lost),
    Mutant("a key that reached another's episode", "leaks", _foreign_read),
    Mutant("replies that were given to each other's clients", "leaks", _another_reply),
)
