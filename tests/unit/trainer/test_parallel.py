"""A model on several ranks learns what it learns on one; bf16 compute keeps every update in float32 masters."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor
from transformers import GPT2Config, GPT2LMHeadModel

from tests.harness.ranks import on_ranks
from trainer.config.optimizer import OptimizerSettings
from trainer.config.parallel import ParallelSettings
from trainer.errors import ConfigError
from trainer.model import optim, parallel, process_group
from trainer.model.parallel import Ranks

STEPS, ROWS, VOCABULARY = 5, 4, 64
OPTIMIZER = OptimizerSettings(lr=1e-2, weight_decay=0.1)


@pytest.fixture(autouse=True)
def _torch_is_left_as_it_was() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
    Ranks(0, 1, "cpu", ParallelSettings()).close()


class Losses(torch.nn.Module):
    """A model whose pass is a sum of token losses over rows; its embedding and its head are one tensor."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        torch.manual_seed(5)
        config = GPT2Config(
            vocab_size=VOCABULARY,
            n_positions=32,
            n_embd=24,
            n_layer=2,
            n_head=2,
            bos_token_id=0,
            eos_token_id=0,
        )
        self.model: Any = GPT2LMHeadModel(config).to(dtype).eval()

    def forward(self, ids: Tensor) -> Tensor:
        logits = (
            self.model(input_ids=ids, use_cache=False)
            .logits[:, :-1]
            .to(torch.promote_types(self.model.dtype, torch.float32))
        )
        return -logits.log_softmax(-1).gather(-1, ids[:, 1:, None]).sum()


def sharded(ranks: Ranks, dtype: torch.dtype, compute: torch.dtype | None = None) -> Losses:
    model = Losses(dtype)
    ranks.shard(model, list(model.model.transformer.h), compute)
    return model


def rows_of(step: int) -> Tensor:
    return torch.randint(0, VOCABULARY, (ROWS, 12), generator=torch.Generator().manual_seed(step))


def step_of(model: Losses, ranks: Ranks, optimizer: optim.Optimizer, step: int) -> tuple[float, float]:
    """The loss and the gradient's norm of one step; each row is a micro-batch, and rank r takes every size-th."""
    loss = 0.0
    for row in rows_of(step)[ranks.rank :: ranks.size]:
        total = model(row[None])
        total.backward()
        loss += float(total.detach())
    norm = parallel.divide_and_clip(model, ROWS * 11, 0.5)
    optimizer.step()
    optimizer.zero_grad()
    return sum(ranks.all_gather(loss)) / (ROWS * 11), norm


def learn(
    settings: ParallelSettings, dtype: torch.dtype, steps: range
) -> tuple[list[tuple[float, float]], dict[str, Tensor]]:
    """The curve of a run, and its final weights."""
    ranks = parallel.join(settings, "cpu")
    model = sharded(ranks, dtype)
    optimizer = optim.create(model.model, OPTIMIZER)
    curve = [step_of(model, ranks, optimizer, step) for step in steps]
    return curve, parallel.gather(model.model.state_dict(keep_vars=True), ranks)


@pytest.mark.parametrize("replicate", [1, 2])
@pytest.mark.parametrize(
    ("dtype", "tolerance"),
    [(torch.float64, 1e-12), pytest.param(torch.float32, 1e-5, marks=pytest.mark.long)],
)
def test_two_ranks_learn_what_one_learns(replicate: int, dtype: torch.dtype, tolerance: float) -> None:
    alone, expected = learn(ParallelSettings(), dtype, range(STEPS))
    (curve, weights), (other, nothing) = on_ranks(
        2, learn, ParallelSettings(replicate=replicate), dtype, range(STEPS)
    )
    assert curve == other, "all ranks know the same figures"
    torch.testing.assert_close(torch.tensor(curve), torch.tensor(alone), rtol=0, atol=tolerance)
    assert nothing == {}, "the first rank alone holds whole weights"
    assert weights.keys() == expected.keys()
    for name, value in expected.items():
        # Adam turns the rounding noise of a gradient that is 0, as that of a key's bias, into steps of full size.
        limit = tolerance if dtype == torch.float64 else STEPS * OPTIMIZER.lr
        torch.testing.assert_close(weights[name], value, rtol=0, atol=limit)
    assert weights["lm_head.weight"].data_ptr() == weights["transformer.wte.weight"].data_ptr()
    assert alone[0][0] > alone[-1][0], "and it learns"


def compute_dtypes() -> tuple[Any, ...]:
    ranks = parallel.join(ParallelSettings(), "cpu")
    model = sharded(ranks, torch.float32, torch.bfloat16)
    seen = []
    model.model.transformer.h[0].register_forward_hook(
        lambda module, given, output: seen.append((output if isinstance(output, Tensor) else output[0]).dtype)
    )
    model(rows_of(1)).backward()
    masters = {p.dtype for p in model.parameters()} | {
        p.grad.dtype for p in model.parameters() if p.grad is not None
    }
    published = {
        value.dtype
        for value in parallel.gather(model.model.state_dict(keep_vars=True), ranks, torch.bfloat16).values()
    }
    return seen, masters, published


def test_bf16_computes_in_bf16_on_masters_and_gradients_in_float32() -> None:
    assert compute_dtypes() == ([torch.bfloat16], {torch.float32}, {torch.bfloat16})


def accumulated(parts: int) -> Tensor:
    """The gradient of the embedding after passes that each add a little."""
    ranks = parallel.join(ParallelSettings(), "cpu")
    model = sharded(ranks, torch.float32, torch.bfloat16)
    for _ in range(parts):
        model(rows_of(1)[:1]).backward()
    gradient = model.model.transformer.wte.weight.grad
    assert gradient is not None
    return parallel.whole(gradient)


def test_gradients_accumulate_in_float32() -> None:
    """In bf16, each of the additions would round by up to 2e-3."""
    torch.testing.assert_close(accumulated(15), 15 * accumulated(1), rtol=1e-5, atol=0)


@pytest.mark.parametrize(
    ("values", "size", "message"),
    [
        ({"shard": 4}, 2, "shard = 4 needs 4 ranks, but 2 run"),
        ({"shard": 2, "replicate": 2}, 2, "replicate = 2 times shard = 2 needs 4 ranks, but 2 run"),
        ({"shard": 2, "tensor": 2}, 2, "shard = 2 times tensor = 2 needs 4 ranks, but 2 run"),
        ({"replicate": 2}, 3, "replicate = 2 needs a multiple of 2 ranks, but 3 run"),
        ({"tensor": 2}, 3, "tensor = 2 needs a multiple of 2 ranks, but 3 run"),
        ({"context": 2}, 3, "context = 2 needs a multiple of that number of ranks, but 3 run"),
    ],
)
def test_a_number_of_ranks_that_does_not_fit_is_refused(
    values: dict[str, int], size: int, message: str
) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        process_group.check(ParallelSettings(**values), size)
    process_group.check(ParallelSettings(**values), 4)


def test_a_missing_gpu_is_an_error_that_names_the_setting() -> None:
    with (
        mock.patch.object(torch.cuda, "device_count", return_value=0),
        pytest.raises(ConfigError, match=r'\[run\] device = "cuda", but PyTorch finds no GPU'),
    ):
        parallel.join(ParallelSettings(), "cuda")


def test_context_and_tensor_together_are_refused() -> None:
    with pytest.raises(ValueError, match="tensor = 2 and context = 2 cannot be combined"):
        ParallelSettings.model_validate({"tensor": 2, "context": 2})
