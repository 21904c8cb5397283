"""What the trainer makes of a family: accepted or refused, how exact, and whether what it writes is read back.

A tiny model with large random weights is written as a checkpoint. Its log-probabilities and gradients, packed together and cut in
two, are held against transformers' eager attention on each row alone; the published bfloat16 weights against the checkpoint, bit
by bit; adapters with random factors against what peft makes of their file. One thread and fixed seeds: the same on every run.
"""

from __future__ import annotations

import math
import tempfile
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor
from transformers import AutoConfig
from transformers.utils import logging

from bench.families.configs import Family
from bench.families.expert_ranks import RANKS, expert_ranks_gap
from bench.families.replay import replay_gap
from trainer.config.settings import Settings
from trainer.data.packing import lay_out
from trainer.data.tree import Row, row_of_tokens
from trainer.errors import ConfigError
from trainer.model import loading, recurrent, rope
from trainer.model.expert_parallel import modules_of
from trainer.model.policy import Attention, Policy
from trainer.publish.filesystem import WeightsDirectory
from trainer.rank_trainer import RankTrainer

_EXACT = 1e-4
"""Nats: how far adapters that peft has read may be from those that were written, in float32, if the model itself is as exact."""
_NOISES = 10
"""How far they may be if it is not, as a multiple of its gap."""


@dataclass(slots=True)
class Found:
    """The findings of one family; None for what was not measured."""

    verdict: str = "refused"
    """With `attention = "spans"`."""
    why: str | None = None
    """The trainer's reason for a refusal, and the setting that works, if one does."""
    rows: str = "refused"
    """The verdict with `attention = "rows"`."""
    gap: float | None = None
    """Nats, the largest over all tokens, with spans if they are accepted, else with rows."""
    gradient: float | None = None
    """The largest relative error of a weight's gradient."""
    export: bool | None = None
    adapter: bool | None = None
    replay_gap: float | None = None
    """Nats, of a mixture, with router replay; None if it cannot be replayed too."""
    packed_gap: float | None = None
    """Nats, of a model whose layers have a state, between rows that are packed and rows one by one."""
    expert_ranks_gap: float | None = None
    """Of a mixture, between two ranks that share its experts and one (`expert_ranks.py`); None if that is refused."""

    def to_json(self) -> dict[str, Any]:
        """Return the keys that programs read."""
        return {key: value for key, value in asdict(self).items() if key != "rows"}


def measure(family: Family) -> Found:
    """Measure one family. What fails in transformers itself, or in peft, is a finding too."""
    found = Found()
    with _quiet(), tempfile.TemporaryDirectory() as work:
        path = Path(work)
        try:
            reference = _written(family, path)
        except Exception as error:  # of a library, for a config that it does not take
            found.why = f"transformers does not build it: {_reason(error)}"
            return found
        spans = _compare(found, family, path, reference, "spans")
        rows = _compare(found, family, path, reference, "rows")
        found.verdict, found.rows = ("refused" if each is None else "accepted" for each in (spans, rows))
        if spans is not None and rows is not None and recurrent.layers_of(spans.model):
            found.packed_gap = _packed_gap(spans, rows)
        if found.gap is not None:
            way: Attention = "spans" if found.verdict == "accepted" else "rows"
            found.export = _is_exported(family, path, way)
            found.adapter = _is_adapted(family, path, way, max(_EXACT, _NOISES * found.gap))
            found.replay_gap = _replay_gap(family, path, reference, way)
            found.expert_ranks_gap = _expert_ranks_gap(family, path, way, spans or rows)
    return found


def _compare(found: Found, family: Family, path: Path, reference: Any, way: Attention) -> Policy | None:
    """Return the policy if the trainer takes the family with this attention; gaps are those of the first that it takes."""
    try:
        trainer = _trainer(family, path / "model", path / way, attention=way)
    except Exception as error:  # whatever it is, a run would end with it
        found.why = found.why or _reason(error)
        return None
    if found.gap is None:
        found.gap, found.gradient = _gaps(trainer.policy, reference)
    return trainer.policy


def _packed_gap(spans: Policy, rows: Policy) -> float:
    """Return the largest gap of a log-probability between rows that are packed and rows one by one."""
    packed, single = (p.logprobs(lay_out(_rows(), share_prefixes=p.shares_prefixes)) for p in (spans, rows))
    return float((packed - single).abs().max())


