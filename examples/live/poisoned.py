"""`trainer` with a bug in its rewards: what users liked counts as what they disliked. The demo trains one version with it.

    python -m examples.live.poisoned run runs/live/live.toml --set run.steps=7 --set optimizer.lr=5e-3

One step at the demo's learning rate changes little, whatever its sign; the larger one does in one step what the bug would do in
many.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any
from unittest import mock

from trainer import cli
from trainer.data import credit


def main() -> None:
    """Run the trainer's command line with the bug."""
    right = credit._rewards

    def inverted(*arguments: Any) -> Any:
        found = right(*arguments)
        return replace(found, values=-found.values)

    with mock.patch.object(credit, "_rewards", inverted):
        cli.main()


if __name__ == "__main__":
    main()
