"""SkyRL's PPO trainer on the batches of a gateway: it trains what unmodified agents did, and its versions reach the engines.

SkyRL asks a generator for rollouts, and this one returns a leased batch: every path of every episode, as steps of one trajectory.
Where SkyRL would send weights to its engines, they are published. Invariants: each batch is one optimizer step; SkyRL's rows are
the recorded tokens with their log-probabilities; a row that stands for an episode without tokens has no loss.
"""

from __future__ import annotations

import asyncio
import shutil
from pathlib import Path
from typing import Any

from skyrl.backends.skyrl_train.training_batch import TrainingInputBatch, pad_training_input_batch
from skyrl.train.config import SkyRLTrainConfig
from skyrl.train.dataset.preprocess import convert_prompts_responses_to_batch_tensors
from skyrl.train.entrypoints.main_base import BasePPOExp
from skyrl.train.generators.base import GeneratorInput, GeneratorInterface, GeneratorOutput, TrajectoryID
from skyrl.train.trainer import RayPPOTrainer

from examples.leased import lease
from headgate.client import Batch, Feed


class LeasedBatches(GeneratorInterface):
    """Returns leased batches as rollouts; `batch` is the one that is trained, from the version `live`."""

    def __init__(self, feed: Feed, live: int, temperature: float) -> None:
        self.feed, self.live, self.temperature = feed, live, temperature
        self.batch: Batch | None = None

    async def generate(self, input_batch: GeneratorInput) -> GeneratorOutput:
        """Lease the next batch, and return its rows in SkyRL's form."""
        self.batch, members = await asyncio.to_thread(lease, self.feed, self.live, self.temperature, "SkyRL")
        rows = [row for member in members for row in member.rows]
        return {
            "prompt_token_ids": [row.prompt_ids.tolist() for row in rows],
            "response_ids": [row.completion_ids.tolist() for row in rows],
            "loss_masks": [row.train[row.prompt :].astype(int).tolist() for row in rows],
            "rollout_logprobs": [row.logprobs[row.prompt :].tolist() for row in rows],
            "rewards": [member.reward for member in members for _ in member.rows],
            "trajectory_ids": [
                TrajectoryID(member.group_id, member.number) for member in members for _ in member.rows
            ],
            "is_last_step": [row is member.rows[-1] for member in members for row in member.rows],
            "stop_reasons": None,
            "rollout_metrics": None,
        }


class GatewayTrainer(RayPPOTrainer):
    """A trainer of SkyRL whose versions are the gateway's."""

    generator: LeasedBatches

    def __init__(self, *, versions: Path, **given: Any) -> None:
        """`versions`: the folder of what is published."""
        self.versions = versions
        super().__init__(**given)

    def _build_train_dataloader_and_compute_training_steps(self) -> None:
        """State how long the run is: the tasks are the agents'."""
        self.total_training_steps = self.cfg.trainer.max_training_steps
        self.train_dataloader: list[list[Any]] = [[]] * self.total_training_steps

    def load_checkpoints(self) -> tuple[int, str]:
        """Begin at the live version, which the policy has loaded."""
        return self.generator.live, ""

    def init_weight_sync_state(self) -> None:
        """Let SkyRL publish where it would send weights to its own engines."""
        self.dispatch.save_weights_for_sampler = self._publish

    async def _publish(self) -> None:
        if self.generator.batch is not None:  # not before the first step, when the live version is loaded
            folder = self.versions / "unpublished"  # the next start writes over a killed trainer's
            self.dispatch.save_hf_model("policy", str(folder), self.tokenizer)
            record = await asyncio.to_thread(self.generator.batch.publish, folder, self.versions, keep=3)
            shutil.rmtree(folder)
            self.generator.live = self.global_step = record["version"]
            print(f"version {self.global_step} is live", flush=True)

    def convert_to_training_input(
        self, generator_output: GeneratorOutput, uids: list[str]
    ) -> TrainingInputBatch:
        """Train each batch in one optimizer step, whatever the number of its groups."""
        self.cfg.trainer.train_batch_size = self.cfg.trainer.policy_mini_batch_size = len(set(uids))
        return super().convert_to_training_input(generator_output, uids)

    def score(self, sequences: list[list[int]]) -> list[list[float]]:
        """Return the log-probabilities of sequences by the policy's weights."""
        masks = [[1] * (len(ids) - 1) for ids in sequences]
        prompts, responses = [ids[:1] for ids in sequences], [ids[1:] for ids in sequences]
        tensors = convert_prompts_responses_to_batch_tensors(self.tokenizer, prompts, responses, masks, masks)
        data = TrainingInputBatch({"sequences": tensors[0], "attention_mask": tensors[1]})
        data.metadata = {"response_length": tensors[2].shape[1]}
        padded = pad_training_input_batch(data, -len(sequences) % self.dispatch.get_lcm_dp_size())
        self.dispatch.set_algorithm_config("policy", temperature=1.0)
        found = self._execute_forward_pass("policy", padded, "logprobs", None)
        self.dispatch.set_algorithm_config("policy", temperature=self.cfg.trainer.algorithm.temperature)
        return [row[-len(mask) :].tolist() for row, mask in zip(found, masks, strict=False)]


class GatewayExperiment(BasePPOExp):
    """SkyRL's parts behind one gateway: no data set, and no engines of its own."""

    def __init__(self, cfg: SkyRLTrainConfig, url: str, key: str | None, versions: Path) -> None:
        _check(cfg)
        self.versions = versions
        self.feed = Feed(url, key, score=lambda sequences: self.trainer.score(sequences))
        self.live, folder = self.feed.live()
        cfg.trainer.policy.model.path = str(folder)
        super().__init__(cfg)

    def get_train_dataset(self) -> None:
        """Have none: agents open their episodes themselves."""

    def get_inference_client(self) -> None:
        """Have none: the engines are the gateway's."""

    def get_generator(
        self, cfg: SkyRLTrainConfig, tokenizer: Any, inference_engine_client: None
    ) -> LeasedBatches:
        return LeasedBatches(self.feed, self.live, cfg.trainer.algorithm.temperature)

    def get_trainer(self, **given: Any) -> GatewayTrainer:
        return GatewayTrainer(versions=self.versions, **given)


def _check(cfg: SkyRLTrainConfig) -> None:
    """Raise ValueError where SkyRL would train otherwise than the adapter states."""
    if cfg.trainer.algorithm.off_policy_correction.tis_ratio_type is None:
        raise ValueError(
            "trainer.algorithm.off_policy_correction.tis_ratio_type is unset, so stale tokens would be trained with weight 1"
        )
    if not cfg.generator.step_wise_trajectories:
        raise ValueError("generator.step_wise_trajectories is false, and an episode may have several rows")
