"""Tables for the commands of show.py, from the responses of the admin API."""

from __future__ import annotations

import time
from typing import Any

from rich import box
from rich.console import Console, Group
from rich.markup import escape
from rich.table import Table
from rich.text import Text

_BATCHES = 4
_WIDE = 160


def status_view(status: dict[str, Any]) -> Group:
    """Return a model on one screen: its versions, batches and episodes, and every engine."""
    lines = [
        "model {model}: version {version} is live, {newest_version} is the newest; {updates} weight updates".format(
            **status
        ),
        f"next to train is batch {status['consumed']}; {_batches(status['batches'])}",
        f"episodes: {status['open_episodes']} open; "
        + (
            ", ".join(f"{count:,} {_kind(key)}" for key, count in status["episodes"].items()) or "none so far"
        ),
        f"calls that wait for an engine: {status['waiting_calls']}; free places in batches: {status['free_slots']}",
    ]
    lines.append(status["limits"]["line"])
    lines += [_slow(row) for row in status["slow_episodes"]]
    lines += [f"version {bad['version']} is bad: {bad['why']}" for bad in status["bad_versions"]]
    return Group(*(Text(line) for line in lines), _engines(status["engines"]))


def _slow(row: dict[str, Any]) -> str:
    """Return how long an episode has run, and when it is closed."""
    usual = f", {row['running_s'] / row['usual_s']:.1f} times as long as usual," if row["usual_s"] else ""
    return (
        f"episode {row['episode_id']} of group {row['group_id']} has run for {row['running_s']:.0f} s{usual} and is closed after"
        f" {row['limit_s']:.0f} s ([episodes] total_s)"
    )


def _kind(key: str) -> str:
    """Return words for `mode/state/reason`."""
    mode, state, *reason = key.split("/", 2)
    return f"{mode} {state}" + "".join(f" ({word})" for word in reason if word)


def _batches(rows: list[dict[str, Any]]) -> str:
    """Return the first batches that are not empty."""
    used = [row for row in rows if row["occupied"] or row["reserved"]]
    parts = [
        f"batch {row['batch']} has {row['occupied']} groups, {row['reserved']} more are on their way"
        for row in used[:_BATCHES]
    ]
    if len(used) > _BATCHES:
        parts.append(f"{len(used) - _BATCHES} later ones: gateway staleness")
    return "; ".join(parts) or "no group has a place in one"


def _engines(engines: list[dict[str, Any]]) -> Table:
    table = Table()
    for name in ("engine", "model", "state", "version", "requests", "restarts", "reason"):
        table.add_column(name, justify="right" if name in ("version", "requests", "restarts") else "left")
    for engine in engines:
        figures = (str(engine[name]) for name in ("version", "streams", "restarts"))
        words = (escape(engine[name]) for name in ("name", "model", "state"))
        table.add_row(*words, *figures, escape(engine["reason"]))
    return table


def canary_view(found: dict[str, Any]) -> Group:
    """Return the running trial with both versions side by side, and how the newest trials ended."""
    running = found["running"]
    if not found["share"]:
        first = "versions are not tried ([update] canary)"
    elif running is None:
        first = f"no version is on trial; the next one gets {found['share']:.0%} of new conversations"
    else:
        first = "version {version} of {model}, against version {live}: {why}".format(**running)
    shown = [Text(first), _arms(running)] if running else [Text(first)]
    ended = [Text("version {version} was {outcome}: {why}".format(**row)) for row in found["ended"]]
    return Group(*shown, *ended)


_ARM = (
    "conversations",
    "rewarded",
    "reward_mean",
    "reward_low",
    "reward_high",
    "faulty_share",
    "refused_share",
)


def _arms(row: dict[str, Any]) -> Table:
    table = Table()
    for name in ("version", *_ARM, "tokens_mean", "seconds_per_token"):
        table.add_column(name.replace("_", " "), justify="right")
    for arm, version in (("candidate", row["version"]), ("live", row["live"])):
        figures = row["figures"][arm]
        cells = (figures[name] for name in (*_ARM, "tokens_mean", "seconds_per_token"))
        table.add_row(str(version), *("" if cell is None else f"{cell:.3g}" for cell in cells))
    return table


def show_episodes(episodes: list[dict[str, Any]]) -> None:
    """Print a row for each episode, the newest first."""
    if not episodes:
        Console().print("no episodes")
        return
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    console = Console()
    console.width = max(
        console.width, _WIDE
    )  # a terminal wraps a long line better than a table wraps its cells
    for name in ("episode", "mode", "version", "state", "reward", "opened", "task", "group"):
        long = name in ("task", "group")
        right = name in ("version", "reward")
        table.add_column(name, justify="right" if right else "left", no_wrap=not long, overflow="fold")
    for row in episodes:
        state = row["state"] + (f" ({row['reason']})" if row["reason"] else "")
        reward = "" if row["reward"] is None else f"{row['reward']:g}"
        opened = time.strftime("%m-%d %H:%M", time.localtime(row["created_at"]))
        words = (row["episode_id"], row["mode"], str(row["version"]), state, reward, opened)
        table.add_row(*map(escape, (*words, row["task_id"], row["group_id"])))
    console.print(table)