def _written(family: Family, path: Path) -> Any:
    """Write the checkpoint in float32 (`model`) and bfloat16 (`half`); return the model as transformers loads it."""
    config = AutoConfig.for_model(family.model_type, **family.sizes)
    kind = loading.kind_of(config)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = kind.from_config(config, attn_implementation="eager").float().eval()
    _randomize(model)
    model.save_pretrained(path / "model")
    kind.from_pretrained(path / "model", dtype=torch.bfloat16).save_pretrained(path / "half")
    fixed = rope.pinned(AutoConfig.from_pretrained(path / "model"), family.max_model_len)
    options = {"config": fixed, "attn_implementation": "eager", "dtype": torch.float32}
    return kind.from_pretrained(path / "model", **options).eval()


@torch.no_grad()
def _randomize(model: Any) -> None:
    """Set weights by which distributions are far from uniform, and every bias and norm counts."""
    generator = torch.Generator().manual_seed(0)
    for name, weight in model.named_parameters():
        noise = torch.randn(weight.shape, generator=generator)
        if weight.ndim >= 2:
            weight.copy_(noise * (1.2 / math.sqrt(weight.shape[-1])))
        else:
            weight.add_(noise * (0.1 if "norm" in name.lower() or "ln_" in name else 0.3))
    for name, buffer in model.named_buffers():
        if "correction_bias" in name:
            buffer.copy_(0.3 * torch.randn(buffer.shape, generator=generator))


def _settings(family: Family, path: Path, work: Path, expert: int = 1, **model: Any) -> Settings:
    return Settings.parse({
        "run": {"dir": work, "steps": 1, "device": "cpu", "threads": 1},
        "gateway": {"url": "http://127.0.0.1:1"},
        "model": {"path": path, "max_model_len": family.max_model_len, **model},
        "optimizer": {"lr": 1e-3},
        "parallel": {"expert": expert},
    })  # fmt: skip


def _trainer(family: Family, path: Path, work: Path, **model: Any) -> RankTrainer:
    return RankTrainer.open(_settings(family, path, work, **model))


def _gaps(policy: Policy, reference: Any) -> tuple[float, float]:
    """Return the largest gap of a log-probability in nats, and the largest relative error of a weight's gradient."""
    rows = _rows()
    theirs = _plain(reference, rows)
    factors = [torch.sin(0.7 * torch.arange(len(each)) + len(each)) for each in theirs]
    (torch.cat(theirs) * torch.cat(factors)).sum().backward()
    wanted = {name: weight.grad for name, weight in reference.named_parameters() if weight.grad is not None}
    gap = error = 0.0
    for cut in ([0, len(rows)], [0, 2, len(rows)]):
        policy.model.zero_grad()
        for start, stop in pairwise(cut):
            micro = lay_out(rows[start:stop], share_prefixes=policy.shares_prefixes).to("cpu", torch.float32)
            with policy.at_work(micro):
                ours = policy(micro)[0]
                (ours * torch.cat(factors[start:stop])).sum().backward()
            gap = max(gap, float((ours - torch.cat(theirs[start:stop])).detach().abs().max()))
        error = max(error, _error(policy.model, wanted))
    return gap, error


def _error(model: Any, wanted: dict[str, Tensor]) -> float:
    """Return the largest difference of gradients, relative to the tensor's largest; rounding noise does not count."""
    floor = 1e-2 * max(float(gradient.abs().max()) for gradient in wanted.values())
    weights = {name: weight for name, weight in model.named_parameters() if weight.requires_grad}
    errors = [0.0]
    for name, gradient in wanted.items():
        if name in weights:
            found = weights[name].grad
            gap = gradient if found is None else found - gradient
            errors.append(float(gap.abs().max()) / max(float(gradient.abs().max()), floor))
    return max(errors)


def _rows() -> list[Row]:
    """Return six rows of 12 to 95 tokens, in an order in which neighbors share most."""
    generator = torch.Generator().manual_seed(7)

    def tokens(n: int) -> list[int]:
        return torch.randint(3, 250, (n,), generator=generator).tolist()

    trunk = tokens(25)
    first = trunk + tokens(50)
    paths = (first, first + tokens(20), first[:45] + tokens(20), trunk + tokens(40), trunk[:10] + tokens(30))
    return [row_of_tokens(path, episode_id=str(n)) for n, path in enumerate((*paths, tokens(12)))]


