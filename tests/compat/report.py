"""Turns JUnit XML into `docs/topics/compatibility.md`: tests passed, failed and skipped by client and version, with reasons."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ElementTree
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import get_args

from tests.compat.known import KNOWN, Known
from tests.compat.suites import Group

HEAD = """# Compatibility

Programs of other projects, run against a gateway in front of a scripted engine (`tests/compat`): `make test-compat` writes this
page. Versions are pinned in `requirements/compat`. openai-python's tests (of its source distribution; the key in its conftest is
the one line that is changed) and langchain's standard suites are their authors'. The others are scenarios of this repository with
the unmodified client: a reply, a stream, a conversation with tools, a typed reply, async, errors. After each scenario the record
of the episode is compared with what the engine received and sampled, except for openai-python's tests, which share one episode.

These take minutes to install and were run by hand on 2026-11-28 against `gateway serve --demo`: aider 0.86.2, promptfoo 0.121.20
(chat, completions, responses, messages), lm-eval 0.4.13 (`generate_until`), deepeval 4.3.1 (replies; its judges want JSON, which
the demo's random words are not), guidance 0.3.1, guidellm 0.8.1 (`run`), ag2 1.2.1, Mastra 0.24.9. All work. Some request
temperature 0, so nothing is trained: [settings that train](agents/python-frameworks.md#programs-that-request-temperature-0).
marvin 3.2.7 does not import with the dependencies that it installs; camel-ai 0.2.90 downloads a tokenizer and was not run.
"""


@dataclass(frozen=True, slots=True)
class Case:
    """One test."""

    name: str
    outcome: str
    """`passed`, `failed` or `skipped`."""
    message: str = ""


@dataclass(frozen=True, slots=True)
class Row:
    """One suite."""

    name: str
    version: str
    group: Group
    cases: Sequence[Case] = ()
    skipped: str = ""
    """Why it was not run at all."""

    def reasons(self) -> list[tuple[str, list[Case], bool]]:
        """Each reason for what did not pass, with its tests, and whether it is known."""
        found: dict[tuple[str, bool], list[Case]] = defaultdict(list)
        for case in self.cases:
            if case.outcome != "passed":
                known = reason_of(self.name, case)
                plain = (
                    case.message if case.outcome == "skipped" else f"unexplained: {case.name}: {case.message}"
                )
                found[known.why if known else plain, known is not None or case.outcome == "skipped"].append(
                    case
                )
        return [(why, cases, known) for (why, known), cases in found.items()]

    @property
    def unexplained(self) -> int:
        """The number of failures without an explanation."""
        return sum(len(cases) for _, cases, known in self.reasons() if not known)


def read(xml: Path) -> list[Case]:
    """The tests in a JUnit file; a test that failed twice (also while it was torn down) is one."""
    cases: dict[str, Case] = {}
    for element in ElementTree.parse(xml).iter("testcase"):
        name = f"{element.get('classname')}::{element.get('name')}"
        bad = element.find("failure") if element.find("failure") is not None else element.find("error")
        skipped = element.find("skipped")
        if bad is not None:
            text = f"{bad.get('message', '')}\n{bad.text or ''}"
            cases[name] = Case(name, "failed", text)
        elif skipped is not None:
            cases[name] = Case(name, "skipped", _line(skipped.get("message", "")))
        else:
            cases.setdefault(name, Case(name, "passed"))
    return list(cases.values())


def reason_of(suite: str, case: Case) -> Known | None:
    """The first known reason that fits a failure, or a skip."""
    fits = (
        known
        for known in KNOWN
        if re.search(known.suite, suite)
        and re.search(known.test, case.name)
        and re.search(known.message, case.message)
    )
    return next(fits, None)


def render(rows: Sequence[Row], day: date) -> str:
    """The page."""
    lines = [HEAD, f"Run on {day.isoformat()}."]
    for group in get_args(Group):
        some = [_entry(row) for row in rows if row.group == group]
        lines += [
            "",
            f"| {group} | version | passed | failed | skipped |",
            "|---|---|---|---|---|",
            *some,
        ] * bool(some)
    for row in rows:
        reasons = row.reasons()
        if reasons:
            lines += ["", f"## {row.name} {row.version}: what did not pass, and why", ""]
            for why, cases, _ in sorted(reasons, key=lambda reason: -len(reason[1])):
                outcome = "/".join(sorted({case.outcome for case in cases}))
                named = _names(cases)
                lines.append(f"- {len(cases)} {outcome} ({named}): {_line(why)}")
    return "\n".join(lines) + "\n"


def _entry(row: Row) -> str:
    if row.skipped:
        return f"| {row.name} | {row.version} | not run: {row.skipped} | | |"
    count = Counter(case.outcome for case in row.cases)
    return f"| {row.name} | {row.version} | {count['passed']} | {count['failed']} | {count['skipped']} |"


def _names(cases: Sequence[Case]) -> str:
    """The tests' names without their parameters, the first of them."""
    bare = (case.name.rpartition("::")[2].partition("[")[0] for case in cases)
    names = list(dict.fromkeys(f"`{name}`" for name in bare))
    return ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")


def _line(text: str) -> str:
    found = [line for line in text.strip().splitlines() if line.startswith("E ")]
    return re.sub(r"\s+", " ", found[-1][1:] if found else text.strip())[:400].strip()
