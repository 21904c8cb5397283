"""How often the test of a canary is wrong, and how soon it finds a worse version: simulated users with a thumb up or down.

python -m lab.canary            # the table of lab/notes/demos.md
"""

from __future__ import annotations

import random
from statistics import median

from scheduler.policies.canary import Arm, CanaryTest, Conversation, Outcome

RUNS = 300
REWARDED = 0.75
"""The share of conversations with a reward."""
CASES = (
    (0.6, 0.6, 0.1),
    (0.5, 0.5, 0.3),
    (0.5, 0.6, 0.1),
    (0.4, 0.6, 0.1),
    (0.3, 0.6, 0.1),
    (0.1, 0.6, 0.1),
    (0.1, 0.6, 0.25),
)
"""The mean reward of the candidate and of the live version, and the share."""


def trial(candidate: float, live: float, share: float, seed: int) -> tuple[Outcome, int]:
    """Return the outcome of a trial of 100 rewarded conversations, and how many of the candidate's had ended by then."""
    rng, test = random.Random(seed), CanaryTest(100, 0.0, 1.0)
    while (decision := test.decision) is None:
        arm: Arm = "candidate" if rng.random() < share else "live"
        liked = rng.random() < (candidate if arm == "candidate" else live)
        test.add(Conversation(arm, float(liked) if rng.random() < REWARDED else None))
    return decision.outcome, test.arms["candidate"].conversations


def main() -> None:
    """Print the table."""
    print(
        "| candidate | live | share | returned | its conversations until then, median |\n|---|---|---|---|---|"
    )
    for candidate, live, share in CASES:
        found = [trial(candidate, live, share, seed) for seed in range(RUNS)]
        returned = [count for outcome, count in found if outcome == "returned"]
        counts = f"{median(returned):.0f}" if returned else ""
        print(f"| {candidate} | {live} | {share} | {len(returned)} of {RUNS} | {counts} |")


if __name__ == "__main__":
    main()
