"""One episode's story in words: what was decided about it and its group, why, and how it ended."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from headgate.types import NO_CALLS

Row = Mapping[str, Any]

_ENDS = ("trained", "skipped", "dropped")
"""The final decisions about a whole group."""

_BECAUSE = {
    "deleted": "what it contained was deleted on request",
    "no_consent": "its caller does not agree to training (X-Headgate-Train, [agents] consent)",
    "not_drawn": "it was not drawn for training ([agents] share)",
    "no_slot": "no slot was free within the staleness bound",
    "size_differs": "its group was begun with another group_size",
    "group_full": "all members of its group had joined",
    "group_closed": "its group took no more members",
    "group_finished": "its group was finished",
    "too_few_rewards": "too few of the group's episodes were rewarded ([staleness] min_members)",
    "zero_variance": "the group's rewards are all equal, so it teaches nothing ([staleness] drop_equal)",
    "nothing_to_train": "no token of the group's rewarded episodes can be trained: its calls were greedy, constrained or cut by"
    " top-p, top-k or min-p ([sampling] sets temperature and top_p of training episodes)",
    "no_calls": "its agent sampled no token from the trained model (its error has the reason and the fix)",
    "stale": "its batch was passed over, and no later one was left within the bound",
    "no_room": "every batch within its bound was whole",
    "surplus": "others were faster, and more run than are trained ([staleness] spare_groups, spare_members)",
    "retry": 'its batch waited for it for too long, so others may take its place ([staleness] on_stuck = "retry")',
    "truncated": 'its batch waited for it for too long, and is trained without it ([staleness] on_stuck = "truncate")',
    "members_missing": "the rest of the group's episodes was not opened in time",
    "idle_deadline": "no request of it arrived for too long ([episodes] idle_s)",
    "total_deadline": "it ran far longer than such episodes usually do ([episodes] total_s allows more)",
    "fed_back": "its feedback came after its end, and it waits for a place in a batch ([agents] feedback_s)",
    "not_judged": "no grader has an opinion about it, and no reward was posted",
    "grading_failed": "its reward could not be computed",
    "agent_failed": "its agent ended without a reward",
    "tool_failed": "a tool of its agent was down",
    "environment_failed": "its environment failed",
    "time_limit": "its agent took longer than the driver allows (gateway episodes run --timeout)",
    "memory_limit": "its agent used more memory than its sandbox allows (--sandbox-memory)",
    "cpu_limit": "its agent used more CPU time than its sandbox allows (--sandbox-cpu)",
    "process_limit": "its agent started more processes than its sandbox allows (--sandbox-processes)",
    "sandbox_failed": "its sandbox could not be started",
    "no_partner": "not all players of its match arrived in time, or one of them left",
    "untrained_late": "its group was given up while it ran",
    "no_reward": "nothing could compute its reward",
    "reward_refused": "the gateway refused the reward that its agent stated",
    "interrupted": "the driver that ran its agent was stopped by a signal",
    "driver_stopped": "the driver that ran its agent stopped, because too many episodes had failed",
    "skipped": "a newer version was published before its batch was trained",
    "nothing_sampled": "the call that opened it was refused before anything was sampled",
    "unknown_conversation": "its first call went on with a conversation of which no open episode of the agent has a reply",
    "ambiguous_conversation": "its first call went on with a conversation that several open episodes of the agent have",
    "retention": "it was older than [retention] keeps episodes",
    "requested": "that was requested",
    "eval": "it is an evaluation episode",
    "ambiguous_retry": "its first call was sent again, and several open episodes of the agent began with the same one",
}

_MASKED = {
    "late": "they are older than the bound allows in this batch",
    "orphaned": "their version is no longer an ancestor of the newest",
    "unconfirmed_version": "two accounts of which version sampled them disagree",
    "unconfirmed": "the engine died before it reported which version sampled them",
    "invalid_logprob": "the engine gave no usable log-probability",
    "greedy": "they were not drawn: the temperature was 0",
    "truncated": "top-p, top-k or min-p cut the distribution, and what they kept is not recorded",
    "constrained": "a grammar or a forced tool limited the choice",
    "abandoned": "no client read them to the end",
    "crashed_attempt": "the agent that requested them crashed, and was restarted",
    "other_model": "another model than the episode's sampled them",
    "frozen_model": "the model that sampled them is frozen",
}


def because(reason: str) -> str:
    """Return a reason in words; one that a client gave stays as it is."""
    return _BECAUSE.get(reason, reason)


def explain(rows: Sequence[Row], episode_id: str) -> list[dict[str, Any]]:
    """Return the decisions about one episode, in order, with words. A group's name can be used again once the group is over;
    decisions
    about earlier and later groups of the name are left out."""
    first = next(i for i, row in enumerate(rows) if row["episode_id"] == episode_id)
    if rows[first]["kind"] in ("refused", "deleted"):
        own = [row for row in rows if row["episode_id"] == episode_id]
    else:
        ends = [i for i, row in enumerate(rows) if not row["episode_id"] and row["kind"] in _ENDS]
        begin = max((i + 1 for i in ends if i < first), default=0)
        end = min((i for i in ends if i > first), default=len(rows))
        own = [row for i, row in enumerate(rows) if row["episode_id"] == episode_id or begin <= i <= end]
    return [
        {
            "at": row["at"],
            "about": "episode" if row["episode_id"] else "group",
            **{name: row[name] for name in ("kind", "reason", "batch", "entry", "details")},
            "words": words(row),
        }
        for row in own
    ]


def with_refusals(story: Sequence[dict[str, Any]], refused: Sequence[Row]) -> list[dict[str, Any]]:
    """Return a story with the refused calls of the episode in it, by time."""
    calls = [
        {
            "at": row["at"],
            "about": "call",
            "kind": "call_refused",
            "reason": row["code"],
            "batch": None,
            "entry": None,
            "details": {name: row[name] for name in ("api", "model", "status", "message", "times")},
            "words": refusal_words(row),
        }
        for row in refused
    ]
    return sorted([*story, *calls], key=lambda step: float(step["at"]))


def refusal_words(row: Row) -> str:
    """Return a refused call as a sentence."""
    often = f", {row['times']} times" if row["times"] > 1 else ""
    return f"a call was refused ({row['status']} {row['code']}{often}): {row['message']}"


def words(row: Row) -> str:
    """Return a decision as a sentence."""
    who = "it" if row["episode_id"] else "its group"
    why, batch, details = because(row["reason"]), row["batch"], row["details"]
    match row["kind"]:
        case "admitted":
            return f"admitted to batch {batch}, because it has a place for a group of version {details['version']}"
        case "refused":
            return f"refused, because {why}"
        case "finished":
            return "its run is over, and its reward is being computed"
        case "rewarded":
            value = details["value"]
            return "rewarded" if value is None else f"rewarded with {value:g}"
        case "closed":
            return f"its group takes no more members, because {why}"
        case "dropped":
            return f"{who} was dropped, because {why}"
        case "aborted":
            return f"it was stopped, because {why}"
        case "moved":
            return f"its group moved from batch {details['from']} to batch {batch}, which is within its bound too"
        case "late":
            return f"its group moved from batch {details['from']} to batch {batch}, beyond its bound: old tokens are not trained"
        case "occupied":
            return f"its group is whole: number {row['entry'] + 1} of batch {batch}"
        case "trained":
            return f"its group was trained in batch {batch}, as number {row['entry'] + 1}"
        case "skipped":
            return f"its group was lost with batch {batch}, because {why}"
        case "masked":
            reason = row["reason"]
            return (
                f"{details['tokens']} of its tokens were not trained, because {_MASKED.get(reason, reason)}"
            )
        case "deleted":
            return f"it was deleted with all that was recorded in it, because {why}"
    raise ValueError(f"no kind of decision: {row['kind']}")


def verdict(episode_id: str, row: Row | None, story: Sequence[Row], sampled: int, masked: int) -> str:
    """Return the end or the present state of an episode, in one line. `row`: the stored episode; `sampled` and `masked`:
    counts of its
    tokens."""
    if row is not None and row["mode"] == "eval":
        lost = (
            f"; its reward does not count, because {because(NO_CALLS)}"
            if row.get("reason") == NO_CALLS
            else ""
        )
        return f"not trained, because {because('eval')}{lost}"
    own = {step["kind"]: step for step in story if step["about"] == "episode"}
    group = {step["kind"]: step for step in story if step["about"] == "group"}
    if step := own.get("deleted"):
        return _deleted(step)
    for kind in ("refused", "dropped", "aborted"):
        if kind in own:
            return f"not trained, because {because(own[kind]['reason'])}"
    if step := group.get("trained"):
        return _trained(episode_id, step, sampled, masked)
    for kind in ("skipped", "dropped"):
        if step := group.get(kind):
            return f"not trained, because {because(step['reason'])}"
    if step := group.get("occupied"):
        return f"waiting in batch {step['batch']}, as number {step['entry'] + 1}"
    if "rewarded" in own:
        return "still running: it is rewarded, others of its group are not yet"
    if "finished" in own:
        return "still running: its reward is being computed"
    if own:
        return "still running"
    return "not known: it is from before reasons were kept"


def _deleted(step: Row) -> str:
    batch, details = step["batch"], step["details"]
    match details["was"]:
        case "trained":
            return f"deleted; it was trained in batch {batch} as version {batch + 1}"
        case "eval":
            return "deleted; it was an evaluation episode"
    return f"deleted; it was not trained, and ended as {details['reason']!r}"


def _trained(episode_id: str, step: Row, sampled: int, masked: int) -> str:
    batch = step["batch"]
    if episode_id not in step["details"]["episodes"]:
        return f"not trained, because it was not rewarded when its group was trained in batch {batch}"
    text = f"trained in batch {batch} as version {batch + 1}"
    if masked < sampled:
        return text
    return f"{text}, but " + (
        "none of its tokens counted" if sampled else "it sampled nothing: only its reward counted"
    )
