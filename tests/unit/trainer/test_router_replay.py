"""Recorded experts in the trainer: against a float64 pass whose routers are written out here, family by family."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from bench.families.configs import FAMILIES
from headgate.routes import PackedRoutes, RouterShape, Routes, pack
from headgate.types import Episode, Group, Node, TokenFlag
from tests.harness.ranks import on_ranks
from tests.unit.trainer.rank_trainers import assert_close, groups_of, settings_of
from tests.unit.trainer.trees import prompt, sampled
from trainer.config.settings import Settings
from trainer.data.packing import lay_out
from trainer.data.routes import RouteSupport
from trainer.data.tree import Row, row_of_tokens, rows_of
from trainer.errors import ConfigError, FeedBroken
from trainer.loop.agreement import check_routers
from trainer.model import start_check
from trainer.model.activations import checkpoint_layers
from trainer.model.policy import Attention, Policy
from trainer.model.router_replay import RouterReplay
from trainer.rank_rpc import serve_commands, shutdown_ranks
from trainer.rank_trainer import RankTrainer

FAMILIES_SHOWN = ("qwen3_moe", "deepseek_v3", "gpt_oss")


def weights_of(name: str, router: Any, logits: Tensor, chosen: Tensor) -> Tensor:
    """The weights of chosen experts by a family's definition."""
    if name == "gpt_oss":
        return logits.gather(1, chosen).softmax(-1)
    scores = (logits.sigmoid() if name == "deepseek_v3" else logits.softmax(-1)).gather(1, chosen)
    scores = scores / scores.sum(-1, keepdim=True)
    return scores * router.routed_scaling_factor if name == "deepseek_v3" else scores


class Engine:
    """A model's plain pass in float64, whose routers choose by noisy logits, or as they are instructed."""

    def __init__(self, name: str, model: Any) -> None:
        self.model = copy.deepcopy(model).double()
        self.model.set_attn_implementation("eager")
        self.given: Tensor | None = None
        self.found: list[Tensor] = []
        routers = [m for m in self.model.modules() if type(m).__name__.endswith(("TopKRouter", "TopkRouter"))]
        for number, router in enumerate(routers):
            router.forward = self._router(name, router, number)
        self._noise = torch.Generator().manual_seed(7)

    def _router(self, name: str, router: Any, number: int) -> Callable[[Tensor], Any]:
        def forward(hidden: Tensor) -> Any:
            hidden = hidden.reshape(-1, hidden.shape[-1])
            logits = F.linear(hidden, router.weight, getattr(router, "bias", None))
            noisy = logits + 0.5 * logits.std() * torch.randn(logits.shape, generator=self._noise)
            chosen = noisy.topk(router.top_k)[1] if self.given is None else self.given[:, number]
            self.found.append(chosen)
            return logits, weights_of(name, router, logits, chosen), chosen

        return forward

    def routes(self, ids: Sequence[int]) -> Routes:
        self.given, self.found = None, []
        with torch.no_grad():
            self.model(input_ids=torch.tensor([ids]), use_cache=False)
        return torch.stack(self.found, 1).numpy().astype(np.int32)

    def logprobs(self, row: Row) -> Tensor:
        ids = torch.tensor(row.ids.tolist())
        self.given = torch.tensor(row.routes).long()
        logits = self.model(input_ids=ids[None], use_cache=False).logits[0, :-1]
        return logits.log_softmax(-1).gather(-1, ids[1:, None])[:, 0]


def model_of(name: str) -> Any:
    torch.manual_seed(3)
    family = FAMILIES[name]
    config = AutoConfig.for_model(family.model_type, **family.sizes)
    config._experts_implementation = "eager"
    model = AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
        for name_, buffer in model.named_buffers():
            if name_.endswith("e_score_correction_bias"):
                buffer.add_(torch.rand_like(buffer))
    return model


