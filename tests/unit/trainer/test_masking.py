"""Warnings about batches of which nothing, or little, is learned because their tokens are masked."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.harness.gateways import RunningGateway
from tests.harness.waiting import within
from tests.unit.trainer.runs import loop_of, settings_of
from trainer.report.metrics import masked_warning


@pytest.mark.parametrize(
    ("trained", "masked", "reason", "message"),
    [
        (
            40,
            {"truncated": 60},
            "truncated",
            "60 of the batch's 100 sampled tokens .* TRUNCATED: .*\\[sampling\\] top_p = ",
        ),
        (0, {"truncated": 9}, "truncated", "9 of the batch's 9 sampled tokens"),
        (60, {"truncated": 40}, None, ""),
        (0, {"greedy": 7, "no_context": 1}, "greedy", "7 of the batch's 8 .*temperature"),
        (1, {"greedy": 700}, None, ""),
        (0, {"crashed_attempt": 5}, "crashed_attempt", "5 of the batch's 5 .* CRASHED_ATTEMPT$"),
        (0, {}, None, ""),
    ],
)
def test_a_warning_names_the_reason_and_what_to_set(
    trained: int, masked: dict[str, float], reason: str | None, message: str
) -> None:
    figures = {"trained_tokens": float(trained), "equal_reward_groups": 0.0}
    figures |= {f"masked_tokens/{name}": float(n) for name, n in masked.items()}
    warning = masked_warning(figures)
    assert (warning and warning[0]) == reason
    if warning is not None:
        assert re.search(message, warning[1]), warning[1]
    assert masked_warning({**figures, "equal_reward_groups": 1.0}) is None, (
        "equal rewards are their own reason"
    )


async def test_top_p_below_1_warns_once(
    gateway: RunningGateway, tiny_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    async with loop_of(gateway, settings_of(gateway, tiny_model, tmp_path)) as loop:
        for batch in range(2):
            for group in ("a", "b"):
                await truncated(gateway, f"{group}{batch}")
        async with within("the trainer is through"):
            await loop.train()
    output = " ".join(capsys.readouterr().err.split())
    assert output.count("top_p = { override = 1.0 }") == 1, output


async def truncated(gateway: RunningGateway, group: str) -> None:
    """A group of two, of which one is better and was sampled with top-p 0.9."""
    for reward, top_p, tokens in ((0.0, 1.0, 1), (1.0, 0.9, 8)):
        opened = await gateway.admin.open_episode(group, group, 2)
        headers = {"Authorization": f"Bearer {opened.api_key}"}
        assert (await gateway.chat(headers, max_tokens=tokens, top_p=top_p)).is_success
        await gateway.admin.reward(opened.episode_id, reward)
