"""Changes of the evidence of a run in which nothing was wrong, as a gateway that is wrong would have left it."""

from __future__ import annotations

from typing import Any

import numpy as np

from tests.faults.evidence import Evidence, Row, ids_of

_WIDTH = {"ids": 4, "logprobs": 4, "flags": 1}


def _finished(evidence: Evidence) -> list[Row]:
    """Return the ends of whole replies, the longest first."""
    found = [e for e in evidence.agents if e["kind"] == "end" and e["how"] == "finished"]
    return sorted(found, key=lambda event: -len(event["text"]))


def _longest(evidence: Evidence) -> tuple[Row, Row]:
    """Return the end of the longest whole reply, and its node."""
    event = _finished(evidence)[0]
    rows = evidence.tables["nodes"]
    return event, next(row for row in rows if row["call_id"] == event["id"] and row["sampled"])


def _keep(row: Row, kept: list[int]) -> None:
    """Keep some tokens of a turn, by their indexes."""
    labels = [[span[0], 1, *span[2:]] for span in row["spans"] for _ in range(span[1])]
    row["spans"] = [labels[i] for i in kept]
    for name, size in _WIDTH.items():
        row[name] = b"".join(row[name][i * size : (i + 1) * size] for i in kept)


def _remove_nodes(evidence: Evidence, call: str) -> None:
    evidence.tables["nodes"] = [row for row in evidence.tables["nodes"] if row["call_id"] != call]


# Replies


def reply_not_stored(evidence: Evidence) -> None:
    _remove_nodes(evidence, _longest(evidence)[0]["id"])


def last_token_not_stored(evidence: Evidence) -> None:
    _, row = _longest(evidence)
    _keep(row, list(range(len(ids_of(row)) - 1)))


def stored_as_abandoned(evidence: Evidence) -> None:
    _longest(evidence)[1]["mask_reason"] = "abandoned"


def token_lost(evidence: Evidence) -> None:
    """Remove a token from reply and record: only the places of the others show it."""
    event, row = _longest(evidence)
    _keep(row, [i for i in range(len(ids_of(row))) if i != 2])
    event["text"] = event["text"][:2] + event["text"][3:]


def too_short(evidence: Evidence) -> None:
    """Remove the last token from reply and record: only the request shows it."""
    event, row = _longest(evidence)
    _keep(row, list(range(len(ids_of(row)) - 1)))
    event["text"] = event["text"][:-1]


def token_differs(evidence: Evidence) -> None:
    event, _ = _longest(evidence)
    event["text"] = event["text"][:2] + "?" + event["text"][3:]


def breaks_off_unlike_record(evidence: Evidence) -> None:
    """Send a client another token before its reply breaks off."""
    event = _finished(evidence)[0]
    call, text = event["id"], event["text"]
    evidence.agents[:] = [e for e in evidence.agents if e["kind"] != "chunk" or e["id"] != call]
    chunk = {"ask": event["ask"], "attempt": event["attempt"], "id": call, "at": event["at"]}
    at = evidence.agents.index(event)
    event["how"] = "broken"
    del event["text"]
    evidence.agents.insert(at, {"kind": "chunk", **chunk, "text": text[:2] + text[1:3]})


def breaks_off_unlike_samples(evidence: Evidence) -> None:
    """Do the same where nothing is stored."""
    reply_not_stored(evidence)
    breaks_off_unlike_record(evidence)


def turn_twice(evidence: Evidence) -> None:
    """Store the same samples as another call's."""
    _add_turn(evidence, dict(_longest(evidence)[1]))


def sampled_twice(evidence: Evidence) -> None:
    """Reply to one question by two trained turns with samples of their own."""
    row = dict(_longest(evidence)[1])
    labels = [span[0] for span in row["spans"] for _ in range(span[1])]
    first = 1 + max(evidence.marks)
    marks = range(first, first + len(labels))
    evidence.marks |= dict(zip(marks, zip(ids_of(row), labels, strict=True), strict=True))
    row["logprobs"] = (-np.asarray(marks, np.float64) / 2**20).astype("<f4").tobytes()
    _add_turn(evidence, row)


def _add_turn(evidence: Evidence, row: Row) -> None:
    nodes = evidence.tables["nodes"]
    index = 1 + max(node["index"] for node in nodes if node["episode_id"] == row["episode_id"])
    nodes.append({**row, "index": index, "call_id": "another"})


