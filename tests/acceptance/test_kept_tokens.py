"""Real vLLM: what the trainer computes for tokens of a truncated distribution is what the engine reported of them."""

from __future__ import annotations

from pathlib import Path

import pytest

from headgate.types import TokenFlag
from tests.harness.gateways import run_gateway, settings_for
from tests.harness.models import save_model
from tests.harness.vllm import SharedEngine
from trainer.data.packing import lay_out
from trainer.data.tree import rows_of
from trainer.model import pretrained
from trainer.model.policy import Policy

pytestmark = pytest.mark.vllm

NOISE = 2e-3
"""Nats between two float32 implementations of the same weights."""
MOST = 12
NARROW = (
    {"top_k": MOST},
    {"top_p": 0.8, "temperature": 0.15},
    {"min_p": 0.3, "temperature": 0.5},
    {"top_p": 0.5, "top_k": 8, "min_p": 0.01, "temperature": 0.25},
)
WIDE = {"top_p": 0.9}


async def test_the_trainer_normalizes_over_what_the_engine_kept(vllm: SharedEngine, tmp_path: Path) -> None:
    model = tmp_path / "model"
    save_model(model, 5, scale=2.0, endless=True)
    values = settings_for(model, tmp_path, engine=vllm.settings, staleness={"batch": 1, "eta": 0})
    values["models"]["demo"]["kept_tokens"] = MOST
    async with run_gateway(values, in_process=False) as gateway:
        for sampling in (*NARROW, WIDE):
            episode, headers = await gateway.open("task", group_id="g", group_size=len(NARROW) + 1)
            reply = await gateway.chat(headers, max_tokens=60, logprobs=True, top_logprobs=2, **sampling)
            assert len(reply.json()["choices"][0]["logprobs"]["content"][0]["top_logprobs"]) == 2
            await gateway.admin.reward(episode, 1.0)
        lease = await gateway.admin.lease("trainer")
        (group,) = (await gateway.admin.leased_groups(lease, wait_s=60)).groups
    *narrow, wide = (next(node for node in episode.nodes if node.sampled) for episode in group.episodes)
    assert wide.kept is None
    assert (wide.flags == TokenFlag.TRUNCATED).all()
    for node in narrow:
        assert node.kept is not None
        assert ((node.flags == 0) == node.kept.known).all()
        assert node.kept.known.mean() > 0.5
        assert 1 <= node.kept.counts.max() <= MOST
    micro = lay_out(rows_of((episode, {}) for episode in group.episodes).rows)
    gaps = (Policy(pretrained.load(model)).logprobs(micro) - micro.recorded).abs()
    assert len(gaps) == sum(int(node.kept.known.sum()) for node in narrow if node.kept is not None)
    assert gaps.max() < NOISE
