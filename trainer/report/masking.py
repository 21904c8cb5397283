"""Warnings about batches whose sampled tokens are masked: nothing is learned from them, and otherwise only a metric shows it."""

from __future__ import annotations

from collections.abc import Mapping

_MASKED = "masked_tokens/"
_MOST = 0.5
_REMEDIES = {
    "truncated": "agents sample with top_p below 1, or with top_k or min_p, and such tokens are not the policy's own; set"
    " top_p = { override = 1.0 } under [sampling] in the gateway's configuration, and leave top_k and min_p out of requests",
    "greedy": "agents request temperature 0; set temperature = { min = 1.0 } under [sampling] in the gateway's configuration",
    "constrained": "grammars, forced tools, logit_bias, min_tokens or penalties shaped them; leave those out of agents' requests",
    "invalid_logprob": "the engine gave no log-probabilities of them; look at the engine's log",
    "overlong": 'calls were cut at their token limit, and [credit] truncated is "mask"; raise max_tokens in agents\' requests',
    "late": "they are older than [staleness] eta of the gateway's configuration allows",
    "images_unseen": "their episodes have images, and the trained model is given none",
    "image_missing": "images of their episodes are unavailable; the run's log has the reasons",
    "image_placeholder": "the token that stands for images was sampled where no image is; ban it in agents' requests",
    "orphaned": "they were sampled by versions that an older checkpoint has replaced; later batches have none",
}
"""The cause, and what to do about it, by the reason for which tokens are masked."""


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
    remedy = _REMEDIES.get(reason)
    return reason, (
        f"warning: {masked[reason]:.0f} of the batch's {sampled:.0f} sampled tokens are not trained, for they are"
        f" {reason.upper()}{': ' if remedy else ''}{remedy or ''}"
    )
