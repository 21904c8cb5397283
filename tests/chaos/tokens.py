"""Stored nodes as tokens, and tokens as text, as the checker reads them. Imports nothing of headgate."""

from __future__ import annotations

import numpy as np

from tests.chaos.evidence import Row, Run


def _alphabet() -> list[str]:
    """The byte-level alphabet's characters in the order of their ids, as bytes."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    rest = [byte for byte in range(256) if byte not in printable]
    shown = {byte: chr(byte) for byte in printable} | {byte: chr(256 + i) for i, byte in enumerate(rest)}
    return [chr(byte) for byte, _ in sorted(shown.items(), key=lambda item: item[1])]


_CHARACTERS = _alphabet()


def text_of(ids: list[int]) -> str:
    """Tokens of one byte each as characters; any other token as a NUL."""
    return "".join(_CHARACTERS[token] if token < len(_CHARACTERS) else "\0" for token in ids)


def ids_of(row: Row) -> list[int]:
    """The token ids of a node."""
    return np.frombuffer(row["ids"], "<i4").tolist()


def prompt_of(tree: dict[int, Row], row: Row) -> list[int] | None:
    """The tokens before a node; None: some of them are not stored."""
    parts = []
    while row["parent"] >= 0:
        if row["parent"] not in tree:
            return None
        at, row = row["at"], tree[row["parent"]]
        parts.append(ids_of(row)[:at])
    return [token for part in reversed(parts) for token in part]


def reply_of(run: Run) -> str:
    """Returns the part of a reply that a run carries: the tokens sampled before, and its own."""
    text = text_of(run.prompt)
    return text[text.rfind("\n") + 1 :] + text_of(run.sampled)


def intervals_of(spans: list[list[int]]) -> list[tuple[int, int]]:
    """The oldest and the newest version of every token."""
    return [(span[0], span[-1] if len(span) > 2 else span[0]) for span in spans for _ in range(span[1])]