def rows_routed(engine: Engine) -> list[Row]:
    """Five rows, of which four share prefixes with the same routes; the last token of each has none to use."""
    generator = np.random.default_rng(4)
    trunk = generator.integers(0, 250, 20).tolist()
    shared = engine.routes(trunk)
    rows = []
    for n in (3, 9, 12, 20, 0):
        ids = trunk[:n] + generator.integers(0, 250, 14).tolist()
        rows.append(
            replace(
                row_of_tokens(ids, episode_id=str(n)),
                routes=np.concatenate([shared[:n], engine.routes(ids)[n:]]),
            )
        )
    return sorted(rows, key=lambda row: row.ids.tolist())


def policy_of(model: Any, attention: Attention = "spans") -> Policy:
    return Policy(model, attention, replay=RouterReplay(model))


def gradients(policy: Policy, rows: Sequence[Row]) -> tuple[Tensor, dict[str, Tensor]]:
    policy.zero_grad()
    micro = lay_out(rows, share_prefixes=policy.shares_prefixes).to("cpu", policy.dtype)
    with policy.at_work(micro):
        found = policy(micro)[0]
        found.pow(2).sum().backward()
    named = policy.model.named_parameters()
    return found.detach(), {n: p.grad.clone() for n, p in named if p.grad is not None}


@pytest.mark.parametrize("name", FAMILIES_SHOWN)
def test_replayed_tokens_have_the_engines_logprobs_and_gradients(name: str) -> None:
    model = model_of(name)
    engine = Engine(name, model)
    rows = rows_routed(engine)
    expected = torch.cat([engine.logprobs(row) for row in rows])
    expected.pow(2).sum().backward()
    policy = policy_of(model)
    found, grads = gradients(policy, rows)
    without = policy.logprobs(lay_out([replace(row, routes=None) for row in rows]))
    torch.testing.assert_close(found.double(), expected.detach(), rtol=0, atol=1e-4)
    assert (without - expected.detach()).abs().max() > 0.05
    routers = 0
    for key, weight in engine.model.named_parameters():
        if weight.grad is not None:
            torch.testing.assert_close(grads[key].double(), weight.grad, rtol=1e-3, atol=1e-3)
            routers += int(
                key.endswith(("gate.weight", "router.weight")) and bool(grads[key].abs().max() > 1e-3)
            )
    assert routers == len(policy.replay.blocks), "every router learns"  # type: ignore[union-attr]


@pytest.mark.parametrize("name", FAMILIES_SHOWN)
def test_bfloat16_is_as_close_as_rounding_allows(name: str) -> None:
    model = model_of(name)
    engine = Engine(name, model.bfloat16())
    rows = rows_routed(engine)
    policy = policy_of(model)
    with torch.no_grad():
        expected = torch.cat([engine.logprobs(row) for row in rows])
        gap = (policy.logprobs(lay_out(rows)) - expected).abs().mean()
        without = (policy.logprobs(lay_out([replace(r, routes=None) for r in rows])) - expected).abs().mean()
    assert gap < 0.02 < without


@pytest.mark.parametrize("attention", ["spans", "rows"])
@pytest.mark.parametrize("every", [0, 1])
def test_trees_and_recomputation_replay_what_single_rows_do(attention: Attention, every: int) -> None:
    model = model_of("qwen3_moe").double()
    rows = rows_routed(Engine("qwen3_moe", model))
    single = policy_of(copy.deepcopy(model), "rows")
    parts = [gradients(single, [row]) for row in rows]
    policy = policy_of(model, attention)
    checkpoint_layers(policy.layers, every, contexts=policy.replay.contexts)  # type: ignore[union-attr]
    found, grads = gradients(policy, rows)
    torch.testing.assert_close(found, torch.cat([part for part, _ in parts]), rtol=1e-5, atol=1e-6)
    for key, gradient in grads.items():
        alone = sum(grads_of[key] for _, grads_of in parts if key in grads_of)
        torch.testing.assert_close(gradient, alone, rtol=1e-4, atol=1e-4)


def test_prefixes_with_other_routes_are_not_shared() -> None:
    ids = [1, 2, 3, 4, 5]
    routes = np.arange(10, dtype=np.int32).reshape(5, 1, 2)
    other = routes.copy()
    other[3] = 0
    absent = routes.copy()
    absent[1:] = -1
    left, right, partly = (replace(row_of_tokens(ids), routes=each) for each in (routes, other, absent))
    assert len(lay_out([left, left])) == 5
    assert len(lay_out([left, right])) == 7
    micro = lay_out([partly, left])
    assert len(micro) == 5
    assert micro.routes is not None
    assert micro.routes.tolist() == routes.tolist(), "what one row lacks, the other has"


