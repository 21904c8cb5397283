"""An upper bound on the trained tokens a second that any policy can reach in a scenario: a cluster that wastes nothing.

A batch cannot take less than the longest of
- the training of its tokens on all GPUs, and a step's fixed time;
- its GPU seconds, of generation and training, over all GPUs: each token costs what it costs in an engine that runs as many calls
  as its slots, its cache and the calls that the bound on staleness lets live allow;
- its longest episode in an engine of its own and the step, over eta + 1: a group that starts under version v is trained by
  version v + eta. The mean over the batches counts. Groups are taken in their order, batch by batch. Weights travel in no time,
  no cache is lost, and prompts are computed once for a group, so the bound is above what can be reached. Pure; every figure is
  simulated.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from lab.simulate.engine import EngineCosts, span_s
from lab.simulate.scenario import Scenario
from lab.simulate.workload import Task, Turn


@dataclass(frozen=True, slots=True)
class UpperBound:
    """The bound for the batches that count, from `warmup` on."""

    tokens: float
    """Sampled tokens of a batch, in the mean."""
    train_s: float
    """Seconds of a step on all GPUs."""
    busy_s: float
    """GPU seconds of a batch over all GPUs."""
    longest_s: float
    """Seconds of a batch's longest episode, over eta + 1."""

    @classmethod
    def of(cls, scenario: Scenario, seed: int) -> UpperBound:
        """Return the bound for a scenario's groups with a seed."""
        workload = scenario.workload(seed)
        batches = [
            [workload.task(number) for number in range(batch * scenario.batch, (batch + 1) * scenario.batch)]
            for batch in range(scenario.warmup, scenario.batches)
        ]
        count, trainer, gpus = len(batches), scenario.trainer, scenario.gpus
        tasks = [task for batch in batches for task in batch]
        contexts = [sum(turn.prompt + turn.sampled for turn in turns) for turns in _episodes(tasks)]
        trained = sum(map(scenario.trained, contexts)) / count
        sizes = {gpus: scenario.engine_on(gpus) for gpus in (scenario.engine_gpus, *scenario.engines_of)}
        generation = min(_gpu_seconds(scenario, tasks, gpus, costs) for gpus, costs in sizes.items()) / count
        alone = [
            max(min(_alone(costs, turns) for costs in sizes.values()) for turns in _episodes(batch))
            for batch in batches
        ]
        return cls(
            tokens=sum(task.sampled for task in tasks) / count,
            train_s=trainer.seconds(trained, gpus, False) + trainer.step_s,
            busy_s=(generation + trainer.seconds(trained, 1, False)) / gpus,
            longest_s=(sum(alone) / count + trainer.step_s) / (scenario.eta + 1),
        )

    @property
    def batch_s(self) -> float:
        """The least seconds of a batch."""
        return max(self.train_s, self.busy_s, self.longest_s)

    @property
    def tokens_per_s(self) -> float:
        """The most trained tokens a second."""
        return self.tokens / self.batch_s

    @property
    def binding(self) -> str:
        """The term that limits: `training`, `GPUs` or `longest episode`."""
        found = {"training": self.train_s, "GPUs": self.busy_s, "longest episode": self.longest_s}
        return max(found, key=lambda name: found[name])


def _episodes(tasks: Iterable[Task]) -> Iterable[Sequence[Turn]]:
    return (turns for task in tasks for turns in task.episodes)


def _gpu_seconds(scenario: Scenario, tasks: Sequence[Task], gpus: int, costs: EngineCosts) -> float:
    """Return the GPU seconds of generating all tasks in engines of `gpus` GPUs that run as many calls as they may."""
    model = costs.model
    sampled = read = prompts = 0
    for task in tasks:
        prompts += task.episodes[0][0].prompt - sum(turns[0].prompt for turns in task.episodes)
        for turns in task.episodes:
            context = 0
            for turn in turns:
                context += turn.prompt
                prompts += turn.prompt
                read += turn.sampled * context + turn.sampled * (turn.sampled - 1) // 2
                sampled += turn.sampled
                context += turn.sampled
    live = (scenario.eta + 1) * scenario.batch * len(tasks[0].episodes)
    calls = max(1, min(costs.slots, live, int(costs.capacity * sampled / read)))
    step_s = max(model.s_per_batch / calls, model.s_per_call) + model.s_per_step / calls
    return gpus * (
        read * model.s_per_kv_token + sampled * step_s + prompts * costs.prefill_s * (1 - costs.overlap)
    )


def _alone(costs: EngineCosts, turns: Sequence[Turn]) -> float:
    """Return the seconds of an episode in an engine of its own, with its tools."""
    seconds, context = 0.0, 0
    for turn in turns:
        context += turn.prompt
        seconds += turn.prompt * costs.prefill_s + turn.wait_s
        seconds += span_s(costs.model, turn.sampled, 1, context)
        context += turn.sampled
    return seconds
