"""A sample of a batch's episodes as a table for trackers: one row for each, told from the rows of its calls. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import Any

EXCERPT = 300
"""Characters of the last reply; the rest is in the table of samples."""
Row = Mapping[str, Any]


def episodes_of(calls: Sequence[Row]) -> list[dict[str, Any]]:
    """The episodes of samples of calls (`trainer.report.samples.Sample`), whose calls follow one another."""
    return [_episode(list(of_one)) for _, of_one in groupby(calls, key=lambda call: call["episode_id"])]


def _episode(calls: list[Row]) -> dict[str, Any]:
    last, reasons = calls[-1], [call["mask_reason"] for call in calls if call["mask_reason"]]
    return {
        "task_id": last["task_id"],
        "group_id": last["group_id"],
        "episode_id": last["episode_id"],
        "reward": last["reward"],
        "reason": "; ".join(dict.fromkeys(reasons)) or "trained",
        "versions": _versions([call["versions"] for call in calls]),
        "calls": len(calls),
        "tokens": sum(call["tokens"] for call in calls),
        "finish_reason": last["finish_reason"],
        "text": _excerpt(last["reply"]),
    }


def _versions(spans: Sequence[str]) -> str:
    """The oldest and the newest version of all, such as `2-4`."""
    numbers = [int(number) for span in spans for number in span.split("-") if number]
    return "-".join(str(number) for number in dict.fromkeys((min(numbers), max(numbers)))) if numbers else ""


def _excerpt(text: str) -> str:
    return text if len(text) <= EXCERPT else f"{text[: EXCERPT - 4]} ..."