def test_a_token_without_routes_has_the_models_own_choice() -> None:
    model = model_of("deepseek_v3")
    rows = [row_of_tokens(range(5, 25)), row_of_tokens(range(30, 45))]
    absent = [replace(row, routes=np.full((len(row), 2, 2), -1, np.int32)) for row in rows]
    plain = Policy(copy.deepcopy(model)).logprobs(lay_out(rows))
    policy = policy_of(model)
    assert torch.equal(policy.logprobs(lay_out(rows)), plain), "nothing changes without routes"
    assert torch.equal(policy.logprobs(lay_out(absent)), plain)


SHAPE = RouterShape((0, 1), 2, 4, 2)


def episode(routes: Sequence[Routes | None], packed: tuple[int, int] = (2, 2)) -> Episode:
    """A prompt of three tokens, and four that were sampled."""
    nodes = (prompt(0, -1, 0, [1, 2, 3]), sampled(1, 0, 3, [4, 5, 6, 7]))
    return Episode(
        "e",
        1.0,
        tuple(
            node if given is None else replace(node, routes=PackedRoutes(pack(given, 4), *packed, "uint8"))
            for node, given in zip(nodes, routes, strict=True)
        ),
    )


def test_a_row_has_the_routes_of_its_path() -> None:
    own = np.arange(7 * 4, dtype=np.int32).reshape(7, 2, 2) % 4
    own[6] = -1
    (row,) = rows_of([(episode([own[:3], own[3:]]), {})], route_support=RouteSupport(SHAPE, "own")).rows
    assert row.routes is not None
    assert row.routes.tolist() == own.tolist()
    assert rows_of([(episode([own[:3], own[3:]]), {})]).rows[0].routes is None, "off"


def test_tokens_without_routes_are_counted_or_masked() -> None:
    routes = np.zeros((4, 2, 2), np.int32)
    routes[1:] = -1
    given = episode([None, routes])
    found = rows_of([(given, {})], route_support=RouteSupport(SHAPE, "own"))
    assert (found.trained, found.unrouted) == (4, 3), "the second sampled token is predicted at the first"
    group = RouteSupport(SHAPE, "mask").masked(Group("g", "g", 0, (given,)))
    assert (group.episodes[0].nodes[1].flags == TokenFlag.UNROUTED).tolist() == [True, False, True, True]
    found = rows_of([(group.episodes[0], {})], route_support=RouteSupport(SHAPE, "mask"))
    assert (found.trained, found.unrouted, found.masked) == (1, 0, {"unrouted": 3})


@pytest.mark.parametrize(
    ("shape", "why"),
    [
        (RouterShape((0, 1, 2), 2, 4, 3), "2 layers with 2 experts a token, and the model has 3 with 2"),
        (RouterShape((0, 1), 3, 4, 2), "and the model has 2 with 3"),
        (RouterShape((0, 1), 2, 3, 2), "4 tokens of 4, and experts up to 3 of 3"),
    ],
)
def test_routes_of_another_model_are_refused(shape: RouterShape, why: str) -> None:
    routes = np.full((4, 2, 2), 3, np.int32)
    with pytest.raises(FeedBroken, match=why):
        rows_of([(episode([None, routes]), {})], route_support=RouteSupport(shape, "own"))


def test_a_dense_model_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"router_replay = true: Qwen3ForCausalLM: it is not a mixture"):
        RouterReplay(model_of("qwen3"))


def test_a_router_that_hides_scores_of_other_groups_is_refused() -> None:
    """DeepSeek-V2's group-limited router sets the scores of groups that it did not choose to 0."""
    family = FAMILIES["deepseek_v2"]
    sizes = family.sizes | {"topk_method": "group_limited_greedy"}
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model("deepseek_v2", **sizes)).eval()
    with pytest.raises(ConfigError, match="does not compute the weights"):
        start_check.check_replay(policy_of(model))


