"""Compare what clients received, what engines sampled and what is stored, and count what does not match.

Imports nothing of headgate: it knows the form of the evidence, that a question names itself, and that a token names its version
and its place. lab/notes/reliability.md defines each count.
`python -m tests.faults.checker FOLDER` checks the evidence in a folder.
"""

from __future__ import annotations

import json
import re
import sys
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from tests.faults.evidence import Evidence, Row, Run, ids_of, intervals_of, prompt_of, read, reply_of, text_of

COUNTS = ("lost", "wrong_reply", "doubled", "wrong_version", "trained_twice", "never_trained", "leaks")
_SHOWN = 10
"""The number of findings of a kind that a report describes."""
_UNCONFIRMED = 32
_MARK = 2**20
"""A log-probability is a mark divided by this, with its sign changed."""
_ASK = re.compile(r"\[ask:([0-9]+-[0-9]+)\]")
_DISOWNED = "unconfirmed_version"
"""The mask of turns whose own record does not vouch for their versions."""
_DROPS = {"dropped", "skipped", "aborted"}


@dataclass(slots=True)
class Report:
    """The findings."""

    counts: Counter[str] = field(default_factory=Counter)
    findings: dict[str, list[str]] = field(default_factory=lambda: defaultdict(list))
    """The first findings of each kind, as text."""
    facts: Counter[str] = field(default_factory=Counter)
    """Counts of what was checked, and of what is not a fault."""
    crossings: Counter[int] = field(default_factory=Counter)
    """The number of turns that went on under each version in their middle."""
    first: dict[str, str] = field(default_factory=dict)
    """The kind of the first finding of each call."""

    @property
    def right(self) -> bool:
        """Return whether nothing is wrong."""
        return not self.counts.total()

    def wrong(self, kind: str, detail: str, count: int = 1, call: str = "") -> None:
        """Count a finding, and keep it if it is among the first of its kind."""
        self.counts[kind] += count
        self.first.setdefault(call, kind)
        if len(self.findings[kind]) < _SHOWN:
            self.findings[kind].append(detail)


def misplaced(digits: Sequence[int], size: int, first: int = 0) -> Iterator[tuple[int, str, int, str]]:
    """Yield (index, "lost" or "doubled", number of tokens, detail) where digits do not count up modulo `size`.

    A gap is tokens lost, a step back is tokens doubled. A negative digit is not a token of any version.
    """
    due = first
    for i, digit in enumerate(digits):
        step = (digit - due) % size if digit >= 0 else 1
        kind, count = ("lost", step) if step <= size // 2 else ("doubled", size - step)
        if step:
            yield i, kind, count, f"token {i} is {digit} where {due} was due"
        due = ((digit if digit >= 0 else due) + 1) % size


@dataclass(slots=True)
class Turn:
    """A recorded, sampled node."""

    row: Row
    ids: list[int]
    text: str
    ask: str
    """The last question of its prompt."""

    @property
    def name(self) -> str:
        """Describe the turn's place."""
        return f"call {self.row['call_id']} of {self.row['episode_id']} (ask {self.ask})"


@dataclass(slots=True)
class Reply:
    """The client's part of one request."""

    ask: str
    episode: str
    tokens: int
    """The number of requested tokens."""
    call: str = ""
    text: str = ""
    how: str = "broken"
    finish: str | None = None

    @property
    def name(self) -> str:
        """Describe the reply's place."""
        return f"call {self.call} of {self.episode} (ask {self.ask})"


def check(evidence: Evidence) -> Report:
    """Check everything."""
    if evidence.remarked:
        raise ValueError(f"{evidence.remarked} marks occur twice: the evidence itself is wrong")
    report = Report()
    _Tokens(evidence, report).check()
    _Training(evidence, report).check()
    _check_keys(evidence, report)
    return report


