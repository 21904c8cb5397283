"""Measures how often a later call extends the recorded tokens, for each chat-template family and kind of conversation.

`python -m bench.prefix` plays the same conversations with every family of `tests/families`: 4 turns of a user each, and in the
kinds with tools two rounds of calls within each. A call is kept if its prompt is the recorded tokens plus what the template adds.
`kept` is the share of later calls that were kept; `possible` is the share whose full rendering begins with the recorded tokens,
which is what a bridge may keep without leaving the template. The last line is one JSON object.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass

from tests.families.conversation import TOOLS, Episode, Reply, results
from tests.families.family import FAMILIES, Family

TURNS, ROUNDS = 4, 2


@dataclass(frozen=True)
class Kind:
    """A kind of conversation."""

    name: str
    tools: bool = False
    thinks: bool = False
    system: bool = False

    def fits(self, family: Family) -> bool:
        """Returns whether a family has such conversations."""
        return (family.tools or not self.tools) and (family.thinks or not self.thinks)

    def replies(self) -> Iterator[Reply]:
        """The model's replies from one user message to the next."""
        thought = "hm, the" if self.thinks else None
        for _ in range(ROUNDS if self.tools else 0):
            yield Reply("", thought, (("look", "é"),))
        yield Reply("hello there", thought)


KINDS = (
    Kind("plain"),
    Kind("plain, system", system=True),
    Kind("tools", tools=True),
    Kind("thinking", thinks=True),
    Kind("thinking, tools", tools=True, thinks=True),
)


def play(family: Family, kind: Kind) -> Episode:
    """One conversation."""
    episode = Episode(family, TOOLS if kind.tools else ())
    messages = [{"role": "system", "content": "be good"}] if kind.system else []
    for turn in range(TURNS):
        messages.append({"role": "user", "content": f"go on {turn}"})
        for reply in kind.replies():
            said = episode.ask(messages, reply)
            messages += [said, *results(said)]
    return episode


def measure(family: Family, kind: Kind) -> dict[str, float] | None:
    """Shares among the later calls; None where the family has no such conversations."""
    if not kind.fits(family):
        return None
    later = [call for call in play(family, kind).calls if call.history is not None]
    kept = sum(call.bridged for call in later)
    possible = sum(
        call.bridged or call.whole[: len(call.history)] == call.history.tolist()
        for call in later
        if call.history is not None
    )
    return {"kept": round(kept / len(later), 3), "possible": round(possible / len(later), 3)}


def main() -> None:
    """Prints the table, and one JSON object."""
    found = {f.name: {k.name: measure(f, k) for k in KINDS} for f in FAMILIES}
    print("| family | " + " | ".join(kind.name for kind in KINDS) + " |")
    print("|---|" + "---|" * len(KINDS))
    for name, row in found.items():
        cells = [_cell(value) for value in row.values()]
        print(f"| {name} | " + " | ".join(cells) + " |")
    print(json.dumps({"prefix_kept": found}, ensure_ascii=False))


def _cell(value: dict[str, float] | None) -> str:
    if value is None:
        return "-"
    lost = "" if value["kept"] == value["possible"] else f" of {value['possible']:.0%}"
    return f"{value['kept']:.0%}{lost}"


if __name__ == "__main__":
    main()
