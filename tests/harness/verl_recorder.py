"""The verl example on the CPU, which also writes what verl trains: `batch-NUMBER-PROCESS.json` for each batch, before its step.

It runs in an environment that has verl: `.venv-verl/bin/python -m tests.harness.verl_recorder FOLDER SETTING=VALUE ...`.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ |= {
    "VERL_PLATFORM": "cpu",
    "VERL_USE_EXTERNAL_MODULES": "tests.harness.verl_cpu",
    "VERL_ENGINE_DEVICE": "cuda",  # the engine that it registers for CUDA; its device is the platform's
}

import ray
import transfer_queue as tq

from examples.verl import train
from examples.verl.adapter import GatewayTrainer
from tests.harness.trained import write_trained

KEPT = ("prompts", "responses", "response_mask", "rollout_log_probs", "rm_scores", "rollout_is_weights")
CPU = """
trainer.device=cpu
trainer.n_gpus_per_node=1
+ray_kwargs.ray_init.address=local
+ray_kwargs.ray_init.num_gpus=1
ray_kwargs.ray_init.num_cpus=8
transfer_queue.backend.SimpleStorage.num_data_storage_units=1
actor_rollout_ref.actor.strategy=fsdp2
actor_rollout_ref.actor.use_torch_compile=false
actor_rollout_ref.actor.fsdp_config.use_torch_compile=false
actor_rollout_ref.model.enable_gradient_checkpointing=false
actor_rollout_ref.model.use_remove_padding=false
+actor_rollout_ref.model.override_config.attn_implementation=sdpa
"""


def patient(init: Callable[..., object]) -> Callable[..., None]:
    """Return an `init` that starts Ray again: it gives its own parts 30 s, and a busy machine takes longer."""

    def start(**given: Any) -> None:
        for _ in range(5):
            try:
                init(**given)
            except Exception as error:
                if "timed out during startup" not in str(error):
                    raise
                ray.shutdown()
            else:
                return
        raise TimeoutError("Ray has not started")

    return start


def record(folder: Path) -> None:
    """Write each batch as verl stores it, whole or not at all."""
    made = GatewayTrainer._update_actor

    def written(self: Any, batch: Any, metrics: Any) -> Any:
        keys = [key for key, tag in zip(batch.keys, batch.tags, strict=True) if not tag.get("is_padding")]
        stored = tq.kv_batch_get(keys=keys, partition_id=batch.partition_id, select_fields=list(KEPT))
        rows = [[row.tolist() for row in stored[name].unbind()] for name in KEPT]
        write_trained(folder, self.batch.number, zip(*rows, strict=True))
        return made(self, batch, metrics)

    GatewayTrainer._update_actor = written  # type: ignore[method-assign]


if __name__ == "__main__":
    work = Path(sys.argv.pop(1))
    record(work)
    ray.init = patient(ray.init)
    sys.argv += [*CPU.split(), f"hydra.run.dir={work}/hydra"]
    train.main()
