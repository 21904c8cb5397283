"""verl's PPO trainer on the batches of a gateway: it trains what unmodified agents did, and its versions reach the engines.

verl samples from its replay buffer, and this one returns a leased batch: every path of every episode, each as the output of an
agent loop. After the step, verl's actor writes a checkpoint and it is published. Invariants: each batch is one optimizer step;
verl's rows are the recorded tokens with their log-probabilities; a row that stands for an episode without tokens has no loss.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import torch
import transfer_queue as tq
from omegaconf import DictConfig, open_dict
from transfer_queue import KVBatchMeta
from verl.experimental.agent_loop.agent_loop import AgentLoopMetrics, AgentLoopOutput
from verl.trainer.ppo.v1 import PPOTrainer
from verl.utils import tensordict_utils as tu
from verl.workers.rollout.replica import RolloutReplica, RolloutReplicaRegistry

from examples.leased import Member, lease
from headgate.client import Batch, Feed, Row


class GatewayTrainer(PPOTrainer):
    """A trainer of verl without engines of its own: rollout and weights are the gateway's."""

    _enable_hybrid_replicas = False

    def __init__(self, config: DictConfig, key: str | None) -> None:
        """`config`: verl's, with `trainer.v1.headgate` (`headgate.yaml`)."""
        self.settings = config.trainer.v1.headgate
        self.ranks = config.trainer.n_gpus_per_node * config.trainer.nnodes
        self.batch: Batch | None = None
        _check_correction(config)
        self.feed = Feed(self.settings.url, key, score=self._score)
        self.live, folder = self.feed.live()
        config.actor_rollout_ref.model.path = str(folder)
        RolloutReplicaRegistry.register("headgate", lambda: RolloutReplica)
        super().__init__(config)

    def _build_replay_buffer(self) -> GatewayTrainer:
        return self

    def _init_dataloader(self) -> None:
        """State how long the run is: the tasks are the agents'."""
        self.total_training_steps = self.steps_per_epoch = self.config.trainer.total_training_steps
        with open_dict(self.config):
            self.config.actor_rollout_ref.actor.optim.total_training_steps = self.total_training_steps

    def _load_checkpoint(self) -> None:
        """Begin at the live version, which the actor has loaded."""
        self.global_steps = self.live

    def prepare_step(self) -> dict[str, Any]:
        """Submit no prompts: agents open their episodes themselves."""
        return {}

    def on_sample_end(self) -> None:
        """Leave the engines running."""

    def sample(
        self, global_steps: int, partition_id: str, batch_size: int
    ) -> tuple[KVBatchMeta, dict[str, Any]]:
        """Lease the next batch, and return its rows in verl's form."""
        temperature = self.config.actor_rollout_ref.rollout.temperature
        self.batch, members = lease(self.feed, self.live, temperature, "verl")
        named = [(f"{m.group_id}_{m.number}_{i}", row, m) for m in members for i, row in enumerate(m.rows)]
        keys, tags = [key for key, _, _ in named], [_tag(row) for _, row, _ in named]
        stored = tu.list_of_dict_to_tensordict([_fields(row, member) for _, row, member in named])
        tq.kv_batch_put(keys=keys, partition_id=partition_id, fields=stored, tags=tags)
        # One optimizer step for the batch, whatever the number of its rows; verl fills the last ones.
        actor, n = self.config.actor_rollout_ref.actor, self.config.actor_rollout_ref.rollout.n
        actor.ppo_mini_batch_size = -(-len(keys) // (self.ranks * n)) * self.ranks
        return KVBatchMeta(partition_id=partition_id, keys=keys, tags=tags), {}

    def on_step_end(self) -> None:
        """Publish the version that the step made, and wait until engines run it."""
        assert self.batch is not None
        versions = Path(self.settings.versions)
        folder = versions / "unpublished"  # the next start writes over one that a killed trainer left
        self.actor_rollout_wg.save_checkpoint(str(folder), None, self.global_steps)
        record = self.batch.publish(folder / "huggingface", versions, keep=3)
        shutil.rmtree(folder)
        self.live = self.global_steps = record["version"]
        print(f"version {self.live} is live", flush=True)

    def _score(self, sequences: list[list[int]]) -> list[list[float]]:
        """Return the log-probabilities of sequences by the actor's weights; each rank gets the same number."""
        padded = [*sequences, *sequences[-1:] * (-len(sequences) % self.ranks)]
        ids = [torch.tensor(sequence) for sequence in padded]
        columns = {
            "input_ids": ids,
            "position_ids": [torch.arange(len(row)) for row in ids],
            "loss_mask": [torch.ones_like(row) for row in ids],
        }
        jagged = {name: tu.nested_tensor_from_tensor_list(rows) for name, rows in columns.items()}
        wanted = {"calculate_entropy": False, "compute_loss": False, "temperature": 1.0}
        found = self.actor_rollout_wg.compute_log_prob(tu.get_tensordict(jagged, wanted))
        return [row[:-1].tolist() for row in found["log_probs"].unbind()[: len(sequences)]]


def _check_correction(config: DictConfig) -> None:
    """Raise ValueError where verl would train stale tokens with weight 1."""
    correction, rollout = config.algorithm.rollout_correction, config.actor_rollout_ref.rollout
    if not ((correction.bypass_mode or correction.rollout_is) and rollout.calculate_log_probs):
        raise ValueError(
            "stale tokens would be trained with weight 1: set algorithm.rollout_correction.rollout_is = token and"
            " actor_rollout_ref.rollout.calculate_log_probs = true, as headgate.yaml does"
        )


def _fields(row: Row, member: Member) -> dict[str, Any]:
    """Return a row as verl's own agent loops store it."""
    fields = AgentLoopOutput(
        prompt_ids=row.prompt_ids.tolist(),
        response_ids=row.completion_ids.tolist(),
        response_mask=row.train[row.prompt :].astype(int).tolist(),
        response_logprobs=row.logprobs[row.prompt :].tolist(),
        reward_score=member.reward,
        num_turns=0,
        metrics=AgentLoopMetrics(),
    ).as_dict()
    ids, mask = torch.tensor(row.ids).long(), fields["response_mask"]
    whole = {"input_ids": ids, "position_ids": torch.arange(len(ids)), "loss_mask": mask}
    return fields | whole | {"uid": member.group_id}


def _tag(row: Row) -> dict[str, Any]:
    versions = row.versions[row.sampled]
    return {
        "status": "success",
        "prompt_len": row.prompt,
        "response_len": len(row.completion_ids),
        "seq_len": len(row),
        "min_global_steps": int(versions.min()),
        "max_global_steps": int(versions.max()),
    }
