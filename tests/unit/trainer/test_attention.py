"""Attention over forests against all scores: values, gradients, blocks of tokens, and memory that grows with tokens alone."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn.attention import flex_attention
from torch.nn.attention.flex_attention import create_block_mask

from bench.gpu.all_scores import all_scores, seen
from trainer.config.model import Kernel
from trainer.data.packing import lay_out
from trainer.data.tree import row_of_tokens
from trainer.model import attention, block_attention
from trainer.model.attention import KERNELS, NotBySpans, Scoring
from trainer.model.block_attention import BLOCK
from trainer.model.forest import FLEX_BLOCK, Forest
from trainer.model.shapes import Live

SCORINGS = {
    "plain": Scoring(),
    "window": Scoring(window=50),
    "window of one": Scoring(window=1),
    "softcap": Scoring(window=150, softcap=0.5),
    "scale and sinks": Scoring(scale=0.3, sinks=torch.tensor([-1.0, 0.0, 1.0, 2.0], dtype=torch.float64)),
}


def random_forest(seed: int, rows: int = 5) -> Forest:
    """Rows of up to 700 tokens that share beginnings, of spans that are shorter and longer than a block."""
    generator = np.random.default_rng(seed)
    trunk = generator.integers(0, 90, 400).tolist()
    found = [
        trunk[: generator.integers(1, 390)] + generator.integers(0, 90, generator.integers(1, 300)).tolist()
        for _ in range(rows)
    ]
    micro = lay_out([row_of_tokens(row) for row in [*sorted(found), generator.integers(0, 90, 40).tolist()]])
    return Forest(micro.positions, micro.ends)


def one_row(tokens: int) -> Forest:
    return Forest(torch.arange(tokens), torch.full((tokens,), tokens))


def inputs_of(forest: Forest, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    """Queries of four heads, keys and values of two, with gradients."""
    torch.manual_seed(1)
    shapes = ((4, 16), (2, 16), (2, 24))
    return [torch.randn(1, n, len(forest), size, dtype=dtype).requires_grad_() for n, size in shapes]


@pytest.mark.parametrize(
    ("scores", "rows"), [(block_attention.SCORES, 5), (1, 2)], ids=["many blocks", "a block at a time"]
)
@pytest.mark.parametrize("scoring", SCORINGS.values(), ids=SCORINGS)
def test_attention_by_blocks_is_that_of_all_scores(
    monkeypatch: pytest.MonkeyPatch, scoring: Scoring, scores: int, rows: int
) -> None:
    monkeypatch.setattr(block_attention, "SCORES", scores)
    forest = random_forest(0, rows)
    given = inputs_of(forest)
    if scoring.sinks is not None:
        given.append(scoring.sinks.clone().requires_grad_())
        scoring = replace(scoring, sinks=given[-1])
    ours = attention.by_blocks(forest, *given[:3], scoring=scoring)
    theirs = all_scores(forest.positions, *given[:3], scoring=scoring)
    cotangent = torch.randn_like(ours)
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-12)
    for found, expected in zip(
        torch.autograd.grad(ours, given, cotangent),
        torch.autograd.grad(theirs, given, cotangent),
        strict=True,
    ):
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize("scoring", SCORINGS.values(), ids=SCORINGS)
def test_flex_attention_is_that_of_all_scores(scoring: Scoring) -> None:
    forest = random_forest(0, 2)
    given = [x.detach() for x in inputs_of(forest)]
    found = attention.by_flex(forest, *given, scoring=scoring)
    torch.testing.assert_close(
        found, all_scores(forest.positions, *given, scoring=scoring), rtol=0, atol=1e-12
    )


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")  # torch's compiler reads it
@pytest.mark.parametrize("scoring", [Scoring(), Scoring(window=24, softcap=0.5)], ids=["plain", "softcap"])
def test_what_a_gpu_compiles_is_one_graph_with_gradients(
    monkeypatch: pytest.MonkeyPatch, scoring: Scoring
) -> None:
    # The CPU lacks kernels of the backward pass alone: what is captured is that of a GPU.
    monkeypatch.setattr(flex_attention, "_validate_device", lambda *_: None)
    forest = random_forest(1, 2)
    torch.manual_seed(1)
    made = [torch.randn(1, heads, len(forest), 64, requires_grad=True) for heads in (4, 2, 2)]
    given = [x * 1.0 for x in made]  # no leaves, as in a model
    found = attention.by_flex(forest, *given, scoring=scoring, backend="aot_eager")
    expected = all_scores(forest.positions, *given, scoring=scoring)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


def several_rows() -> Forest:
    """Rows without a prefix in common, of which one has a single token."""
    micro = lay_out([row_of_tokens(range(i, i + n)) for i, n in enumerate((70, 1, 130, 200))])
    return Forest(micro.positions, micro.ends)


@pytest.mark.parametrize("name", ["plain", "window", "window of one"])
def test_attention_of_rows_that_share_nothing_is_that_of_all_scores(name: str) -> None:
    forest, scoring = several_rows(), SCORINGS[name]
    given = inputs_of(forest)[:2]
    given.append(torch.randn_like(given[1]).requires_grad_())
    ours = attention.attend(forest, *given, scoring=scoring, kernel="varlen")
    theirs = all_scores(forest.positions, *given, scoring=scoring)
    cotangent = torch.randn_like(ours)
    for found, expected in zip(
        (ours, *torch.autograd.grad(ours, given, cotangent)),
        (theirs, *torch.autograd.grad(theirs, given, cotangent)),
        strict=True,
    ):
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)


def test_rows_are_known_by_what_no_other_row_continues() -> None:
    forest = several_rows()
    assert forest.rows is not None
    assert (forest.rows.starts.tolist(), forest.rows.longest) == ([0, 70, 71, 201, 401], 200)
    assert random_forest(0).rows is None
    # A row that continues all of the row before it is one with it.
    micro = lay_out([row_of_tokens(range(5)), row_of_tokens(range(9))])
    longer = Forest(micro.positions, micro.ends).rows
    assert longer is not None and longer.starts.tolist() == [0, 9]


@pytest.mark.parametrize(
    ("forest", "scoring", "size", "why"),
    [
        (random_forest(0), Scoring(), 16, "prefixes that its rows share"),
        (several_rows(), Scoring(softcap=1.0), 16, "soft cap"),
        (several_rows(), Scoring(sinks=torch.zeros(4)), 16, "sinks"),
        (several_rows(), Scoring(), 24, "values of another size"),
    ],
)
def test_what_flash_attention_lacks_is_refused_by_name(
    forest: Forest, scoring: Scoring, size: int, why: str
) -> None:
    query, key = (torch.zeros(1, heads, len(forest), 16) for heads in (4, 2))
    with pytest.raises(NotBySpans, match=rf'attention_kernel = "varlen": .*{why}.*"auto"'):
        attention.attend(forest, query, key, key.new_zeros(*key.shape[:3], size), scoring, "varlen")


@pytest.mark.parametrize(
    ("is_cuda", "dtype", "tokens", "kernel", "way"),
    [
        (False, torch.bfloat16, 9000, "auto", "blocks"),
        (True, torch.float32, 1, "auto", "blocks"),
        (True, torch.float32, 1, "flex", "blocks"),
        (True, torch.float32, 1, "varlen", "blocks"),
        (True, torch.float32, 9000, "auto", "flex"),
        (True, torch.bfloat16, 1, "auto", "varlen"),
        (True, torch.bfloat16, 1, "flex", "flex"),
        (True, torch.bfloat16, 1, "blocks", "blocks"),
        (True, torch.bfloat16, None, "auto", "flex"),
    ],
)
def test_a_gpu_attends_by_flash_attention_where_no_prefix_is_shared_and_else_by_flex_attention(
    monkeypatch: pytest.MonkeyPatch,
    is_cuda: bool,
    dtype: torch.dtype,
    tokens: int | None,
    kernel: Kernel,
    way: str,
) -> None:
    """Without `tokens`: rows that share a prefix."""
    monkeypatch.setattr(attention, "KERNELS", {name: lambda *_, name=name: name for name in KERNELS})
    forest = random_forest(0) if tokens is None else one_row(tokens)
    query: Any = SimpleNamespace(is_cuda=is_cuda, dtype=dtype, shape=(1, 4, len(forest), 64))
    for scoring, expected in ((Scoring(), way), (Scoring(softcap=1.0), "flex" if way == "varlen" else way)):
        found: Any = attention.attend(forest, query, query, query, scoring, kernel)
        assert found == expected


@pytest.mark.parametrize("window", [None, 1, 50, 200])
@pytest.mark.parametrize("size", [BLOCK, FLEX_BLOCK])
def test_blocks_leave_out_what_sees_nothing_and_need_no_mask_where_all_is_seen(
    size: int, window: int | None
) -> None:
    """A pair in a block that is left out, or none in a block without a mask, is a wrong log-probability. Without a window,
    FlexAttention's own search over all pairs finds the same blocks."""
    forest = random_forest(0)
    pairs = seen(forest.positions, window)
    n, count = len(forest), -(-len(forest) // size)
    padded = torch.nn.functional.pad(pairs, (0, -n % size) * 2).view(count, size, count, size)
    blocks = forest.blocks(window, size)
    assert bool((blocks.some | ~padded.any(3).any(1)).all())
    assert bool((padded.all(3).all(1) | ~blocks.whole).all())
    if size == BLOCK:
        return
    mask = forest.block_mask(window)
    assert mask.to_dense()[0, 0].bool().equal(blocks.some)
    if window is None:
        exact = create_block_mask(mask.mask_mod, None, None, n, n, device="cpu")
        assert exact.to_dense().equal(mask.to_dense())


def test_the_mask_of_a_long_row_has_a_number_for_each_pair_of_blocks() -> None:
    tokens = 131_072
    made = Live(iter(()))
    with made:
        forest = one_row(tokens)
        for window in (None, 4096):
            forest.block_mask(window)
    pairs = (tokens // FLEX_BLOCK) ** 2
    # Two tables of bool and eight lists of int32, of which a sort holds as many again as int64, for each window.
    assert made.restart() < 2 * (2 + 8 * 4 + 2 * 8) * pairs + 16 * 8 * tokens
    assert tokens**2 > 1000 * pairs


@pytest.mark.parametrize("name", ["plain", "window", "softcap", "scale and sinks"])
def test_a_long_row_takes_memory_by_its_tokens(name: str) -> None:
    """Forwards and backwards, at two lengths: what a token takes is what it takes in a shorter row."""
    taken = []
    for tokens in (512, 2048):
        forest = one_row(tokens)
        given = inputs_of(forest, torch.float32)
        made = Live(iter(given))
        with made:
            attention.by_blocks(forest, *given, scoring=SCORINGS[name]).sum().backward()
        taken.append(made.restart())
    tiles = 8 * 4 * block_attention.SCORES
    assert (taken[1] - tiles) / 2048 < taken[0] / 512
    assert taken[1] < 4 * 4 * 2048**2 / 4, "a quarter of the scores alone"
