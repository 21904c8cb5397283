"""Long sums of one-digit numbers: every partial sum is to be written down, so a reply has some 110 tokens.

    python -m examples.lending.tasks --count 2000 --seed 1 --out tasks.jsonl

The reward is the share of partial sums that follow from the one before, so that few slips earn more than many.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from examples.demo.tasks import SLIP_CHANCE, working

TERMS = 56


def tasks(seed: int) -> Iterator[dict[str, Any]]:
    """Yield tasks without end."""
    rng = random.Random(seed)
    for number in itertools.count():
        yield {"task_id": f"sum-{seed}-{number}", "question": expression(rng)}


def expression(rng: random.Random) -> str:
    """Return an expression like `4 + 3 - 2`, with `TERMS` terms, whose partial sums stay small."""
    parts, total = [str(first := rng.randint(0, 9))], first
    for _ in range(TERMS - 1):
        sign = "-" if total > 40 else "+" if total < 10 else rng.choice("+-")
        term = rng.randint(0, 9)
        total += term if sign == "+" else -term
        parts += [sign, str(term)]
    return " ".join(parts)


def careless_teacher(seed: int) -> Iterator[tuple[str, str]]:
    """Yield an endless stream of (question, answer), many of them wrong on purpose, as in the demo."""
    rng = random.Random(seed)
    while True:
        question = expression(rng)
        yield question, working(question, rng, SLIP_CHANCE)


def score(task: dict[str, Any], text: str) -> float:
    """Return the reward, 0 to 1."""
    first, *rest = re.findall(r"[+-]|\d+", task["question"])
    sums = [int(word) for word in text.split() if re.fullmatch(r"-?\d{1,6}", word)]
    total, right = int(first), 0
    for i, (sign, term) in enumerate(zip(rest[::2], rest[1::2], strict=True)):
        if i >= len(sums):
            break
        right += sums[i] == total + (int(term) if sign == "+" else -int(term))
        total = sums[i]
    return right / (len(rest) // 2)


def main() -> None:
    """Write tasks as JSON lines."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--count", type=int, required=True)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    chosen = itertools.islice(tasks(arguments.seed), arguments.count)
    arguments.out.write_text("".join(json.dumps(task) + "\n" for task in chosen))


if __name__ == "__main__":
    main()
