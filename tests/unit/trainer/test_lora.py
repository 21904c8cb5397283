"""LoRA: gradients from those of whole matrices, merged weights by hand, and what is trained, kept, published and exported."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM
from typer.testing import CliRunner

from gateway.engines.fake import create_fake_app
from headgate.processes.ports import free_port
from headgate.weights.adapter import FACTORS, misfit
from headgate.weights.tensors import layout_of, tensors_of
from tests.harness.gateways import run_gateway, serve, settings_for
from tests.harness.model_engine import ModelEngine
from tests.harness.plain_model import plain_logprobs
from tests.harness.waiting import within
from tests.unit.trainer.rollouts import episodes
from tests.unit.trainer.runs import CONFIG, offline_settings
from tests.unit.trainer.runs import settings_of as gateway_settings
from tests.unit.trainer.trees import group
from trainer.cli import app
from trainer.config.model import LoraSettings, ModelSettings
from trainer.config.parallel import ParallelSettings
from trainer.config.settings import Settings
from trainer.data.packing import lay_out
from trainer.data.tree import row_of_tokens
from trainer.errors import CheckpointError, ConfigError
from trainer.loop.run import warn_merged_adapters
from trainer.loop.training_loop import TrainingLoop
from trainer.model import build, parallel, pretrained, probe, shards
from trainer.model.policy import Policy
from trainer.rank_trainer import RankTrainer
from trainer.report.metrics import Metrics

PRECISIONS = ["bfloat16", pytest.param("float32", marks=pytest.mark.long)]
RANK, ALPHA = 3, 7.0
SCALE = ALPHA / RANK
ROWS = [[*range(9), 20 + i, *range(30, 40)] for i in range(3)]
SIZES = {
    "vocab_size": 128, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 128, "pad_token_id": 0,
}  # fmt: skip


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Linear layers, where GPT-2 has matrices the other way round; its embedding is its head."""
    directory = tmp_path_factory.mktemp("models") / "llama"
    torch.manual_seed(4)
    config = AutoConfig.for_model("llama", **SIZES, tie_word_embeddings=True)
    AutoModelForCausalLM.from_config(config).save_pretrained(directory)
    return directory


def adapted(path: Path, monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype = torch.float64) -> Policy:
    """A policy whose adapters are no longer zero."""
    monkeypatch.setitem(pretrained.DTYPES, "float32", dtype)
    wanted = ModelSettings(path=path, lora=LoraSettings(rank=RANK, alpha=ALPHA))
    policy = build.trained(wanted, parallel.join(ParallelSettings(), "cpu"), seed=1)
    with torch.no_grad():
        for name, weight in policy.model.named_parameters():
            if "lora_B" in name:
                assert bool((weight == 0).all()), "at the start, nothing is added"
                weight.copy_(torch.randn(weight.shape, generator=torch.Generator().manual_seed(2)) * 0.05)
    return policy


def factors(model: Any, name: str) -> tuple[Tensor, Tensor]:
    """A and B of a layer."""
    module = model.get_submodule(name)
    return module.lora_A.default.weight, module.lora_B.default.weight


def targets_of(path: Path) -> list[str]:
    """The matrices of the layers, by a plain model's names."""
    model = AutoModelForCausalLM.from_pretrained(path)
    kinds = ("Linear", "Conv1D")
    return [n for n, m in model.named_modules() if type(m).__name__ in kinds and n != "lm_head"]


def whole_model(path: Path, policy: Policy) -> Any:
    """A plain model whose matrices are W + alpha / rank * B A, all to be trained."""
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float64)
    with torch.no_grad():
        for name in targets_of(path):
            a, b = factors(policy.model, name)
            module = model.get_submodule(name)
            module.weight += SCALE * ((b @ a).T if type(module).__name__ == "Conv1D" else b @ a)
    return model


@pytest.fixture(params=["llama", "gpt2"])
def path(request: pytest.FixtureRequest, llama: Path, exact_model: Path) -> Path:
    return llama if request.param == "llama" else exact_model


