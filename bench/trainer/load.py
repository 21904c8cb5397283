"""The batches of the trainer's bench, made from a seed, as token trees; numpy alone, because both sides read them.

- long_tail: one turn an episode, whose lengths are log-normal: most are short, and few are many times as long.
- branches: an episode is a long shared history (a prompt, and a turn that the model sampled) and turns that branch off it, as
  from a search, from agents that edit their context, or from the members of a group. `shared` is the share of a path's tokens
  that are shared.

Owns the form in which a batch goes to the sides, a file of arrays. Invariant: each side trains every sampled token once.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int32]
Floats = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class Turn:
    """A node of an episode's tree: tokens that follow the whole of their parent's."""

    parent: int
    """-1 for the root."""
    sampled: bool
    ids: Ints
    logprobs: Floats
    """Recorded, in nats; 0 where nothing was sampled."""


@dataclass(frozen=True, slots=True)
class Rollout:
    """One episode."""

    group: int
    reward: float
    turns: tuple[Turn, ...]

    def paths(self) -> Iterator[list[int]]:
        """Yield the turns from the root to each leaf."""
        parents = {turn.parent for turn in self.turns}
        for leaf in range(len(self.turns)):
            if leaf in parents:
                continue
            path = [leaf]
            while self.turns[path[-1]].parent >= 0:
                path.append(self.turns[path[-1]].parent)
            yield path[::-1]

    def separate_paths(self) -> Iterator[Rollout]:
        """Yield every path as an episode of its own; turns of an earlier path are not sampled in it."""
        earlier: set[int] = set()
        for path in self.paths():
            turns = (self._copy(place, index, index in earlier) for place, index in enumerate(path))
            yield Rollout(self.group, self.reward, tuple(turns))
            earlier.update(path)

    def _copy(self, place: int, index: int, repeated: bool) -> Turn:
        turn = self.turns[index]
        return Turn(place - 1, turn.sampled and not repeated, turn.ids, turn.logprobs)


@dataclass(frozen=True, slots=True)
class Sizes:
    """How much there is in a batch."""

    groups: int
    members: int
    """Episodes in a group."""
    vocabulary: int


def long_tail(
    sizes: Sizes, seed: int, *, prompt: int, median: float, sigma: float, most: int
) -> list[Rollout]:
    """Return episodes of one turn; the logarithm of its length is normal around that of `median`, with a deviation of `sigma`."""
    draw = np.random.default_rng(seed)
    made = []
    for group in range(sizes.groups):
        question = _prompt(draw, sizes, prompt)
        for reward in _rewards(draw, sizes.members):
            length = int(np.clip(round(median * np.exp(sigma * draw.standard_normal())), 1, most))
            made.append(Rollout(group, reward, (question, _sampled(draw, sizes, length, 0))))
    return made


def branches(sizes: Sizes, seed: int, *, path: int, shared: float, fan: int) -> list[Rollout]:
    """Return episodes of `fan` paths of `path` tokens on average, of which the share `shared` is a common history."""
    draw = np.random.default_rng(seed)
    made = []
    history = round(path * shared)
    for group in range(sizes.groups):
        question = _prompt(draw, sizes, history // 2)
        for reward in _rewards(draw, sizes.members):
            first = _sampled(draw, sizes, history - history // 2, 0)
            spread = draw.integers(-(path - history) // 2, (path - history) // 2 + 1, fan // 2)
            lengths = path - history + np.concatenate([spread, -spread])
            tails = (_sampled(draw, sizes, int(length), 1) for length in lengths)
            made.append(Rollout(group, reward, (question, first, *tails)))
    return made


def trained_tokens(batch: list[Rollout]) -> int:
    """Return the number of sampled tokens, each counted once."""
    return sum(len(turn.ids) for rollout in batch for turn in rollout.turns if turn.sampled)


def tokens(batch: list[Rollout]) -> int:
    """Return the tokens that a model must compute if episodes share nothing."""
    return sum(len(turn.ids) for rollout in batch for turn in rollout.turns)


def shared_tokens(batch: list[Rollout]) -> int:
    """Return the fewest tokens that a model must compute, if what the members of a group share is computed once."""
    prefixes = {(rollout.group, prefix) for rollout in batch for prefix in _prefixes(rollout)}
    return sum(len(prefix[-1]) // 4 for _, prefix in prefixes)


def _prefixes(rollout: Rollout) -> Iterator[tuple[bytes, ...]]:
    """Yield the tokens of every turn after those of the turns before it."""
    histories: list[tuple[bytes, ...]] = []
    for turn in rollout.turns:
        before = histories[turn.parent] if turn.parent >= 0 else ()
        histories.append((*before, turn.ids.tobytes()))
    yield from histories


def paths_of(batch: list[Rollout]) -> list[Rollout]:
    """Return the same batch without a tree: see `Rollout.separate_paths`."""
    return [path for rollout in batch for path in rollout.separate_paths()]


def advantages(batch: list[Rollout]) -> list[float]:
    """Return the advantage of each episode: its reward less the group's mean, over the (population) standard deviation + 1e-4."""
    rewards, groups = (
        np.array([getattr(rollout, name) for rollout in batch]) for name in ("reward", "group")
    )
    found = np.zeros(len(batch))
    for group in np.unique(groups):
        members = groups == group
        found[members] = (rewards[members] - rewards[members].mean()) / (rewards[members].std() + 1e-4)
    return found.tolist()


