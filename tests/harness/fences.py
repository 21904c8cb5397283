"""The code in the pages: each fenced block, the file that it is, if it is one, and why no test runs it, if none does.

A block of `sh` or `python` is run, unless a comment in the line before it has the reason:

    <!-- not run: needs a GPU -->

A block with a title (` ```python title="my_agent.py" `) is a file, for the shell blocks of its page.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
_FENCE = re.compile(
    r"(?:^<!-- not run: (?P<why>[^>]*) -->\n)?"
    r"^(?P<ticks>`{3,})(?P<kind>\w*)(?P<rest>[^\n]*)\n(?P<body>.*?)^(?P=ticks)\s*$",
    re.M | re.S,
)
_TITLE = re.compile(r'title="([^"]+)"')


@dataclass(frozen=True)
class Fence:
    """A block of code in a page."""

    page: str
    """The page's path from the root of the repository."""
    line: int
    kind: str
    title: str
    body: str
    why_not: str
    """Why it is not run; empty if it is."""

    def __str__(self) -> str:
        return f"{self.page}:{self.line}"


def pages() -> list[Path]:
    """README.md and everything in docs/ that a person wrote."""
    written = [path for path in sorted((ROOT / "docs").rglob("*.md")) if "reference" not in path.parts]
    return [ROOT / "README.md", *written]


def fences(page: Path) -> list[Fence]:
    """Return the blocks of a page, in its order."""
    text = page.read_text()
    found = []
    for match in _FENCE.finditer(text):
        title = _TITLE.search(match["rest"])
        line = text.count("\n", 0, match.start("ticks")) + 1
        name = str(page.relative_to(ROOT))
        found.append(
            Fence(name, line, match["kind"], title[1] if title else "", match["body"], match["why"] or "")
        )
    return found