def _plain(model: Any, rows: list[Row]) -> list[Tensor]:
    found = []
    for row in rows:
        ids = torch.tensor(row.ids.tolist())
        logits = model(input_ids=ids[None], use_cache=False).logits[0, :-1].float()
        found.append(logits.log_softmax(-1).gather(-1, ids[1:, None])[:, 0])
    return found


def _is_exported(family: Family, path: Path, way: Attention) -> bool:
    """Return whether an untrained bfloat16 model is published with its checkpoint's names and numbers.

    A tensor that the model keeps in float32 is published in float32, whatever the checkpoint stores.
    """
    trainer = None
    try:
        trainer = _trainer(family, path / "half", path / "exported", attention=way, dtype="bfloat16")
        weights = WeightsDirectory(path / "weights", path / "half")
        found = _stored(weights.write(1, 0, trainer.model, None, trainer.gather_weights()))
    except Exception:  # then it is not published
        return False
    finally:
        if trainer is not None:
            trainer.ranks.close()
    wanted = _stored(path / "half")
    return found.keys() == wanted.keys() and all(
        found[name].dtype in (value.dtype, torch.float32) and torch.equal(found[name].float(), value.float())
        for name, value in wanted.items()
    )


def _is_adapted(family: Family, path: Path, way: Attention, exact: float) -> bool:
    """Return true if peft reads adapters with random factors as the model that was trained, up to `exact` nats."""
    # Seconds to import.
    from peft import PeftModel

    try:
        trainer = _trainer(family, path / "model", path / "adapted", attention=way, lora={"rank": 4})
        generator = torch.Generator().manual_seed(3)
        with torch.no_grad():
            for weight in trainer.model.parameters():
                if weight.requires_grad:
                    weight.copy_(0.1 * torch.randn(weight.shape, generator=generator))
        (path / "adapter").mkdir()
        assert trainer.policy.adapters is not None
        trainer.policy.adapters.save(path / "adapter", trainer.gather_adapter())
        config = rope.pinned(AutoConfig.from_pretrained(path / "model"), family.max_model_len)
        base = loading.kind_of(config).from_pretrained(
            path / "model", config=config, attn_implementation="eager", dtype=torch.float32
        )
        with torch.no_grad():
            theirs = torch.cat(_plain(PeftModel.from_pretrained(base, path / "adapter").eval(), _rows()))
        ours = trainer.policy.logprobs(lay_out(_rows(), share_prefixes=trainer.policy.shares_prefixes))
    except Exception:  # no adapter, or one that peft does not read
        return False
    return float((ours - theirs).abs().max()) <= exact


def _replay_gap(family: Family, path: Path, reference: Any, way: Attention) -> float | None:
    """Return how exact router replay is; None for a family that is refused with it. Changes the reference."""
    try:
        trainer = _trainer(family, path / "model", path / "replayed", attention=way, router_replay=True)
    except ConfigError:
        return None
    return replay_gap(trainer.policy, reference, _rows())


def _expert_ranks_gap(family: Family, path: Path, way: Attention, alone: Policy | None) -> float | None:
    """Return how exact expert parallelism is; None for a family that is refused with it."""
    assert alone is not None
    try:
        modules_of(alone.model, RANKS)
    except ConfigError:
        return None
    settings = _settings(family, path / "model", path / "shared", RANKS, attention=way)
    return expert_ranks_gap(alone, settings, pass_of)


def pass_of(policy: Policy) -> Tensor:
    """Return the log-probabilities of rows that are packed together, and add a gradient."""
    micro = lay_out(_rows(), share_prefixes=policy.shares_prefixes).to("cpu", torch.float32)
    with policy.at_work(micro):
        found: Tensor = policy(micro)[0]
        found.pow(2).sum().backward()
    return found


def _stored(directory: Path) -> dict[str, Tensor]:
    found: dict[str, Tensor] = {}
    for file in sorted(directory.glob("*.safetensors")):
        with safe_open(file, framework="pt") as opened:
            found |= {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118 (not a mapping)
    return found


def _reason(error: Exception) -> str:
    text = (str(error).strip().splitlines() or [""])[0].removeprefix("[model] path: ")
    return text if type(error).__module__.startswith("trainer.") else f"{type(error).__name__}: {text}"


@contextmanager
def _quiet() -> Iterator[None]:
    """Silence the warnings and bars of libraries, which would bury the matrix."""
    before = logging.get_verbosity()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.set_verbosity(before)
