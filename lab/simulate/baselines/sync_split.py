"""Synchronous, rollout and training apart: each waits for the other.

Source: the on-policy loop of frameworks with separate engines (OpenRLHF, arXiv 2405.11143; verl's fully-async recipe with
trigger_parameter_sync_step = 1 and staleness_threshold = 0, its mode 1). At most one batch is live; staleness is 0.

Left out: nothing that is known. Knobs: the split of the GPUs, which is the scenario's.
"""

from __future__ import annotations

from lab.simulate.baselines.plain import Plain


class SyncSplit(Plain):
    """One batch at a time."""

    name = "sync_split"