def tolerance(path: Path) -> dict[str, float]:
    """Llama's norms are computed in float32, whatever its weights are."""
    return {"rtol": 1e-4, "atol": 1e-5} if path.name == "llama" else {"rtol": 1e-10, "atol": 1e-12}


def test_factors_have_the_gradient_of_the_whole_matrix_through_each_other(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With W' = W + s B A: dL/dB = s dL/dW' A^T and dL/dA = s B^T dL/dW'."""
    policy = adapted(path, monkeypatch)
    model = whole_model(path, policy)
    expected = [plain_logprobs(model, torch.tensor(row)) for row in ROWS]
    torch.cat(expected).pow(2).sum().backward()
    micro = lay_out([row_of_tokens(row) for row in ROWS])
    assert len(micro) < sum(map(len, ROWS)), "a prefix is shared"
    with policy.at_work(micro):
        found = policy(micro.to("cpu", torch.float64))[0]
        found.pow(2).sum().backward()
    torch.testing.assert_close(found.detach(), torch.cat(expected).detach(), **tolerance(path))
    names = targets_of(path)
    for name in names:
        a, b = factors(policy.model, name)
        module = model.get_submodule(name)
        gradient = module.weight.grad.T if type(module).__name__ == "Conv1D" else module.weight.grad
        torch.testing.assert_close(b.grad, SCALE * gradient @ a.T, **tolerance(path))
        torch.testing.assert_close(a.grad, SCALE * b.T @ gradient, **tolerance(path))
    assert sum(p.grad is not None for p in policy.parameters()) == 2 * len(names), "and nothing else has one"


def test_what_is_published_computes_what_is_trained(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    policy = adapted(path, monkeypatch)
    model = whole_model(path, policy)
    micro = lay_out([row_of_tokens(row) for row in ROWS])
    before = {name: weight.clone() for name, weight in policy.named_parameters()}
    apart = policy.logprobs(micro)
    with policy.computing("merged"):
        together = policy.logprobs(micro)
    state = parallel.gather(policy.published(), parallel.join(ParallelSettings(), "cpu"))
    torch.testing.assert_close(together, apart, **tolerance(path))
    assert state.keys() == model.state_dict().keys()
    for name, value in model.state_dict().items():
        torch.testing.assert_close(state[name], value, rtol=1e-14, atol=1e-14)
    assert state["lm_head.weight"].data_ptr() == state[EMBEDDING[path.name]].data_ptr(), "still tied"
    with policy.computing("initial"):
        initial = policy.logprobs(micro)
    plain = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float64)
    expected = torch.cat([plain_logprobs(plain, torch.tensor(row)) for row in ROWS]).detach()
    torch.testing.assert_close(initial, expected, **tolerance(path))
    assert float((initial - apart).abs().max()) > 1e-3, "the adapters matter"
    assert torch.equal(policy.logprobs(micro), apart), "and are back at work"
    assert all(torch.equal(weight, before[name]) for name, weight in policy.named_parameters())


EMBEDDING = {"llama": "model.embed_tokens.weight", "gpt2": "transformer.wte.weight"}


def test_experts_stay_as_they_are_and_are_published_as_they_are_stored(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the model they are one tensor, in the checkpoint one for each expert."""
    torch.manual_seed(4)
    config = AutoConfig.for_model("mixtral", **SIZES, num_local_experts=3, num_experts_per_tok=1)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "base")
    policy = adapted(tmp_path / "base", monkeypatch, torch.float32)
    adapters = {
        name.split(".lora_")[0] for name, weight in policy.model.named_parameters() if weight.requires_grad
    }
    attention = {f"model.layers.{i}.self_attn.{n}_proj" for i in range(2) for n in "qkvo"}
    assert adapters == attention
    state = parallel.gather(policy.published(), parallel.join(ParallelSettings(), "cpu"))
    pretrained.save(policy.model, tmp_path / "out", tmp_path / "base", state)
    base, out = (load_file(tmp_path / name / "model.safetensors") for name in ("base", "out"))
    assert base.keys() == out.keys()
    changed = {
        name.removesuffix(".weight") for name, value in base.items() if not torch.equal(value, out[name])
    }
    assert changed == attention


def settings_of(model: Path, work: Path, dtype: str = "float32", **changes: Any) -> Settings:
    lora = {"rank": RANK, "alpha": ALPHA, **changes}
    given = {"optimizer": {"lr": 1e-2}, "algorithm": {"kl_coef": 0.1}, "batch": {"tokens": 64}}
    return offline_settings(model, work, model={"dtype": dtype, "lora": lora}, **given)


def train(trainer: RankTrainer, steps: int) -> list[dict[str, float]]:
    return [
        trainer.train([group(f"g{trainer.version}", [1.0, 0.0, 0.5], version=trainer.version)])
        for _ in range(steps)
    ]


@pytest.mark.parametrize("dtype", PRECISIONS)
def test_a_run_changes_adapters_alone_and_keeps_them_alone(
    tiny_model: Path, tmp_path: Path, dtype: str
) -> None:
    trainer = RankTrainer.open(settings_of(tiny_model, tmp_path, dtype))
    base = load_file(tiny_model / "model.safetensors")
    train(trainer, 2)
    weights = {name: parallel.whole(w.detach()) for name, w in trainer.model.named_parameters()}
    target, names = pretrained.DTYPES[dtype], targets_of(tiny_model)  # type: ignore[index]
    trained = {f"{name}.lora_{factor}.default.weight" for name in names for factor in "AB"}
    assert {name for name, weight in trainer.model.named_parameters() if weight.requires_grad} == trained
    assert trainer.optimizer.moments().keys() == trained
    for name, weight in weights.items():
        plain = name.replace(".base_layer", "")
        assert weight.dtype == (torch.float32 if name in trained else target), name
        assert plain not in base or torch.equal(weight, base[plain].to(target)), f"{name} is frozen"
    directory = trainer.save_checkpoint()
    kept = {name.split("/")[1] for name in shards.stored(directory / "tensors") if "/" in name}
    assert kept == trained
    published = trainer.gather_weights()
    for name in names:
        a, b = (weights[f"{name}.lora_{factor}.default.weight"].to(target).float() for factor in "AB")
        expected = (base[f"{name}.weight"].to(target).float() + SCALE * (b @ a)).to(target)
        torch.testing.assert_close(published[f"{name}.weight"], expected, rtol=1e-6, atol=1e-7)
        assert not torch.equal(expected, base[f"{name}.weight"].to(target))
    trainer.ranks.close()


@pytest.mark.parametrize("dtype", PRECISIONS)
def test_the_probe_is_of_the_weights_as_they_are_published(
    tiny_model: Path, tmp_path: Path, dtype: str
) -> None:
    trainer = RankTrainer.open(settings_of(tiny_model, tmp_path / "run", dtype))
    train(trainer, 1)
    pretrained.save(trainer.model, tmp_path / "out", tiny_model, trainer.gather_weights())
    assert trainer.probe is not None
    sequences = trainer.probe.sequences
    served = Policy(pretrained.load(tmp_path / "out", dtype))  # type: ignore[arg-type]
    recorded, expected = (
        torch.tensor([value for row in rows for value in row])
        for rows in (trainer.probe.new_logprobs, probe.logprobs(served, sequences))
    )
    torch.testing.assert_close(recorded, expected, rtol=0, atol=1e-5)
    micro = lay_out([row_of_tokens(sequence) for sequence in sequences])
    gap = float((trainer.policy.logprobs(micro) - expected).abs().max())
    assert gap > 1e-3 if dtype == "bfloat16" else gap < 1e-4, (
        "rounding alone distinguishes the sum from its parts"
    )
    trainer.ranks.close()


def test_the_divergence_is_from_the_weights_without_adapters(tiny_model: Path, tmp_path: Path) -> None:
    """The same run, with the reference of a whole model, has the same figures."""
    trainer = RankTrainer.open(settings_of(tiny_model, tmp_path / "adapters"))
    other = RankTrainer.open(settings_of(tiny_model, tmp_path / "whole"))
    whole = other.settings.model.model_copy(update={"lora": None})
    other._reference = build.reference(whole, other.ranks, Policy(pretrained.load(tiny_model)))
    assert isinstance(other._reference, Policy)
    found, expected = train(trainer, 3), train(other, 3)
    assert [m["loss"] for m in found] == pytest.approx([m["loss"] for m in expected], rel=1e-5)
    assert found[-1]["kl_reference_k3"] == pytest.approx(expected[-1]["kl_reference_k3"], rel=1e-4)
    assert found[-1]["kl_reference_k3"] > 1e-4


@pytest.mark.parametrize("dtype", PRECISIONS)
def test_a_resumed_run_has_bit_equal_adapters(tiny_model: Path, tmp_path: Path, dtype: str) -> None:
    straight = RankTrainer.open(settings_of(tiny_model, tmp_path, dtype))
    train(straight, 1)
    straight.save_checkpoint()
    train(straight, 2)
    resumed = RankTrainer.open(straight.settings)
    assert resumed.version == 1
    train(resumed, 2)
    expected = parallel.weights(straight.model)
    for name, weight in parallel.weights(resumed.model).items():
        assert torch.equal(parallel.whole(weight), parallel.whole(expected[name])), name
    assert all(torch.equal(v, resumed.gather_weights()[n]) for n, v in straight.gather_weights().items())
    assert resumed.probe == straight.probe
    straight.ranks.close()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"rank": 5}, r"\[model.lora\] rank = 3, and now it is 5"),
        ({"alpha": 5.0}, r"\[model.lora\] alpha = 7.0, and now it is 5.0"),
        ({"targets": ("q_proj",)}, r"\[model.lora\] targets = 'all-linear', and now it is \['q_proj'\]"),
        (None, r"trained with \[model.lora\], and now is without it"),
    ],
)
def test_what_may_not_change_between_runs_is_refused_by_its_setting(
    tiny_model: Path, tmp_path: Path, change: dict[str, Any] | None, message: str
) -> None:
    settings = settings_of(tiny_model, tmp_path)
    trainer = RankTrainer.open(settings)
    train(trainer, 1)
    trainer.save_checkpoint()
    lora = (
        None
        if change is None or settings.model.lora is None
        else settings.model.lora.model_copy(update=change)
    )
    model = settings.model.model_copy(update={"lora": lora})
    with pytest.raises(CheckpointError, match=f"v000001 .*{message}"):
        RankTrainer.open(settings.model_copy(update={"model": model}))


@pytest.mark.parametrize(
    ("targets", "message"),
    [
        (["nothing"], "the model has no layer nothing; the linear layers are .*q_proj"),
        (["q_proj", "k_prj"], "the model has no layer k_prj; "),
        (["lm_head"], "lm_head has no weight matrix of its own"),
        (["embed_tokens"], "embed_tokens has no weight matrix of its own"),
    ],
)
def test_targets_that_cannot_be_adapted_are_refused(llama: Path, targets: list[str], message: str) -> None:
    wanted = ModelSettings(path=llama, lora=LoraSettings(targets=tuple(targets)))
    with pytest.raises(ConfigError, match=rf"\[model.lora\] targets = .*{message}.*name linear layers"):
        build.trained(wanted, parallel.join(ParallelSettings(), "cpu"), seed=1)


def test_muon_is_refused_with_adapters(tiny_model: Path, tmp_path: Path) -> None:
    values = settings_of(tiny_model, tmp_path).model_dump(exclude={"gateway", "algorithm"})
    values |= {"gateway": {"url": "http://x"}, "optimizer": {"lr": 1.0, "type": "muon"}}
    with pytest.raises(ConfigError, match=r'optimizer.type = "muon".*\[model.lora\]; use "adamw"'):
        Settings.parse(values)


LORA = """
[model.lora]
rank = 3
alpha = 7.0
targets = ["q_proj", "down_proj"]
"""


def export(config: Path, *arguments: object) -> tuple[int, str]:
    result = CliRunner().invoke(app, ["export", str(config), *map(str, arguments)])
    return result.exit_code, result.output


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated")
def test_exports_read_by_transformers_and_by_peft_compute_the_same(tiny_model: Path, tmp_path: Path) -> None:
    config = tmp_path / "trainer.toml"
    config.write_text(CONFIG.format(work=tmp_path, model=tiny_model) + LORA)
    trainer = RankTrainer.open(Settings.load(config))
    train(trainer, 2)
    trainer.save_checkpoint()
    for name, arguments in {"merged": [], "adapter": ["--adapter"]}.items():
        code, output = export(config, "--out", tmp_path / name, *arguments)
        assert code == 0, output
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged", dtype=torch.float64)
    base = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float64)
    ids = torch.tensor([[5, 6, 7, 8, 9]])
    before = base(ids).logits
    apart = PeftModel.from_pretrained(base, str(tmp_path / "adapter"))
    found, expected = merged(ids).logits, apart(ids).logits
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    assert float((found - before).detach().abs().max()) > 0.01
    size = sum(file.stat().st_size for file in (tmp_path / "adapter").iterdir())
    assert size < (tmp_path / "merged" / "model.safetensors").stat().st_size / 5


def test_the_share_that_merging_keeps_is_that_of_the_rounded_change(tiny_model: Path, tmp_path: Path) -> None:
    """By the published weights themselves: in bfloat16 most of a step at a learning rate of 1e-5 is lost, in float32 nothing."""
    base = load_file(tiny_model / "model.safetensors")
    shares: dict[str, float] = {}
    dtypes: tuple[pretrained.Dtype, ...] = ("float32", "bfloat16")
    for dtype in dtypes:
        settings, target = settings_of(tiny_model, tmp_path / dtype, dtype), pretrained.DTYPES[dtype]
        slow = settings.optimizer.model_copy(update={"lr": 1e-5})
        settings = settings.model_copy(update={"optimizer": slow})
        trainer = RankTrainer.open(settings)
        shares[dtype] = train(trainer, 1)[0]["merged_share"]
        published, kept, whole = trainer.gather_weights(), 0.0, 0.0
        for name in targets_of(tiny_model):
            a, b = (parallel.whole(f.detach()).to(target).double() for f in factors(trainer.model, name))
            weight, added = base[f"{name}.weight"].to(target).double(), SCALE * (b @ a)
            kept += float(((published[f"{name}.weight"].double() - weight) * added).sum())
            whole += float((added * added).sum())
        assert shares[dtype] == pytest.approx(kept / whole, rel=1e-3)
        trainer.ranks.close()
    assert shares["float32"] == pytest.approx(1.0, abs=1e-2) and 0.0 <= shares["bfloat16"] < 0.9
    alone = settings.model_copy(update={"publish": settings.publish.model_copy(update={"transport": "lora"})})
    assert "max_lora_rank = 3" in warn_merged_adapters(settings) and warn_merged_adapters(alone) == ""


MIXTURES: dict[str, dict[str, Any]] = {
    "deepseek_v3": {
        "n_routed_experts": 4, "first_k_dense_replace": 1, "n_group": 2, "topk_group": 1, "q_lora_rank": 16, "kv_lora_rank": 16,
        "qk_rope_head_dim": 8, "qk_nope_head_dim": 16, "v_head_dim": 16, "num_key_value_heads": 4,
    },
    "glm4_moe": {"n_routed_experts": 4, "first_k_dense_replace": 1, "n_group": 2, "topk_group": 1},
    "qwen2_moe": {"num_experts": 4, "shared_expert_intermediate_size": 24, "mlp_only_layers": [0]},
}  # fmt: skip


@pytest.mark.parametrize("family", MIXTURES)
def test_peft_reads_every_factor_next_to_dense_layers_and_shared_experts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, recwarn: pytest.WarningsRecorder, family: str
) -> None:
    """peft takes their names for those of experts, which have no adapters here."""
    torch.manual_seed(4)
    sizes = SIZES | {"num_experts_per_tok": 2, "moe_intermediate_size": 16} | MIXTURES[family]
    AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **sizes)).save_pretrained(tmp_path / "base")
    policy = adapted(tmp_path / "base", monkeypatch, torch.float32)
    assert policy.adapters is not None
    factors = {name: value.detach() for name, value in policy.adapters.factors().items()}
    assert any("shared_expert" in name for name in factors) and any(
        "layers.0.mlp" in name for name in factors
    )
    (tmp_path / "adapter").mkdir()
    policy.adapters.save(tmp_path / "adapter", factors)
    base = AutoModelForCausalLM.from_pretrained(tmp_path / "base", dtype=torch.float32)
    loaded = PeftModel.from_pretrained(base, str(tmp_path / "adapter")).eval()
    assert not [str(each.message) for each in recwarn if "adapter" in str(each.message).lower()]
    read = [value for name, value in loaded.named_parameters() if "lora_" in name]
    assert sum(value.numel() for value in read) == sum(value.numel() for value in factors.values())
    row = torch.tensor([ROWS[0]])
    with torch.no_grad():
        theirs = loaded(input_ids=row).logits[0, :-1].log_softmax(-1).gather(-1, row[0, 1:, None])[:, 0]
    found = policy.logprobs(lay_out([row_of_tokens(ROWS[0])]))
    torch.testing.assert_close(found, theirs, rtol=1e-5, atol=1e-5)
    config = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    stored = layout_of(tmp_path / "adapter" / FACTORS)[0]
    assert misfit(config, tensors_of(tmp_path / "base"), stored, RANK) == "", "the gateway accepts it"


def test_an_adapter_of_a_run_without_one_is_not_exported(tiny_model: Path, tmp_path: Path) -> None:
    config = tmp_path / "trainer.toml"
    config.write_text(CONFIG.format(work=tmp_path, model=tiny_model))
    trainer = RankTrainer.open(Settings.load(config))
    train(trainer, 1)
    trainer.save_checkpoint()
    code, output = export(config, "--out", tmp_path / "out", "--adapter")
    assert (code, "the run has no [model.lora]" in output) == (2, True)
    assert not (tmp_path / "out").exists()


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated")
@pytest.mark.parametrize("transport", ["filesystem", pytest.param("lora", marks=pytest.mark.long)])
async def test_engines_run_what_the_probe_was_computed_with(
    tiny_model: Path, tmp_path: Path, transport: str
) -> None:
    """An engine that samples from the published weights, or as peft reads the adapter on top of the first ones, passes the
    probe; with other weights, the version would be refused."""
    port = free_port()
    engine = {"launch": "external", "url": f"http://127.0.0.1:{port}"}
    engine |= {"transport": "lora"} if transport == "lora" else {}
    staleness = {"batch": 2, "eta": 1, "min_members": 1}
    async with (
        serve(create_fake_app(ModelEngine(str(tiny_model))), port),
        run_gateway(
            settings_for(tiny_model, tmp_path, engine=engine, staleness=staleness), in_process=False
        ) as gateway,
        episodes(gateway),
        within("the trainer is through", 120),
    ):
        settings = gateway_settings(gateway, tiny_model, tmp_path)
        lora = settings.model.model_copy(update={"lora": LoraSettings(rank=RANK)})
        optimizer = settings.optimizer.model_copy(update={"lr": 0.02})
        weights = settings.publish.model_copy(update={"transport": transport})
        settings = settings.model_copy(update={"model": lora, "optimizer": optimizer, "publish": weights})
        with Metrics(settings.run.dir, settings.run.steps) as metrics:
            loop = TrainingLoop(settings, RankTrainer.open(settings), gateway.admin, metrics)
            await loop.check_versions()
            await loop.train()
        assert (await gateway.admin.status())["version"] == 2
    version = settings.run.dir / "weights" / "v000002"
    assert (version / "adapter_config.json").exists() == (transport == "lora")
    assert (version / "model.safetensors").exists() == (transport != "lora")
    probe = json.loads((version / "manifest.json").read_text())["probe"]
    pairs = zip(probe["new_logprobs"], probe["parent_logprobs"], strict=True)
    assert max(abs(a - b) for new, old in pairs for a, b in zip(new, old, strict=True)) > 0.05
