"""The peak memory of the output head, forward and backward, in a process of its own: bytes on stdout.

The most that the process had by the kernel's count (Linux), less what it had with weights, their gradient and inputs in memory.
"""

from __future__ import annotations

import argparse
import gc
import re
from pathlib import Path

import torch

from trainer.model.head import Head, token_logprobs


def main() -> None:
    """Measure one pass, after one that warms up."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--vocabulary", type=int, required=True)
    parser.add_argument("--hidden", type=int, required=True)
    parser.add_argument("--tokens", type=int, required=True)
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(1)
    layer = torch.nn.Linear(options.hidden, options.vocabulary, bias=False)
    hidden = torch.randn(options.tokens, options.hidden, requires_grad=True)
    ids = torch.randint(options.vocabulary, (options.tokens,))
    temperature = torch.ones(options.tokens)

    def work(count: int) -> None:
        output = token_logprobs(
            Head(layer), hidden[:count], ids[:count], temperature[:count], options.vocabulary
        )
        output[0].sum().backward()

    work(16)
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")
    before = _kib("VmRSS")
    work(options.tokens)
    print(1024 * (_kib("VmHWM") - before))


def _kib(name: str) -> int:
    found = re.search(rf"{name}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found
    return int(found[1])


if __name__ == "__main__":
    main()