class _Tokens:
    """Checks of replies, turns and tokens."""

    def __init__(self, evidence: Evidence, report: Report) -> None:
        self._evidence = evidence
        self._report = report
        self._block: int = evidence.plan["block"]
        self._blocks: int = evidence.plan["blocks"]
        self._unlogged = bool(evidence.plan["unlogged_engines"])
        self._turns = self._read_turns()
        self._of_call: dict[str, list[Turn]] = defaultdict(list)
        for turn in self._turns:
            self._of_call[turn.row["call_id"]].append(turn)
        self._calls = {row["id"]: row for row in evidence.tables["calls"]}
        self._runs: dict[str, list[Run]] = defaultdict(list)
        for run in evidence.runs:
            self._runs[run.request.split(".")[0]].append(run)

    def check(self) -> None:
        """Check replies first, then turns."""
        replies, owners = self._read_replies()
        for reply in replies:
            self._report.facts[f"{reply.how}_replies"] += 1
            if reply.how == "finished":
                self._check_finished(reply)
            elif reply.text:
                self._check_unfinished(reply)
        requested = {reply.call: reply.tokens for reply in replies if reply.how == "finished"}
        for turn in self._turns:
            self._check_places(turn, requested.get(turn.row["call_id"]))
        self._check_tokens()
        self._check_questions(owners)

    def _read_turns(self) -> list[Turn]:
        trees: dict[tuple[str, str], dict[int, Row]] = defaultdict(dict)
        for row in self._evidence.tables["nodes"]:
            trees[row["episode_id"], row["model"]][row["index"]] = row
        turns = []
        for tree in trees.values():
            for row in (row for row in tree.values() if row["sampled"]):
                ids, prompt = ids_of(row), prompt_of(tree, row)
                if prompt is None:
                    self._wrong("lost", row["call_id"], f"call {row['call_id']}: its prompt is not stored")
                found = _ASK.findall(text_of(prompt or []))
                turns.append(Turn(row, ids, text_of(ids), found[-1] if found else ""))
        return turns

    def _read_replies(self) -> tuple[list[Reply], dict[str, str]]:
        """Return the reply of every request, and the episode of every question."""
        replies: dict[tuple[str, int], Reply] = {}
        owners: dict[str, str] = {}
        for event in self._evidence.agents:
            kind = event["kind"]
            if kind == "ask":
                reply = Reply(event["ask"], event["episode"], event["tokens"])
                replies[event["ask"], event["attempt"]] = reply
                owners[event["ask"]] = event["episode"]
            elif kind in ("chunk", "end"):
                reply = replies[event["ask"], event["attempt"]]
                reply.call = event.get("id") or reply.call
                if kind == "chunk":
                    reply.text += event["text"]
                else:
                    reply.how, reply.finish = event["how"], event.get("finish")
                    reply.text = event.get("text", reply.text)
        return list(replies.values()), owners

    def _check_finished(self, reply: Reply) -> None:
        turns, call = self._of_call[reply.call], self._calls.get(reply.call)
        if not turns or call is None:
            detail = f"{len(reply.text)} characters were received, nothing is stored"
            self._wrong("lost", reply.call, f"{reply.name}: {detail}")
            return
        turn = turns[0]
        mask, finish = turn.row["mask_reason"], call["finish_reason"]
        if turn.text != reply.text:
            kind = "lost" if reply.text.startswith(turn.text) else "wrong_reply"
            detail = f"{reply.text!r} was received, {turn.text!r} is stored"
            self._wrong(kind, reply.call, f"{reply.name}: {detail}")
        elif finish != reply.finish or mask == "abandoned":
            detail = f"it ended with {reply.finish!r}, and is stored with {finish!r} and {mask!r}"
            self._wrong("lost", reply.call, f"{reply.name}: {detail}")
        if turn.row["episode_id"] != reply.episode or turn.ask != reply.ask:
            self._wrong("leaks", reply.call, f"{reply.name}: the reply is that of {turn.name}")

    def _check_unfinished(self, reply: Reply) -> None:
        detail = f"{reply.name}: {reply.text!r} was received"
        if turns := self._of_call[reply.call]:
            if not turns[0].text.startswith(reply.text):
                self._wrong("wrong_reply", reply.call, f"{detail}, {turns[0].text!r} is stored")
            return
        sampled = [reply_of(run) for run in self._runs[reply.call]]
        counts_up = all(self._digit(ord(c) - ord("!")) == i % self._block for i, c in enumerate(reply.text))
        if any(text.startswith(reply.text) for text in sampled) or (self._unlogged and counts_up):
            return
        self._wrong("wrong_reply", reply.call, f"{detail}, nothing is stored, engines sampled {sampled}")

    def _digit(self, token: int) -> int:
        return token % self._block if 0 <= token < self._block * self._blocks else -1

    def _check_places(self, turn: Turn, requested: int | None) -> None:
        """Check that every token of a reply names the number of tokens before it, and that there are as many as requested."""
        call, there = turn.row["call_id"], len(turn.ids)
        for _, kind, count, detail in misplaced([self._digit(i) for i in turn.ids], self._block):
            self._wrong(kind, call, f"{turn.name}: {detail}", count)
            there += count if kind == "lost" else -count
        if requested is not None and there != requested:
            kind = "lost" if there < requested else "doubled"
            self._wrong(kind, call, f"{turn.name}: {there} tokens, not {requested}", abs(requested - there))

    def _check_tokens(self) -> None:
        """Check that every token was sampled once, by the version that is stored with it."""
        trained: dict[int, Turn] = {}
        masked: set[int] = set()
        for turn in self._turns:
            row = turn.row
            logprobs = np.frombuffer(row["logprobs"], "<f4").astype(np.float64)
            marks: list[int] = np.rint(-logprobs * _MARK).astype(np.int64).tolist()
            flags, spans = np.frombuffer(row["flags"], "u1").tolist(), intervals_of(row["spans"])
            if not len(marks) == len(turn.ids) == len(flags) == len(spans):
                detail = f"{turn.name}: its arrays differ in length"
                self._wrong("wrong_version", row["call_id"], detail, len(turn.ids))
                continue
            self._report.facts["tokens"] += len(turn.ids)
            before = None
            for i, (mark, flag, span) in enumerate(zip(marks, flags, spans, strict=True)):
                version = self._check_version(turn, i, mark, flag, span)
                self._report.crossings[version] += before not in (None, version)
                before = version
                if mark and row["mask_reason"]:
                    self._report.facts["masked_copies"] += mark in masked or mark in trained
                    masked.add(mark)
                elif mark and mark in trained:
                    detail = f"{turn.name}: token {i} is also in {trained[mark].name}"
                    self._wrong("doubled", row["call_id"], detail)
                elif mark:
                    self._report.facts["masked_copies"] += mark in masked
                    trained[mark] = turn

    def _check_version(self, turn: Turn, i: int, mark: int, flag: int, span: tuple[int, int]) -> int:
        """Check a token's label; return the version that sampled the token, as far as it is known."""
        (oldest, newest), token = span, turn.ids[i]
        if mark:
            known = self._evidence.marks.get(mark)
            version = known[1] if known else -1
            right = known is not None and known[0] == token and oldest <= version <= newest
            truth = f"the engine's log has {known}"
        else:  # an engine without a log: the token names its version modulo the number of blocks
            version = token // self._block
            right = self._unlogged and any(v % self._blocks == version for v in range(oldest, newest + 1))
            truth = f"it names {version} modulo {self._blocks}"
        self._report.facts["unconfirmed"] += oldest < newest
        if not right and turn.row["mask_reason"] == _DISOWNED:
            self._report.facts["disowned"] += 1
        elif not right or (oldest < newest) != bool(flag & _UNCONFIRMED):
            stored = f"stored as {oldest} to {newest} with flags {flag}"
            detail = f"{turn.name}: token {i} ({token}) is {stored}, {truth}"
            self._wrong("wrong_version", turn.row["call_id"], detail)
        return version

    def _check_questions(self, owners: dict[str, str]) -> None:
        """Check that every trained turn replies to one question, once, in the question's own episode."""
        responded: dict[str, Turn] = {}
        for turn in self._turns:
            call, owner = turn.row["call_id"], owners.get(turn.ask)
            if owner is not None and owner != turn.row["episode_id"]:
                self._wrong("leaks", call, f"{turn.name}: the question is of {owner}")
            if turn.row["mask_reason"]:
                self._report.facts["masked_turns"] += 1
                continue
            self._report.facts["turns"] += 1
            if owner is None:
                self._wrong("doubled", call, f"{turn.name}: no client sent its question")
            elif turn.ask in responded:
                detail = f"{turn.name}: {responded[turn.ask].name} answers the same question"
                self._wrong("doubled", call, detail)
            responded[turn.ask] = turn

    def _wrong(self, kind: str, call: str, detail: str, count: int = 1) -> None:
        self._report.wrong(kind, detail, count, call)


