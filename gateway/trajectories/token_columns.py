"""The tokens of an episode by column: text, log-probability, version, flags, and why each is not trained. Pure, but for decoding.

A column has the tokens of all nodes, node by node; a node has the position of its first token. The trainer's figures are read
by `token_figures`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

from gateway.trajectories.lineage import lineages
from headgate.types import Node, TokenFlag

PROMPT = "prompt"
"""The reason why tokens are not trained that no model sampled."""
FLAG_NAMES = {str(int(flag)): flag.name for flag in TokenFlag if flag}


class Texts(Protocol):
    """Decodes one run of tokens: `step` each, then `end` once."""

    def step(self, token: int) -> str:
        """Return the text that is complete so far."""
        ...

    def end(self) -> str:
        """Return the rest of the text."""
        ...


class Vocabulary(Protocol):
    """The part of a model's tokenizer that columns need."""

    @property
    def control_ids(self) -> frozenset[int]:
        """The control tokens, such as `<|im_start|>`."""
        ...

    def text_stream(self) -> Texts:
        """Return a decoder for one run of tokens."""
        ...


@dataclass(slots=True)
class TokenColumns:
    """Every list but `nodes`, `control` and `mask_reasons` has one entry a token."""

    nodes: list[dict[str, Any]] = field(default_factory=list)
    count: int = 0
    text: list[str] = field(default_factory=list)
    ids: list[int] = field(default_factory=list)
    control: list[int] = field(default_factory=list)
    """The positions of control tokens."""
    logprob: list[float | None] = field(default_factory=list)
    """None: a prompt's, or no usable one."""
    version: list[int] = field(default_factory=list)
    """-1: a prompt's."""
    flags: list[int] = field(default_factory=list)
    mask: list[int] = field(default_factory=list)
    """An index into `mask_reasons`."""
    mask_reasons: list[str] = field(default_factory=lambda: ["", PROMPT])


def token_columns(nodes: Sequence[Node], vocabulary: Vocabulary, first: int = 0) -> TokenColumns:
    """Return the columns of the nodes from the index `first` on. `nodes`: all of the tree."""
    found, lines, control = TokenColumns(), lineages(nodes), vocabulary.control_ids
    for node in nodes:
        if node.index < first:
            continue
        ids = node.ids.tolist()
        found.nodes.append(_described(node, found.count, lines.get(node.index)))
        found.control += [found.count + i for i, token in enumerate(ids) if token in control]
        found.text += _texts(ids, vocabulary)
        found.ids += ids
        _measured(found, node)
        found.count += len(ids)
    return found


def _described(node: Node, start: int, line: int | None) -> dict[str, Any]:
    return {
        "index": node.index,
        "parent": node.parent,
        "at": node.at,
        "sampled": node.sampled,
        "start": start,
        "tokens": len(node.ids),
        "call_id": node.call_id,
        "lineage": line,
        "mask_reason": node.mask_reason,
        "finish_reason": node.finish_reason,
        "reward": node.reward,
        "temperature": node.temperature,
    }


def _texts(ids: Sequence[int], vocabulary: Vocabulary) -> list[str]:
    """Return the text of each token; a character that several share is with the last of them."""
    stream = vocabulary.text_stream()
    found = [stream.step(token) for token in ids]
    if found:
        found[-1] += stream.end()
    return found


def _measured(found: TokenColumns, node: Node) -> None:
    if not node.sampled:
        n = len(node.ids)
        found.logprob += [None] * n
        found.version += [-1] * n
        found.flags += [0] * n
        found.mask += [1] * n
        return
    rounded = np.round(node.logprobs.astype(np.float64), 5)
    found.logprob += [value if np.isfinite(value) else None for value in rounded.tolist()]
    found.version += node.versions.tolist()
    found.flags += (flags := node.flags.tolist())
    if node.mask_reason:
        found.mask += [code(found.mask_reasons, node.mask_reason)] * len(flags)
    else:
        codes = {bits: code(found.mask_reasons, first_flag(bits)) for bits in set(flags)}
        found.mask += [codes[bits] for bits in flags]


def first_flag(bits: int) -> str:
    """Return the first of some flags, as a word; empty: none."""
    return next((str(flag.name).lower() for flag in TokenFlag if flag & bits), "")


def code(words: list[str], word: str) -> int:
    """Return the place of a word, which is added if it is new."""
    if word not in words:
        words.append(word)
    return words.index(word)


def depths(nodes: Sequence[Node]) -> Mapping[int, int]:
    """Return the number of tokens before each node on its path, by the node's index."""
    found: dict[int, int] = {}
    for node in nodes:
        found[node.index] = found.get(node.parent, 0) + node.at
    return found
