"""Replies that cross a change of coordinator."""

from __future__ import annotations

import json
from dataclasses import dataclass, field


def mark(logprob: float) -> int:
    """Return the mark that names a sampling."""
    return round(-logprob * 2**20)


@dataclass
class StreamedReply:
    """The part of a stream that a client has got."""

    id: str = ""
    marks: list[int] = field(default_factory=list)
    finish: str | None = None
    failed: bool = False
    """The connection broke, or an error came."""

    def take(self, line: str) -> None:
        if not line.startswith("data: {"):
            return
        event = json.loads(line[6:])
        if "error" in event:
            self.failed = True
            return
        self.id = event["id"]
        for choice in event["choices"]:
            self.marks += [
                mark(entry["logprob"]) for entry in (choice["logprobs"] or {"content": []})["content"]
            ]
            self.finish = choice["finish_reason"] or self.finish
