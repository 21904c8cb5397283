"""Statements about what a list shows of many episodes: the end of each first prompt and the beginning of each last reply."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from sqlalchemy import Connection, case, func, select

from gateway.store.columns import portions
from gateway.store.models import NodeRow

TOKENS = 200
"""Tokens of the prompt and of the reply that are read."""
_BYTES = 4 * TOKENS
_C = NodeRow.__table__.c


def previews(
    connection: Connection, model: str, episode_ids: Sequence[str]
) -> dict[str, tuple[list[int], list[int]]]:
    """Return the last tokens of each episode's first prompt, and the first tokens of its last reply."""
    found: dict[str, tuple[list[int], list[int]]] = {}
    for some in portions(episode_ids):
        own = (_C.episode_id.in_(some), _C.model == model)
        places = (
            select(_C.episode_id, func.max(_C.index).label("last"))
            .where(*own, _C.sampled)
            .group_by(_C.episode_id)
            .subquery()
        )
        size = func.length(_C.ids)
        end = func.substr(_C.ids, case((size > _BYTES, size - _BYTES + 1), else_=1), _BYTES)
        prompts = select(_C.episode_id, end).where(*own, _C.index == 0, ~_C.sampled)
        replies = (
            select(_C.episode_id, func.substr(_C.ids, 1, _BYTES))
            .join(places, (places.c.episode_id == _C.episode_id) & (places.c.last == _C.index))
            .where(*own)
        )
        prompt_end = {row[0]: _ids(row[1]) for row in connection.execute(prompts)}
        reply_start = {row[0]: _ids(row[1]) for row in connection.execute(replies)}
        found |= {one: (prompt_end.get(one, []), reply_start.get(one, [])) for one in some}
    return found


def _ids(stored: bytes) -> list[int]:
    return [int(token) for token in np.frombuffer(stored, "<i4")]
