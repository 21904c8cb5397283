"""Warns when calls of training episodes sample in a way that cannot be trained, and says what to do."""

from __future__ import annotations

import logging

from gateway.types import TokenFlag

log = logging.getLogger(__name__)

WHAT_TO_DO = {
    "greedy": "temperature 0 draws no tokens: ask for a temperature above 0, or set [sampling] temperature = { override = 1.0 }",
    "truncated": "top-p, top-k or min-p cut the distribution: leave them out of requests, or set [sampling]"
    " top_p = { override = 1.0 } if it is top_p",
    "constrained": "a grammar, a forced tool, a penalty or a bias shaped the tokens: leave response_format, tool_choice,"
    " penalties and logit_bias out of requests",
}
"""By the name of the flag that such a request puts on its tokens (`TokenFlag`)."""


class UntrainedNotice:
    """One for a process: each model and reason is reported once."""

    def __init__(self) -> None:
        self._reported: set[tuple[str, str]] = set()

    def see(self, model: str, episode_id: str, flags: TokenFlag) -> None:
        """Take note of the flags that a call of a training episode puts on every token of its reply."""
        reasons = [reason for reason in WHAT_TO_DO if flags & TokenFlag[reason.upper()]]
        for reason in reasons:
            if (model, reason) not in self._reported:
                self._reported.add((model, reason))
                log.warning(
                    "a call of training episode %s samples tokens of %s that are not trained (%s): %s",
                    episode_id,
                    model,
                    reason,
                    WHAT_TO_DO[reason],
                )
