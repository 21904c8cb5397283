"""`trainer sft`: its gradient is that of transformers' labels, its end a model that replies what it learned."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from torch.nn.functional import cross_entropy
from transformers import AutoModelForCausalLM, AutoTokenizer, GPT2Config, GPT2LMHeadModel
from typer.testing import CliRunner

from headgate.arrow import groups_to_arrow
from headgate.types import Episode, Group, TokenFlag
from tests.families.family import TEMPLATES, named, save
from tests.harness.gateways import run_gateway, settings_for
from tests.harness.models import save_model
from tests.harness.ranks import on_ranks
from tests.unit.trainer.trees import prompt, sampled
from trainer.cli import app
from trainer.commands.sft import sft
from trainer.config.settings import SupervisedSettings
from trainer.config.sft import SftSettings
from trainer.data import supervised
from trainer.data.supervised import Examples
from trainer.errors import ConfigError, NotFinite
from trainer.model import pretrained
from trainer.rank_trainer import RankTrainer

END = "<|im_end|>"
ANSWERS = {"color?": "red", "shape?": "an oval", "size?": "10"}


def talk(*turns: str) -> dict[str, Any]:
    roles = ("user", "assistant")
    return {"messages": [{"role": roles[i % 2], "content": text} for i, text in enumerate(turns)]}


TALKS = [
    talk("hello", "the one", "and?", "as before", "more", "no."),
    talk("hello", "the other"),
    talk("hello", "the one", "and?", "hell"),
    talk("what is it", "a longer answer than the others, by far"),
]


def write(path: Path, examples: Iterable[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(example) + "\n" for example in examples))
    return path


@pytest.fixture(scope="module")
def exact(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that computes in float64 throughout, with a tokenizer whose template appends only."""
    directory = tmp_path_factory.mktemp("exact")
    save(named("qwen2.5"), directory)
    torch.manual_seed(5)
    size = {"n_positions": 256, "n_embd": 32, "n_layer": 2, "n_head": 2}
    GPT2LMHeadModel(GPT2Config(vocab_size=300, **size, bos_token_id=0, eos_token_id=0)).save_pretrained(
        directory
    )
    return directory


@pytest.fixture(scope="module")
def chatty(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny Qwen3 with Qwen3's chat template."""
    directory = tmp_path_factory.mktemp("chatty")
    save_model(directory, 3, scale=1.0)
    (directory / "chat_template.jinja").write_text((TEMPLATES / "qwen3.jinja").read_text())
    return directory


def settings_of(
    model: Path, work: Path, data: Sequence[Path], tokens: int = 4096, **sft: Any
) -> SupervisedSettings:
    return SupervisedSettings.parse({
        "run": {"dir": work, "device": "cpu", "threads": 1, "deterministic": True},
        "model": {"path": model},
        "optimizer": {"lr": 3e-3, "grad_clip": float("inf")},
        "batch": {"tokens": tokens},
        "sft": {"data": [str(path) for path in data], **sft},
    })  # fmt: skip


def labeled(model: Path, examples: Iterable[dict[str, Any]]) -> tuple[torch.Tensor, torch.Tensor]:
    """Ids and labels of the whole texts, -100 but for what follows the assistant's mark up to its end; padded on the right."""
    tokenizer = AutoTokenizer.from_pretrained(model)
    rows, mark = [], "<|im_start|>assistant\n"
    for example in examples:
        text = tokenizer.apply_chat_template(example["messages"], tokenize=False)
        found = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
        spans, at = [], 0
        while (start := text.find(mark, at)) >= 0:
            at = text.index(END, start) + len(END)
            spans.append((start + len(mark), at))
        learned = [any(a <= s and e <= b for a, b in spans) for s, e in found["offset_mapping"]]
        rows.append((found["input_ids"], learned))
    longest = max(len(ids) for ids, _ in rows)
    ids, labels = torch.zeros(len(rows), longest, dtype=torch.int64), torch.full((len(rows), longest), -100)
    for i, (row, learned) in enumerate(rows):
        ids[i, : len(row)] = torch.tensor(row)
        labels[i, : len(row)] = torch.where(torch.tensor(learned), ids[i, : len(row)], -100)
    return ids, labels


@pytest.mark.parametrize("tokens", [16, 200, 4096])
def test_the_gradient_is_that_of_transformers_with_labels(exact: Path, tmp_path: Path, tokens: int) -> None:
    """In float64, with the loss's cross-entropy in float64 too, which transformers computes in float32."""
    data = write(tmp_path / "talks.jsonl", TALKS)
    settings = settings_of(exact, tmp_path, [data], tokens)
    examples = supervised.read(settings.sft, exact, 1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(pretrained.DTYPES, "float32", torch.float64)
        trainer = RankTrainer.open(settings)
    plain = AutoModelForCausalLM.from_pretrained(
        exact, dtype=torch.float64, attn_implementation="eager"
    ).eval()
    ids, labels = labeled(exact, TALKS)
    logits = plain(input_ids=ids).logits
    loss = cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), ignore_index=-100)
    loss.backward()
    theirs = {name: parameter.grad for name, parameter in plain.named_parameters()}
    value = loss.item()
    assert plain(input_ids=ids, labels=labels).loss.item() == pytest.approx(value, rel=1e-6)

    mean, count = trainer.likelihood(examples.learned)
    assert count == int((labels != -100).sum())
    assert -mean == pytest.approx(value, rel=1e-10)
    seen: dict[str, torch.Tensor] = {}
    (adamw,) = trainer.optimizer.parts
    adamw.register_step_pre_hook(
        lambda *_: seen.update({n: p.grad.clone() for n, p in trainer.model.named_parameters()})
    )
    measured = trainer.train(examples.learned)
    assert measured["loss"] == pytest.approx(value, rel=1e-10)
    assert measured["trained_tokens"] == count
    assert seen.keys() == theirs.keys()
    for name, gradient in seen.items():
        torch.testing.assert_close(gradient, theirs[name], rtol=1e-9, atol=1e-12)


