"""The check at the start: a policy against its model's own forward pass, on rows that pass every threshold its config names.

First the real weights, on short rows. What a model does later only (windows, chunks, top-k attention, compressed keys, positions
that change with length) is looked at in a small copy with random weights, on the CPU, whose thresholds are low
(`trainer.model.small_copy`). Rows are packed together, cut in two, and compared with transformers, unpacked. What differs or
cannot be looked at is refused by name, with `attention = "rows"` as the way out only if that passes the same check.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from trainer.data.packing import lay_out
from trainer.data.tree import Row, row_of_tokens
from trainer.errors import ConfigError
from trainer.model import recurrent, rope, small_copy
from trainer.model.policy import Attention, Policy
from trainer.model.router_replay import refused

TOLERANCE = 1e-3
"""Nats, in float32; an attention or head that is not the model's own is off by far more."""
_NOISES = 10
"""A gap counts if it is this many times what one rounding of the weights makes of a small copy, if that is more."""
_SHORT, _LONG = 48, 96
"""Tokens of the longest row, of the real weights and of a small copy."""
_AFFORDABLE = 2048
"""Tokens of a row that the real weights compute where no small copy works."""
_ERRORS = (
    *(AttributeError, TypeError, NotImplementedError, RuntimeError, ValueError, LookupError, AssertionError),
    ConfigError,
)


@dataclass(frozen=True, slots=True)
class SmallCopy:
    """A model's small copy, and the thresholds that were lowered in it."""

    kind: type[Any]
    config: Any
    lowered: dict[str, int]
    """What they are in the real config, by name."""

    @classmethod
    def of(cls, kind: type[Any], config: Any) -> SmallCopy:
        """Make the copy of a model of class `kind`. Raise ValueError if none can be made."""
        return cls(kind, *small_copy.lowered(kind, small_copy.small(kind, config)))

    def difference(self, attention: Attention) -> str | None:
        """Return how the copy differs from its own forward pass with this attention; None if it does not.

        Raise what its own forward pass does.
        """
        policy = Policy(small_copy.build(self.kind, self.config, torch.float32), attention)
        return difference(policy, _LONG, _noise)


def check(policy: Policy, max_model_len: int | None = None) -> None:
    """Raise ConfigError if a policy's log-probabilities are not its model's own. Collective, if the weights are shared.

    `max_model_len`: the longest row of the engine, by which positions are pinned (`trainer.model.rope`).
    """
    config = rope.pinned(policy.model.config, max_model_len)
    why = difference(policy, _SHORT)
    late, by_spans = small_copy.lengths(config), policy.attention_kind == "spans"
    # Of new weights a state has no effect that shows: whether it is continued, a copy's large ones show.
    if why is None and not late and not (by_spans and recurrent.layers_of(policy.model)):
        return
    try:
        copy = SmallCopy.of(type(policy.model), config)
        found = copy.difference(policy.attention_kind)
        works = found is not None and by_spans and copy.difference("rows") is None
    except _ERRORS as error:
        _check_real(policy, why, max((value for _, value in late), default=0), error)
        return
    if why is None and found is not None:
        thresholds = ", ".join(f"{name} = {value}" for name, value in copy.lowered.items())
        why = f"{found}, in a small copy of it, on rows that pass {thresholds or 'what acts late'}"
    if why is not None:
        raise _refused(policy, why, works=works)


def _check_real(policy: Policy, why: str | None, longest: int, uncopied: Exception) -> None:
    """Check with the real weights alone, as no small copy works. Raise ConfigError unless their rows can pass all thresholds."""
    if why is None and longest <= _AFFORDABLE:
        why = difference(policy, longest + _SHORT)
    elif why is None:
        why = f"what it does after {longest} tokens cannot be looked at: no small copy of it works ({_first_line(uncopied)})"
    if why is not None:
        raise _refused(policy, why, works=False)


@torch.no_grad()
def difference(
    policy: Policy, longest: int, noise: Callable[[Policy, Sequence[Tensor], Tensor], float] | None = None
) -> str | None:
    """Return how a policy differs from its model's own forward pass on rows of up to `longest` tokens; None if it does not.

    `noise`: how exact the model's own log-probabilities are, in nats; called if they differ.
    """
    rows = _rows(policy, longest)
    ids = [torch.tensor(row.ids.tolist()) for row in rows]
    theirs = torch.cat(policy.plain(ids))
    try:
        gap = max(
            float((_logprobs(policy, parts) - theirs).abs().max()) for parts in ([rows], [rows[:1], rows[1:]])
        )
    except _ERRORS as error:
        # A reason ends where the way out begins, which is tried here.
        text = _first_line(error).partition("; set attention")[0]
        return text if isinstance(error, ConfigError) else f"{type(error).__name__}: {text}"
    if gap <= TOLERANCE or (noise is not None and gap <= _NOISES * noise(policy, ids, theirs)):
        return None
    return f"log-probabilities differ from the model's own by {gap:.2g} nats"


