"""The demo with tools: a model learns to use a tool to the end, behind an agent of the openai-agents SDK, on real vLLM.

    python -m examples.tools_demo.run               # what `make demo NAME=tools` does
    python -m examples.tools_demo.run --seed 2 --dir runs/other
    python -m examples.tools_demo.run --frozen      # the control: the same, with a learning rate of 0

The same runner as `examples.demo.run`, and it leaves the same files.
"""

from __future__ import annotations

from examples.demo.run import Job, main

SHOP = Job("examples.tools_demo", "An agent with a tool (openai-agents SDK), trained", "runs/tools-demo")

if __name__ == "__main__":
    main(SHOP, __doc__)
