"""The tasks of the demo with tools: what does an order cost, if prices are only known from a tool?

    python -m examples.tools_demo.tasks --split train --count 2000 --seed 1 --out train.jsonl

An order is a list of 2 to 4 items; every task has prices of its own, so that only the tool knows them. Owns the split:
an order belongs to `heldout` or to `train` by a hash of its text, so the two never share an order, whatever the seeds.
"""

from __future__ import annotations

import hashlib
import random
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal

from examples.demo.task_file import write_tasks

Split = Literal["train", "heldout"]

ITEMS = (
    "apples", "bread", "butter", "cheese", "coffee", "eggs", "flour", "honey",
    "lemons", "milk", "onions", "rice", "salt", "soap", "sugar", "tea",
)  # fmt: skip
QUESTION = "What does this cost?"
FEWEST, MOST = 2, 4
"""Items of an order."""
HIGHEST_PRICE = 5
HELDOUT_SHARE = 16
"""One order in this many is held out."""


def question_of(order: Sequence[str]) -> str:
    """Return the user's question."""
    return "\n".join([QUESTION, *order])


def split_of(question: str) -> Split:
    """Return the split that an order belongs to, by its text alone."""
    digest = hashlib.sha256(question.encode()).digest()
    return "heldout" if digest[0] % HELDOUT_SHARE == 0 else "train"


def tasks(split: Split, seed: int) -> Iterator[dict[str, Any]]:
    """Yield the tasks of one split without end, in an order given by the seed; as many of every length."""
    for number, (order, prices) in enumerate(orders(split, f"tasks {seed}")):
        yield {
            "task_id": f"order-{split}-{seed}-{number:05d}",
            "question": question_of(order),
            "prices": prices,
            "total": sum(prices[item] for item in order),
        }


def score(task: Mapping[str, Any], answer: str) -> float:
    """Return the reward of an answer: 1 if its last number is the order's total, else 0. The numbers before it are working."""
    numbers = re.findall(r"\d+", answer)
    return float(bool(numbers) and int(numbers[-1]) == task["total"])


def orders(split: Split, seed: str) -> Iterator[tuple[list[str], dict[str, int]]]:
    """Yield orders of one split without end, each with the price of every item that there is."""
    rng = random.Random(seed)
    while True:
        order = rng.sample(ITEMS, rng.randint(FEWEST, MOST))
        prices = {item: rng.randint(1, HIGHEST_PRICE) for item in ITEMS}
        if split_of(question_of(order)) == split:
            yield order, prices


if __name__ == "__main__":
    assert __doc__ is not None
    write_tasks(__doc__.splitlines()[0], tasks)
