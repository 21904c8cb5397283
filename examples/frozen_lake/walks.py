"""Walks over lakes in one process: the demo's model, tokenizer and environment without an engine, a gateway or an agent's client.

For comparisons: the same seed gives the same run, and nothing depends on the machine's pace. Prompts and replies have the tokens
that the gateway records. One thing differs from the agent: a reply without a valid call ends the walk.
"""

from __future__ import annotations

import random
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from renderers import Qwen3Renderer
from tokenizers import Tokenizer
from torch.nn.utils.rnn import pad_sequence
from transformers import DynamicCache, PreTrainedTokenizerFast

from examples.frozen_lake.agent import MAX_STEPS, TOOL, opening
from examples.frozen_lake.lake import MOVES, Crossing
from headgate.types import Episode, Node
from trainer.data.conversations import END
from trainer.model import pretrained

LONGEST_REPLY = 16
_CALL = re.compile(r'<tool_call>\s*\{"name": "move", "arguments": \{"direction": "(\w+)"\}\}\s*</tool_call>')


@dataclass(slots=True)
class Walk:
    """One episode so far: the tokens in turns, those of the environment and those of the model."""

    crossing: Crossing
    turns: list[list[int]]
    """The first is a prompt, and every second one was sampled."""
    logprobs: list[list[float]] = field(default_factory=list)
    """In nats, of each sampled turn."""
    gave_up: bool = False
    failed: bool = False
    """A tool call of it failed, by no fault of the model."""

    @property
    def ids(self) -> list[int]:
        """All tokens."""
        return [token for turn in self.turns for token in turn]

    @property
    def over(self) -> bool:
        """True if the agent calls the model no more."""
        return self.gave_up or self.failed or self.crossing.over or len(self.logprobs) == MAX_STEPS

    def episode(self, name: str, version: int) -> Episode:
        """Return the walk as the trainer sees it, sampled by one version at temperature 1."""
        nodes = []
        for index, turn in enumerate(self.turns):
            logprobs = self.logprobs[index // 2] if index % 2 else []
            parts = (np.array(logprobs, np.float32), np.full(len(logprobs), version, np.int32))
            at = len(self.turns[index - 1]) if index else 0
            flags = np.zeros(len(logprobs), np.uint8)
            nodes.append(Node(index, index - 1, at, bool(index % 2), np.array(turn, np.int32), *parts, flags))
        reward = self.crossing.reward
        return Episode(name, reward, tuple(nodes), components={"reward": reward})


class Reading:
    """The rows that a model has read, each token once, and what it expects next."""

    def __init__(self, model: Any, rows: Sequence[Sequence[int]]) -> None:
        self._model = model
        self._cache = DynamicCache(config=model.config)
        lengths = torch.tensor([len(row) for row in rows])
        ids = pad_sequence([torch.tensor(row) for row in rows], batch_first=True)
        self._mask = (torch.arange(ids.shape[1]) < lengths[:, None]).long()
        self.logits = self._read(ids, lengths - 1)
        """Logits of each row's next token, shape (rows, vocabulary), float32."""

    def go_on(self, rows: torch.Tensor, tokens: torch.Tensor) -> None:
        """Keep these rows, and reads one more token of each."""
        self._cache.batch_select_indices(rows)
        self._mask = torch.cat([self._mask[rows], torch.ones(len(rows), 1, dtype=torch.int64)], 1)
        self.logits = self._read(tokens[:, None], torch.zeros(len(rows), dtype=torch.int64))

    def _read(self, ids: torch.Tensor, last: torch.Tensor) -> torch.Tensor:
        """Return the logits behind each row's token at `last`. Short rows are padded behind it, where nothing looks."""
        places = (self._mask.cumsum(1) - 1)[:, -ids.shape[1] :]
        hidden = self._model.get_decoder()(
            input_ids=ids,
            attention_mask=self._mask,
            position_ids=places,
            past_key_values=self._cache,
            use_cache=True,
        ).last_hidden_state
        logits: torch.Tensor = self._model.get_output_embeddings()(hidden[torch.arange(len(last)), last])
        return logits


class Walker:
    """A model that walks; its weights are its own, and are replaced by `take`."""

    def __init__(self, model: Path, seed: int, fails: float = 0.0) -> None:
        """Load a model. `fails`: the share of tool calls that fail, which ends their walks; greedy walks are spared."""
        self._fails = fails
        self._failures = random.Random(f"failures {seed}")
        self._tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
        fast = PreTrainedTokenizerFast(
            tokenizer_object=self._tokenizer, eos_token=END, pad_token="<|endoftext|>"
        )
        self._renderer = Qwen3Renderer(fast)
        self._end = self._tokenizer.token_to_id(END)
        self._model: Any = pretrained.load(model)
        self._random = torch.Generator().manual_seed(seed)

    def load_weights(self, model: Any) -> None:
        """Load the weights of another model."""
        self._model.load_state_dict(model.state_dict())

    def walk(self, lakes: Sequence[Sequence[str]], *, greedy: bool = False) -> list[Walk]:
        """Walk each map once, all concurrently."""
        walks = [self._begin(Crossing(lake)) for lake in lakes]
        while under_way := [walk for walk in walks if not walk.over]:
            self._sample(under_way, greedy)
            for walk in under_way:
                walk.failed = not greedy and self._failures.random() < self._fails
                if not walk.failed:
                    self._act(walk)
        return walks

    def _begin(self, crossing: Crossing) -> Walk:
        prompt = self._renderer.render_ids(opening(crossing), tools=[TOOL], add_generation_prompt=True)
        return Walk(crossing, [list(prompt)])

    @torch.inference_mode()
    def _sample(self, walks: Sequence[Walk], greedy: bool) -> None:
        """Sample the next turn of each walk."""
        sampling = list(walks)
        for walk in sampling:
            walk.turns.append([])
            walk.logprobs.append([])
        reading = Reading(self._model, [walk.ids for walk in sampling])
        for _ in range(LONGEST_REPLY):
            logprobs = reading.logits.log_softmax(-1)
            tokens = (
                logprobs.argmax(-1)
                if greedy
                else torch.multinomial(logprobs.exp(), 1, generator=self._random)[:, 0]
            )
            chosen = logprobs.gather(-1, tokens[:, None])[:, 0]
            for walk, token, logprob in zip(sampling, tokens.tolist(), chosen.tolist(), strict=True):
                walk.turns[-1].append(token)
                walk.logprobs[-1].append(logprob)
            going = [row for row, walk in enumerate(sampling) if walk.turns[-1][-1] != self._end]
            if not going:
                return
            sampling = [sampling[row] for row in going]
            reading.go_on(torch.tensor(going), tokens[going])

    def _act(self, walk: Walk) -> None:
        """Execute the model's call, as the agent would. Without a call the walk ends."""
        text = self._tokenizer.decode(walk.turns[-1], skip_special_tokens=False)
        called = _CALL.search(text)
        if called is None or called[1] not in MOVES:
            walk.gave_up = True
            return
        result = {"role": "tool", "tool_call_id": "call", "content": walk.crossing.move(called[1])}
        if walk.over:
            return
        before = [token for turn in walk.turns[:-1] for token in turn]
        bridged = self._renderer.bridge_to_next_turn(before, walk.turns[-1], [result], tools=[TOOL])
        if bridged is None:
            raise ValueError("the template does not go on after a tool's answer")
        walk.turns.append(list(bridged.token_ids)[len(walk.ids) :])
