"""Lays what clients were told, what engines sampled and what is stored beside one another, and counts what does not fit.

Imports nothing of headgate: it knows the form of the evidence, that a question names itself, and that a token names its version
and its place. lab/notes/reliability.md defines each count.
`python -m tests.chaos.checker FOLDER` checks the evidence in a folder.
"""

from __future__ import annotations

import json
import re
import sys
from collections import Counter, defaultdict
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from tests.chaos.evidence import Evidence, Row, Run, read
from tests.chaos.tokens import ids_of, intervals_of, prompt_of, reply_of, text_of

COUNTS = ("absent", "not_prefix", "doubled", "wrong_version", "trained_twice", "never_trained", "leaks")
SHOWN = 10
"""Findings of a kind that are told in words."""
_UNCONFIRMED = 32
_MARK = 2**20
"""A log-probability is a mark divided by this, with its sign changed."""
_ASK = re.compile(r"\[ask:([0-9]+-[0-9]+)\]")
_DISOWNED = "unconfirmed_version"
"""The mask of turns whose labels are not believed by those who stored them."""
_DROPS = {"dropped", "skipped", "aborted"}


@dataclass(slots=True)
class Report:
    """The findings."""

    counts: Counter[str] = field(default_factory=lambda: Counter(dict.fromkeys(COUNTS, 0)))
    findings: dict[str, list[str]] = field(default_factory=lambda: defaultdict(list))
    """The first of each kind, in words."""
    facts: Counter[str] = field(default_factory=Counter)
    """Counts of what was checked, and of what is no fault."""

    @property
    def right(self) -> bool:
        """Returns whether nothing is wrong."""
        return not any(self.counts.values())

    def wrong(self, kind: str, said: str, count: int = 1) -> None:
        """Counts what is wrong, and keeps the first of it."""
        self.counts[kind] += count
        if len(self.findings[kind]) < SHOWN:
            self.findings[kind].append(said)

    def to_json(self) -> dict[str, Any]:
        """A JSON object."""
        return {**self.counts, **self.facts, "findings": dict(self.findings)}


@dataclass(slots=True)
class Turn:
    """A recorded, sampled node."""

    row: Row
    ids: list[int]
    text: str
    ask: str
    """The last question of its prompt."""

    @property
    def where(self) -> str:
        """The turn's place, for people."""
        return f"call {self.row['call_id']} of {self.row['episode_id']} (ask {self.ask})"


@dataclass(slots=True)
class Reply:
    """The client's part of one request."""

    ask: str
    episode: str
    call: str = ""
    text: str = ""
    how: str = "broken"
    finish: str | None = None


def check(evidence: Evidence) -> Report:
    """Everything."""
    return _Checker(evidence).run()


