"""Markdown that the pages share: tables, and the docstrings' sentences in cells."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from pathlib import Path

DOCS = Path(__file__).parents[1] / "docs"
_PAGE = re.compile(r"docs/([\w/-]+\.md)")


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a table; cells must have been made by `cell` or `code`."""
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines) + "\n"


def cell(text: str) -> str:
    """Return a docstring on one line, as a table's cell: nothing in it is markup but code between backticks, and pages are
    links."""
    parts = re.split(r"(`[^`]*`)", " ".join(text.split()))
    plain = [part if i % 2 else _escaped(part) for i, part in enumerate(parts)]
    return "".join(plain).replace("|", "\\|")


def code(text: str) -> str:
    """Return a piece of code in a table's cell; nothing for no code."""
    return f"`{text}`".replace("|", "\\|") if text else ""


def prose(text: str) -> str:
    """Return a docstring's paragraphs."""
    return "\n\n".join(cell(part).replace("\\|", "|") for part in text.split("\n\n"))


def _escaped(text: str) -> str:
    text = re.sub(r"([*_<>])", r"\\\1", text)
    return _PAGE.sub(_link, text)


def _link(found: re.Match[str]) -> str:
    name = found[1].replace("\\_", "_")
    return f"[{name}](../{name})" if (DOCS / name).is_file() else found[0]
