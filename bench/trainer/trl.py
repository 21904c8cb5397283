"""TRL's side of the trainer's bench: GRPOTrainer as its users run it, on a recorded batch in place of its own samples.

It runs in an environment that has TRL (`make trl` makes .venv-trl) and uses none of headgate's packages. Only sampling is
replaced: TRL pads, shuffles and splits the batch, computes its loss, accumulates, clips and steps. Each path of an episode is a
row; what an earlier row trains is masked by `tool_mask`. Commands come on stdin, and answers go to stdout: a line each.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer
from trl.trainer.utils import pad

from bench.trainer.load import Rollout, advantages, load, paths_of

CLIP_LOW, CLIP_HIGH = 0.2, 0.28


class Recorded(GRPOTrainer):
    """A GRPOTrainer whose completions are there already."""

    rollouts: list[Rollout]

    def _generate_and_score_completions(self, inputs: Any) -> dict[str, Any]:
        """Return the batch in TRL's form: prompts padded on the left, completions on the right, to the longest of the batch."""
        gained = advantages(self.rollouts)
        rows = [
            (row, gained[place]) for place, rollout in enumerate(self.rollouts) for row in paths_of([rollout])
        ]
        filler = self._tokenizer.pad_token_id
        prompts = [torch.as_tensor(row.turns[0].ids, dtype=torch.int64) for row, _ in rows]
        tails = [_after_prompt(row) for row, _ in rows]
        lengths = [torch.ones(len(ids), dtype=torch.int64) for ids, _, _ in tails]
        sampled = pad([mask for _, mask, _ in tails], padding_value=0, padding_side="right")
        return {
            "prompt_ids": pad(prompts, padding_value=filler, padding_side="left"),
            "prompt_mask": pad([torch.ones_like(p) for p in prompts], padding_value=0, padding_side="left"),
            "completion_ids": pad([ids for ids, _, _ in tails], padding_value=filler, padding_side="right"),
            "completion_mask": pad(lengths, padding_value=0, padding_side="right"),
            "tool_mask": sampled,
            "old_per_token_logps": pad(
                [logprobs for _, _, logprobs in tails], padding_value=0.0, padding_side="right"
            ),
            "advantages": torch.tensor([advantage for _, advantage in rows], dtype=torch.float32),
            "num_items_in_batch": sampled.sum(),
        }


class OnCommand(TrainerCallback):
    """Makes a step for each line of stdin, and reports how long it took."""

    def __init__(self, answers: Any, gradient: Path | None) -> None:
        self._answers, self._gradient = answers, gradient
        self._began = (0.0, 0.0)

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Wait for the command."""
        if not sys.stdin.readline():
            os._exit(0)
        self._began = (time.perf_counter(), time.process_time())

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, *, model: Any, **_: Any) -> None:
        """Write the clipped gradient of the first step."""
        if self._gradient is not None:
            grads = {name: p.grad.numpy() for name, p in model.named_parameters()}
            np.savez(self._gradient, **grads)
            self._gradient = None

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Report the step's seconds."""
        took = time.perf_counter() - self._began[0], time.process_time() - self._began[1]
        self._answers.write(json.dumps({"seconds": took[0], "cpu_s": took[1]}) + "\n")


def _after_prompt(row: Rollout) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return ids, which of them are trained, and recorded log-probabilities, of what follows the first turn."""
    turns = row.turns[1:]
    return (
        torch.as_tensor(np.concatenate([turn.ids for turn in turns]), dtype=torch.int64),
        torch.as_tensor(np.concatenate([np.full(len(turn.ids), turn.sampled, np.int64) for turn in turns])),
        torch.as_tensor(np.concatenate([turn.logprobs for turn in turns])),
    )


def main() -> None:
    """Train once for each line of standard input."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", required=True)
    parser.add_argument("--batch", type=Path, required=True)
    parser.add_argument("--rows", type=int, required=True, help="of a micro-batch")
    parser.add_argument("--threads", type=int, required=True)
    parser.add_argument("--gradient", type=Path)
    options = parser.parse_args()
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    torch.set_num_threads(options.threads)
    rollouts = load(options.batch)
    rows = len(paths_of(rollouts))
    with tempfile.TemporaryDirectory() as folder:
        config = GRPOConfig(
            folder,
            per_device_train_batch_size=options.rows,
            gradient_accumulation_steps=rows // options.rows,
            steps_per_generation=rows // options.rows,
            num_generations=2,
            max_steps=1_000_000,
            learning_rate=1e-6,
            lr_scheduler_type="constant",
            weight_decay=0.0,
            max_grad_norm=1.0,
            loss_type="dapo",
            epsilon=CLIP_LOW,
            epsilon_high=CLIP_HIGH,
            beta=0.0,
            # TRL's default saves memory and costs time; our side does not save any either.
            gradient_checkpointing=False,
            bf16=False,
            use_cpu=True,
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
            logging_steps=1_000_000,
        )
        trainer = Recorded(
            model=AutoModelForCausalLM.from_pretrained(options.model, dtype=torch.float32),
            processing_class=AutoTokenizer.from_pretrained(options.model),
            reward_funcs=lambda completions, **_: [0.0] * len(completions),
            args=config,
            train_dataset=Dataset.from_list([{"prompt": "recorded"}] * rows),
            callbacks=[OnCommand(answers, options.gradient)],
        )
        trainer.rollouts = rollouts
        trainer.train()


if __name__ == "__main__":
    main()
