"""Train with SkyRL behind a gateway: `python -m examples.skyrl.train URL VERSIONS trainer.max_training_steps=100`.

Every argument after the two is SkyRL's; `SETTINGS` are those that differ from its own.
"""

import os
import sys
from pathlib import Path

from skyrl.train.config import SkyRLTrainConfig
from skyrl.train.utils import validate_cfg
from skyrl.train.utils.utils import initialize_ray

from examples.skyrl.adapter import GatewayExperiment

SETTINGS = (
    "trainer.algorithm.advantage_estimator=grpo",
    "trainer.algorithm.off_policy_correction.tis_ratio_type=token",
    "trainer.algorithm.off_policy_correction.token_tis_ratio_clip_high=2.0",
    "trainer.algorithm.use_kl_loss=false",
    "trainer.placement.colocate_all=false",
    "trainer.epochs=1",
    "trainer.max_training_steps=30",
    "trainer.eval_interval=-1",
    "trainer.ckpt_interval=-1",
    "trainer.print_example_interval=0",
    "trainer.logger=console",
    "generator.step_wise_trajectories=true",
    "generator.inference_engine.enable_ray_prometheus_stats=false",
)


def main() -> None:
    """Train until version `trainer.max_training_steps` is live."""
    url, versions, *given = sys.argv[1:]
    cfg = SkyRLTrainConfig.from_cli_overrides([*SETTINGS, *given])
    validate_cfg(cfg)
    Path(versions).mkdir(parents=True, exist_ok=True)
    initialize_ray(cfg)
    experiment = GatewayExperiment(cfg, url, os.environ.get("HEADGATE_ADMIN_KEY"), Path(versions))
    with experiment.feed:
        experiment.run()


if __name__ == "__main__":
    main()
