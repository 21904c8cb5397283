"""How exact router replay is in a family: packed rows with recorded routes against each row alone.

Two references: the model of transformers without replay, for the routes that it chose itself, which judges the weights that the
trainer's routers compute; and with replay of routes that no router would choose, which judges that each token gets its own.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from headgate.routes import RouterShape
from trainer.data.packing import lay_out
from trainer.data.tree import Row
from trainer.model.policy import Policy
from trainer.model.router_replay import RouterReplay


@torch.no_grad()
def replay_gap(policy: Policy, reference: Any, rows: Sequence[Row]) -> float:
    """Return the largest gap of a log-probability in nats. Changes the reference, which is the same model in transformers."""
    replay = RouterReplay(reference)
    chosen, own = _own(reference, replay, rows)
    forced = [replace(row, routes=_cyclic(row, replay.shape)) for row in rows]
    theirs = [*own, *(_alone(reference, replay, row) for row in forced)]
    gaps = [
        (_packed(policy, routed) - torch.cat(expected)).abs().max()
        for routed, expected in ((chosen, theirs[: len(rows)]), (forced, theirs[len(rows) :]))
    ]
    return float(max(gaps))


def _own(reference: Any, replay: RouterReplay, rows: Sequence[Row]) -> tuple[list[Row], list[Tensor]]:
    """Return rows with the routes that the reference chooses, and its log-probabilities."""
    routed, found = [], []
    for row in rows:
        with _observed(replay) as routes:
            found.append(_alone(reference, replay, row))
        routed.append(replace(row, routes=torch.stack(routes, 1).numpy().astype(np.int32)))
    return routed, found


def _alone(reference: Any, replay: RouterReplay, row: Row) -> Tensor:
    """Return the log-probabilities of all tokens of a row but the first, with its routes if it has any."""
    ids = torch.tensor(row.ids.tolist())
    with replay.using(None if row.routes is None else torch.tensor(row.routes).long()):
        logits = reference(input_ids=ids[None], use_cache=False).logits[0, :-1].float()
    return logits.log_softmax(-1).gather(-1, ids[1:, None])[:, 0]


def _packed(policy: Policy, rows: Sequence[Row]) -> Tensor:
    return policy.logprobs(lay_out(rows, share_prefixes=policy.shares_prefixes))


def _cyclic(row: Row, shape: RouterShape) -> Any:
    """Return neighboring experts that depend on layer, position and token, so rows share what they share of tokens."""
    first = np.arange(len(row))[:, None] * 3 + row.ids[:, None] + 5 * np.arange(len(shape.layers))
    return ((first[..., None] + np.arange(shape.top_k)) % shape.experts).astype(np.int32)


@contextmanager
def _observed(replay: RouterReplay) -> Iterator[list[Tensor]]:
    """Collect the experts that each block's tokens are given, of shape (tokens, top_k), in the block."""
    found: list[Tensor] = []

    def look(top_k: int, _: Any, arguments: tuple[Any, ...], named: dict[str, Any]) -> None:
        given = (each for each in (*arguments, *named.values()) if isinstance(each, Tensor))
        found.append(next(each for each in given if not each.is_floating_point() and each.shape[-1] == top_k))

    hooks = [
        block.get_submodule("experts").register_forward_pre_hook(
            partial(look, replay.shape.top_k), with_kwargs=True
        )
        for block in replay.blocks
    ]
    try:
        yield found
    finally:
        for hook in hooks:
            hook.remove()
