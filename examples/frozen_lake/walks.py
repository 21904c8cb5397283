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
from transformers import PreTrainedTokenizerFast

from examples.frozen_lake.agent import MAX_STEPS, TOOL, opening
from examples.frozen_lake.lake import MOVES, Crossing
from gateway.types import Episode, Node
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
        """The walk as the trainer sees it, sampled by one version at temperature 1."""
        nodes = []
        for index, turn in enumerate(self.turns):
            logprobs = self.logprobs[index // 2] if index % 2 else []
            parts = (np.array(logprobs, np.float32), np.full(len(logprobs), version, np.int32))
            at = len(self.turns[index - 1]) if index else 0
            flags = np.zeros(len(logprobs), np.uint8)
            nodes.append(Node(index, index - 1, at, bool(index % 2), np.array(turn, np.int32), *parts, flags))
        return Episode(name, self.crossing.reward, tuple(nodes))


class Walker:
    """A model that walks; its weights are its own, and are replaced by `take`."""

    def __init__(self, model: Path, seed: int, fails: float = 0.0) -> None:
        """`fails`: the share of tool calls that fail, which ends their walks; greedy walks are spared."""
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

    def take(self, model: Any) -> None:
        """Takes over the weights of another model."""
        self._model.load_state_dict(model.state_dict())

    def walk(self, lakes: Sequence[Sequence[str]], *, greedy: bool = False) -> list[Walk]:
        """One walk on each map, all at once."""
        walks = [self._begin(Crossing(lake)) for lake in lakes]
        while under_way := [walk for walk in walks if not walk.over]:
            self._speak(under_way, greedy)
            for walk in under_way:
                walk.failed = not greedy and self._failures.random() < self._fails
                if not walk.failed:
                    self._act(walk)
        return walks

    def _begin(self, crossing: Crossing) -> Walk:
        prompt = self._renderer.render_ids(opening(crossing), tools=[TOOL], add_generation_prompt=True)
        return Walk(crossing, [list(prompt)])

    @torch.inference_mode()
    def _speak(self, walks: Sequence[Walk], greedy: bool) -> None:
        """The next turn of each."""
        speaking = list(walks)
        for walk in speaking:
            walk.turns.append([])
            walk.logprobs.append([])
        for _ in range(LONGEST_REPLY):
            logprobs = self._next(speaking)
            tokens = (
                logprobs.argmax(-1)
                if greedy
                else torch.multinomial(logprobs.exp(), 1, generator=self._random)[:, 0]
            )
            said = logprobs.gather(-1, tokens[:, None])[:, 0]
            for walk, token, logprob in zip(speaking, tokens.tolist(), said.tolist(), strict=True):
                walk.turns[-1].append(token)
                walk.logprobs[-1].append(logprob)
            speaking = [walk for walk in speaking if walk.turns[-1][-1] != self._end]
            if not speaking:
                return

    def _next(self, walks: Sequence[Walk]) -> torch.Tensor:
        """Log-probabilities of the next token, shape (walks, vocabulary), float32."""
        rows = [walk.ids for walk in walks]
        last = torch.tensor([len(row) - 1 for row in rows])
        ids = torch.zeros(len(rows), int(last.max()) + 1, dtype=torch.int64)
        for row, filled in zip(rows, ids, strict=True):
            filled[: len(row)] = torch.tensor(row)
        hidden = self._model.get_decoder()(input_ids=ids, use_cache=False).last_hidden_state
        logits: torch.Tensor = self._model.get_output_embeddings()(hidden[torch.arange(len(rows)), last])
        return logits.log_softmax(-1)

    def _act(self, walk: Walk) -> None:
        """Does what the model said, as the agent would; without a call the walk is over."""
        said = self._tokenizer.decode(walk.turns[-1], skip_special_tokens=False)
        called = _CALL.search(said)
        if called is None or called[1] not in MOVES:
            walk.gave_up = True
            return
        told = {"role": "tool", "tool_call_id": "call", "content": walk.crossing.move(called[1])}
        if walk.over:
            return
        before = [token for turn in walk.turns[:-1] for token in turn]
        bridged = self._renderer.bridge_to_next_turn(before, walk.turns[-1], [told], tools=[TOOL])
        if bridged is None:
            raise ValueError("the template does not go on after a tool's answer")
        walk.turns.append(list(bridged.token_ids)[len(walk.ids) :])
