"""Losses of TRL's GRPOTrainer and RLOOTrainer, and their gradients, on fixed tensors: what ours are compared with.

It runs in an environment that has TRL, and writes the record that tests/unit/trainer/test_trl.py reads:

    make trl
    .venv-trl/bin/python -m tests.harness.trl_losses tests/unit/trainer/recorded/trl.json
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

EPISODES, LENGTH = 6, 7
CASES: dict[str, dict[str, Any]] = {
    "grpo": {"loss_type": "grpo"},
    "bnpo": {"loss_type": "bnpo"},
    "dr_grpo": {"loss_type": "dr_grpo"},
    "dapo": {"loss_type": "dapo"},
    "cispo": {"loss_type": "cispo", "epsilon_high": 1.5},
    "gspo": {
        "loss_type": "grpo",
        "importance_sampling_level": "sequence",
        "epsilon": 0.05,
        "epsilon_high": 0.08,
    },
    "delta": {"loss_type": "dapo", "delta": 1.6},
    "kl": {"loss_type": "dapo", "beta": 0.3},
    "kl_corrected": {"loss_type": "dapo", "beta": 0.3, "use_bias_correction_kl": True},
    "decoupled": {"loss_type": "dapo", "epsilon": 0.1, "epsilon_high": 0.15, "cap": 1.2},
    "rloo": {"loss_type": "rloo", "epsilon": 1.0, "epsilon_high": 1e9},
}
"""Names of cases and the values of GRPOConfig (for `rloo`, of RLOOConfig) in which they differ from `_trainer`'s. `cap` is
`vllm_importance_sampling_clip_max`: with it, `recorded` is the sampler's and `proximal` is what the ratio is taken to."""


def _tensors() -> dict[str, Any]:
    """float64; `logprobs`, `recorded` and `reference` have shape (episodes, length) in nats, `mask` is 1 where a token counts."""
    import torch

    torch.manual_seed(7)
    recorded = -torch.rand(EPISODES, LENGTH, dtype=torch.float64) * 3 - 0.05
    lengths = torch.tensor([7, 5, 1, 6, 3, 4])
    return {
        "recorded": recorded,
        "logprobs": recorded + 0.4 * torch.randn(EPISODES, LENGTH, dtype=torch.float64),
        "reference": recorded + 0.3 * torch.randn(EPISODES, LENGTH, dtype=torch.float64),
        "mask": (torch.arange(LENGTH)[None] < lengths[:, None]).to(torch.float64),
        "advantages": torch.tensor([1.2, -0.7, 0.4, -1.1, 0.9, -0.3], dtype=torch.float64),
        "proximal": recorded + 0.3 * torch.randn(EPISODES, LENGTH, dtype=torch.float64),
    }


def _trainer(
    loss_type: str,
    importance_sampling_level: str = "token",
    epsilon: float = 0.2,
    epsilon_high: float = 0.28,
    beta: float = 0.0,
    delta: float | None = None,
    use_bias_correction_kl: bool = False,
    cap: float | None = None,
) -> Any:
    """Return the part of a GRPOTrainer or RLOOTrainer that its loss reads."""
    from collections import defaultdict

    def alone(value: Any, reduction: str = "") -> Any:
        return value

    return SimpleNamespace(
        aux_loss_enabled=False, top_entropy_quantile=1.0, off_policy_mask_threshold=None,
        importance_sampling_level=importance_sampling_level, beta=beta, loss_type=loss_type,
        epsilon_low=epsilon, epsilon_high=epsilon_high, use_vllm=cap is not None, max_completion_length=LENGTH,
        vllm_importance_sampling_correction=cap is not None, current_gradient_accumulation_steps=1, _entropy_bonus_enabled=False,
        args=SimpleNamespace(delta=delta, use_bias_correction_kl=use_bias_correction_kl, steps_per_generation=1),
        model=SimpleNamespace(training=True), accelerator=SimpleNamespace(num_processes=1, gather=alone, reduce=alone),
        _metrics=defaultdict(lambda: defaultdict(list)),
    )  # fmt: skip


def measure() -> dict[str, Any]:
    """Return the tensors, and of each case the loss and its gradient by the log-probabilities."""
    import torch
    import trl
    from trl.trainer.grpo_trainer import GRPOTrainer
    from trl.trainer.rloo_trainer import RLOOTrainer

    given = _tensors()
    # TRL makes this while it samples; cut from above, its mode is token_truncate.
    ratio = (given["proximal"] - given["recorded"]).exp()
    ids = torch.zeros(EPISODES, LENGTH, dtype=torch.int64)
    found: dict[str, Any] = {}
    for name, case in CASES.items():
        logprobs = given["logprobs"].clone().requires_grad_()
        trainer = _trainer(**case)
        result = (logprobs, torch.zeros_like(logprobs), None)
        trainer._get_per_token_logps_and_entropies = lambda *_, result=result, **__: result
        compute = RLOOTrainer._compute_loss if name == "rloo" else GRPOTrainer._compute_loss
        capped = "cap" in case
        loss = compute(trainer, None, {
            "prompt_ids": ids[:, :1], "prompt_mask": torch.ones_like(ids[:, :1]),
            "completion_ids": ids, "completion_mask": given["mask"],
            "advantages": given["advantages"], "old_per_token_logps": given["proximal" if capped else "recorded"],
            "importance_sampling_ratio": ratio.clamp(max=case["cap"]) if capped else None,
            "old_logps": (given["recorded"] * given["mask"]).sum(1),
            "ref_per_token_logps": given["reference"], "num_items_in_batch": given["mask"].sum(),
        })  # fmt: skip
        loss.backward()
        found[name] = {"settings": case, "loss": loss.item(), "gradient": logprobs.grad.tolist()}
    tensors = {name: value.tolist() for name, value in given.items()}
    return {"trl": trl.__version__, "tensors": tensors, "cases": found}


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(json.dumps(measure(), indent=1) + "\n")
