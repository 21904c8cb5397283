"""SkyRL's policy worker on the CPU, in the trainer's process: `python -m tests.harness.skyrl_cpu FOLDER URL VERSIONS ...`.

SkyRL's own workers need CUDA and NCCL. As its own tests do, this replaces what they need of CUDA; the batch, its advantages, the
forward and the loss are SkyRL's. It writes what SkyRL trains: `batch-NUMBER-PROCESS.json`
for each batch, before its step.
"""

from __future__ import annotations

import copy
import os
import sys
import types
import typing
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import typing_extensions

os.environ["SKYRL_DUMP_INFRA_LOG_TO_STDOUT"] = "1"
# SkyRL gives pydantic a TypedDict of `typing`, which pydantic accepts from Python 3.12 on.
typing.TypedDict = typing_extensions.TypedDict  # type: ignore[assignment]
# It imports two functions of flash-attn, which it calls only with `remove_microbatch_padding`.
padding = types.ModuleType("flash_attn.bert_padding")
padding.pad_input = padding.unpad_input = None  # type: ignore[attr-defined]
package = types.ModuleType("flash_attn")
package.__spec__ = ModuleSpec("flash_attn", None)
sys.modules |= {"flash_attn": package, "flash_attn.bert_padding": padding}
torch.cuda.current_device = lambda: torch.device("cpu")  # type: ignore[assignment, return-value]
torch.autocast = lambda *_, **__: nullcontext()  # type: ignore[assignment, misc]

from skyrl.backends.skyrl_train.workers.model_wrapper import HFModelWrapper  # noqa: E402
from skyrl.backends.skyrl_train.workers.worker import PolicyWorkerBase  # noqa: E402

from examples.skyrl import train  # noqa: E402
from examples.skyrl.adapter import GatewayTrainer  # noqa: E402
from tests.harness.trained import write_trained  # noqa: E402


class Step:
    """What the worker needs of a strategy and a mesh of one rank."""

    def backward(self, loss: torch.Tensor, *_: Any) -> None:
        loss.backward()

    def optimizer_step(self, optimizer: Any, *_: Any, **__: Any) -> None:
        optimizer.step()
        optimizer.zero_grad()

    def all_reduce(self, data: Any, *_: Any, **__: Any) -> Any:
        return data

    def get_group(self, _: str) -> None:
        return None


class Policy:
    """The calls of SkyRL's dispatch, on one worker."""

    def __init__(self, cfg: Any) -> None:
        self.worker = PolicyWorkerBase(
            cfg=copy.deepcopy(cfg.trainer),
            world_size=1,
            rank=0,
            local_rank=0,
            master_addr="localhost",
            master_port=1,
            sequence_parallel_size=1,
        )
        wrapped = HFModelWrapper(cfg.trainer.policy.model.path, bf16=False)
        self.worker.model = wrapped
        self.worker.optimizer = torch.optim.AdamW(
            wrapped.parameters(), lr=cfg.trainer.policy.optimizer_config.lr
        )
        self.worker.scheduler = torch.optim.lr_scheduler.ConstantLR(self.worker.optimizer, 1.0)
        self.worker.strategy = self.worker.device_mesh = Step()
        self.worker.mesh_rank = SimpleNamespace(dp_size=1)

    def get_lcm_dp_size(self) -> int:
        return 1

    def empty_cache(self, _: str | None = None) -> None: ...

    def forward(self, _: str, data: Any) -> Any:
        return self.worker.forward(data)

    def stage_data(self, _: str, data: Any, boundaries: Sequence[tuple[int, int]]) -> list[Any]:
        return [data[start:end] for start, end in boundaries]

    def forward_from_staged(self, _: str, data: Any) -> Any:
        return self.worker.forward(data)

    def forward_backward_from_staged(self, _: str, data: Any) -> Any:
        return self.worker.forward_backward(data)

    def optim_step(self, _: str) -> None:
        return self.worker.optim_step()

    def set_algorithm_config(self, _: str, **values: Any) -> None:
        self.worker.set_algorithm_config(**values)

    def save_hf_model(self, _: str, folder: str, tokenizer: Any) -> None:
        self.worker.model.model.save_pretrained(folder)


def prepare(folder: Path) -> None:
    """Let the trainer train on the CPU, and write each batch, whole or not at all."""

    def build(self: Any, *_: Any) -> None:
        self.dispatch = Policy(self.cfg)

    made = GatewayTrainer.compute_advantages_and_returns

    def written(self: Any, data: Any) -> Any:
        write_trained(folder, self.generator.batch.number, _rows(data))
        return made(self, data)

    train.initialize_ray = lambda _: None  # all of it is in this process
    GatewayTrainer.build_models = build  # type: ignore[method-assign]
    GatewayTrainer.compute_advantages_and_returns = written  # type: ignore[method-assign]


def _rows(data: Any) -> Iterator[tuple[list[Any], ...]]:
    """Yield the rows of a batch, in which SkyRL aligns everything at the end."""
    ratios = (data["action_log_probs"] - data["rollout_logprobs"]).exp()
    for i in range(len(data["sequences"])):
        ids = data["sequences"][i][data["attention_mask"][i] > 0].tolist()
        real = data["response_mask"][i] > 0
        columns = [data[name][i][real].tolist() for name in ("loss_mask", "rollout_logprobs")]
        prompt = len(ids) - int(real.sum())
        yield (
            ids[:prompt],
            ids[prompt:],
            *columns,
            data["rewards"][i][real].tolist(),
            ratios[i][real].tolist(),
        )


CPU = (
    *("trainer.remove_microbatch_padding=false", "trainer.flash_attn=false"),
    *("trainer.policy.optimizer_config.lr=1e-3",),
)

if __name__ == "__main__":
    work = Path(sys.argv.pop(1))
    prepare(work)
    sys.argv += [*CPU, f"trainer.export_path={work}/exports", f"trainer.ckpt_path={work}/checkpoints"]
    train.main()