class _Training:
    """Checks of groups, batches and rewards."""

    def __init__(self, evidence: Evidence, report: Report) -> None:
        self._evidence = evidence
        self._tables = evidence.tables
        self._wrong = report.wrong
        self._facts = report.facts

    def check(self) -> None:
        """Check that every complete group is in one batch, which was trained once."""
        held = self._evidence.checkpoints
        recorded: dict[int, list[str]] = defaultdict(list)
        for row in self._tables["decisions"]:
            if row["kind"] == "trained":
                recorded[row["batch"]].append(row["group_id"])
        for source, batches in (("the database", recorded), ("the trainer's checkpoints", held)):
            times = Counter(group for groups in batches.values() for group in groups)
            for group in (group for group, count in times.items() if count > 1):
                self._wrong("trained_twice", f"{source}: {group} is in {times[group]} batches")
        acked = Counter(row["batch"] for row in self._tables["leases"] if row["state"] == "acked")
        for batch, count in acked.items():
            if count > 1:
                self._wrong("trained_twice", f"batch {batch} was acknowledged {count} times", count - 1)
        for batch, groups in held.items():
            for group in set(groups) - set(recorded.get(batch, groups)):
                self._wrong("trained_twice", f"{group} was trained in batch {batch}, which does not have it")
        for batch, groups in recorded.items():
            for group in set(groups) - set(held.get(batch, ())):
                detail = f"{group}: batch {batch} was acknowledged, and is in no checkpoint"
                self._wrong("never_trained", detail)
        trained = {g for batch, groups in recorded.items() for g in groups if g in held.get(batch, ())}
        self._facts["trained_groups"] = len(trained)
        self._check_complete(trained, max(recorded, default=-1) + 1)

    def _check_complete(self, trained: set[str], unfilled: int) -> None:
        """Check groups whose members were all rewarded, by their transcripts; `unfilled`: the next batch, at first."""
        ended = [event for event in self._evidence.agents if event["kind"] == "ended" and event["rewarded"]]
        rewarded, lost = Counter(event["group"] for event in ended), self._lost_rewards(ended)
        decisions: dict[str, list[Row]] = defaultdict(list)
        for row in sorted(self._tables["decisions"], key=lambda row: row["seq"]):
            decisions[row["group_id"]].append(row)
        places = Counter(rows[-1]["batch"] for rows in decisions.values() if rows[-1]["kind"] == "occupied")
        while places[unfilled] >= self._evidence.plan["batch"]:
            unfilled += 1  # the first that waits for more groups holds up all later ones
        for event in self._evidence.agents:
            if event["kind"] == "group" and event["mode"] == "train":
                group, rows = event["group"], decisions[event["group"]]
                if rewarded[group] >= event["size"]:
                    self._check_group(group, rows, group in trained, unfilled, lost.get(group))

    def _check_group(
        self, group: str, rows: list[Row], trained: bool, unfilled: int, lost: str | None
    ) -> None:
        self._facts["complete_groups"] += 1
        last = rows[-1] if rows else {"kind": "nothing", "batch": None}
        if lost is not None:
            self._wrong("never_trained", f"{group}: the reward of {lost} is not stored")
        elif trained:
            return
        elif any(row["kind"] in _DROPS and row["reason"] and not row["episode_id"] for row in rows):
            self._facts["dropped_groups"] += 1
        elif last["kind"] == "occupied" and last["batch"] >= unfilled:
            self._facts["waiting_groups"] += 1
        elif not any(row["kind"] == "trained" for row in rows):
            self._wrong("never_trained", f"{group}: its last decision is {last}")

    def _lost_rewards(self, ended: list[Row]) -> dict[str, str]:
        """Return the groups that have a reward which was accepted and is not stored, with the episode."""
        stored = {row["id"]: row for row in self._tables["episodes"]}
        lost = {}
        for event in ended:
            row = stored.get(event["episode"])
            kept = row is not None and row["state"] == "closed"
            if kept and row is not None and row["reason"] == "rewarded" and "reward" in event:
                kept = abs(row["reward"] - event["reward"]) < 1e-9
            if not kept:
                lost[event["group"]] = event["episode"]
        return lost


def _check_keys(evidence: Evidence, report: Report) -> None:
    """Check that no key reached another episode's data."""
    for event in (event for event in evidence.agents if event["kind"] == "try"):
        status = event["status"]
        undecided = not status or status >= 500 or status == 429
        report.facts["tries_undecided" if undecided else "tries"] += 1
        if 200 <= status < 400:
            detail = f"{event['own']} reached {event['foreign']} by {event['what']}: {status}"
            report.wrong("leaks", detail)


if __name__ == "__main__":
    found = check(read(Path(sys.argv[1])))
    print(json.dumps({**found.counts, **found.facts, "findings": found.findings}, indent=2))
    sys.exit(not found.right)
