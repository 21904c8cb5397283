"""Warn when calls of training episodes sample in a way that cannot be trained."""

from __future__ import annotations

import logging

from headgate.mask_reasons import REMEDIES
from headgate.types import TokenFlag

log = logging.getLogger(__name__)


class UntrainedNotice:
    """One for a process: each model and reason is reported once."""

    def __init__(self) -> None:
        self._reported: set[tuple[str, str]] = set()

    def see(self, model: str, episode_id: str, flags: TokenFlag) -> None:
        """Take note of the flags that a call of a training episode puts on every token of its reply."""
        for reason in [reason for flag in flags if (reason := str(flag.name).lower()) in REMEDIES]:
            if (model, reason) not in self._reported:
                self._reported.add((model, reason))
                log.warning(
                    "a call of training episode %s samples tokens of %s that are not trained (%s): %s",
                    episode_id,
                    model,
                    reason,
                    REMEDIES[reason],
                )
