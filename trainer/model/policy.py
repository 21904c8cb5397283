"""The policy: a Hugging Face causal language model and its log-probabilities of the tokens of a micro-batch.

One module from tokens to log-probabilities, so that sharding sees one forward pass. Nothing here is written for an architecture:
`trainer.model.start_check` compares it with the model's plain forward pass.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from headgate.routes import ABSENT
from trainer.config.model import Kernel
from trainer.data.packing import MicroBatch
from trainer.errors import ConfigError
from trainer.model import attention, head, recurrent
from trainer.model.attention import Exchange
from trainer.model.expert_parallel import Experts
from trainer.model.forest import Forest
from trainer.model.parallel import State
from trainer.model.router_replay import RouterReplay
from trainer.model.vision import VisionInputs

Attention = Literal["spans", "rows"]
Weights = Literal["initial", "merged"]


class Adapters(Protocol):
    """Weights that are trained in addition to frozen ones (`trainer.model.lora`)."""

    of_experts: bool
    """True if experts have some: then engines do not load them without the weights."""

    def computing(self, weights: Weights) -> AbstractContextManager[None]:
        """Make passes without gradient in the block compute by other weights than the trained ones."""

    def initialize(self, device: str, seed: int) -> None:
        """Make the trained weights."""

    def base_of(self, module: nn.Module) -> nn.Module:
        """Return the module that has the weights which `module` had before it was adapted."""

    def published(self) -> State:
        """Return the weights as engines know them. Collective."""

    def factors(self) -> State:
        """Return only the trained weights, by their names in the model."""

    def save(self, directory: Path, factors: Mapping[str, Tensor]) -> None:
        """Write whole factors as peft reads them."""


class Policy(nn.Module):
    """A model with its attention over spans (`"spans"`), or its own attention on one row after another (`"rows"`)."""

    def __init__(
        self,
        model: Any,
        attention_kind: Attention = "spans",
        exchange: Exchange | None = None,
        adapters: Adapters | None = None,
        vision_inputs: VisionInputs | None = None,
        replay: RouterReplay | None = None,
        experts: Experts | None = None,
        kernel: Kernel = "auto",
    ) -> None:
        """`exchange`: the ranks that share each micro-batch, which requires spans. `vision_inputs`: of a vision model, which
        requires rows. `replay`: of the model's routers. `experts`: those that ranks share. `kernel`: of attention over spans.
        Raise ConfigError.
        """
        super().__init__()
        self.adapters = adapters
        """Those of `model`; None if all of its weights are trained."""
        self.model = model
        self.attention_kind: Attention = attention_kind
        self.vision_inputs = vision_inputs
        self.replay = replay
        self.experts = experts
        self._head = head.head_of(model)
        self.vocabulary = int(model.get_output_embeddings().weight.shape[0])
        self._own = model.config._attn_implementation
        self._exchange = exchange
        if exchange is not None:
            self._check_exchange(exchange)
        self._kernel: Kernel = kernel
        self._holder = attention.install(model, exchange, kernel) if attention_kind == "spans" else None

    @property
    def shares_prefixes(self) -> bool:
        """True if it can compute a common prefix of rows once."""
        return self._holder is not None and self._kernel != "varlen"

    @property
    def layers(self) -> list[nn.Module]:
        """The decoder's layers, in order; none where the architecture has no list of them."""
        lists = (module for module in self.model.get_decoder().modules() if isinstance(module, nn.ModuleList))
        return list(next(lists, []))

    @property
    def dtype(self) -> torch.dtype:
        """The precision of losses: float32, or that of the weights if it is greater."""
        return head.loss_dtype(next(self.model.parameters()).dtype)

    @property
    def device(self) -> torch.device:
        """The device of the weights."""
        device: torch.device = next(self.model.parameters()).device
        return device

    def forward(
        self, micro: MicroBatch, with_entropy: bool = True, entropy_grad: bool = False
    ) -> tuple[Tensor, Tensor]:
        """Return log-probability and entropy of each trained token, both of shape (trained,), in nats; see `head.token_logprobs`.

        Within `at_work`, if a backward pass follows.
        """
        if self._exchange is None:
            return self._scores(self._hidden(micro), micro, slice(None), 0, with_entropy, entropy_grad)
        micro = _padded(micro, self._exchange.size)
        own = len(micro) // self._exchange.size
        start = own * self._exchange.rank
        own_tokens = ((micro.context >= start) & (micro.context < start + own)).nonzero()[:, 0]
        with self._replaying(micro, start, start + own):
            hidden = self._decode(micro.ids[start : start + own], micro.positions[start : start + own])
        parts = self._scores(hidden, micro, own_tokens, start, with_entropy, entropy_grad)
        every = (part.new_zeros(len(micro.at)).index_put((own_tokens,), part) for part in parts)
        logprobs, entropy = (self._exchange.total(part) for part in every)
        return logprobs, entropy

    def _scores(
        self,
        hidden: Tensor,
        micro: MicroBatch,
        which: Tensor | slice,
        start: int,
        with_entropy: bool,
        entropy_grad: bool,
    ) -> tuple[Tensor, Tensor]:
        """Return log-probability and entropy of some trained tokens; `hidden` begins with token `start`."""
        return head.token_logprobs(
            self._head,
            hidden[micro.context[which] - start],
            micro.ids[micro.at[which]],
            micro.temperature[which],
            self.vocabulary,
            with_entropy=with_entropy,
            entropy_grad=entropy_grad,
            kept=None if micro.kept is None else micro.kept[which],
        )

    def _check_exchange(self, exchange: Exchange) -> None:
        heads = self.model.config.get_text_config().num_attention_heads
        if self.attention_kind != "spans":
            why = 'it needs attention = "spans"'
        elif heads % exchange.size:
            why = f"its {heads} attention heads cannot be divided by it"
        elif layers := recurrent.layers_of(self.model):
            why = f"{type(layers[0]).__name__} has a state, which passes through all tokens of a row; set it to 1"
        else:
            return
        raise ConfigError(f"[parallel] context = {exchange.size}: {why}")

    @contextmanager
    def at_work(self, micro: MicroBatch) -> Iterator[None]:
        """Hold the micro-batch's spans for its forward and backward pass (which may compute layers again)."""
        if self._holder is None:
            yield
            return
        if self._exchange is not None:
            micro = _padded(micro, self._exchange.size)
        self._holder.forest = Forest(micro.positions, micro.ends)
        try:
            yield
        finally:
            self._holder.forest = None

    @contextmanager
    def computing(self, weights: Weights) -> Iterator[None]:
        """Make passes without gradient in the block compute by the initial weights, or by the published ones."""
        with nullcontext() if self.adapters is None else self.adapters.computing(weights):
            yield

    def published(self) -> State:
        """Return the weights as engines know them, by name. Collective."""
        if self.adapters is not None:
            return self.adapters.published()
        return dict(self.model.state_dict(keep_vars=True))

    def base_of(self, module: nn.Module) -> nn.Module:
        """Return the module that has the weights which a checkpoint has for `module`."""
        return module if self.adapters is None else self.adapters.base_of(module)

    @torch.no_grad()
    def logprobs(self, micro: MicroBatch) -> Tensor:
        """Return the log-probability of each trained token, without gradient."""
        micro = micro.to(str(self.device), self.dtype)
        with self.at_work(micro):
            found: Tensor = self(micro, with_entropy=False)[0]
            return found

    def _hidden(self, micro: MicroBatch) -> Tensor:
        """Return the last hidden state of every token, shape (tokens, width)."""
        if self._holder is not None:
            with self._replaying(micro, 0, len(micro)):
                return self._decode(micro.ids, micro.positions)
        starts = [*(micro.positions == 0).nonzero()[:, 0].tolist(), len(micro)]
        rows = itertools.pairwise(starts)
        found = [self._row(micro, a, b) for a, b in rows]
        one = micro.ids.new_zeros(1)
        idle = [self._decode(one, one).sum() for _ in range(micro.passes - len(found))]
        return torch.cat(found) + 0.0 * sum(idle) if idle else torch.cat(found)

    def _row(self, micro: MicroBatch, start: int, stop: int) -> Tensor:
        """Return the last hidden states of one row of a micro-batch."""
        images = [image.hash for image in micro.images if start <= image.offset < stop]
        with self._replaying(micro, start, stop):
            if not images:
                return self._decode(micro.ids[start:stop], micro.positions[start:stop])
            assert self.vision_inputs is not None
            return self.vision_inputs.hidden(self.model, micro.ids[start:stop], images)

    def _replaying(self, micro: MicroBatch, start: int, stop: int) -> AbstractContextManager[None]:
        """Replay the recorded routes of these tokens in the block, if there are any."""
        if self.replay is None or micro.routes is None:
            return nullcontext()
        return self.replay.using(micro.routes[start:stop])

    def _decode(self, ids: Tensor, positions: Tensor) -> Tensor:
        decoder = self.model.get_decoder()
        found = decoder(input_ids=ids[None], position_ids=positions[None], use_cache=False)
        if not hasattr(found, "last_hidden_state"):
            raise ConfigError("transformers does not name its decoder")
        hidden: Tensor = found.last_hidden_state[0]
        return hidden

    @torch.no_grad()
    def plain(self, rows: Sequence[Tensor]) -> list[Tensor]:
        """Return log-probabilities of each row's tokens but the first, shape (length - 1,), by the model's own forward pass."""
        if self._holder is not None:
            self.model.set_attn_implementation(self._own)
        try:
            return [self._plain(row.to(self.device)) for row in rows]
        finally:
            if self._holder is not None:
                self.model.set_attn_implementation(attention.NAME)

    def _plain(self, ids: Tensor) -> Tensor:
        logits = self.model(input_ids=ids[None], use_cache=False).logits[0, :-1].to(self.dtype)
        return logits.log_softmax(-1).gather(-1, ids[1:, None])[:, 0]


def _padded(micro: MicroBatch, ranks: int) -> MicroBatch:
    """Return a micro-batch whose tokens are a multiple of `ranks`; added tokens see only themselves."""
    more = -len(micro) % ranks
    zeros, ends = micro.ids.new_zeros(more), len(micro) + 1 + torch.arange(more, device=micro.ends.device)
    return replace(
        micro,
        ids=torch.cat([micro.ids, zeros]),
        positions=torch.cat([micro.positions, zeros]),
        ends=torch.cat([micro.ends, ends]),
        routes=None if micro.routes is None else F.pad(micro.routes, (0, 0, 0, 0, 0, more), value=ABSENT),
    )
