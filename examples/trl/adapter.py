"""TRL's GRPOTrainer on the batches of a gateway: it trains what unmodified agents did, and its versions reach the engines.

TRL requests rollouts, and this trainer returns a leased batch: a row for each episode, its newest path. Before the next batch, it
publishes the version that TRL's step made. Invariants: each batch is one optimizer step; TRL's rows are the recorded tokens with
their log-probabilities; a row that stands for no episode has neither loss nor reward.
"""

from __future__ import annotations

import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from trl import GRPOConfig, GRPOTrainer

from examples.leased import check_temperature
from headgate.client import Batch, Feed, Row


class GatewayTrainer(GRPOTrainer):
    """A GRPOTrainer whose rollouts are the batches of a gateway, with groups of `num_generations` episodes."""

    def __init__(self, url: str, key: str | None, versions: Path, steps: int, args: GRPOConfig) -> None:
        """`versions`: the folder of what is published; `steps`: the version at which the run ends."""
        self.feed = Feed(url, key, score=self._score)
        self.versions = versions
        self.batch: Batch | None = None
        version, folder = self.feed.live()
        args.max_steps = max(0, steps - version)
        groups = args.generation_batch_size // args.num_generations
        super().__init__(
            model=str(folder),
            args=args,
            reward_funcs=_rewards,
            rollout_func=self._rollouts,
            train_dataset=Dataset.from_list([{"prompt": ""}] * groups),
        )
        # TRL reads recorded log-probabilities only with its correction for vLLM, and trains stale tokens with weight 1 without
        # it. Its constructor would start vLLM. Before each batch TRL calls vllm_generation.sync_weights().
        self.use_vllm = self.vllm_importance_sampling_correction = True
        self.vllm_generation = self
        self._last_loaded_step = -1

    def train(self, *args: Any, **kwargs: Any) -> Any:
        """Train, and publish the last version too."""
        result = super().train(*args, **kwargs) if self.args.max_steps else None
        self.sync_weights()
        self.feed.close()
        return result

    def sync_weights(self) -> None:
        """Publish the version that the last batch made, and wait until engines run it."""
        if self.batch is not None:
            with tempfile.TemporaryDirectory() as folder:
                self.accelerator.unwrap_model(self.model).save_pretrained(folder)
                record = self.batch.publish(Path(folder), self.versions, keep=3)
            print(f"version {record['version']} is live", flush=True)
            self.batch = None

    def _rollouts(self, prompts: list[str], _: GRPOTrainer) -> dict[str, list[Any]]:
        """Return the next batch in TRL's form; short groups, and a batch with too few, are filled with masked rows."""
        self.batch = self.feed.batch()
        newest = {row.episode_id: row for row in self.batch.rows("newest") if len(row.completion_ids)}
        check_temperature(newest.values(), self.args.temperature, "TRL")
        first = next(iter(newest.values()))
        filler = replace(first, train=first.train & False)
        members: list[tuple[Row, float | None]] = []
        for group in self.batch.groups:
            found = [(newest.get(one.episode_id, filler), one.reward) for one in group.episodes]
            members += found + [(filler, None)] * (self.args.num_generations - len(found))
        members += [(filler, None)] * (len(prompts) - len(members))
        if len(members) > len(prompts):
            raise ValueError(f"the batch has {len(members)} rows, and TRL trains {len(prompts)} in a step")
        return {
            "prompt_ids": [row.prompt_ids.tolist() for row, _ in members],
            "completion_ids": [row.completion_ids.tolist() for row, _ in members],
            "logprobs": [row.logprobs[row.prompt :].tolist() for row, _ in members],
            "env_mask": [row.train[row.prompt :].astype(int).tolist() for row, _ in members],
            "recorded_reward": [reward for _, reward in members],
        }

    @torch.no_grad()
    def _score(self, sequences: list[list[int]]) -> list[list[float]]:
        model = self.accelerator.unwrap_model(self.model)
        scores = []
        for sequence in sequences:
            ids = torch.tensor(sequence, device=model.device)
            logprobs = model(input_ids=ids[None, :-1]).logits[0].float().log_softmax(-1)
            scores.append(logprobs.gather(-1, ids[1:, None])[:, 0].tolist())
        return scores


def _rewards(recorded_reward: list[float | None], **_: Any) -> list[float | None]:
    """Return the recorded rewards; None leaves a row out of its group's mean."""
    return recorded_reward