def token_twice(evidence: Evidence) -> None:
    """Double a token in reply and record."""
    event, row = _longest(evidence)
    _keep(row, [0, 1, 1, *range(2, len(ids_of(row)))])
    event["text"] = event["text"][:2] + event["text"][1:]


def swapped_replies(evidence: Evidence) -> None:
    """Send two clients each other's replies."""
    events = _finished(evidence)
    one, other = events[0], next(e for e in events if e["episode"] != events[0]["episode"])
    calls = (one["id"], other["id"])
    evidence.agents[:] = [e for e in evidence.agents if e["kind"] != "chunk" or e["id"] not in calls]
    for key in ("id", "text"):
        one[key], other[key] = other[key], one[key]


# Versions


def other_version(evidence: Evidence) -> None:
    _, row = _longest(evidence)
    row["spans"] = [[span[0] + 1, *span[1:]] for span in row["spans"]]


def interval_not_flagged(evidence: Evidence) -> None:
    _, row = _longest(evidence)
    row["spans"] = [[span[0], span[1], span[0] + 1] for span in row["spans"]]


def flag_without_interval(evidence: Evidence) -> None:
    _, row = _longest(evidence)
    row["flags"] = bytes([32]) * len(row["flags"])


def interval_without_truth(evidence: Evidence) -> None:
    _, row = _longest(evidence)
    row["spans"] = [[span[0] + 1, span[1], span[0] + 2] for span in row["spans"]]
    row["flags"] = bytes([32]) * len(row["flags"])


def sampled_by_no_engine(evidence: Evidence) -> None:
    _, row = _longest(evidence)
    del evidence.marks[round(-float(np.frombuffer(row["logprobs"], "<f4")[0]) * 2**20)]


# Batches and keys


def _trained(evidence: Evidence) -> tuple[int, str]:
    """Return the first batch and its first group."""
    batch = min(evidence.checkpoints)
    return batch, evidence.checkpoints[batch][0]


def in_two_batches(evidence: Evidence) -> None:
    batch, group = _trained(evidence)
    rows = evidence.tables["decisions"]
    row = next(row for row in rows if row["kind"] == "trained" and row["group_id"] == group)
    rows.append({**row, "batch": batch + 1, "seq": row["seq"] + 10**6})


def in_two_checkpoints(evidence: Evidence) -> None:
    batch, group = _trained(evidence)
    assert max(evidence.checkpoints) > batch
    evidence.checkpoints[max(evidence.checkpoints)].append(group)


def acknowledged_twice(evidence: Evidence) -> None:
    row = next(row for row in evidence.tables["leases"] if row["state"] == "acked")
    evidence.tables["leases"].append({**row, "fence": row["fence"] + 10**6})


def acknowledged_untrained(evidence: Evidence) -> None:
    batch, group = _trained(evidence)
    evidence.checkpoints[batch].remove(group)


def missing_in_ledger(evidence: Evidence) -> None:
    """Leave a rewarded group without any end in the ledger."""
    _, group = _trained(evidence)
    acknowledged_untrained(evidence)
    rows = evidence.tables["decisions"]
    kept = [row for row in rows if row["group_id"] != group or row["kind"] == "admitted"]
    evidence.tables["decisions"] = kept


def untrain(evidence: Evidence, batch: int) -> None:
    """Leave a full batch untrained."""
    evidence.checkpoints.pop(batch)
    rows, leases = evidence.tables["decisions"], evidence.tables["leases"]
    kept = [row for row in rows if (row["kind"], row["batch"]) != ("trained", batch)]
    evidence.tables["decisions"] = kept
    evidence.tables["leases"] = [row for row in leases if row["batch"] != batch]


def last_batch_untrained(evidence: Evidence) -> None:
    untrain(evidence, max(evidence.checkpoints))


def reward_lost(evidence: Evidence) -> None:
    _, group = _trained(evidence)
    for row in evidence.tables["episodes"]:
        if row["group_id"] == group:
            row.update(state="open", reason="", reward=None)


def foreign_read(evidence: Evidence) -> None:
    event: dict[str, Any] = {"own": "ep-a", "foreign": "ep-b", "what": "path", "status": 200, "body": ""}
    evidence.agents.append({"kind": "try", "at": 0.0, **event})