class _Checker:
    def __init__(self, evidence: Evidence) -> None:
        self._evidence = evidence
        self._report = Report()
        self._block: int = evidence.plan["block"]
        self._blocks: int = evidence.plan["blocks"]
        self._unlogged = set(evidence.plan["unlogged_engines"])
        self._turns = self._read_turns()
        self._of_call: dict[str, list[Turn]] = defaultdict(list)
        for turn in self._turns:
            self._of_call[turn.row["call_id"]].append(turn)
        self._calls = {row["id"]: row for row in evidence.tables["calls"]}
        self._runs: dict[str, list[Run]] = defaultdict(list)
        for run in evidence.runs:
            self._runs[run.request.split(".")[0]].append(run)

    def run(self) -> Report:
        """Every count, one after another."""
        if self._evidence.remarked:
            raise ValueError(f"{self._evidence.remarked} marks were given twice: this is no evidence")
        replies, asked = self._read_replies()
        for reply in replies:
            self._reply(reply)
        self._places()
        self._marks()
        self._asks(asked)
        self._training()
        self._tries()
        return self._report

    # Reading

    def _read_turns(self) -> list[Turn]:
        trees: dict[tuple[str, str], dict[int, Row]] = defaultdict(dict)
        for row in self._evidence.tables["nodes"]:
            trees[row["episode_id"], row["model"]][row["index"]] = row
        turns = []
        for tree in trees.values():
            for row in tree.values():
                if row["sampled"]:
                    ids, prompt = ids_of(row), prompt_of(tree, row)
                    if prompt is None:
                        self._report.wrong(
                            "absent", f"call {row['call_id']}: what its node hangs at is not stored"
                        )
                    found = _ASK.findall(text_of(prompt or []))
                    turns.append(Turn(row, ids, text_of(ids), found[-1] if found else ""))
        return turns

    def _read_replies(self) -> tuple[list[Reply], dict[str, str]]:
        """Every request's reply, and for every question its episode."""
        replies: dict[tuple[str, int], Reply] = {}
        asked: dict[str, str] = {}
        for event in self._evidence.agents:
            kind = event["kind"]
            if kind == "ask":
                replies[event["ask"], event["attempt"]] = Reply(event["ask"], event["episode"])
                asked[event["ask"]] = event["episode"]
            elif kind in ("chunk", "end"):
                reply = replies[event["ask"], event["attempt"]]
                reply.call = event.get("id") or reply.call
                if kind == "chunk":
                    reply.text += event["text"]
                else:
                    reply.how, reply.finish = event["how"], event.get("finish")
                    reply.text = event.get("text", reply.text)
        return list(replies.values()), asked

    # Replies

    def _reply(self, reply: Reply) -> None:
        self._report.facts[f"{reply.how}_replies"] += 1
        if reply.how == "finished":
            self._finished(reply)
        elif reply.text:
            self._unfinished(reply)

    def _finished(self, reply: Reply) -> None:
        turns, call = self._of_call[reply.call], self._calls.get(reply.call)
        said = f"call {reply.call} of {reply.episode} (ask {reply.ask})"
        if not turns or call is None:
            self._report.wrong(
                "absent", f"{said}: {len(reply.text)} characters were received, nothing is stored"
            )
            return
        turn = turns[0]
        if turn.text != reply.text:
            self._report.wrong("absent", f"{said}: {reply.text!r} was received, {turn.text!r} is stored")
        elif call["finish_reason"] != reply.finish or turn.row["mask_reason"] == "abandoned":
            stored = f"{call['finish_reason']!r} and {turn.row['mask_reason']!r}"
            self._report.wrong(
                "absent", f"{said}: it ended with {reply.finish!r}, and is stored with {stored}"
            )
        if turn.row["episode_id"] != reply.episode or turn.ask != reply.ask:
            self._report.wrong("leaks", f"{said}: the reply is that of {turn.where}")

    def _unfinished(self, reply: Reply) -> None:
        said = f"call {reply.call} of {reply.episode} (ask {reply.ask}): {reply.text!r} was received"
        if turns := self._of_call[reply.call]:
            if not turns[0].text.startswith(reply.text):
                self._report.wrong("not_prefix", f"{said}, {turns[0].text!r} is stored")
            return
        sampled = [reply_of(run) for run in self._runs[reply.call]]
        if any(text.startswith(reply.text) for text in sampled):
            return
        if self._unlogged and all(self._digit(c) == i % self._block for i, c in enumerate(reply.text)):
            return  # what an engine without a log can have sampled
        self._report.wrong("not_prefix", f"{said}, nothing is stored, engines sampled {sampled}")

    # Tokens

    def _digit(self, character: str) -> int:
        at = ord(character) - ord("!")
        return at % self._block if 0 <= at < self._block * self._blocks else -1

    def _places(self) -> None:
        """Every token of a reply says how many came before it."""
        for turn in self._turns:
            due = 0
            for i, character in enumerate(turn.text):
                digit = self._digit(character)
                step = (digit - due) % self._block if digit >= 0 else 1
                if 0 < step <= self._block // 2:
                    self._report.wrong(
                        "absent", f"{turn.where}: token {i} is {digit} where {due} was due", step
                    )
                elif step:
                    again = self._block - step
                    self._report.wrong(
                        "doubled", f"{turn.where}: token {i} is {digit} where {due} was due", again
                    )
                due = (digit + 1) % self._block

    def _marks(self) -> None:
        """Every token was sampled once, by the version that is stored with it."""
        trained: dict[int, Turn] = {}
        masked: set[int] = set()
        for turn in self._turns:
            row = turn.row
            marks = np.rint(-np.frombuffer(row["logprobs"], "<f4").astype(np.float64) * _MARK).astype(
                np.int64
            )
            flags, spans = np.frombuffer(row["flags"], "u1").tolist(), intervals_of(row["spans"])
            if not len(marks) == len(turn.ids) == len(flags) == len(spans):
                self._report.wrong(
                    "wrong_version", f"{turn.where}: its arrays differ in length", len(turn.ids)
                )
                continue
            self._report.facts["tokens"] += len(turn.ids)
            for i, (mark, token, flag, span) in enumerate(
                zip(marks.tolist(), turn.ids, flags, spans, strict=True)
            ):
                self._version(turn, i, mark, token, flag, span)
                if not mark:
                    continue
                if row["mask_reason"]:
                    self._report.facts["masked_copies"] += mark in masked or mark in trained
                    masked.add(mark)
                elif mark in trained:
                    self._report.wrong("doubled", f"{turn.where}: token {i} is also in {trained[mark].where}")
                else:
                    self._report.facts["masked_copies"] += mark in masked
                    trained[mark] = turn

    def _version(self, turn: Turn, i: int, mark: int, token: int, flag: int, span: tuple[int, int]) -> None:
        oldest, newest = span
        if mark:
            known = self._evidence.marks.get(mark)
            right = known is not None and known[0] == token and oldest <= known[1] <= newest
            truth = f"the engine's log has {known}"
        else:  # an engine without a log: the token names its version modulo the number of blocks
            block = token // self._block
            right = bool(self._unlogged) and any(v % self._blocks == block for v in range(oldest, newest + 1))
            truth = f"it names {block} modulo {self._blocks}"
        self._report.facts["unconfirmed"] += oldest < newest
        if not right and turn.row["mask_reason"] == _DISOWNED:
            self._report.facts["disowned"] += 1
            return
        if not right or (oldest < newest and not flag & _UNCONFIRMED):
            said = f"stored as {oldest} to {newest} with flags {flag}"
            self._report.wrong("wrong_version", f"{turn.where}: token {i} ({token}) is {said}, {truth}")

    def _asks(self, asked: dict[str, str]) -> None:
        """Every trained turn was asked for, once, in its own episode."""
        seen: dict[str, Turn] = {}
        for turn in self._turns:
            owner = asked.get(turn.ask)
            if owner is not None and owner != turn.row["episode_id"]:
                self._report.wrong("leaks", f"{turn.where}: the question was asked in {owner}")
            if turn.row["mask_reason"]:
                self._report.facts["masked_turns"] += 1
                continue
            self._report.facts["turns"] += 1
            if owner is None:
                self._report.wrong("doubled", f"{turn.where}: nobody asked")
            elif turn.ask in seen:
                self._report.wrong("doubled", f"{turn.where}: {seen[turn.ask].where} is the same question's")
            seen[turn.ask] = turn

    # Training

    def _training(self) -> None:
        tables, held = self._evidence.tables, self._evidence.checkpoints
        recorded: dict[int, list[str]] = defaultdict(list)
        for row in tables["decisions"]:
            if row["kind"] == "trained":
                recorded[row["buffer"]].append(row["group_id"])
        for source, batches in (("the database", recorded), ("the trainer's checkpoints", held)):
            times = Counter(group for groups in batches.values() for group in groups)
            for group, count in times.items():
                if count > 1:
                    self._report.wrong("trained_twice", f"{source}: {group} is in {count} batches")
        acked = Counter(row["buffer"] for row in tables["leases"] if row["state"] == "acked")
        for buffer, count in acked.items():
            if count > 1:
                self._report.wrong(
                    "trained_twice", f"batch {buffer} was acknowledged {count} times", count - 1
                )
        for buffer, groups in held.items():
            for group in set(groups) - set(recorded.get(buffer, groups)):
                self._report.wrong(
                    "trained_twice", f"{group} was trained in batch {buffer}, of which it is no part"
                )
        trained = {g for buffer, groups in recorded.items() for g in groups if g in held.get(buffer, ())}
        self._report.facts["trained_groups"] = len(trained)
        for buffer, groups in recorded.items():
            for group in set(groups) - set(held.get(buffer, ())):
                self._report.wrong(
                    "never_trained", f"{group}: batch {buffer} was acknowledged, no checkpoint holds it"
                )
        self._complete(trained, max(recorded, default=-1) + 1)

    def _complete(self, trained: set[str], first: int) -> None:
        """Groups all of whose members were rewarded, as their agents were told; `first`: the buffer to be trained next."""
        rewarded = Counter(
            e["group"] for e in self._evidence.agents if e["kind"] == "ended" and e["rewarded"]
        )
        lost = self._lost_rewards()
        decisions: dict[str, list[Row]] = defaultdict(list)
        for row in sorted(self._evidence.tables["decisions"], key=lambda row: row["seq"]):
            decisions[row["group_id"]].append(row)
        places = Counter(rows[-1]["buffer"] for rows in decisions.values() if rows[-1]["kind"] == "occupied")
        unfilled = first  # it waits for more groups, and all behind it wait for it
        while places[unfilled] >= self._evidence.plan["batch"]:
            unfilled += 1
        for event in self._evidence.agents:
            if (
                event["kind"] != "group"
                or event["mode"] != "train"
                or rewarded[event["group"]] < event["size"]
            ):
                continue
            group, rows = event["group"], decisions[event["group"]]
            self._report.facts["complete_groups"] += 1
            dropped = [
                row for row in rows if row["kind"] in _DROPS and row["reason"] and not row["episode_id"]
            ]
            last = rows[-1] if rows else {"kind": "nothing", "buffer": None}
            if group in lost:
                self._report.wrong("never_trained", f"{group}: the reward of {lost[group]} is not stored")
            elif group in trained:
                pass
            elif dropped:
                self._report.facts["dropped_groups"] += 1
            elif last["kind"] == "occupied" and last["buffer"] >= unfilled:
                self._report.facts["waiting_groups"] += 1
            elif not any(row["kind"] == "trained" for row in rows):
                self._report.wrong("never_trained", f"{group}: the last that is known is {last}")

    def _lost_rewards(self) -> dict[str, str]:
        """Groups of which a reward was taken and is not stored, with the episode."""
        stored = {row["id"]: row for row in self._evidence.tables["episodes"]}
        lost = {}
        for event in self._evidence.agents:
            if event["kind"] != "ended" or not event["rewarded"]:
                continue
            row = stored.get(event["episode"])
            kept = row is not None and row["state"] == "closed"
            if kept and row is not None and row["reason"] == "rewarded" and "reward" in event:
                kept = abs(row["reward"] - event["reward"]) < 1e-9
            if not kept:
                lost[event["group"]] = event["episode"]
        return lost

    # Keys

    def _tries(self) -> None:
        for event in self._evidence.agents:
            if event["kind"] != "try":
                continue
            undecided = not event["status"] or event["status"] >= 500 or event["status"] == 429
            self._report.facts["tries_undecided" if undecided else "tries"] += 1
            if 200 <= event["status"] < 400:
                said = f"{event['own']} reached {event['foreign']} by {event['what']}: {event['status']}"
                self._report.wrong("leaks", said)


if __name__ == "__main__":
    found = check(read(Path(sys.argv[1])))
    print(json.dumps(found.to_json(), indent=2))
    sys.exit(not found.right)