def record(path: Path) -> list[Group]:
    """An export of episodes with flagged, hot, masked and cut tokens."""
    flags = [TokenFlag.GREEDY, TokenFlag.TRUNCATED, TokenFlag.CONSTRAINED | TokenFlag.LATE, 0]

    def episode(name: str, reward: float, start: int) -> Episode:
        nodes = (
            prompt(0, -1, 0, [1, 2, 3]),
            sampled(1, 0, 3, range(start, start + 4), flags=flags, temperature=0.7, logprob=-2.0, version=4),
            prompt(2, 1, 4, [4]),
            sampled(3, 2, 1, [start + 9], temperature=0.0, version=5),
            replace(sampled(4, 0, 2, [start + 10]), mask_reason="crashed_attempt"),
        )
        return Episode(name, reward, nodes)

    groups = [
        Group("a", "a", 0, (episode("good", 1.0, 20), episode("bad", 0.0, 40))),
        Group("b", "b", 0, (episode("fair", 0.5, 60), Episode("silent", 1.0, (prompt(0, -1, 0, [1]),)))),
    ]
    pq.write_table(groups_to_arrow(groups), path)
    return groups


@pytest.mark.parametrize(("least", "starts"), [(None, (20, 40, 60)), (0.5, (20, 60)), (1.0, (20,))])
def test_of_recorded_episodes_the_sampled_tokens_themselves_are_learned_at_temperature_1(
    exact: Path, tmp_path: Path, least: float | None, starts: tuple[int, ...]
) -> None:
    record(tmp_path / "x.parquet")
    settings = settings_of(exact, tmp_path, [tmp_path / "x.parquet"], min_reward=least)
    examples = supervised.read(settings.sft, exact, 1)
    trainer = RankTrainer.open(settings)
    plain = AutoModelForCausalLM.from_pretrained(exact, attn_implementation="eager").eval()
    total, count = 0.0, 0
    for start in starts:
        ids = torch.tensor([[1, 2, 3, start, start + 1, start + 2, start + 3, 4, start + 9]])
        with torch.no_grad():
            logprobs = plain(input_ids=ids).logits[0].log_softmax(-1)
        learned = [3, 4, 5, 6, 8]
        total += sum(float(logprobs[at - 1, ids[0, at]]) for at in learned)
        count += len(learned)
    mean, tokens = trainer.likelihood(examples.learned)
    assert tokens == count
    assert mean == pytest.approx(total / count, rel=1e-5)