def learn_routed(settings: Settings, step: int) -> tuple[dict[str, float], dict[str, Tensor]] | None:
    """One step on groups with random routes, of which one token in eight has none: the metrics and the weights."""
    trainer = RankTrainer.open(settings)
    if not trainer.ranks.is_rank_zero:
        serve_commands(trainer)
        return None
    generator = np.random.default_rng(5)

    def routed(node: Node) -> Node:
        routes = generator.permuted(np.tile(np.arange(4), (len(node.ids), 2, 1)), axis=2)[:, :, :2]
        routes[generator.random(len(routes)) < 0.125] = -1
        return replace(node, routes=PackedRoutes(pack(routes, 4), 2, 2, "uint8"))

    def with_routes(each: Episode) -> Episode:
        return replace(each, nodes=tuple(map(routed, each.nodes)))

    groups = [replace(g, episodes=tuple(map(with_routes, g.episodes))) for g in groups_of(step)]
    found = trainer.train(groups), trainer.gather_weights()
    shutdown_ranks(trainer)
    return found


@pytest.fixture(scope="module")
def mixture(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("mixture")
    model_of("qwen3_moe").save_pretrained(path)
    return path


def test_two_ranks_replay_what_one_replays(mixture: Path, tmp_path: Path) -> None:
    more = {"router_replay": True, "activation_checkpointing": 1}
    settings = [
        settings_of(mixture, tmp_path / str(n), {"type": "grpo", "kl_coef": 0.1}, more=more) for n in (1, 2)
    ]
    (alone,) = on_ranks(1, learn_routed, settings[0], 0)
    found, _ = on_ranks(2, learn_routed, settings[1], 0)
    assert_close([found[0]], [alone[0]], 1e-5)
    assert found[0]["unrouted_tokens"] > 0
    (mask,) = on_ranks(
        1, learn_routed, settings_of(mixture, tmp_path / "m", {}, more=more | {"missing_routes": "mask"}), 0
    )
    assert mask[0]["masked_tokens/unrouted"] == found[0]["unrouted_tokens"]
    assert mask[0]["unrouted_tokens"] == 0


@pytest.mark.parametrize(
    ("more", "parallel"),
    [({}, {"context": 2}), ({"lora": {"rank": 4}}, {}), ({"lora": {"rank": 4}}, {"context": 2})],
    ids=["context", "lora", "both"],
)
def test_adapters_and_shared_rows_replay_too(
    more: dict[str, Any], parallel: dict[str, int], mixture: Path, tmp_path: Path
) -> None:
    routed = {"router_replay": True, **more}
    alone, together = (
        settings_of(mixture, tmp_path / str(n), {"type": "grpo"}, more=routed, **given)
        for n, given in ((1, {}), (2, parallel))
    )
    plain = settings_of(mixture, tmp_path / "plain", {"type": "grpo"}, more=more)
    (expected,) = on_ranks(1, learn_routed, alone, 0)
    (other,) = on_ranks(1, learn_routed, plain, 0)
    found, _ = on_ranks(2, learn_routed, together, 0)
    assert_close([found[0]], [expected[0]], 1e-5)
    assert abs(other[0]["loss"] - expected[0]["loss"]) > 1e-4, "replay changes the loss"


def test_a_dense_checkpoint_is_refused_at_the_start(exact_model: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"router_replay = true: .*: it is not a mixture of experts"):
        RankTrainer.open(settings_of(exact_model, tmp_path, {}, more={"router_replay": True}))


@pytest.mark.parametrize(
    ("recorded", "why"),
    [
        (None, "the gateway records no experts: set router_replay = true in its .models.NAME."),
        (
            RouterShape((1, 2), 2, 8, 4),
            "records 2 of 8 experts in 2 of 4 layers, and the model has 2 of 8 experts in 3 of 4",
        ),
    ],
)
def test_a_gateway_that_records_other_routers_is_refused(recorded: RouterShape | None, why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        check_routers(RouterShape((1, 2, 3), 2, 8, 4), recorded and recorded._asdict())
