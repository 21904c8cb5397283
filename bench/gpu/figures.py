"""Rates, and the share of the GPU's arithmetic that was useful (MFU). Pure.

The useful arithmetic of a step is that of its tokens, each path's prefix once, without padding and without what activation
checkpointing computes again. A multiplication of matrices has 2 operations for each weight and token, forwards, and twice as many
backwards (Kaplan et al. 2020, arXiv 2001.08361, section 2.1; Chowdhery et al. 2022, arXiv 2204.02311, appendix B), so

    operations = 6 x W x computed + 6 x V x H x trained + 12 x L x A x D x pairs
    MFU        = operations / seconds / the GPU's bf16 peak without sparsity

with W the weights of the layers' matrices, V x H those of the output head, which sees trained tokens alone, L layers, A heads of
width D, and `pairs` the pairs of tokens of which one sees the other: n (n + 1) / 2 for a row of n. (Appendix B takes n x n.)

prime-rl counts otherwise (`src/prime_rl/trainer/perf.py`): all tokens through the head, n x n pairs, and H in place of A x D. Its
own figure is held against the same formula, `mfu_as_prime_rl_counts`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any

PUBLISHED = {
    "tokens_per_s": 11_896.0,
    "mfu_as_prime_rl_counts": 0.1108,
    "memory_gib": 12.53,
    "step_s": 1.992,
    "what": "Qwen3-0.6B, all weights, two rows of 16,384 tokens a step, one H100 80GB HBM3, FlashAttention 3, recomputation",
    "source": "prime-rl benchmarks/baselines/benchmark-1xh100-Qwen--Qwen3-0.6B-rl-full-1gpu-Recompute-flash_attention_3-16384"
    "-cp1-ep1.json, 2026-01-15",
}
"""The figures that prime-rl publishes for its trainer alone."""
_PEAKS = (
    ("A100", 312e12),
    ("H100 NVL", 835e12),
    ("H100 PCIe", 756e12),
    ("H100", 989e12),
    ("H200", 989e12),
    ("GH200", 989e12),
    ("B200", 2250e12),
    ("L40S", 362e12),
)
"""bf16 operations a second without sparsity, by NVIDIA's data sheets; the first name that is part of the GPU's counts."""


def peak_of(gpu: str) -> float | None:
    """Return a GPU's peak in bf16; None for one that is not in the table."""
    return next((peak for name, peak in _PEAKS if name in gpu), None)


def layer_weights(config: Mapping[str, Any]) -> int:
    """Return the weights of all layers' matrices, of a dense decoder with grouped queries and a gated MLP."""
    hidden, width = config["hidden_size"], config["head_dim"]
    heads, shared = config["num_attention_heads"], config["num_key_value_heads"]
    attention = hidden * width * (2 * heads + 2 * shared)
    return int(config["num_hidden_layers"] * (attention + 3 * hidden * config["intermediate_size"]))


def pairs_of(record: Mapping[str, float]) -> float:
    """Return a lower bound on the pairs of tokens in a step whose groups share a question, taking replies to be equally long.

    Replies of different lengths have more pairs, so what follows from it is too small, if anything.
    """
    prompt = max(0.0, record["computed_tokens"] - record["trained_tokens"]) / max(1.0, record["groups"])
    reply = record["trained_tokens"] / max(1.0, record["episodes"])
    each = reply * prompt + reply * (reply + 1) / 2
    return record["groups"] * prompt * (prompt + 1) / 2 + record["episodes"] * each


def operations(config: Mapping[str, Any], record: Mapping[str, float]) -> float:
    """Return the useful operations of a step."""
    head = config["vocab_size"] * config["hidden_size"]
    scores = config["num_hidden_layers"] * config["num_attention_heads"] * config["head_dim"]
    return (
        6.0 * layer_weights(config) * record["computed_tokens"]
        + 6.0 * head * record["trained_tokens"]
        + 12.0 * scores * pairs_of(record)
    )


def operations_as_prime_rl_counts(config: Mapping[str, Any], tokens: float, row: int) -> float:
    """Return the operations of `tokens` tokens in rows of one length, by the formula of prime-rl's published figure."""
    matrices = layer_weights(config) + config["vocab_size"] * config["hidden_size"]
    attention = 12 * config["num_hidden_layers"] * config["hidden_size"] * row
    return tokens * float(6 * matrices + attention)


def share(operations: float, seconds: float, peak: float | None) -> float | None:
    """Return the share of the peak; None where it is not known."""
    return operations / seconds / peak if peak else None


def alone(
    config: Mapping[str, Any], records: Sequence[Mapping[str, float]], row: int, peak: float | None
) -> dict[str, Any]:
    """Return the trainer alone: medians over steps."""
    seconds = median(record["seconds"] for record in records)
    typical = records[-1]
    counted = operations_as_prime_rl_counts(config, typical["computed_tokens"], row)
    return {
        "tokens_per_s": typical["computed_tokens"] / seconds,
        "mfu": share(operations(config, typical), seconds, peak),
        "mfu_as_prime_rl_counts": share(counted, seconds, peak),
        "memory_gib": typical.get("memory_peak_gib"),
        "memory_reserved_gib": typical.get("memory_reserved_gib"),
        "step_s": seconds,
        "computed_tokens": typical["computed_tokens"],
    }


def next_to_engine(
    config: Mapping[str, Any], records: Sequence[Mapping[str, Any]], peak: float | None
) -> dict[str, Any]:
    """Summarize training next to an engine: the rate of computing, that of the whole run, and seconds by part."""
    computing = sum(record["seconds/compute"] for record in records)
    total = sum(record["seconds/total"] for record in records)
    tokens = sum(record["computed_tokens"] for record in records)
    parts = dict.fromkeys(key for record in records for key in record if key.startswith("seconds/"))
    return {
        "steps": len(records),
        "tokens_per_s": tokens / total,
        "tokens_per_s_of_compute": tokens / computing,
        "trained_tokens": sum(record["trained_tokens"] for record in records),
        "mfu_of_compute": share(sum(operations(config, record) for record in records), computing, peak),
        "memory_gib": records[-1].get("memory_peak_gib"),
        "seconds": {
            key.removeprefix("seconds/"): median(record.get(key, 0.0) for record in records) for key in parts
        },
        "logprob_gap_mean": max(
            (r["logprob_gap_mean"] for r in records if "logprob_gap_mean" in r), default=None
        ),
        "per_step": [_of_step(record) for record in records],
    }


def _of_step(record: Mapping[str, Any]) -> dict[str, Any]:
    keys = ("version", "reward_mean", "loss", "grad_norm", "computed_tokens", "trained_tokens")
    return {key: record.get(key) for key in keys} | {
        key: value for key, value in record.items() if key.startswith("seconds/")
    }


def updates(records: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the updates' figures: the median seconds of each part over versions and engines, and the probes' results."""
    reports = [report for record in records for report in record["report"]]
    parts = dict.fromkeys(part for report in reports for part in report["seconds"])
    probes = [report["probe"] for report in reports if report["probe"]]
    return {
        "versions": len(records),
        "live": sum(record["state"] == "live" for record in records),
        "seconds": {
            part: median(r["seconds"][part] for r in reports if part in r["seconds"]) for part in parts
        },
        "probes": len(probes),
        "probe_gap_max": max((probe["gap"] for probe in probes), default=None),
        "probe_verdicts": sorted({probe["verdict"] for probe in probes}),
    }
