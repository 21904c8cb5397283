"""The written samples of a run, and their calls as Markdown."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from trainer.errors import ConfigError

_UNPRINTABLE = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")


def read(path: Path) -> list[dict[str, Any]]:
    """The rows of a file."""
    return [json.loads(line) for line in path.read_text().splitlines()]


def newest(directory: Path, step: int | None = None) -> Path:
    """The file of a step under `[run] dir`, or of the newest that has one. Raises ConfigError, which names those there are."""
    files = sorted((directory / "samples").glob("step-*.jsonl"))
    chosen = [file for file in files if step is None or int(file.stem.removeprefix("step-")) == step]
    if not chosen:
        steps = ", ".join(file.stem.removeprefix("step-").lstrip("0") for file in files)
        there = f"there are those of steps {steps}" if files else "[report] samples_every = 10 writes them"
        which = "any step" if step is None else f"step {step}"
        raise ConfigError(f"{directory}: no samples of {which}; {there}")
    return chosen[-1]


def as_markdown(rows: Sequence[Mapping[str, Any]]) -> str:
    """Rows as text for a terminal or a page: control characters are left out, and fences are longer than any in the text."""
    return "\n".join(_row_as_markdown(row) for row in rows)


def as_table(rows: Sequence[Mapping[str, Any]]) -> str:
    """Rows of equal columns as a table; line breaks and control characters become spaces."""
    lines = [[*rows[0]], ["---"] * len(rows[0]), *([str(value) for value in row.values()] for row in rows)]
    return "\n".join("| " + " | ".join(map(_cell, line)) + " |" for line in lines) + "\n"


def _cell(text: str) -> str:
    return _UNPRINTABLE.sub(" ", text).replace("\n", " ").replace("|", "\\|")


def _row_as_markdown(row: Mapping[str, Any]) -> str:
    call = "" if row["call_reward"] is None else f", of the call {row['call_reward']:g}"
    facts = [
        f"reward {row['reward']:g}{call}",
        f"advantage {row['advantage']:+.3f}",
        f"{row['tokens']} tokens of version {row['versions']}",
        *([row["finish_reason"]] if row["finish_reason"] else []),
        *([f"not trained: {row['mask_reason']}"] if row["mask_reason"] else []),
    ]
    title = (
        f"## Episode {row['episode_id']}, call {row['turn']} (task {row['task_id']}, group {row['group_id']})"
    )
    parts = [title, "; ".join(facts), "Prompt:", _fenced(row["prompt"]), "Reply:", _fenced(row["reply"])]
    return _UNPRINTABLE.sub("", "\n\n".join(parts)) + "\n"


def _fenced(text: str) -> str:
    longest = max((len(ticks) for ticks in re.findall(r"`+", text)), default=0)
    fence = "`" * max(3, longest + 1)
    return f"{fence}\n{text}\n{fence}"
