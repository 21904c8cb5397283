"""The attention that a device chooses is that of all scores in float64, forwards and backwards."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn.attention import flex_attention

from tests.gpu.rank_trainers import batch
from tests.harness.all_scores import all_scores
from trainer.data.packing import lay_out
from trainer.data.tree import rows_of
from trainer.model import attention
from trainer.model.attention import Scoring
from trainer.model.forest import Forest

SEVERAL = 4
"""How many times the error of all scores in the same dtype and on the same device another order of sums may have."""
SCORINGS = {
    "plain": Scoring(),
    "window": Scoring(window=24),
    "softcap": Scoring(softcap=0.5),
    "scale": Scoring(scale=0.3),
    "sinks": Scoring(window=24, sinks=torch.tensor([-1.0, 0.0, 1.0, 2.0])),
}


def forest(device: str) -> Forest:
    """Two groups of episodes that branch: spans with long prefixes, and tokens that do not see one another."""
    rows = rows_of([(episode, {}) for group in batch() for episode in group.episodes]).rows
    micro = lay_out(rows)
    assert len(micro) < sum(len(row) for row in rows), "something is shared"
    return Forest(micro.positions.to(device), micro.ends.to(device))


def error(found: Tensor, exact: Tensor) -> float:
    """Return the norm of the difference over the norm."""
    return float((found - exact).norm() / exact.norm())


def forward_and_backward(found: Tensor, inputs: list[Tensor], cotangent: Tensor) -> list[Tensor]:
    """The output and the gradients, in float64 on the CPU."""
    gradients = torch.autograd.grad(found, inputs, cotangent.to(found))
    return [tensor.detach().double().cpu() for tensor in (found, *gradients)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("scoring", SCORINGS.values(), ids=SCORINGS)
def test_attention_is_that_of_all_scores(device: str, dtype: torch.dtype, scoring: Scoring) -> None:
    torch.manual_seed(1)
    reference, tokens = forest("cpu"), len(forest("cpu").positions)
    made = [torch.randn(1, heads, tokens, 64, dtype=torch.float64) for heads in (4, 2, 2)]
    cotangent = torch.randn(1, 4, tokens, 64, dtype=torch.float64)
    exact = [x.to(dtype).double().requires_grad_() for x in made]
    expected = forward_and_backward(
        all_scores(reference.positions, *exact, scoring=scoring), exact, cotangent
    )
    given = [x.to(device, dtype).requires_grad_() for x in made]
    found = forward_and_backward(attention.attend(forest(device), *given, scoring=scoring), given, cotangent)
    again = [x.detach().requires_grad_() for x in given]
    simple = forward_and_backward(all_scores(reference.positions, *again, scoring=scoring), again, cotangent)
    for name, ours, plain, theirs in zip(
        ("output", "query", "key", "value"), found, simple, expected, strict=True
    ):
        assert error(ours, theirs) < SEVERAL * error(plain, theirs), name


@pytest.mark.parametrize("scoring", SCORINGS.values(), ids=SCORINGS)
def test_what_a_gpu_compiles_is_one_graph_with_gradients(
    monkeypatch: pytest.MonkeyPatch, scoring: Scoring
) -> None:
    # The CPU lacks kernels of the backward pass alone: what is captured is that of a GPU.
    monkeypatch.setattr(flex_attention, "_validate_device", lambda *_: None)
    torch.manual_seed(1)
    tokens = len(forest("cpu").positions)
    made = [torch.randn(1, heads, tokens, 64, requires_grad=True) for heads in (4, 2, 2)]
    given = [x * 1.0 for x in made]  # no leaves, as in a model
    found = attention.by_flex(forest("cpu"), *given, scoring=scoring, backend="aot_eager")
    torch.testing.assert_close(
        found, all_scores(forest("cpu").positions, *given, scoring=scoring), rtol=1e-4, atol=1e-4
    )


@pytest.mark.gpu
@pytest.mark.usefixtures("gpu")
def test_a_gpu_attends_by_flex_attention(monkeypatch: pytest.MonkeyPatch) -> None:
    taken = []
    by_flex = attention.by_flex
    monkeypatch.setattr(attention, "by_flex", lambda *given: taken.append(1) or by_flex(*given))
    query = torch.randn(1, 2, len(forest("cpu").positions), 64, device="cuda")
    attention.attend(forest("cuda"), query, query, query, Scoring())
    assert taken
