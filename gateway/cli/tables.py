"""Tables for `gateway staleness` and `gateway episodes why`, from the answers of the admin API."""

from __future__ import annotations

import time
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table


def show_staleness(shown: dict[str, Any]) -> None:
    """The ledger of a model: a row per batch, and under it who waits and what was lost."""
    console = Console()
    head = "model {model}, rule {rule}, eta {eta}, batches of {batch}: version {version}, next to train is batch {consumed}"
    table = Table(title=escape(head.format(**shown)), title_justify="left")
    for name in ("batch", "state", "occupied", "reserved", "groups"):
        table.add_column(name, justify="right" if name in ("batch", "occupied", "reserved") else "left")
    for row in shown["buffers"]:
        groups = "\n".join(_group(group) for group in row["groups"])
        state = row["state"] + (", leased" if row["leased"] else "")
        table.add_row(str(row["buffer"]), state, str(row["occupied"]), str(row["reserved"]), escape(groups))
    console.print(table)
    if lease := shown["lease"]:
        consumer, left = escape(lease["consumer"]), lease["left_s"]
        until = f"{left:.0f} s left" if left > 0 else "over"
        console.print(f"batch {lease['buffer']} is leased to {consumer} (fence {lease['fence']}, {until})")
    if shown["waiting"]:
        named = ", ".join(f"{group_id} ({count})" for group_id, count in shown["waiting"].items())
        console.print(f"waiting for a slot: {escape(named)}")
    for lost in shown["lost"]:
        console.print(f"{lost['count']:>8} {lost['kind']}: {escape(lost['reason'])}")


def show_why(why: dict[str, Any]) -> None:
    """An episode's story: a row per decision, and the verdict."""
    console = Console()
    table = Table(title=escape(f"{why['episode_id']}, group {why['group_id']}, model {why['model']}"))
    for name in ("time", "what", "reason", "batch", "in words"):
        table.add_column(name)
    for step in why["story"]:
        at = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(step["at"]))
        buffer = "" if step["buffer"] is None else str(step["buffer"])
        table.add_row(at, step["kind"], escape(step["reason"]), buffer, escape(step["words"]))
    console.print(table)
    for reason, tokens in why["masked_tokens"].items():
        console.print(f"{tokens} of {why['sampled_tokens']} sampled tokens are not trained: {escape(reason)}")
    if why["notice"]:
        console.print(f"notice: {escape(why['notice'])}, {escape(why['notice_words'])}", soft_wrap=True)
    if why["error"]:
        console.print(f"error: {escape(why['error'])}", soft_wrap=True)
    console.print(f"verdict: {escape(why['verdict'])}", soft_wrap=True)


def _group(group: dict[str, Any]) -> str:
    members = ", ".join(f"{count} {state}" for state, count in group["members"].items())
    return f"{group['group_id']} (version {group['version']}, {group['state']}): {members} of {group['size']}"
