"""Train with TRL behind a gateway: `.venv-trl/bin/python -m examples.trl.train URL VERSIONS --steps 30`."""

import argparse
import os
from pathlib import Path

import torch
from trl import GRPOConfig

from examples.trl.adapter import GatewayTrainer


def main() -> None:
    """Train until a version is live."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("url")
    parser.add_argument("versions", type=Path)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--groups", type=int, default=4, help="[staleness] batch of the gateway")
    parser.add_argument("--group-size", type=int, default=4)
    parser.add_argument("--lr", type=float, default=1e-4)
    given = parser.parse_args()
    args = GRPOConfig(
        output_dir=str(given.versions.parent / "trl"),
        num_generations=given.group_size,
        per_device_train_batch_size=given.group_size,
        gradient_accumulation_steps=given.groups,
        learning_rate=given.lr,
        lr_scheduler_type="constant",
        vllm_importance_sampling_mode="token_truncate",
        bf16=torch.cuda.is_available(),
        model_init_kwargs={"dtype": "float32"},
        save_strategy="no",
        report_to="none",
        logging_steps=1,
    )
    GatewayTrainer(given.url, os.environ.get("HEADGATE_ADMIN_KEY"), given.versions, given.steps, args).train()


if __name__ == "__main__":
    main()
