"""The demo on a lake: a model learns to cross gymnasium's FrozenLake, one tool call a step, on real vLLM.

    python -m examples.frozen_lake.run               # what `make demo NAME=frozen-lake` does
    python -m examples.frozen_lake.run --seed 2 --dir runs/other
    python -m examples.frozen_lake.run --frozen      # the control: the same, with a learning rate of 0

The same runner as `examples.demo.run`, and it leaves the same files.
"""

from __future__ import annotations

from examples.demo.run import Job, main

LAKE = Job("examples.frozen_lake", "FrozenLake through tool calls (openai SDK), trained", "runs/frozen-lake")

if __name__ == "__main__":
    main(LAKE, __doc__)