def save(batch: list[Rollout], path: Path) -> None:
    """Write a batch."""
    turns = [(i, turn) for i, rollout in enumerate(batch) for turn in rollout.turns]
    np.savez(
        path,
        group=[rollout.group for rollout in batch],
        reward=[rollout.reward for rollout in batch],
        episode=[i for i, _ in turns],
        parent=[turn.parent for _, turn in turns],
        sampled=[turn.sampled for _, turn in turns],
        length=[len(turn.ids) for _, turn in turns],
        ids=np.concatenate([turn.ids for _, turn in turns]),
        logprobs=np.concatenate([turn.logprobs for _, turn in turns]),
    )


def load(path: Path) -> list[Rollout]:
    """Read a batch."""
    with np.load(path) as file:
        read = {name: file[name] for name in file.files}
    ends = np.cumsum(read["length"])
    turns: dict[int, list[Turn]] = {}
    for i, end in enumerate(ends.tolist()):
        part = slice(end - int(read["length"][i]), end)
        turn = Turn(
            int(read["parent"][i]), bool(read["sampled"][i]), read["ids"][part], read["logprobs"][part]
        )
        turns.setdefault(int(read["episode"][i]), []).append(turn)
    return [
        Rollout(int(group), float(reward), tuple(turns[i]))
        for i, (group, reward) in enumerate(zip(read["group"], read["reward"], strict=True))
    ]


def _rewards(draw: np.random.Generator, members: int) -> list[float]:
    """Return rewards of a group, never all equal."""
    return [float(i == 0 or (i > 1 and draw.random() < 0.5)) for i in range(members)]


def _prompt(draw: np.random.Generator, sizes: Sizes, length: int) -> Turn:
    return Turn(-1, False, _ids(draw, sizes, length), np.zeros(length, np.float32))


def _sampled(draw: np.random.Generator, sizes: Sizes, length: int, parent: int) -> Turn:
    return Turn(parent, True, _ids(draw, sizes, length), _near_uniform(draw, sizes, length))


def _near_uniform(draw: np.random.Generator, sizes: Sizes, length: int) -> Floats:
    """Log-probabilities (nats) near those of an untrained model: ratios are near 1, and some are clipped."""
    logprobs = -np.log(sizes.vocabulary) + 0.15 * draw.standard_normal(length)
    return logprobs.astype(np.float32)


def _ids(draw: np.random.Generator, sizes: Sizes, length: int) -> Ints:
    return draw.integers(0, sizes.vocabulary, length, dtype=np.int32)
