"""The reasons for which episodes end, and which of them are failures. Pure.

Invariant: every reason is a failure, except `REWARDED` and those in `NO_FAILURE`: agents and drivers may name others.
The driver, the trainer and the console's Health judge by this alone.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

REWARDED = "rewarded"
FED_BACK = "fed_back"
"""The reason of an episode whose feedback came after its end, and that waits for a place in a batch."""
NO_PARTNER = "no_partner"
"""The reason of an episode that was alone in a match."""
INTERRUPTED = "interrupted"
"""The reason of an episode whose driver was interrupted."""
DRIVER_STOPPED = "driver_stopped"
"""The reason of an episode whose driver stopped, because too many had failed."""
NOTHING_TO_TRAIN = "nothing_to_train"
"""The reason of a group of which no token can be trained."""
DRIVER_ENDED = frozenset((INTERRUPTED, DRIVER_STOPPED))
"""The reasons with which a driver that ends leaves its episodes: it opens no other of their groups."""
GIVEN_UP = frozenset(
    (
        "surplus",
        "zero_variance",
        NOTHING_TO_TRAIN,
        "too_few_rewards",
        "stale",
        "no_room",
        "retry",
        "truncated",
        "untrained_late",
    )
)
"""The reasons for which the staleness ledger gives an episode up, without fault of its agent."""
NO_FAILURE = GIVEN_UP | {
    FED_BACK,
    NO_PARTNER,
    INTERRUPTED,
    DRIVER_STOPPED,
    "deleted",
    "not_judged",
    "members_missing",
    "skipped",
    "group_finished",
    "group_closed",
    "group_full",
}
"""The reasons for which episodes end without a reward although nothing failed."""


def counted(ended: Mapping[str, int]) -> Counter[str]:
    """Return the numbers of rewarded and failed episodes by reason."""
    return Counter({reason: count for reason, count in ended.items() if reason not in NO_FAILURE})


def failed(ended: Mapping[str, int]) -> Counter[str]:
    """Return the numbers of failed episodes by reason."""
    found = counted(ended)
    del found[REWARDED]
    return found
