"""Published ways to run rollout and training, as policies of the simulator. A policy is a file here and a line below.

| policy | GPUs | rule | weights | calls at an update | trainer begins | log-probabilities again |
|---|---|---|---|---|---|---|
| sync_colocated | all for both, in turn | synchronous | at the switch | none run | whole batch | yes |
| sync_split | apart | synchronous | collective | none run | whole batch | yes |
| one_step | apart | one_step | engine by engine, when its calls ended | end first | whole batch | yes |
| areal | apart | areal | collective | go on, prefilled again | whole batch | yes |
| roll_flash | apart | roll | collective | go on, prefilled again | whole batch | yes |
| verl_async | apart | verl | collective | go on, prefilled again | quarters | no |
| streamrl | apart | one_step | overlapped, when its calls ended | end first | as groups come | no |
| staleflow | apart | staleflow | each engine by itself | moved or kept | whole batch | no |
| seamlessflow | train nodes are lent | verl | collective | go on elsewhere | whole batch | no |
| dora | apart | staleflow | each engine by itself | keep their version, elsewhere | sixteenths | no |
| heddle | apart | staleflow | all engines together | go on, prefilled again | sixteenths | no |

Where a source is silent, the policy gets what favours it; each file says what that is.
"""

from __future__ import annotations

from collections.abc import Callable

from lab.simulate.baselines.areal import Areal
from lab.simulate.baselines.dora import Dora
from lab.simulate.baselines.heddle import Heddle
from lab.simulate.baselines.one_step import OneStep
from lab.simulate.baselines.roll_flash import RollFlash
from lab.simulate.baselines.seamlessflow import SeamlessFlow
from lab.simulate.baselines.staleflow import StaleFlow
from lab.simulate.baselines.streamrl import StreamRL
from lab.simulate.baselines.sync_colocated import SyncColocated
from lab.simulate.baselines.sync_split import SyncSplit
from lab.simulate.baselines.verl_async import VerlAsync
from lab.simulate.world import Policy

BASELINES: dict[str, Callable[[], Policy]] = {
    "sync_colocated": SyncColocated,
    "sync_split": SyncSplit,
    "one_step": OneStep,
    "areal": Areal,
    "roll_flash": RollFlash,
    "verl_async": VerlAsync,
    "streamrl": StreamRL,
    "staleflow": StaleFlow,
    "seamlessflow": SeamlessFlow,
    "dora": Dora,
    "heddle": Heddle,
}
"""By name. A policy has the state of one run."""
