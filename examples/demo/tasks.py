"""The demo's tasks: sums of one-digit numbers from reasoning-gym (`chain_sum`), scored by its own scorer.

    python -m examples.demo.tasks --split train --count 2000 --seed 1 --out train.jsonl

Owns the split: a question belongs to `heldout` or to `train` by a hash of its text, so the two never share a question, whatever
the seeds. `careless_teacher` shows the warm start how to answer, from the training split alone. It writes down every partial
sum, and it makes one slip: it counts back from a number with the number itself as the first step, so that most of its
subtractions come out one too high. A model that imitates it has learnt to add and to subtract, and mostly answers wrong; what
GRPO has to find, from the scorer alone, is that the other habit pays.
"""

from __future__ import annotations

import functools
import hashlib
import itertools
import random
import re
from collections.abc import Iterator
from typing import Any, Literal

import reasoning_gym

from examples.demo.task_file import write_tasks

Split = Literal["train", "heldout"]

HELDOUT_SHARE = 16
"""One question in this many is held out."""
TERMS = 3
_DRAWS = 100_000
"""Enough for every question of this length to come up."""
SLIP_CHANCE = 0.6
"""The chance that the teacher gets a subtraction wrong, each time."""


def split_of(question: str) -> Split:
    """Return the split that a question belongs to, by its text alone."""
    digest = hashlib.sha256(question.encode()).digest()
    return "heldout" if digest[0] % HELDOUT_SHARE == 0 else "train"


def tasks(split: Split, seed: int) -> Iterator[dict[str, Any]]:
    """Yield the tasks of one split, in an order given by the seed, each question once; about 3750 to train, 250 held out."""
    drawn: set[str] = set()
    for entry in itertools.islice(_entries(seed), _DRAWS):
        question = entry["question"]
        if split_of(question) == split and question not in drawn:
            drawn.add(question)
            yield {
                "task_id": "chain-sum-" + hashlib.sha256(question.encode()).hexdigest()[:16],
                "question": question,
                "answer": entry["answer"],
                "metadata": entry["metadata"],
            }


def score(task: dict[str, Any], text: str) -> float:
    """Return the reward, 0 to 1, of an answer: reasoning-gym's scorer, given the last word (the words before it are working)."""
    words = text.split()
    reward: float = _dataset(0).score_answer(words[-1] if words else None, task)
    return reward


def careless_teacher(seed: int) -> Iterator[tuple[str, str]]:
    """Yield an endless stream of (question, answer) of the training split, many of them wrong on purpose (see above)."""
    rng = random.Random(seed)
    for entry in _entries(seed):
        if split_of(entry["question"]) == "train":
            yield entry["question"], working(entry["metadata"]["expression"], rng, SLIP_CHANCE)


def working(expression: str, rng: random.Random, slip_chance: float) -> str:
    """Return the partial sums of `expression`, such as "7 5" for "4 + 3 - 2"."""
    first, *rest = re.findall(r"[+-]|\d+", expression)
    total, sums = int(first), []
    for sign, term in zip(rest[::2], rest[1::2], strict=True):
        slip = sign == "-" and rng.random() < slip_chance
        total += int(term) if sign == "+" else -int(term) + slip
        sums.append(str(total))
    return " ".join(sums)


def _entries(seed: int) -> Iterator[dict[str, Any]]:
    dataset = _dataset(seed)
    return (dataset[i] for i in range(dataset.size))


@functools.cache
def _dataset(seed: int) -> Any:
    # The library seeds entry i with seed + i, so that near seeds would give the same questions.
    return reasoning_gym.create_dataset(
        "chain_sum",
        min_terms=TERMS,
        max_terms=TERMS,
        min_digits=1,
        max_digits=1,
        seed=seed * 10_000_019,
        size=10_000_000,
    )


if __name__ == "__main__":
    assert __doc__ is not None
    write_tasks(__doc__.splitlines()[0], tasks)
