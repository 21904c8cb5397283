"""AReaL: generation never stops; what may be in flight is bounded, and running calls go on with new weights.

Source: AReaL (arXiv 2505.24298); inclusionAI/AReaL, areal/infra. Admission is its budget (`lab/rules/areal.py`):
live groups, not ages, are bounded. At an update the engines are interrupted, load, compute the cache of their calls anew,
and go on ("interruptible generation"). The trainer computes proximal log-probabilities once more (decoupled PPO), so
`recompute` is True.

Left out: its limit of concurrent rollouts (the engine's slots bound it), shuffling within a batch, its micro-batch
packing (in the trainer's flops). Knobs: eta 4 for code, 8 for mathematics (its authors; here the scenario's), and a split
of 75 % rollout to 25 % training (here the scenario's, balanced)."""

from __future__ import annotations

from lab.simulate.baselines.plain import Plain


class Areal(Plain):
    """A budget of groups, and interruptible engines."""

    name = "areal"
    rule_name = "areal"