def show_trajectory(episode: dict[str, Any], most: int | None) -> None:
    """Print an episode and the nodes of its token tree, in the order of recording; at most `most` characters of each."""
    console = Console()
    reward = "no reward" if episode["reward"] is None else f"reward {episode['reward']:g}"
    head = "{episode_id}, task {task_id}, group {group_id}, {mode}, {state}".format(**episode)
    console.print(f"{escape(head)}, {reward}", soft_wrap=True)
    for node in episode["nodes"]:
        console.print(
            Text(_node_head(node), style="bold cyan" if node["sampled"] else "bold"), soft_wrap=True
        )
        text = node["text"] if most is None else node["text"][:most]
        console.print(Text(text), soft_wrap=True)
        if len(text) < len(node["text"]):
            console.print(f"({len(node['text']) - len(text):,} more characters: --full)", style="dim")


def _node_head(node: dict[str, Any]) -> str:
    """Return a heading for a node: the prompt's tokens, or sampled ones with their versions, mean log-probability and flags."""
    place = f"node {node['index']}" + (f" after {node['parent']}" if node["parent"] >= 0 else "")
    count = len(node["ids"])
    if not node["sampled"]:
        return f"-- {place}: {count} tokens of the prompt"
    versions = " to ".join(str(version) for version, _ in node["versions"])
    mean = sum(node["logprobs"]) / max(count, 1)
    flags = sorted({flag for flag in node["flags"] if flag})
    rest = [
        node["finish_reason"] or "",
        *flags,
        node["mask_reason"] and f"not trained: {node['mask_reason']}",
    ]
    line = f"{count} tokens sampled by version {versions}, mean log-probability {mean:.3f}"
    return f"-- {place}: {', '.join([line, *filter(None, rest)])}"


def show_staleness(shown: dict[str, Any]) -> None:
    """Print a model's ledger: a row per batch up to the last one used; below it the waiting groups and recent losses."""
    console = Console()
    head = (
        "model {model}, eta {eta}, late_groups {late_groups}, batches of {batch_size}: version {version},"
        " next to train is batch {consumed}"
    )
    table = Table(title=escape(head.format(**shown)), title_justify="left")
    for name in ("batch", "state", "occupied", "reserved", "groups"):
        table.add_column(name, justify="right" if name in ("batch", "occupied", "reserved") else "left")
    rows = shown["batches"]
    used = [i for i, row in enumerate(rows) if row["occupied"] or row["reserved"] or row["leased"]]
    end = used[-1] + 1 if used else 1
    for row in rows[:end]:
        groups = "\n".join(_group(group) for group in row["groups"])
        state = row["state"] + (", leased" if row["leased"] else "")
        table.add_row(str(row["batch"]), state, str(row["occupied"]), str(row["reserved"]), escape(groups))
    console.print(table)
    if rows[end:]:
        console.print(f"all batches from {rows[end]['batch']} to {rows[-1]['batch']} are empty")
    if lease := shown["lease"]:
        consumer, left = escape(lease["consumer"]), lease["left_s"]
        until = f"{left:.0f} s left" if left > 0 else "over"
        console.print(f"batch {lease['batch']} is leased to {consumer} (fence {lease['fence']}, {until})")
    if shown["waiting"]:
        named = ", ".join(f"{group_id} ({count})" for group_id, count in shown["waiting"].items())
        console.print(f"waiting for a slot: {escape(named)}")
    for lost in shown["lost"]:
        console.print(f"{lost['count']:>8} {lost['kind']}: {escape(lost['reason'])}")


def show_why(why: dict[str, Any]) -> None:
    """Print an episode's story: a row per decision, and the verdict."""
    console = Console()
    table = Table(title=escape(f"{why['episode_id']}, group {why['group_id']}, model {why['model']}"))
    for name in ("time", "what", "reason", "batch", "in words"):
        table.add_column(name)
    for step in why["story"]:
        batch = "" if step["batch"] is None else str(step["batch"])
        table.add_row(_time(step["at"]), step["kind"], escape(step["reason"]), batch, escape(step["words"]))
    console.print(table)
    for reason, tokens in why["masked_tokens"].items():
        console.print(f"{tokens} of {why['sampled_tokens']} sampled tokens are not trained: {escape(reason)}")
    for call in why["tool_faults"]:
        console.print(f"{call['call_id']}: {escape('; '.join(call['words']))}", soft_wrap=True)
    if why["notice"]:
        console.print(f"notice: {escape(why['notice'])}, {escape(why['notice_words'])}", soft_wrap=True)
    if why["error"]:
        console.print(f"error: {escape(why['error'])}", soft_wrap=True)
    console.print(f"verdict: {escape(why['verdict'])}", soft_wrap=True)


def _group(group: dict[str, Any]) -> str:
    members = ", ".join(f"{count} {state}" for state, count in group["members"].items())
    return f"{group['group_id']} (version {group['version']}, {group['state']}): {members} of {group['size']}"


def _time(at: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(at))
