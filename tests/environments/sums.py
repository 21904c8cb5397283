"""A task of inspect-ai."""

from __future__ import annotations

from inspect_ai import Task, task
from inspect_ai.dataset import Sample
from inspect_ai.scorer import Score, Target, accuracy, scorer
from inspect_ai.solver import TaskState, generate


@scorer(metrics=[accuracy()])
def right():
    async def score(state: TaskState, target: Target) -> Score:
        if state.output.completion == "crash":
            raise ValueError("the scorer is broken")
        return Score(value=float(target.text in state.output.completion))

    return score


@task
def sums(size: int = 40) -> Task:
    samples = [Sample(input=f"{n} + {n}", target=str(2 * n)) for n in range(size)]
    return Task(dataset=samples, solver=generate(max_tokens=8), scorer=right())
