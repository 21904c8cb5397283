"""Warnings about batches whose sampled tokens are masked: nothing is learned from them, and otherwise only a metric shows it."""

from __future__ import annotations

from collections.abc import Mapping

from headgate.mask_reasons import REMEDIES

_MASKED = "masked_tokens/"
_MOST = 0.5


def masked_warning(measured: Mapping[str, float]) -> tuple[str, str] | None:
    """Return the reason and the text of a warning about a batch's metrics; None if there is nothing to warn of.

    A batch is warned of if no token of it is trained, or if truncated distributions mask most of them.
    """
    masked = {k.removeprefix(_MASKED): n for k, n in measured.items() if k.startswith(_MASKED) and n}
    if not masked or measured["equal_reward_groups"] == 1.0:
        return None
    trained = measured["trained_tokens"] + measured.get("skipped_tokens", 0.0)
    sampled = trained + sum(masked.values())
    reason = max(masked, key=masked.__getitem__)
    if masked.get("truncated", 0.0) > _MOST * sampled:
        reason = "truncated"
    elif trained:
        return None
    remedy = REMEDIES.get(reason)
    return reason, (
        f"warning: {masked[reason]:.0f} of the batch's {sampled:.0f} sampled tokens are not trained, for they are"
        f" {reason.upper()}{': ' if remedy else ''}{remedy or ''}"
    )