def _logprobs(policy: Policy, parts: Sequence[Sequence[Row]]) -> Tensor:
    """Return the policy's log-probabilities of rows that are packed in some parts."""
    micros = (lay_out(part, share_prefixes=policy.shares_prefixes) for part in parts)
    return torch.cat([policy.logprobs(micro) for micro in micros])


def _noise(policy: Policy, ids: Sequence[Tensor], theirs: Tensor) -> float:
    """Return what one rounding of each weight changes of a small copy's log-probabilities, in nats. Changes the weights."""
    generator = torch.Generator().manual_seed(2)
    for weight in policy.model.parameters():
        up = torch.randint(0, 2, weight.shape, generator=generator) * 2 - 1
        weight.mul_(1 + up * torch.finfo(weight.dtype).eps / 2)
    return float((torch.cat(policy.plain(ids)) - theirs).abs().max())


def _rows(policy: Policy, longest: int) -> list[Row]:
    """Return four rows, of which three share prefixes of different lengths; all tokens are trained."""
    config = policy.model.config.get_text_config()
    n = min(longest, getattr(config, "max_position_embeddings", None) or longest)
    numbers = torch.randperm(
        min(config.vocab_size, 1000), generator=torch.Generator().manual_seed(1)
    ).tolist()
    ids: list[int] = (numbers * (3 * n // len(numbers) + 1))[: 3 * n]
    branches = (ids[: n // 2] + ids[n : n + n // 3], ids[: n // 4] + ids[2 * n :][: n // 2], ids[-n // 2 :])
    return [row_of_tokens(path, episode_id=str(number)) for number, path in enumerate((ids[:n], *branches))]


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def _refused(policy: Policy, why: str, *, works: bool) -> ConfigError:
    name = type(policy.model).__name__
    if works:
        remedy = 'set [model] attention = "rows": every path is then computed separately, by the model\'s own attention'
    else:
        remedy = "this architecture cannot be trained here (docs/topics/models-matrix.md has those that can)"
    return ConfigError(
        f"[model] path: {name} does not work with the trainer's attention and head: {why}; {remedy}"
    )


def check_replay(policy: Policy) -> None:
    """Raise ConfigError unless all experts are given the routes of a short pass. Collective, if the weights are shared."""
    replay, tokens = policy.replay, 8
    assert replay is not None
    layers, top_k, experts = len(replay.shape.layers), replay.shape.top_k, replay.shape.experts
    # Neighbors, beginning at another expert in each token and layer.
    first = np.arange(tokens)[:, None, None] + np.arange(layers)[:, None]
    row = row_of_tokens(range(tokens))
    routed = replace(row, routes=((first + np.arange(top_k)) % experts).astype(np.int32))
    found: list[bool] = []

    def look(number: int, _: Any, arguments: tuple[Any, ...], named: dict[str, Any]) -> None:
        assert replay.routes is not None
        found.append(_replays([*arguments, *named.values()], replay.routes[:, number]))

    hooks = [
        block.get_submodule("experts").register_forward_pre_hook(partial(look, number), with_kwargs=True)
        for number, block in enumerate(replay.blocks)
    ]
    try:
        policy.logprobs(lay_out([routed], share_prefixes=policy.shares_prefixes))
    except RuntimeError as error:
        raise refused(policy.model, _first_line(error)) from error
    finally:
        for hook in hooks:
            hook.remove()
    if len(found) != layers or not all(found):
        raise refused(
            policy.model, "its router does not compute the weights of experts that it did not choose itself"
        )


def _replays(given: Sequence[Any], routes: Tensor) -> bool:
    """Return true if experts are given these routes, each with a weight; a padding token has the model's choice."""
    known = routes >= 0
    tensors = [each for each in given if isinstance(each, Tensor) and each.shape == routes.shape]
    chosen = [each[known] for each in tensors if not each.is_floating_point()]
    weights = [each[known] for each in tensors if each.is_floating_point()]
    return bool(chosen and weights and (chosen[0] == routes[known]).all() and (weights[0] != 0).all())
