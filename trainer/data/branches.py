"""The calls of an episode as a tree: which follows which, what each returns, and which are siblings.

A call follows the nearest call whose tokens it continues. One that begins a conversation follows the newest earlier call whose
reply is quoted in its prompt: an agent that summarizes its history goes on from the summary. Siblings sampled after the same
prompt: choices of one request, or requests that were repeated from one point. Pure: no I/O, no model.
Source: Yang et al., "TreeRPO: Tree Relative Policy Optimization" (arXiv 2506.05183): a call's value is the mean over the branches
behind it, and its advantage is against its siblings.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Sequence

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view

from headgate.types import Episode, Int32Array, Node

QUOTED = 8
"""Tokens by which a reply is recognized: its last ones but two: its end, and a token that may merge with what follows."""


def previous_calls(episode: Episode, calls: Sequence[Node]) -> list[int | None]:
    """Return the place of the call that each call follows; None for those that begin."""
    by_index = {node.index: node for node in episode.nodes}
    places = {node.index: place for place, node in enumerate(calls)}
    found: list[int | None] = []
    for call in calls:
        node, prompt = call, [call.ids[:0]]
        while node.parent >= 0 and (node.at == 0 or node.parent not in places):
            prompt.append(by_index[node.parent].ids[: node.at])
            node = by_index[node.parent]
        before = places.get(node.parent)
        found.append(_quoted(np.concatenate(prompt[::-1]), calls[: len(found)]) if before is None else before)
    return found


def _quoted(prompt: Int32Array, earlier: Sequence[Node]) -> int | None:
    """Return the place of the newest call whose reply's end is in a prompt; None if there is none. Short replies are in none."""
    if len(prompt) < QUOTED:
        return None
    windows = sliding_window_view(prompt, QUOTED)
    for place in reversed(range(len(earlier))):
        end = earlier[place].ids[-2 - QUOTED : -2]
        if len(end) == QUOTED and (windows == end).all(1).any():
            return place
    return None


def returns(rewards: Sequence[float], previous: Sequence[int | None], discount: float) -> list[float]:
    """Return the reward of each call plus `discount` times the mean of what the calls that follow it return."""
    found, following = [*rewards], Counter(previous)
    for place in reversed(range(len(found))):
        before = previous[place]
        if before is not None:
            found[before] += discount * found[place] / following[before]
    return found


def compared(calls: Sequence[Node], previous: Sequence[int | None], episode: int) -> list[Hashable]:
    """Return, for each call, what the calls that it is compared with have in common: the prompt of siblings in this episode, or,
    for a call without siblings, the number of calls before it on its path."""
    depths: list[int] = []
    for before in previous:
        depths.append(0 if before is None else depths[before] + 1)
    prompts = [(call.parent, call.at) for call in calls]
    alike = Counter(prompts)
    return [
        (episode, *prompt) if alike[prompt] > 1 else depth
        for prompt, depth in zip(prompts, depths, strict=True)
    ]
