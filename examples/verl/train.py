"""Train with verl behind a gateway: `python -m examples.verl.train trainer.v1.headgate.url=URL trainer.v1.headgate.versions=DIR`.

Every other argument is verl's; `headgate.yaml` has those that differ from its own.
"""

import os
from pathlib import Path

import hydra
import ray
import transfer_queue as tq
from omegaconf import DictConfig, OmegaConf
from verl.trainer.constants_ppo import get_ppo_ray_runtime_env

from examples.verl.adapter import GatewayTrainer


@hydra.main(config_path=".", config_name="headgate", version_base=None)
def main(config: DictConfig) -> None:
    """Train until a version is live."""
    OmegaConf.resolve(config)
    Path(config.trainer.v1.headgate.versions).mkdir(parents=True, exist_ok=True)
    environment = get_ppo_ray_runtime_env(config)
    environment["env_vars"]["TRANSFER_QUEUE_ENABLE"] = os.environ["TRANSFER_QUEUE_ENABLE"] = "1"
    given = OmegaConf.to_container(config.ray_kwargs.ray_init)
    ray.init(**{**given, "runtime_env": environment})
    tq.init(config.transfer_queue)
    trainer = GatewayTrainer(config, os.environ.get("HEADGATE_ADMIN_KEY"))
    with trainer.feed:
        trainer.init()
        trainer.fit(agent_loop_manager=None)


if __name__ == "__main__":
    main()
