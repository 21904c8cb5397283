"""The same engine, token by token: a loop over decode steps that knows nothing of the closed form."""

from __future__ import annotations

from dataclasses import dataclass

from lab.simulate.engine import HEADROOM, EngineCosts


@dataclass(slots=True)
class Job:
    """A call that comes at a time."""

    number: int
    time: float
    prompt: int
    want: int
    done: int = 0


def finished(costs: EngineCosts, jobs: list[Job]) -> dict[int, float]:
    """The end time of each job."""
    model = costs.model
    coming, waiting, running = sorted(jobs, key=lambda job: job.time), [], []
    now, ends = 0.0, {}
    while coming or waiting or running:
        if not running and not waiting:
            now = max(now, coming[0].time)
        for job in [job for job in running if job.done == job.want]:
            running.remove(job)
            ends[job.number] = now
        preempted = False
        while len(running) > 1 and sum(j.prompt + j.done for j in running) + len(running) > costs.capacity:
            waiting.insert(0, running.pop())
            preempted = True
        while coming and coming[0].time <= now:
            waiting.append(coming.pop(0))
        while waiting and not preempted and len(running) < costs.slots:
            job, held = waiting[0], sum(j.prompt + j.done for j in running)
            if running and held + job.prompt + job.done + HEADROOM * (len(running) + 1) > costs.capacity:
                break
            running.append(waiting.pop(0))
            now += costs.prefill_s * (job.prompt + job.done)
            while coming and coming[0].time <= now:
                waiting.append(coming.pop(0))
        if running:
            kv = sum(j.prompt + j.done for j in running)
            now += (
                model.s_per_kv_token * kv
                + max(model.s_per_batch, model.s_per_call * len(running))
                + model.s_per_step
            )
            for job in running:
                job.done += 1
    return ends