def test_every_epoch_learns_all_that_is_not_held_out_once_each_in_another_order(
    exact: Path, tmp_path: Path
) -> None:
    data = write(tmp_path / "talks.jsonl", [talk("hi", str(i)) for i in range(11)])
    wanted = SftSettings(data=(data,), batch_size=4, epochs=3, held_out_share=0.2)
    examples = supervised.read(wanted, exact, 7)
    assert (len(examples.learned), len(examples.held_out), examples.steps_per_epoch, examples.steps) == (
        9,
        2,
        3,
        9,
    )
    held_out = {group.group_id for group in examples.held_out}
    orders = []
    for epoch in range(3):
        ids = [group.group_id for step in range(3) for group in examples.of_step(3 * epoch + step)]
        assert sorted(ids, key=int) == sorted({str(i) for i in range(11)} - held_out, key=int)
        orders.append(tuple(ids))
    assert len(set(orders)) == 3
    assert ids_of(supervised.read(wanted, exact, 7)) == ids_of(examples)


def ids_of(examples: Examples) -> list[str]:
    return [group.group_id for step in range(examples.steps) for group in examples.of_step(step)]


def test_what_is_too_long_is_left_out_and_counted(exact: Path, tmp_path: Path) -> None:
    data = write(tmp_path / "talks.jsonl", TALKS)
    lengths = [int((row != 0).sum()) for row in labeled(exact, TALKS)[0]]
    wanted = SftSettings(data=(data,), max_tokens=sorted(lengths)[1])
    examples = supervised.read(wanted, exact, 1)
    assert (len(examples.learned), examples.left_out) == (2, 2)
    with pytest.raises(ConfigError, match=r"nothing to learn \(4 examples are too long\)"):
        supervised.read(SftSettings(data=(data,), max_tokens=5), exact, 1)


def lines(work: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (work / "run" / "metrics.jsonl").open()]


def config_of(model: Path, work: Path, data: Path, **sft: Any) -> Path:
    path = work / "sft.toml"
    values = {"data": [str(data)], "batch_size": 3, **sft}
    path.write_text(
        f'[run]\ndir = "{work}/run"\ndevice = "cpu"\nthreads = 1\ndeterministic = true\n[model]\npath = "{model}"\n'
        "[optimizer]\nlr = 3e-3\n[checkpoint]\nkeep = 1\n[sft]\n"
        + "".join(f"{name} = {json.dumps(value)}\n" for name, value in values.items())
    )
    return path


def invoke(*arguments: object) -> tuple[int, str]:
    result = CliRunner(env={"COLUMNS": "200"}).invoke(app, ["sft", *map(str, arguments)])
    return result.exit_code, result.output


async def test_the_model_replies_what_it_learned_and_a_gateway_starts_with_it(
    chatty: Path, tmp_path: Path
) -> None:
    data = write(tmp_path / "talks.jsonl", [talk(q, a) for q, a in ANSWERS.items()])
    config = config_of(chatty, tmp_path, data, epochs=60)
    out = tmp_path / "tuned"
    status, output = invoke(config, "--out", out)
    assert status == 0, output
    tokenizer = AutoTokenizer.from_pretrained(out)
    model = AutoModelForCausalLM.from_pretrained(out).eval()
    for question, response in ANSWERS.items():
        messages = [{"role": "user", "content": question}]
        text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        ids = tokenizer(text, add_special_tokens=False, return_tensors="pt")["input_ids"]
        generated = model.generate(
            ids, max_new_tokens=40, do_sample=False, pad_token_id=256, eos_token_id=258
        )
        assert tokenizer.decode(generated[0, ids.shape[1] :]) == f"<think>\n\n</think>\n\n{response}{END}"
    losses = [line["loss"] for line in lines(tmp_path)]
    assert len(losses) == 60
    assert losses[0] > 3 > 0.05 > losses[-1]
    async with run_gateway(settings_for(out, tmp_path / "gateway")) as gateway:
        _, headers = await gateway.open("t")
        assert (await gateway.chat(headers, max_tokens=4)).status_code == 200
    status, output = invoke(config, "--out", out)
    assert (status, "exists; name another --out" in output) == (2, True)


class Stopped(Exception):
    """Stands for what ends a process."""


