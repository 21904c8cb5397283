"""The matrix as a page: docs/topics/models-matrix.md. Pure."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping

from bench.families.measure import Found

_HEAD = """# Which models can be trained

Measured with {versions}, on tiny random models of each family, on the CPU: made by `make report NAME=models`, and made
again at every upgrade of transformers, peft or torch. `python -m bench.families NAME ...` measures only some.

- **spans**, **rows**: whether a run with this `[model] attention` starts. `spans`, the default, computes prefixes that
  rows share once; `rows` computes every row separately, by the model's own attention.
- **gap**: how far a log-probability is from transformers' own, unpacked, at most, in nats; **gradient**: the same of a
  weight's gradient, relative to its largest number. In float32, with rows packed together and cut in two; with spans if
  they are accepted, else with rows.
- **export**: the published bfloat16 weights have the checkpoint's names and numbers. **adapter**: peft reads a run's
  adapter as the model that was trained. **replay**: the gap of a mixture with `router_replay`, for routes that the model
  would choose and for others; empty for a model that cannot replay them. **experts**: the gap or the gradient, whichever is
  larger, between two ranks that share a mixture's experts (`[parallel] expert = 2`) and one; empty where that is refused.

{accepted} of {all} families are trained with spans, and {rows} more with rows.

| families | spans | rows | gap | gradient | export | adapter | replay | experts |
|---|---|---|---|---|---|---|---|---|
"""


def page(found: Mapping[str, Found], versions: Mapping[str, str]) -> str:
    """Return the page for all families, by name; `versions` of the packages that they were measured with."""
    accepted = sum(each.verdict == "accepted" for each in found.values())
    more = sum(each.verdict != "accepted" and each.rows == "accepted" for each in found.values())
    named = ", ".join(f"{name} {version}" for name, version in versions.items())
    lines = [_HEAD.format(versions=named, accepted=accepted, all=len(found), rows=more)]
    rows = _grouped((name, " | ".join(cells(name, each)[1:])) for name, each in found.items())
    lines += [f"| {names} | {result} |\n" for result, names in rows.items()]
    reasons = _grouped((name, _cause(each.why)) for name, each in found.items() if each.why is not None)
    if reasons:
        lines += ["\n## Why families are refused\n\n"]
        lines += [f"- **{names}**: {cause}\n" for cause, names in reasons.items()]
    return "".join(lines)


def _grouped(named: Iterable[tuple[str, str]]) -> dict[str, str]:
    """Return the names of each text, in the order in which the texts come first."""
    groups: dict[str, list[str]] = {}
    for name, text in named:
        groups.setdefault(text, []).append(name)
    return {text: ", ".join(names) for text, names in groups.items()}


def _cause(why: str) -> str:
    """Return a refusal without the names and figures of one family, and without the advice that the table has."""
    return re.sub(
        r"^\w+ does not work with [^:]*: | by [\d.]+ nats|; set \[model\] .*|; this architecture .*", "", why
    )


def cells(name: str, found: Found) -> list[str]:
    """Return a family's row."""
    truths = (found.export, found.adapter)
    return [
        *(name, _mark(found.verdict == "accepted"), _mark(found.rows == "accepted")),
        *(_bound(found.gap), _bound(found.gradient)),
        *("" if each is None else _mark(each) for each in truths),
        _bound(found.replay_gap),
        _bound(found.expert_ranks_gap),
    ]


def _mark(holds: bool) -> str:
    return "yes" if holds else "no"


def _bound(value: float | None) -> str:
    """Return the power of ten above a value, which is the same on machines that round otherwise."""
    if value is None:
        return ""
    return "0" if value == 0 else f"< 1e{math.floor(math.log10(value)) + 1}"
