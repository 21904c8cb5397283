"""Statements about what an episode sampled, by which its reward is judged."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

import numpy as np
from sqlalchemy import Connection, func, select

from gateway.store import refused_calls, turns
from gateway.store.models import CallRow
from headgate.types import CRASHED_ATTEMPT, TokenFlag, UInt8Array


@dataclass(frozen=True, slots=True)
class Sampled:
    """The tokens that an episode sampled from its own model, without those of crashed attempts."""

    tokens: int = 0
    masked: Counter[str] = field(default_factory=Counter)
    """Tokens that no trainer can train, by reason; each token counts once."""
    calls: Counter[str] = field(default_factory=Counter)
    """Recorded calls of the whole episode by model."""
    refused: int = 0
    """Calls of the whole episode that were refused."""
    last_refusal: str = ""
    """Status, code and message of the last of them."""

    @property
    def trainable(self) -> int:
        """The number of tokens that a trainer can train, as far as it is known before they are leased."""
        return self.tokens - self.masked.total()


def sampled(connection: Connection, model: str, episode_id: str) -> Sampled:
    tokens, masked = 0, Counter[str]()
    for turn in turns.sampled(connection, model, [episode_id]):
        if turn.mask_reason == CRASHED_ATTEMPT:
            continue
        tokens += len(turn.flags)
        masked += Counter({turn.mask_reason: len(turn.flags)}) if turn.mask_reason else reasons(turn.flags)
    refused = refused_calls.of_episode(connection, episode_id)
    last = "{status} {code}: {message}".format_map(refused[-1]) if refused else ""
    calls = _calls(connection, episode_id)
    return Sampled(tokens, masked, calls, sum(row["times"] for row in refused), last)


def reasons(flags: UInt8Array) -> Counter[str]:
    """Return the number of tokens with each flag; of several flags, the first counts."""
    found: Counter[str] = Counter()
    values, counts = np.unique(flags[flags != 0], return_counts=True)
    for value, count in zip(values.tolist(), counts.tolist(), strict=True):
        found[str(next(flag.name for flag in TokenFlag if flag & value)).lower()] += count
    return found


def _calls(connection: Connection, episode_id: str) -> Counter[str]:
    query = select(CallRow.model, func.count()).where(CallRow.episode_id == episode_id)
    rows = connection.execute(query.group_by(CallRow.model))
    return Counter({row[0]: row[1] for row in rows})