def test_a_run_that_was_stopped_goes_on_to_the_same_weights(
    chatty: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the second of three epochs; the held-out loss is that of an uninterrupted run too. So it is if its newest checkpoint is
    damaged: the steps since the one before are a function of their numbers."""
    data = write(tmp_path / "talks.jsonl", [talk(f"q{i}", f"a{i}" * (1 + i % 3)) for i in range(8)])
    found, records, train = [], [], RankTrainer.train

    def until_the_fifth(self: RankTrainer, groups: Sequence[Group]) -> dict[str, float]:
        if self.steps == 4:
            raise Stopped
        return train(self, groups)

    for name in ("through", "stopped", "damaged"):
        work = tmp_path / name
        work.mkdir()
        config = config_of(chatty, work, data, epochs=3, held_out_share=0.25, batch_size=2)
        settings = SupervisedSettings.load(config, ["checkpoint.every=1", "checkpoint.keep=2"])
        if name != "through":
            with monkeypatch.context() as patch:
                patch.setattr(RankTrainer, "train", until_the_fifth)
                patch.setattr(RankTrainer, "begin_checkpoint", RankTrainer.save_checkpoint)
                with pytest.raises(Stopped):
                    sft(settings)
        if name == "damaged":
            (work / "run" / "checkpoints" / "v000004" / "state.json").write_text("[1,2]")
        sft(settings)
        found.append(AutoModelForCausalLM.from_pretrained(work / "run" / "model").state_dict())
        records.append({line["step"]: line for line in lines(work)})
    for weights, record in zip(found[1:], records[1:], strict=True):
        assert all(torch.equal(found[0][name], weights[name]) for name in found[0])
        assert list(records[0]) == list(record) == list(range(10))
        for through, stopped in zip(records[0].values(), record.values(), strict=True):
            for name in ("loss", "held_out_loss", "lr", "epoch"):
                assert through.get(name) == stopped.get(name)
    assert (tmp_path / "damaged" / "run" / "checkpoints" / "v000004.damaged").is_dir()
    assert [step for step, line in records[0].items() if "held_out_loss" in line] == [0, 3, 6, 9]


def curve_of(model: Path, work: Path, data: Path) -> list[dict[str, float]] | None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(pretrained.DTYPES, "float32", torch.float64)
        settings = settings_of(model, work / "run", [data], 64, batch_size=3, epochs=2, held_out_share=0.25)
        sft(settings, work / "out")
    return lines(work)


@pytest.mark.long
def test_two_ranks_learn_what_one_learns(exact: Path, tmp_path: Path) -> None:
    data = write(tmp_path / "talks.jsonl", [talk(f"q{i}", f"a{i}" * (1 + i % 5)) for i in range(8)])
    one, two = tmp_path / "one", tmp_path / "two"
    (alone,) = on_ranks(1, curve_of, exact, one, data)
    together, _ = on_ranks(2, curve_of, exact, two, data)
    assert len(alone) == len(together) == 5
    for ours, theirs in zip(together, alone, strict=True):
        assert ours.keys() == theirs.keys()
        for name in ours.keys() & {"loss", "held_out_loss", "grad_norm", "trained_tokens"}:
            assert ours[name] == pytest.approx(theirs[name], rel=1e-9)
    weights = [AutoModelForCausalLM.from_pretrained(d / "out").state_dict() for d in (one, two)]
    assert all(torch.allclose(weights[0][name], weights[1][name], atol=1e-6) for name in weights[0])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (["algorithm.type=grpo"], "supervised fine-tuning has no algorithm"),
        (['sft.data=["x.csv"]'], "neither a .jsonl nor a .parquet"),
        (['sft.data=["no.jsonl"]'], "[sft] data: no.jsonl does not exist"),
        (["sft.data=[]"], "sft.data"),
        (["gateway.url=http://x"], "gateway"),
    ],
)
def test_wrong_settings_are_refused_by_name(
    chatty: Path, tmp_path: Path, changes: list[str], message: str
) -> None:
    config = config_of(chatty, tmp_path, write(tmp_path / "talks.jsonl", TALKS))
    status, output = invoke(config, *(part for change in changes for part in ("--set", change)))
    assert (status, message in " ".join(output.split())) == (2, True), output


def test_steps_that_are_not_finite_end_the_run_without_a_model(
    chatty: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = settings_of(chatty, tmp_path / "run", [write(tmp_path / "talks.jsonl", TALKS)], batch_size=1)
    monkeypatch.setattr("trainer.model.parallel.divide_and_clip", lambda *_: float("nan"))
    with pytest.raises(NotFinite, match="3 steps in a row"):
        sft(settings)
    assert not (tmp_path / "run" / "model").exists()
    assert np.all([line["skipped_steps"] for line in lines(tmp_path)])
